"""Training: a pure `init` / `step` pair, compiled chunks of steps, and a loop that knows when to stop.

A step draws a branch, gathers the rows and the data of its members, differentiates the reduced ELBO, and writes back
the shared weights and just those rows (paper, algorithm 2). Nothing in it grows with the study. Steps run in compiled
chunks; the host sees a vector of ELBOs now and then.
"""

from __future__ import annotations

import dataclasses
import functools
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from tqdm.auto import tqdm

from pavi import data as observed_data
from pavi import rows as row_ops
from pavi.branch import draw_branch, fixed_branch
from pavi.cascade import Draw, Prior, Study, cascade, draw_prior
from pavi.compiling import quick_jit, quick_options
from pavi.elbo import reduced_elbo
from pavi.errors import TrainingError
from pavi.families import Family, Glimpse, Units, Weights
from pavi.schedule import LONGEST_CHUNK, Schedule, Stop, early_rates
from pavi.starting import SCORED_STEPS, STARTED_PACE, TRIAL_STEPS, Start, other_start
from pavi.template import Level, Site, Template

# Adam with a short memory of squared gradients: they fall by orders of magnitude as the posterior narrows.
ADAM = optax.scale_by_adam(b1=0.9, b2=0.95)
SHARED_RATE = 5e-3
PRIOR_DRAWS = 256


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything a compiled step depends on besides arrays. Equal problems share their compiled steps."""

    study: Study
    family: Family
    batch: tuple[tuple[str, int], ...]
    num_particles: int
    optimizer: optax.GradientTransformation
    row_optimizer: optax.GradientTransformation

    @property
    def template(self) -> Template:
        return self.study.template

    @property
    def sizes(self) -> dict[str, int]:
        return {plate.name: plate.size for plate in self.template.plates}

    @property
    def whole(self) -> frozenset[str]:
        """The plates whose members are all taken in every step."""
        return frozenset(plate for plate, count in self.batch if count == self.sizes[plate])

    def step(self, inputs: Inputs, state: State, rate: Float[Array, ""]) -> tuple[State, Float[Array, ""]]:
        return step(self, inputs, state, rate)


class Inputs(NamedTuple):
    """The arrays a step reads and does not change."""

    arguments: Any
    data: dict[str, Array]
    units: Units
    paces: Float[Array | np.ndarray, " weights"] | float = 1.0
    """What the rates of the shared weights are multiplied by, each: zero holds a weight."""


class State(NamedTuple):
    """The arrays a step changes."""

    weights: Weights
    optimizer: Any
    row_optimizer: dict[Level, Any]
    key: PRNGKeyArray
    step: Int[Array, ""]
    skipped: Int[Array, ""]


@functools.cache
def default_optimizers(row_rate: float) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Optimizers of the shared weights and of the rows, whose learning rate is `row_rate` times the shared one."""
    return optax.chain(ADAM, optax.scale(-SHARED_RATE)), optax.chain(ADAM, optax.scale(-row_rate * SHARED_RATE))


def init(problem: Problem, data: Mapping[str, Array], seed: np.ndarray, start: int = 0) -> State:
    """The state before the first step. `seed` is the data of a JAX key; other starts have other weights."""
    weights = problem.family.init(problem.template, np.random.default_rng([*seed, start]), data, problem.whole)
    return first_state(problem.optimizer, problem.row_optimizer, weights, seed)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def first_state(
    optimizer: optax.GradientTransformation, row_optimizer: optax.GradientTransformation, weights: Weights, seed: Array
) -> State:
    """The state before the first step from given weights, which it takes over: their buffers are gone afterwards."""
    zero = jnp.zeros((), jnp.int32)
    row_states = {level: row_ops.init_optimizer(row_optimizer, rows) for level, rows in weights.rows.items()}
    key = jax.random.wrap_key_data(seed)
    return State(weights, optimizer.init(weights.shared), row_states, key, zero, zero)


def prepare(problem: Problem, arguments: Any, data: dict[str, Array], seed: np.ndarray, quick: bool) -> tuple[Inputs, State]:
    """The inputs and the first state of training, with both of its functions compiled.

    The small one is compiled in a thread while the big one is traced, which saves a user most of a second.
    """
    zeros = {site.name: np.zeros(site.size, jnp.result_type(float)) for site in problem.template.latents}
    measured = problem.family.measure(problem.template, data, arguments)
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(draws_of_prior.lower(problem.study, arguments, data, seed, {}).compile)
        state = init(problem, data, seed)
        paces = np.ones(state.weights.shared.shape, state.weights.shared.dtype)
        inputs = Inputs(arguments, data, Units(zeros, zeros, zeros) | measured, paces)
        chunk_runner(quick).lower(problem, inputs, state, np.zeros(LONGEST_CHUNK, np.float32), np.int32(0))
        compiling.result()
    return inputs._replace(units=prior_units(problem.study, arguments, data, seed) | measured), state


