"""Many fits of one model side by side: data sets and seeds are one more axis of a step, which a GPU has room for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pavi.experiments.measuring import evaluated, plateau
from pavi.experiments.records import Row
from pavi.experiments.stepwise import start
from pavi.families import Family
from pavi.posterior import Posterior, seed_of
from pavi.reading import read_study
from pavi.schedule import Schedule
from pavi.stepping import Inputs, Problem, State, init
from pavi.units import prior_units

# Training is timed in so many parts.
PARTS = 50


def fitted_together(
    model: Callable,
    runs: Sequence[tuple[Mapping[str, Any], int]],
    family: Family,
    steps: int | None = None,
    batch: Mapping[str, int] | None = None,
) -> Iterator[tuple[Row, Posterior]]:
    """A fit for each pair of data and seed, all trained at once; seconds are of all of them, divided by their number.

    Without `steps` each takes as many as a fit that settles as soon as it may.
    """
    started = time.perf_counter()
    template = read_study(model, runs[0][0], (), None)[0].template
    chosen = {plate.name: plate.size for plate in template.plates} if batch is None else dict(batch)
    problem, first, state, _ = start(model, dict(runs[0][0]), family, chosen)
    schedule = Schedule(template, chosen, steps, decays=True, load=0.0)
    if steps is None:
        schedule = Schedule(template, chosen, 2 * schedule.fewest, decays=True, load=0.0)
    del state
    studies, inputs, states = [], [], []
    for data, number in runs:
        _, arguments, observations = read_study(model, data, (), None)
        seed = seed_of(number)
        measured = family.measure(template, observations.everything, arguments)
        units = prior_units(problem.study, arguments, observations.arrays, seed) | measured
        studies.append(observations)
        inputs.append(Inputs(arguments, observations.arrays, units, first.paces, first.row_paces))
        states.append(init(problem, observations.everything, seed))
    all_inputs, all_states = _stacked(inputs), _stacked(states)
    del states
    rates = _all_rates(schedule)
    elbos, seconds = [], [0.0]
    for part in np.split(rates, PARTS):
        all_states, found = _train(problem, all_inputs, all_states, part)
        elbos.append(np.asarray(found, np.float64))
        seconds.append(time.perf_counter() - started)
    curves = np.concatenate(elbos)
    times = np.interp(np.arange(1, len(rates) + 1), np.linspace(0, len(rates), PARTS + 1), seconds)
    for k, observations in enumerate(studies):
        weights = jax.tree.map(lambda array: array[k], all_states.weights)  # noqa: B023 (used at once)
        units, arguments = inputs[k].units, inputs[k].arguments
        reading = family.settle(problem.study, arguments, observations.everything, units, weights)
        posterior = Posterior(problem.study, *reading, units, arguments, observations)
        row = {
            "weights": weights.count,
            "steps": len(rates),
            "seconds": round(seconds[-1] / len(runs), 3),
            "plateau_seconds": round(plateau(curves[:, k], times, template.num_latents) / len(runs), 3),
            "together": len(runs),
        }
        yield {**evaluated(posterior), **row}, posterior


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _train(problem: Problem, inputs: Inputs, states: State, rates: Array) -> tuple[State, Array]:
    """Steps of every run, one after the other."""

    def step(states: State, rate: Array) -> tuple[State, Array]:
        return jax.vmap(lambda inputs, state: problem.step(inputs, state, rate))(inputs, states)

    return jax.lax.scan(step, states, rates)


def _all_rates(schedule: Schedule) -> np.ndarray:
    """The rates of a fit from its first step to its last, in a number that can be split."""
    rates: list[np.ndarray] = []
    taken = 0
    while taken < schedule.limit:
        rates.append(schedule.rates(taken))
        taken += len(rates[-1])
    found = np.concatenate(rates)
    return np.interp(np.linspace(0, len(found) - 1, -(-len(found) // PARTS) * PARTS), np.arange(len(found)), found)


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
