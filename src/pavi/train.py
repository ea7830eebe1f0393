"""Training: compiled chunks of steps, several starts, and a loop that knows when to stop.

Steps run in compiled chunks; the host sees a vector of ELBOs now and then.
"""

from __future__ import annotations

import functools
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits
from tqdm.auto import tqdm

from pavi.compiling import finish_tracing, in_background, step_options
from pavi.data import Observations
from pavi.errors import TrainingError
from pavi.families import Informed, Units
from pavi.mesh import agreed
from pavi.schedule import LONGEST_CHUNK, Schedule, Stop, early_rates
from pavi.starting import (
    HELD_STEPS,
    SCORED_STEPS,
    STARTED_PACE,
    TRIAL_STEPS,
    Start,
    other_start,
)
from pavi.stepping import (
    Inputs,
    Problem,
    State,
    first_state,
    in_pieces,
    init,
    place,
)
from pavi.units import draws_of_prior, prior_ahead, prior_units

# Cores that the search for one start uses: threads of one that wait for each other would wait for compilers too.
CLUSTERING_CORES = 1


@runtime_checkable
class Steppable(Protocol):
    """What a training loop needs of a problem: a hashable record with a step."""

    def step(self, inputs: Inputs, state: State, rate: Float[Array, ""], /) -> tuple[State, Float[Array, ""]]: ...


def run_chunk(
    problem: Any, inputs: Inputs, state: State, rates: Array, count: Array, stored: Mapping[str, Array] | None = None
) -> tuple[State, Array]:
    """`count` steps in one compiled loop; the ELBO of each. `stored` are data of each step that lie elsewhere."""

    def body(k: Int[Array, ""], carry: tuple[State, Array]) -> tuple[State, Array]:
        state, elbos = carry
        state, elbo = problem.step(inputs, state, rates[k], **{name: data[k] for name, data in (stored or {}).items()})
        return state, elbos.at[k].set(elbo)

    return jax.lax.fori_loop(0, count, body, (state, jnp.full(rates.shape, jnp.nan)))


@functools.cache
def chunk_runner(quick: bool) -> Any:
    """The compiled `run_chunk`, compiled quickly for a fit that will be short."""
    return jax.jit(run_chunk, static_argnums=0, donate_argnums=2, compiler_options=step_options(quick))


def compile_ahead(
    problem: Problem, inputs: Inputs, observations: Observations, seed: np.ndarray, quick: bool
) -> Future | None:
    """Compiles the chunk of steps in the background, before there is a state; where that runs on one device by itself."""
    if observations.stored or problem.hosted or problem.shards is not None:
        return None
    weights = problem.family.shapes(problem.template, problem.whole)
    optimizers = problem.optimizer, problem.row_optimizer
    state = jax.eval_shape(lambda weights, seed: first_state(*optimizers, weights, seed), weights, seed)
    return in_background(chunk_runner(quick), problem, inputs, state, np.zeros(LONGEST_CHUNK, np.float32), np.int32(0))


def once_compiled(run: Callable[..., Any], compiling: Future | None) -> Callable[..., Any]:
    """A function that waits until it has been compiled."""

    def wait_and_run(*args: Any) -> Any:
        if compiling is not None:
            compiling.result()
        return run(*args)

    return wait_and_run


def inputs_of(problem: Problem, arguments: Any, observations: Observations, units: Units) -> Inputs:
    """The inputs of training, with no weight held back."""
    weights = problem.family.shapes(problem.template, problem.whole)
    paces = np.ones(weights.shared.shape, weights.shared.dtype)
    return Inputs(arguments, observations.arrays, units, paces, dict.fromkeys(weights.rows, np.float32(1.0)))