def prior_units(
    study: Study, arguments: Any, data: dict[str, Array], seed: np.ndarray, values: Mapping[str, Any] = MappingProxyType({})
) -> Units:
    """Center and spread of each latent, by drawing from the prior for a few members spread over the plates.

    Sites with given `values` are centered there, and the others where the prior puts them then.
    """
    draws = draws_of_prior(study, arguments, data, seed, dict(values))
    center, spread = {}, {}
    for name, drawn in draws.items():
        low, middle, high = np.nanquantile(np.asarray(drawn), [0.16, 0.5, 0.84], axis=0)
        half = (high - low) / 2
        usable = np.isfinite(half) & (half > 0)
        center[name] = np.where(np.isfinite(middle), middle, 0.0).astype(drawn.dtype)
        spread[name] = np.where(usable, half, 1.0).astype(drawn.dtype)
    return Units(center, spread, spread)


@quick_jit(static_argnums=(0,))
def draws_of_prior(
    study: Study, arguments: Any, data: dict[str, Array], seed: Array, values: dict[str, Array]
) -> dict[str, Array]:
    """Unconstrained draws of every latent from the prior, with some sites held at given values."""
    template = study.template

    def sampler(site: Site, prior: Prior, encoding: Any, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
        if site.name in values:
            return Draw(values[site.name], None, values[site.name])
        return draw_prior(site, prior, encoding, given, key)

    def one(k: Int[Array, ""]) -> dict[str, Array]:
        indices = {plate.name: (k * plate.size // PRIOR_DRAWS)[None] for plate in template.plates}
        branch = fixed_branch(indices)
        sliced = observed_data.at_branch(template, data, branch, frozenset()) if data else {}
        key = jax.random.fold_in(jax.random.wrap_key_data(seed), k)
        found = cascade(study, arguments, sampler, {}, branch, sliced, key, predict=not data)
        return {name: value.reshape(-1) for name, value in found.unconstrained.items()}

    return jax.vmap(one)(jnp.arange(PRIOR_DRAWS))


def step(problem: Problem, inputs: Inputs, state: State, rate: Float[Array, ""]) -> tuple[State, Float[Array, ""]]:
    """One training step at a fraction `rate` of the optimizers' learning rates; returns the reduced ELBO too.

    A step whose ELBO or gradient is not finite changes nothing but the count of skipped steps.
    """
    template, whole = problem.template, problem.whole
    branch_key, noise_key = jax.random.split(jax.random.fold_in(state.key, state.step))
    branch = draw_branch(branch_key, problem.sizes, dict(problem.batch))
    index = {level: () if set(level) <= whole else branch.at(level) for level in state.weights.rows}
    rows = {level: row_ops.gather(array, index[level]) for level, array in state.weights.rows.items()}
    row_states = {level: row_ops.gather(tree, index[level]) for level, tree in state.row_optimizer.items()}
    sliced = observed_data.at_branch(template, inputs.data, branch, whole)

    memory_index = {key: () if set(key[1]) <= whole else branch.at(key[1]) for key in state.weights.memory}
    memory = {key: row_ops.gather(array, memory_index[key]) for key, array in state.weights.memory.items()}
    glimpse = Glimpse(problem.study, inputs.arguments, branch, sliced)

    def loss(shared: Array, rows: dict[Level, Array]) -> tuple[Float[Array, ""], Any]:
        encodings, new_memory = problem.family.encode(Weights(shared, rows, memory), inputs.units, glimpse)
        sampler = problem.family.sampler(template, inputs.units, shared)

        def particle(key: PRNGKeyArray) -> Float[Array, ""]:
            return reduced_elbo(problem.study, inputs.arguments, sampler, encodings, branch, sliced, key)

        return -jax.vmap(particle)(jax.random.split(noise_key, problem.num_particles)).mean(), new_memory

    (value, new_memory), (shared_grad, row_grads) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        state.weights.shared, rows
    )
    # Zero times a number is zero exactly when the number is finite.
    finite = jnp.isfinite(value + sum((0.0 * leaf).sum() for leaf in jax.tree.leaves((shared_grad, row_grads))))

    def kept(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    shared = state.weights.shared
    updates, optimizer_state = problem.optimizer.update(shared_grad, state.optimizer, shared)
    new_rows, new_row_states = {}, {}
    for level, old in rows.items():
        row_updates, row_state = row_ops.update(problem.row_optimizer, row_grads[level], row_states[level], old)
        new_rows[level] = row_ops.scatter(state.weights.rows[level], index[level], kept(old + rate * row_updates, old))
        row_state = kept(row_state, row_states[level])
        new_row_states[level] = row_ops.scatter(state.row_optimizer[level], index[level], row_state)
    new_memories = {
        key: row_ops.scatter(array, memory_index[key], kept(new_memory[key], memory[key]))
        for key, array in state.weights.memory.items()
    }
    new_state = State(
        Weights(kept(shared + rate * inputs.paces * updates, shared), new_rows, new_memories),
        kept(optimizer_state, state.optimizer),
        new_row_states,
        state.key,
        state.step + 1,
        state.skipped + ~finite,
    )
    return new_state, -value


@runtime_checkable
class Steppable(Protocol):
    """What a training loop needs of a problem: a hashable record with a step."""

    def step(self, inputs: Inputs, state: State, rate: Float[Array, ""]) -> tuple[State, Float[Array, ""]]: ...


def _run_chunk(problem: Steppable, inputs: Inputs, state: State, rates: Array, count: Array) -> tuple[State, Array]:
    """`count` steps in one compiled loop; the ELBO of each."""

    def body(k: Int[Array, ""], carry: tuple[State, Array]) -> tuple[State, Array]:
        state, elbos = carry
        state, elbo = problem.step(inputs, state, rates[k])
        return state, elbos.at[k].set(elbo)

    return jax.lax.fori_loop(0, count, body, (state, jnp.full(rates.shape, jnp.nan)))


@functools.cache
def chunk_runner(quick: bool) -> Any:
    """The compiled `_run_chunk`, compiled quickly for a fit that will be short."""
    options = quick_options() if quick else None
    return jax.jit(_run_chunk, static_argnums=0, donate_argnums=2, compiler_options=options)


def started_units(problem: Problem, inputs: Inputs, seed: np.ndarray, values: Mapping[str, Start]) -> Units:
    """Units around given starts of some sites: the prior's, given these values, for the other sites."""
    if not values:
        return inputs.units
    units = inputs.units
    centers = {name: np.asarray(start.value, units.center[name].dtype).reshape(-1) for name, start in values.items()}
    spreads = {
        name: np.minimum(start.spread, units.spread[name]).astype(centers[name].dtype) for name, start in values.items()
    }
    given = prior_units(problem.study, inputs.arguments, inputs.data, seed, centers)
    return units | given | Units(centers, spreads, {name: (units.prior_spread or units.spread)[name] for name in values})


def best_start(
    problem: Problem,
    inputs: Inputs,
    state: State,
    seed: np.ndarray,
    starts: int,
    schedule: Schedule,
    fixed: Mapping[str, Start],
    progress_bar: bool,
) -> tuple[Inputs, State]:
    """Trains from several starts for some steps, on the same branches; the inputs and state of the best.

    Args:
        fixed: values that the caller chose, which every start shares.
    """
    rates = np.zeros(LONGEST_CHUNK, np.float32)
    rates[:TRIAL_STEPS] = schedule.pace * early_rates(np.arange(TRIAL_STEPS)) if schedule.decays else 1.0
    draws = draws_of_prior(problem.study, inputs.arguments, inputs.data, seed, {})
    run = chunk_runner(schedule.short)
    scores: list[float] = []
    kept: list[tuple[Inputs, Array]] = []
    for number in tqdm(range(starts), disable=not progress_bar, desc="starts", leave=False, dynamic_ncols=True):
        tried, values = inputs, fixed
        if number:
            values = {**other_start(problem.template, inputs.data, draws, number), **fixed}
            tried = inputs._replace(units=started_units(problem, inputs, seed, values))
            state = init(problem, inputs.data, seed, number)
        state, elbos = run(problem, _paced(problem, tried, values, 0.0), state, rates, np.int32(TRIAL_STEPS))
        last = np.asarray(elbos)[TRIAL_STEPS - SCORED_STEPS : TRIAL_STEPS]
        scores.append(float(np.nan_to_num(last, nan=-np.inf).mean()))
        # Rows start over from the data: to keep them of several starts would take as much memory again.
        kept.append((_paced(problem, tried, values, STARTED_PACE), jnp.array(state.weights.shared)))
        del state
    best = int(np.argmax(scores))
    state = init(problem, inputs.data, seed, best)
    inputs, shared = kept[best]
    return inputs, state._replace(weights=state.weights._replace(shared=shared))


def _paced(problem: Problem, inputs: Inputs, values: Mapping[str, Start], pace: float) -> Inputs:
    """Inputs that slow down the sites which start at some value: the others start at random and would tear them away."""
    paces = np.array(inputs.paces)
    for name, part in problem.family.parts(problem.template).items():
        if name in values:
            paces[part] = pace
    return inputs._replace(paces=paces)


class Trained(NamedTuple):
    """What training leaves."""

    state: State
    history: dict[str, np.ndarray]
    stop: Stop


def train(
    problem: Steppable,
    inputs: Inputs,
    state: State,
    schedule: Schedule,
    started: float,
    progress_bar: bool,
    earlier: tuple[np.ndarray, np.ndarray] | None = None,
    after_chunk: Callable[..., None] | None = None,
) -> Trained:
    """Takes chunks of steps until the schedule says stop, Ctrl-C is pressed, or steps keep failing.

    Args:
        earlier: ELBOs and seconds of the steps that were taken before, if training goes on.
        after_chunk: called after each chunk with the state, the ELBOs and seconds so far, and why training ends, if it does.
    """
    elbos = [] if earlier is None else [earlier[0]]
    seconds = [] if earlier is None else [earlier[1]]
    taken, skipped = sum(len(chunk) for chunk in elbos), int(state.skipped)
    resumed = taken
    stop = None
    with (
        _interruptible() as interrupted,
        tqdm(total=schedule.total, initial=resumed, disable=not progress_bar, unit="step", dynamic_ncols=True) as bar,
    ):
        while stop is None:
            rates = schedule.rates(taken)
            padded = np.zeros(LONGEST_CHUNK, np.float32)
            padded[: len(rates)] = rates
            before = time.perf_counter()
            state, chunk = chunk_runner(schedule.short)(problem, inputs, state, padded, np.int32(len(rates)))
            elbos.append(np.asarray(chunk)[: len(rates)].astype(np.float64))
            now = time.perf_counter()
            seconds.append(np.linspace(before, now, len(rates) + 1)[1:] - started)
            taken += len(rates)
            failed = int(state.skipped) - skipped
            skipped += failed
            stop = _verdict(schedule, elbos, failed, len(rates), interrupted)
            if after_chunk is not None:
                after_chunk(state, elbos, seconds, stop)
            bar.total = schedule.total
            bar.set_postfix_str(_summary(elbos, skipped), refresh=False)
            bar.update(len(rates))
    return Trained(state, history_of(np.concatenate(elbos), np.concatenate(seconds)), stop)


def history_of(elbos: np.ndarray, seconds: np.ndarray) -> dict[str, np.ndarray]:
    """How training went, by step."""
    return {"step": np.arange(1, len(elbos) + 1), "elbo": elbos, "seconds": seconds}


def _verdict(
    schedule: Schedule, elbos: list[np.ndarray], failed: int, taken: int, interrupted: Callable[[], bool]
) -> Stop | None:
    if failed > 0.5 * taken:
        return Stop.NON_FINITE
    schedule.update(elbos)
    if schedule.stop is None and interrupted():
        return Stop.INTERRUPTED
    return schedule.stop


def _summary(elbos: list[np.ndarray], skipped: int) -> str:
    recent = elbos[-1][np.isfinite(elbos[-1])]
    text = f"ELBO {recent.mean():.2f}" if len(recent) else "ELBO not finite"
    return text + (f", {skipped} skipped" if skipped else "")


def report(trained: Trained) -> None:
    """Warns of, or refuses, a training that ended badly."""
    stop, skipped, taken = trained.stop, int(trained.state.skipped), len(trained.history["step"])
    if stop is Stop.NON_FINITE and skipped == taken:
        raise TrainingError(
            f"All {taken} steps had an ELBO or gradient that is not finite, so nothing was learned. Run the model under "
            "`numpyro.handlers.seed` and `trace` and look for NaN or infinite log-probabilities: a scale of zero, an "
            "exponential that overflows, or data outside the support of its distribution."
        )
    if stop in (Stop.NON_FINITE, Stop.LIMIT):
        warnings.warn(f"The fit ended early: {stop.value} ({skipped} of {taken} steps skipped).", stacklevel=4)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a flag, so that it takes effect between chunks; a second one raises as usual."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    previous = signal.getsignal(signal.SIGINT)

    def note(signum: int, frame: Any) -> None:
        if pressed:
            signal.signal(signal.SIGINT, previous)
            raise KeyboardInterrupt
        pressed.append(signum)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, previous)
