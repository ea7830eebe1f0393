"""Training on a study that has been read: from nothing, or on from given weights."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pavi.cascade import Study
from pavi.checkpoint import Keeper, Progress
from pavi.data import Observations
from pavi.families import Reading, Units, Weights
from pavi.memory import free_memory, in_all
from pavi.planning import pull_bytes
from pavi.schedule import Schedule, Stop
from pavi.setting import Setting, identity_of, problem_of, runner_of
from pavi.sharding import gathered
from pavi.starting import spreads_ahead
from pavi.stepping import Inputs, Problem, State, default_optimizers, place
from pavi.streaming import runner
from pavi.train import (
    Trained,
    best_start,
    compile_ahead,
    history_of,
    informed,
    inputs_of,
    once_compiled,
    prepare,
    report,
    started_units,
    train,
)

# Fractions of the learning rate that are tried, one after the other, while steps fail.
PACES = (1.0, 0.5, 0.125)


class Outcome(NamedTuple):
    """What training on a study came to: all that makes a fit."""

    study: Study
    units: Units
    arguments: Any
    observations: Observations
    trained: Reading
    stop: Stop
    history: Mapping[str, np.ndarray]
    batch: Mapping[str, int]
    skipped: int


def train_study(
    study: Study,
    arguments: Any,
    observations: Observations,
    setting: Setting,
    prepared: Callable[[Inputs], None] = lambda inputs: None,
) -> Outcome:
    """Trains from scratch; again and slower where too many steps were not finite.

    Args:
        prepared: called once with the first inputs, before what takes long.
    """
    for pace in PACES:
        problem, inputs, trained = _attempt(study, arguments, observations, setting, pace, prepared)
        if trained.stop is not Stop.NON_FINITE:
            break
        if pace != PACES[-1]:
            del trained  # its arrays and those of the next attempt need not fit side by side
    report(trained)
    return _finish(problem, inputs, observations, trained)


def _attempt(
    study: Study,
    arguments: Any,
    observations: Observations,
    setting: Setting,
    pace: float,
    prepared: Callable[[Inputs], None],
) -> tuple[Problem, Inputs, Trained]:
    """Trains at a fraction of the learning rate; or goes on from a checkpoint, if this is not a new attempt."""
    family, optimizer = setting.family, setting.optimizer
    optimizers = default_optimizers(family.row_rate) if optimizer is None else (optimizer, optimizer)
    problem, schedule = problem_of(study, setting, optimizers, pace == PACES[0], pace)
    inputs, state, compiling = prepare(problem, arguments, observations, setting.seed, schedule.short)
    if pace == PACES[0]:
        if setting.starts > 1:
            spreads_ahead(study, arguments, observations.everything)
        prepared(inputs)
    run = once_compiled(runner_of(problem, observations, schedule, setting), compiling)
    keeper, progress = _keeper(problem, setting), None
    if keeper is not None and pace == PACES[0]:
        progress = keeper.read(inputs, state, schedule)
    elif keeper is not None:
        keeper.clear()
    if progress is not None:
        inputs, state = progress.inputs, progress.state
    else:
        if setting.polishing is not None:  # of a fit that is no more
            shutil.rmtree(setting.polishing, ignore_errors=True)
        data = {} if observations.stored else observations.arrays
        inputs = inputs._replace(units=started_units(problem, inputs, data, setting.seed, setting.values))
        if setting.starts > 1:
            first = [state]
            del state  # its rows, which may be most of the memory, are gone when the next start is tried
            inputs, state = best_start(
                problem,
                inputs,
                first.pop(),
                observations,
                setting.seed,
                setting.starts,
                schedule,
                setting.values,
                setting.progress_bar,
                run,
            )
            schedule.early = False  # that was in the trial
        else:
            state = informed(problem, inputs, state, observations)
    return problem, inputs, _train(problem, inputs, state, schedule, setting, keeper, progress, run)


def _keeper(problem: Problem, setting: Setting, *first: np.ndarray) -> Keeper | None:
    """What keeps checkpoints, if any are wanted, of training that starts from the first weights, if these are given."""
    if setting.checkpoint is None:
        return None
    return Keeper(setting.checkpoint, identity_of(problem, setting), problem.shards is not None, first)


def _train(
    problem: Problem,
    inputs: Inputs,
    state: State,
    schedule: Schedule,
    setting: Setting,
    keeper: Keeper | None,
    progress: Progress | None,
    run: Callable[..., tuple[State, Any]],
) -> Trained:
    """Trains, from where a checkpoint stands if there is one, writing checkpoints if there is a keeper."""
    if progress is not None and progress.stop not in (None, Stop.INTERRUPTED):
        return Trained(progress.state, history_of(progress.elbos, progress.seconds), progress.stop)
    before = None if progress is None else (progress.elbos, progress.seconds)
    started = setting.started if progress is None else time.perf_counter() - progress.seconds[-1]

    def write(state: State, elbos: list[np.ndarray], seconds: list[np.ndarray], stop: Stop | None) -> None:
        if keeper is not None and stop is not Stop.NON_FINITE:
            keeper.write(inputs, state, elbos, seconds, schedule, stop)

    together = problem.shards is not None
    return train(problem, inputs, state, schedule, started, setting.progress_bar, before, write, run, together)


class Refinement:
    """Training on from weights that need not be known yet; with `frozen`, only the rows are trained."""

    def __init__(
        self, study: Study, arguments: Any, observations: Observations, setting: Setting, frozen: bool = False
    ) -> None:
        optimizer, row_optimizer = default_optimizers(setting.family.row_rate)
        self._optimizers = (optax.set_to_zero() if frozen else optimizer, row_optimizer)
        self._study, self._arguments, self._observations, self._setting = study, arguments, observations, setting
        self._problem, schedule = problem_of(study, setting, self._optimizers, early=False, pace=1.0)
        self._quick = schedule.short
        self._compiling: Future | None = None

    def compile(self, units: Units) -> None:
        """Begins to compile in the background, for units like these."""
        inputs = inputs_of(self._problem, self._arguments, self._observations, units)
        self._compiling = compile_ahead(self._problem, inputs, self._observations, self._setting.seed, self._quick)

    def check(self, steps: int | None) -> None:
        """Refuses checkpoints of another fit, before there are weights to train on from."""
        keeper = _keeper(self._problem, self._setting._replace(steps=steps))
        if keeper is not None:
            keeper.check()

    def run(self, weights: Weights, units: Units, steps: int | None, started: float) -> Outcome:
        """Trains on from these weights, for so many steps, or until the ELBO has settled."""
        setting = self._setting._replace(steps=steps)
        problem, schedule = problem_of(self._study, setting, self._optimizers, early=False, pace=1.0)
        first = setting.family.shapes(self._study.template, problem.whole).memory
        memory = {key: each for key, each in weights.memory.items() if key in first and each.shape == first[key].shape}
        if memory.keys() != first.keys():
            rng = np.random.default_rng(setting.seed)
            memory = {
                **setting.family.init(self._study.template, rng, self._observations.everything, problem.whole).memory,
                **memory,
            }
        inputs = inputs_of(problem, self._arguments, self._observations, units)
        copied = jax.tree.map(np.array if problem.hosted else jnp.array, weights._replace(memory=memory))
        state = place(problem, copied, setting.seed)
        run = once_compiled(runner(problem, self._observations.stored, self._quick), self._compiling)
        keeper = _keeper(problem, setting, np.asarray(weights.shared))
        progress = None if keeper is None else keeper.read(inputs, state, schedule)
        if progress is not None:
            inputs, state = progress.inputs, progress.state
        setting = setting._replace(started=started)
        trained = _train(problem, inputs, state, schedule, setting, keeper, progress, run)
        report(trained)
        return _finish(problem, inputs, self._observations, trained)


def _finish(problem: Problem, inputs: Inputs, observations: Observations, trained: Trained) -> Outcome:
    state = trained.state
    if problem.shards is not None:
        state = gathered(problem, state)
        rows, family = state.weights.rows, problem.family
        if in_all(rows, observations.in_memory) + pull_bytes(problem.template, family, state.weights) <= free_memory():
            on_device = {level: jnp.asarray(array) for level, array in rows.items()}
            state = state._replace(weights=state.weights._replace(rows=on_device))
            observations = observations.loaded()
    return Outcome(
        problem.study,
        inputs.units,
        inputs.arguments,
        observations,
        Reading(problem.family, state.weights),
        trained.stop,
        trained.history,
        {plate: min(count, problem.sizes[plate]) for plate, count in problem.batch},
        int(state.skipped),
    )