def prepare(
    problem: Problem, arguments: Any, observations: Observations, seed: np.ndarray, quick: bool
) -> tuple[Inputs, State, Future | None]:
    """The inputs and the first state of training, while its steps are compiled in the background."""
    zeros = {site.name: np.zeros(site.size, jnp.result_type(float)) for site in problem.template.latents}
    measured = problem.family.measure(problem.template, observations.everything, arguments)
    inputs = inputs_of(problem, arguments, observations, Units(zeros, zeros, zeros) | measured)
    compiling = compile_ahead(problem, inputs, observations, seed, quick)
    finish_tracing()  # steps take the longest to compile, and Python would trace them at half the pace beside other work
    data = {} if observations.stored else observations.arrays  # the prior is drawn without data as well
    drawing = prior_ahead(problem.study, arguments, data, seed)
    state = init(problem, observations.everything, seed)
    drawing.result()
    return inputs._replace(units=prior_units(problem.study, arguments, data, seed) | measured), state, compiling


def started_units(
    problem: Problem, inputs: Inputs, data: Mapping[str, Array], seed: np.ndarray, values: Mapping[str, Start]
) -> Units:
    """Units around given starts of some sites: the prior's, given these values, for the other sites."""
    if not values:
        return inputs.units
    units = inputs.units
    centers = {name: np.asarray(start.value, units.center[name].dtype).reshape(-1) for name, start in values.items()}
    spreads = {
        name: np.minimum(start.spread, units.spread[name]).astype(centers[name].dtype) for name, start in values.items()
    }
    given = prior_units(problem.study, inputs.arguments, dict(data), seed, centers)
    return units | given | Units(centers, spreads, {name: (units.prior_spread or units.spread)[name] for name in values})


def informed(problem: Problem, inputs: Inputs, state: State, observations: Observations) -> State:
    """The first state with rows that tell what can be told once it is known where latents start."""
    rows, shards = state.weights.rows, problem.shards
    if not isinstance(problem.family, Informed):
        return state
    if shards is not None:  # what they hold so far is not looked at: it stays on the devices
        sizes = problem.template.sizes
        rows = {level: np.broadcast_to(np.zeros((), r.dtype), (*sizes(level), r.shape[-1])) for level, r in rows.items()}
    data = in_pieces(problem, observations.everything)
    found = problem.family.inform(problem.study, inputs.arguments, data, inputs.units, rows)
    if found is rows:
        return state
    if shards is not None:
        laid_out = {level: shards.lay_out(each, level) for level, each in found.items()}
        return state._replace(weights=state.weights._replace(rows=laid_out))
    for level in problem.hosted:
        rows[level][...] = found[level]  # in place: it may be a memory map
    new = {level: rows[level] if level in problem.hosted else jnp.asarray(each) for level, each in found.items()}
    return state._replace(weights=state.weights._replace(rows=new))


