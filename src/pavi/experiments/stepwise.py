"""Training by hand, to look inside a fit: problems, states and ELBOs along the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from pavi.posterior import Posterior, seed_of
from pavi.reading import read_study
from pavi.schedule import early_rates
from pavi.stepping import Inputs, Problem, State, default_optimizers
from pavi.train import chunk_runner, prepare


def start(model: Callable, data: dict, family: Any, batch: dict[str, int], particles: int = 8, seed: int = 0) -> tuple:
    """A problem ready to step: (problem, inputs, state, study's observations)."""
    study, arguments, observations = read_study(model, data, (), None)
    problem = Problem(study, family, tuple(batch.items()), particles, *default_optimizers(family.row_rate))
    inputs, state, compiling = prepare(problem, arguments, observations, seed_of(seed), True)
    if compiling is not None:
        compiling.result()
    return problem, inputs, state, observations


def advance(problem: Problem, inputs: Inputs, state: State, steps: int) -> State:
    """Takes some steps at the rates a fit would have before its decay."""
    while steps > 0:
        count = min(steps, 1000)
        rates = early_rates(int(state.step) + np.arange(1000))
        state, _ = chunk_runner(True)(problem, inputs, state, rates, np.int32(count))
        steps -= count
    return jax.block_until_ready(state)


def elbos(
    model: Callable, data: dict, family: Any, batch: dict[str, int], at: Sequence[int], seed: int = 0, samples: int = 64
) -> Iterator[tuple[int, float]]:
    """The full ELBO after each of some increasing numbers of steps, before any decay."""
    problem, inputs, state, observations = start(model, data, family, batch, seed=seed)
    taken = 0
    for target in at:
        state = advance(problem, inputs, state, target - taken)
        taken = target
        reading = family.settle(problem.study, inputs.arguments, observations.everything, inputs.units, state.weights)
        posterior = Posterior(problem.study, reading.family, reading.weights, inputs.units, inputs.arguments, observations)
        yield taken, posterior.elbo(samples).mean
