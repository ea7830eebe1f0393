"""The members of the outermost plate, looked at in tiles: their evidences, scores and posteriors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from tqdm.auto import tqdm

from pavi.cascade import Study
from pavi.compiling import in_background
from pavi.data import Observations
from pavi.evidence import (
    Look,
    Top,
    Weighed,
    climb_tile,
    draw_tile,
    lean_tile,
    look_outside,
    normals_of_tile,
    sum_tile,
    weigh_tile,
    with_tile,
)
from pavi.families import Units
from pavi.inner import Marginal
from pavi.journal import Journal
from pavi.memory import device_memory
from pavi.proposing import KNOTS, Draws
from pavi.sources import take
from pavi.template import Kind, Level
from pavi.tiles import one_ahead, tile_budget

# Numbers that are held for each number of a draw.
LAYERS = 2
# Numbers that a tile may hold on a CPU; on an accelerator at most so many, and at most this part of its free memory. There
# each tile takes some milliseconds whatever it holds, so that tiles had better be large.
CPU_BUDGET, LARGEST_BUDGET, FREE_PART = 2**23, 2**32, 0.25


class _Told(NamedTuple):
    """A look at all members of which only the outcome is known: with which theta, and from which values of theirs."""

    theta: np.ndarray
    values: np.ndarray


class Members:
    """The members of the plate, in tiles of one size, with where their latents are likeliest as far as is known.

    What looks at them is compiled in the background.
    """

    def __init__(
        self,
        study: Study,
        marginal: Marginal,
        arguments: Any,
        observations: Observations,
        units: Units,
        seed: np.ndarray,
        journal: Journal | None = None,
    ):
        self.study, self.marginal, self.arguments = study, marginal, arguments
        self.observations, self.seed, self.journal = observations, seed, journal
        template, dtype = study.template, jnp.result_type(float)
        self.count = template.plate(marginal.plate).size
        start = [np.ravel(units.center[site.name]) for site in marginal.latents(template)]
        self.values = np.tile(np.concatenate(start).astype(dtype), (self.count, 1))
        self.tile = int(np.clip(_budget() // self._numbers(), 1, self.count))
        self.found: list[tuple[np.ndarray, Top, Weighed]] | _Told = []
        self._compiling = self._compile(sum(site.size for site in template.latents if not site.level))

    def _compile(self, size: int) -> list[Future]:
        """Compiles all that looks at members, side by side."""

        def array(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, self.values.dtype)

        tile, own, theta = self.tile, self.values.shape[1], array(size)
        index = np.zeros(tile, np.int32)
        top = Top(array(tile, own), array(tile, own, own), array(tile, own), array(tile))
        # Nothing is read here: what is waited for now, the fit would wait for.
        inside = self._data_shapes(tile)
        outside = jax.eval_shape(self._without_plate, self._data_shapes(1))
        start, rest = (self.study, self.marginal, self.arguments), (self.seed, theta)
        mixed, draws = array(tile, size), self.marginal.draws
        drawn = Draws(array(tile, draws, own), array(tile, draws), array(tile, own, own), array(tile, own))
        weighed = Weighed(array(tile), mixed, top.values, array(tile), array(tile, own * (1 + own)))
        # What takes longest to compile comes first.
        return [
            in_background(weigh_tile, *start, inside, *rest, index, top, drawn),
            in_background(lean_tile, *start, inside, *rest, index, top.values, top.values),
            in_background(climb_tile, *start, inside, *rest, index, array(tile, own)),
            in_background(draw_tile, *start, inside, *rest, index, top),
            in_background(normals_of_tile, weighed, top, [mixed] * own, theta),
            in_background(with_tile, *(array(rows, own * (1 + own + size)) for rows in (self.count, tile)), index),
            in_background(look_outside, *start, outside, *rest),
            in_background(sum_tile, weighed, mixed, index > 0),
        ]

    def _start(self, index: np.ndarray, theta: np.ndarray) -> tuple[Any, ...]:
        """The first arguments of what looks at some members."""
        place = np.asarray(theta, self.values.dtype)
        return self.study, self.marginal, self.arguments, self._data(index), self.seed, place

    def _numbers(self) -> int:
        """Numbers that are held while one member is looked at, about: by its draws, or where its density is followed."""
        template, plate = self.study.template, self.marginal.plate
        data = sum(
            math.prod(site.member_shape) * math.prod(template.sizes(_without(site.level, plate)))
            for site in template.observed
            if plate in site.level
        )
        followed = KNOTS.size * self.marginal.size(template) * self._evaluated(self.marginal.coarse)
        return data + LAYERS * max(self.marginal.draws * self._evaluated(self.marginal), followed)

    def _evaluated(self, marginal: Marginal) -> int:
        """Numbers of one member's log-density at one place."""
        template, (plate, inner, _) = self.study.template, marginal
        held = marginal.size(template)
        for level, each in ({} if inner is None else inner.work(template)).items():
            held += math.prod(template.sizes(_without(level, plate))) * each
        mixed = None if inner is None else inner.mixing(template)
        for site in template.sites:
            if plate not in site.level or site.kind is Kind.DETERMINISTIC:
                continue
            numbers = math.prod(site.member_shape)
            if site == mixed and inner is not None:  # the chances of its values or components, as many as have logits
                numbers = 2 * sum(each.size for each in template.latents if inner.holds(each))
            held += math.prod(template.sizes(_without(site.level, plate))) * max(numbers, 1)
        return held

    def look(self, theta: np.ndarray, members: np.ndarray, bar: tqdm | None = None) -> Look:
        """Looks at some members; if at all, remembers their posteriors. What a journal tells need not be looked at again."""
        told = None if self.journal is None else self.journal.next(theta, len(members))
        if told is not None:
            self.found = _Told(theta, self.values.copy()) if len(members) == self.count else []
            total, self.values[members] = told
        else:
            total = self._look(theta, members, bar)
            if self.journal is not None:
                self.journal.add(theta, total, self.values[members])
        return total

    def _look(self, theta: np.ndarray, members: np.ndarray, bar: tqdm | None = None) -> Look:
        total, found = None, []
        for chosen, look, top, weighed in one_ahead(self._tiles(theta, members)):
            self.values[chosen] = np.asarray(top.values)[: len(chosen)]
            look = Look(*(np.asarray(each, np.float64) for each in look))
            look = look._replace(evidence=look.evidence.sum())
            total = look if total is None else total.plus(look)
            if len(members) == self.count:
                found.append((_filled(chosen, self.tile), top, weighed))
            if bar is not None:
                bar.update(len(chosen))
        assert total is not None
        self.found = found
        return total

    def _tiles(self, theta: np.ndarray, members: np.ndarray) -> Iterator[tuple[np.ndarray, Look, Top, Weighed]]:
        self._wait()
        for first in range(0, len(members), self.tile):
            chosen = members[first : first + self.tile]
            index = _filled(chosen, self.tile)
            start = (*self._start(index, theta), index)
            top = climb_tile(*start, self.values[index])
            weighed = weigh_tile(*start, top, draw_tile(*start, top))
            moving = lean_tile(*start, top.values, weighed.along)
            yield chosen, sum_tile(weighed, moving, np.arange(self.tile) < len(chosen)), top, weighed

    def posteriors(self, theta: np.ndarray, moved: np.ndarray) -> Array:
        """Posteriors of all members, which were last looked at with theta, once that has moved on a little.

        Numbers of each as in `pavi.families.polished`.
        """
        step, own = np.asarray(moved, self.values.dtype), self.values.shape[1]
        if isinstance(self.found, _Told):
            self.values[...] = self.found.values
            self._look(self.found.theta, np.arange(self.count))
        assert not isinstance(self.found, _Told)
        found = jnp.zeros((self.count, own * (1 + own + len(step))), self.values.dtype)
        for index, top, weighed in self.found:
            start = (*self._start(index, theta), index, top.values)
            units = np.eye(own, dtype=self.values.dtype)
            mixed = [lean_tile(*start, np.broadcast_to(unit, top.values.shape)) for unit in units]
            found = with_tile(found, normals_of_tile(weighed, top, mixed, step), index)
        return found

    def known(self) -> tuple[np.ndarray, list | _Told]:
        """What the last look found, to be recalled after a look elsewhere that is not to count."""
        return self.values.copy(), self.found

    def recall(self, known: tuple[np.ndarray, list | _Told]) -> None:
        self.values[...], self.found = known

    def _wait(self) -> None:
        for compiling in self._compiling:
            compiling.result()

    def _data(self, index: np.ndarray) -> dict[str, Any]:
        """The data of some members."""
        template, plate = self.study.template, self.marginal.plate
        indices = {p.name: index if p.name == plate else np.arange(p.size, dtype=np.int32) for p in template.plates}
        levels = {site.name: site.level for site in template.observed}
        return {
            name: take(array, tuple(indices[each] for each in levels[name]))
            for name, array in self.observations.everything.items()
        }

    def _data_shapes(self, count: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the data of so many members."""
        template, found = self.study.template, {}
        sizes = {p.name: count if p.name == self.marginal.plate else p.size for p in template.plates}
        for name, array in self.observations.everything.items():
            level = template.site(name).level
            shape = (*(sizes[plate] for plate in level), *array.shape[len(level) :])
            found[name] = jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(array.dtype))
        return found

    def _without_plate(self, data: dict[str, Any]) -> dict[str, Any]:
        """The data of one member, without the axis of its plate."""
        plate, levels = self.marginal.plate, {site.name: site.level for site in self.study.template.observed}
        return {
            name: each.squeeze(levels[name].index(plate)) if plate in levels[name] else each for name, each in data.items()
        }

    def outside(self, theta: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """What is outside of plates: its log-density, the gradient, and the information."""
        self._wait()
        study, marginal, arguments, data, seed, place = self._start(np.zeros(1, np.int32), theta)
        found = look_outside(study, marginal, arguments, self._without_plate(data), seed, place)
        value, gradient, curvature = (np.asarray(each, np.float64) for each in found)
        return float(value), gradient, -curvature


def _filled(chosen: np.ndarray, tile: int) -> np.ndarray:
    """Indices of members, and of the last of them again until a tile is full."""
    return np.pad(chosen, (0, tile - len(chosen)), mode="edge").astype(np.int32)


def _budget() -> int:
    """Numbers that one tile may hold: on an accelerator a part of the memory that is free."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or jax.default_backend() == "cpu":
        return CPU_BUDGET
    free = device_memory() - stats.get("bytes_in_use", 0)
    return int(np.clip(FREE_PART * free // 4, tile_budget(), LARGEST_BUDGET))


def _without(level: Level, plate: str) -> Level:
    return tuple(each for each in level if each != plate)