def best_start(
    problem: Problem,
    inputs: Inputs,
    state: State,
    observations: Observations,
    seed: np.ndarray,
    starts: int,
    schedule: Schedule,
    fixed: Mapping[str, Start],
    progress_bar: bool,
    run: Callable[..., tuple[State, Any]],
) -> tuple[Inputs, State]:
    """Trains from several starts for some steps, on the same branches; the inputs and state of the best.

    Args:
        run: runs a chunk of steps.
        fixed: values that the caller chose, which every start shares.
    """
    early = schedule.pace * early_rates(np.arange(HELD_STEPS + TRIAL_STEPS))
    data = {} if observations.stored else observations.arrays
    draws = draws_of_prior(problem.study, inputs.arguments, data, seed)
    tries: list[tuple[float, Mapping[str, Start], int]] = []
    # Most starts have the same first weights, which are kept; rows in host memory are found again instead.
    kept = None if problem.hosted else jax.tree.map(jnp.copy, state.weights)

    def started_from(weights: int) -> State:
        if kept is None or weights:
            return init(problem, observations.everything, seed, weights)
        return place(problem, jax.tree.map(jnp.copy, kept), seed)

    def stretch(state: State, tried: Inputs, first: int, count: int) -> tuple[State, np.ndarray]:
        rates = np.zeros(LONGEST_CHUNK, np.float32)
        rates[:count] = early[first : first + count] if schedule.decays else 1.0
        state, elbos = run(problem, tried, state, rates, np.int32(count))
        return state, np.asarray(elbos)[:count]

    def attempt(values: Mapping[str, Start], state: State) -> tuple[float, Inputs, State]:
        tried = inputs._replace(units=started_units(problem, inputs, data, seed, values))
        state = informed(problem, tried, state, observations)
        # Let go at once, a latent is torn away by the flows of members, which start at random.
        state, _ = stretch(state, _held(problem, tried, values), 0, HELD_STEPS)
        tried = _paced(problem, tried, values, STARTED_PACE)
        state, elbos = stretch(state, tried, HELD_STEPS, TRIAL_STEPS)
        last = elbos[-SCORED_STEPS:].astype(np.float64)
        return float(np.where(np.isfinite(last), last, -np.inf).mean()), tried, state

    # Starts are found while the steps are compiled, which needs most of the cores. They need not have converged, nor all
    # points be distinct.
    with (
        warnings.catch_warnings(),
        threadpool_limits(CLUSTERING_CORES),
        ThreadPoolExecutor(max(starts - 1, 1)) as pool,
    ):
        warnings.simplefilter("ignore", ConvergenceWarning)
        finding = [
            pool.submit(other_start, problem.study, inputs.arguments, observations.everything, draws, number)
            for number in range(1, starts)
        ]
        for number in tqdm(range(starts), disable=not progress_bar, desc="starts", leave=False, dynamic_ncols=True):
            values, weights = fixed, 0
            if number:
                values = {**finding[number - 1].result(), **fixed}
                # Starts at some value share their first weights, which would tell more in so few steps than values do.
                weights = 0 if values else number
                del state  # to keep those of several starts would take several times the memory
                state = started_from(weights)
            score, tried, state = attempt(values, state)
            tries.append((score, values, weights))
    best = int(np.argmax([score for score, _, _ in tries]))
    if best != starts - 1:  # the same steps once more
        _, values, weights = tries[best]
        del state
        _, tried, state = attempt(values, started_from(weights))
    return tried, state._replace(step=jnp.zeros_like(state.step), skipped=jnp.zeros_like(state.skipped))


def _held(problem: Problem, inputs: Inputs, names: Iterable[str]) -> Inputs:
    """Inputs that hold some sites: their flows, and the rows of their levels, which other sites may share."""
    levels = {problem.template.site(name).level for name in names}
    paces = {level: np.float32(level not in levels) for level in inputs.row_paces}
    return _paced(problem, inputs, names, 0.0)._replace(row_paces=paces)


def _paced(problem: Problem, inputs: Inputs, names: Iterable[str], pace: float) -> Inputs:
    """Inputs that slow down some sites."""
    paces = np.array(inputs.paces)
    for name, part in problem.family.parts(problem.template).items():
        if name in names:
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
    run: Callable[..., tuple[State, Any]] | None = None,
    together: bool = False,
) -> Trained:
    """Takes chunks of steps until the schedule says stop, Ctrl-C is pressed, or steps keep failing.

    Args:
        earlier: ELBOs and seconds of the steps that were taken before, if training goes on.
        after_chunk: called after each chunk with the state, the ELBOs and seconds so far, and why training ends, if it does.
        run: runs a chunk of steps; by default all on the device.
        together: whether all processes train one fit, and so must end it together.
    """
    run = chunk_runner(schedule.short) if run is None else run
    elbos = [] if earlier is None else [earlier[0]]
    seconds = [] if earlier is None else [earlier[1]]
    taken, skipped = sum(len(chunk) for chunk in elbos), int(state.skipped)
    resumed = taken
    stop = None

    def interrupted() -> bool:
        return agreed(pressed()) if together else pressed()

    with (
        _interruptible() as pressed,
        tqdm(total=schedule.total, initial=resumed, disable=not progress_bar, unit="step", dynamic_ncols=True) as bar,
    ):
        while stop is None:
            rates = schedule.rates(taken)
            padded = np.zeros(LONGEST_CHUNK, np.float32)
            padded[: len(rates)] = rates
            before = time.perf_counter()
            state, chunk = run(problem, inputs, state, padded, np.int32(len(rates)))
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
