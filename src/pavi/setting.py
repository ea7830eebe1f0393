"""What a fit was told, and what follows from it: the problem to step through, how to run it, and what makes it the same."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import optax

from pavi.branch import fit_runs
from pavi.cascade import Study
from pavi.data import Observations
from pavi.errors import SettingError
from pavi.families import Family
from pavi.identity import Identity, digest
from pavi.inner import Inner, inner_of
from pavi.packing import FORMAT
from pavi.reading import members_per_step
from pavi.schedule import Schedule
from pavi.sharding import Sharded, sharded
from pavi.stepping import Problem, State
from pavi.streaming import runner
from pavi.template import Template


class Setting(NamedTuple):
    """How to train: what `fit` was told."""

    family: Family
    batch: Mapping[str, int] | None
    steps: int | None
    num_particles: int
    optimizer: optax.GradientTransformation | None
    seed: np.ndarray
    progress_bar: bool
    started: float
    starts: int = 1
    values: Mapping[str, Any] = MappingProxyType({})
    checkpoint: str | os.PathLike | None = None
    devices: int | Mapping[str, int] | None = None
    runs: Mapping[str, int] | None = None
    rows_on_host: bool = False
    folder: str | None = None
    inner_points: int = 0
    streamed: bool = True
    """Whether data in host memory are read step by step; if not, several devices are given their parts."""
    identity: Identity | None = None
    """What makes the study the same, if there are checkpoints."""

    @property
    def polishing(self) -> Path | None:
        """Where a polished fit keeps what it has come to."""
        return None if self.checkpoint is None else Path(self.checkpoint) / "polishing"


def problem_of(study: Study, setting: Setting, optimizers: tuple, early: bool, pace: float) -> tuple[Problem, Schedule]:
    """The problem that a setting poses for a study, and its schedule. Rates start high with `early`, all times `pace`."""
    inner = inner_of(study.template, setting.inner_points)
    chosen, runs, load = _per_step(study.template, setting, inner)
    problem = Problem(study, setting.family, tuple(chosen.items()), setting.num_particles, *optimizers)
    problem = _checked(dataclasses.replace(problem, runs=tuple(runs.items()), inner=inner))
    if setting.rows_on_host:
        levels = frozenset(level for level in setting.family.shapes(study.template, problem.whole).rows if level)
        problem = dataclasses.replace(problem, hosted=levels, folder=setting.folder)
    if setting.devices is not None:
        problem = sharded(problem, setting.devices)
        chosen = {plate: min(count, problem.sizes[plate]) for plate, count in problem.batch}
    decays = setting.optimizer is None
    return problem, Schedule(study.template, chosen, setting.steps, decays=decays, load=load, early=early, pace=pace)


def _per_step(template: Template, setting: Setting, inner: Inner | None) -> tuple[dict[str, int], dict[str, int], float]:
    """Members per step of each plate, how many of them side by side, and what share that is of what a step can afford."""
    chosen, load = members_per_step(template, setting.batch, setting.num_particles, inner)
    return *fit_runs({plate.name: plate.size for plate in template.plates}, chosen, setting.runs or {}), load


def _checked(problem: Problem) -> Problem:
    """The problem, if every step sees all that depends on a member it averages out."""
    inner = problem.inner
    if inner is not None:
        parts = inner.below(problem.template) - problem.whole
        if parts:
            raise SettingError(
                f"inner_points={inner.points}: members of {inner.level} are averaged over with all that depends on them, so "
                f"a step must take {sorted(parts)} whole. Name all of their members in `batch`."
            )
    return problem


def runner_of(
    problem: Problem, observations: Observations, schedule: Schedule, setting: Setting
) -> Callable[..., tuple[State, Any]]:
    """What runs a chunk of steps: on one device or several, with data on it or elsewhere."""
    if problem.shards is None:
        return runner(problem, observations.stored, schedule.short)
    return Sharded(problem, observations.stored, setting.streamed, schedule.short)


def identity_of(problem: Problem, setting: Setting) -> Identity:
    """What two calls of `fit` must agree in for one to go on where the other stopped."""
    assert setting.identity is not None
    # As they were asked for: several devices may take some more members each.
    chosen, runs, _ = _per_step(problem.template, setting, problem.inner)
    return setting.identity.and_also(
        format=str(FORMAT),
        family=repr(problem.family),
        batch=str(chosen),
        runs=str(runs),
        optimizer="the default" if setting.optimizer is None else _recipe(setting.optimizer),
        steps=str(setting.steps),
        number_of_particles=str(problem.num_particles),
        inner_points=str(setting.inner_points),
        number_of_starts=str(setting.starts),
        starting_values=digest([np.asarray(start.value) for _, start in sorted(setting.values.items())]),
        rows="one after the other" if problem.shards is None else problem.shards.layout,
    )


def _recipe(optimizer: optax.GradientTransformation) -> str:
    """What can be told of an optimizer: which functions it is made of, and with which numbers."""

    def told(value: Any) -> str:
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        name = getattr(value, "__qualname__", None)
        if name is None:
            return ", ".join(map(told, value)) if isinstance(value, tuple) else str(value)
        return f"{name}({', '.join(told(cell) for cell in cells)})"

    return told(tuple(optimizer))
