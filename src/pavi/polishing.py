"""Polishing: the posterior of latents outside of plates, with those inside averaged out member by member.

Training follows a bound. It falls short of the evidence by what flows cannot express, member by member, and where single
members say little of a spread, that is more than the data say. Here the evidence itself is followed (`pavi.evidence`).

The gradients of the members' log evidences, their *scores*, add up to that of the whole, and the scatter of scores is
the information they carry (Berndt, Hall, Hall and Hausman 1974). Newton steps with both lead to the posterior's mode. With
many members the posterior is normal, and its covariance the inverse of that information and the prior's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from tqdm.auto import tqdm

from pavi import data as observed_data
from pavi.branch import fixed_branch
from pavi.cascade import Study
from pavi.data import Observations
from pavi.evidence import Look, Marginal, look_at_tile, look_outside
from pavi.families import Normal, outside
from pavi.planning import device_memory
from pavi.template import Kind, Level
from pavi.tiles import one_ahead, tile_budget

# So many members per number outside of plates, or this many in all, are looked at until a step is small.
FIRST_MEMBERS, FIRST_IN_ALL = 10, 1000
# In standard deviations of the posterior: the last step is shorter than this, and the last before all members are looked at.
SETTLED, NEAR = 0.25, 1.0
# Prior standard deviations that a number moves at most in one step. A step after which the log posterior is lower by this
# many nats, and this part of it, which may be rounding, is taken back by half.
LONGEST_STEP, LARGEST_FALL, LEAST_PART = 10.0, 5.0, 1e-7
MOST_ROUNDS = 20
# Times that a step is shortened at most where the last one turned out too long.
MOST_STEEPER = 4.0
# Draws that count, of those made, below which a member's posterior is too far from what they are drawn from.
FEWEST_COUNTING = 0.3
# Numbers that are held for each number of a draw.
LAYERS = 6
# Numbers that a tile may hold on a CPU; on an accelerator at most so many, and at most this part of its free memory.
CPU_BUDGET, LARGEST_BUDGET, FREE_PART = 2**24, 2**31, 0.25


class Members:
    """The members of the plate, in tiles of one size, with where their latents are likeliest as far as is known."""

    def __init__(self, study: Study, marginal: Marginal, arguments: Any, observations: Observations, seed: np.ndarray):
        self.study, self.marginal, self.arguments = study, marginal, arguments
        self.observations, self.seed = observations, seed
        template = study.template
        self.count = template.plate(marginal.plate).size
        self.values = np.zeros((self.count, sum(site.size for site in marginal.latents(template))), jnp.result_type(float))
        self.known = np.zeros(self.count, bool)
        self.tile = int(np.clip(_budget() // self._numbers(), 1, self.count))

    def _numbers(self) -> int:
        """Numbers that are held while one member is looked at, about."""
        template, (plate, inner, draws) = self.study.template, self.marginal
        work = {} if inner is None else inner.work(template)
        held = sum(math.prod(template.sizes(_without(level, plate))) * each for level, each in work.items())
        for site in template.sites:
            if plate in site.level and site.kind is not Kind.DETERMINISTIC:
                held += math.prod(template.sizes(_without(site.level, plate))) * max(site.size, 1)
        data = sum(
            math.prod(template.sizes(_without(site.level, plate))) * math.prod(site.member_shape)
            for site in template.observed
        )
        return data + LAYERS * draws * held

    def look(
        self, theta: np.ndarray, members: np.ndarray, start: Callable[[np.ndarray], np.ndarray], bar: tqdm | None = None
    ) -> Look:
        """Looks at some members; `start` says where the latents of those that are seen for the first time begin."""
        total = None
        for chosen, look, values in one_ahead(self._tiles(theta, members, start)):
            self.values[chosen] = np.asarray(values)[: len(chosen)]
            self.known[chosen] = True
            total = look if total is None else total.plus(look)
            if bar is not None:
                bar.update(len(chosen))
        assert total is not None
        return total

    def _tiles(
        self, theta: np.ndarray, members: np.ndarray, start: Callable[[np.ndarray], np.ndarray]
    ) -> Iterator[tuple[np.ndarray, Look, Array]]:
        for first in range(0, len(members), self.tile):
            chosen = members[first : first + self.tile]
            index = np.pad(chosen, (0, self.tile - len(chosen)), mode="edge")
            if not self.known[index].all():
                self.values[index] = np.where(self.known[index, None], self.values[index], start(index))
            look, values = look_at_tile(
                self.study,
                self.marginal,
                self.arguments,
                jnp.asarray(theta, self.values.dtype),
                self.values[index],
                index.astype(np.int32),
                np.arange(self.tile) < len(chosen),
                self._data(index),
                self.seed,
            )
            yield chosen, look, values

    def _data(self, index: np.ndarray) -> dict[str, Any]:
        template = self.study.template
        indices = {p.name: index if p.name == self.marginal.plate else np.arange(p.size) for p in template.plates}
        whole = frozenset(indices) - {self.marginal.plate}
        branch = fixed_branch({name: jnp.asarray(each, jnp.int32) for name, each in indices.items()})
        stored = observed_data.stored_at(template, self.observations.stored, indices)
        return {**observed_data.at_branch(template, self.observations.arrays, branch, whole), **stored}

    def outside(self, theta: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """What is outside of plates: its log-density, the gradient, and the information."""
        data = self._data(np.zeros(1, np.int64))
        levels = {site.name: site.level for site in self.study.template.observed}
        one = {
            name: jnp.take(each, 0, levels[name].index(self.marginal.plate)) if self.marginal.plate in levels[name] else each
            for name, each in data.items()
        }
        found = look_outside(
            self.study, self.marginal, self.arguments, jnp.asarray(theta, self.values.dtype), one, self.seed
        )
        value, gradient, curvature = (np.asarray(each, np.float64) for each in found)
        return float(value), gradient, -curvature


def _budget() -> int:
    """Numbers that one tile may hold: on an accelerator a part of the memory that is free."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or jax.default_backend() == "cpu":
        return CPU_BUDGET
    free = device_memory() - stats.get("bytes_in_use", 0)
    return int(np.clip(FREE_PART * free // 4, tile_budget(), LARGEST_BUDGET))


def _without(level: Level, plate: str) -> Level:
    return tuple(each for each in level if each != plate)


def polish(
    members: Members,
    theta: np.ndarray,
    spread: np.ndarray,
    start: Callable[[np.ndarray], np.ndarray],
    progress_bar: bool,
) -> Normal:
    """The posterior of what is outside of plates, as a normal distribution.

    Args:
        theta: where to start.
        spread: prior standard deviations.
        start: where the latents of members begin.
    """
    count, size = members.count, len(theta)
    blocks = list(outside(members.study.template).values())
    order = np.random.default_rng(0).permutation(count)
    looked_at = min(max(FIRST_MEMBERS * size, FIRST_IN_ALL), count)
    last: _Newton | None = None
    with tqdm(disable=not progress_bar, desc="polishing", unit="member", dynamic_ncols=True, leave=False) as bar:
        for _ in range(MOST_ROUNDS):
            look = members.look(theta, np.sort(order[:looked_at]), start, bar)
            found = _newton(theta, look, looked_at, count, blocks, *members.outside(theta))
            if last is not None and found.height < last.height - LARGEST_FALL * (1 + LEAST_PART * abs(last.height)):
                theta = (theta + last.theta) / 2
                continue
            step = found.step * min(1.0, LONGEST_STEP / np.abs(found.step / spread).max())
            step /= 1.0 if last is None else found.steeper_than_thought(last)
            last, theta = found, theta + step
            moved = np.abs(step / np.sqrt(np.diag(found.covariance))).max()
            bar.set_postfix_str(f"last step {moved:.2f} posterior sd", refresh=False)
            if looked_at == count and moved < SETTLED:
                break
            if moved < NEAR * np.sqrt(count / looked_at) and looked_at < count:
                looked_at, last = count, None
        else:
            warnings.warn(
                f"Polishing took {MOST_ROUNDS} steps, the last of which moved a number by {moved:.1f} posterior standard "
                "deviations: the posterior may not be settled. Train longer before polishing, or polish again.",
                stacklevel=3,
            )
    counting = look.counting / looked_at
    if counting < FEWEST_COUNTING:
        warnings.warn(
            f"Only {counting:.0%} of the draws of members' latents count: their posteriors are far from normal, and what "
            "polishing says may be off. Raise `num_draws`, or keep to the fit as it was.",
            stacklevel=3,
        )
    return Normal(theta, np.linalg.cholesky(found.covariance), theta)


class _Newton(NamedTuple):
    """The log posterior as far as some of the members tell: its height, gradient, information and covariance."""

    theta: np.ndarray
    height: float
    gradient: np.ndarray
    information: np.ndarray
    covariance: np.ndarray

    @property
    def step(self) -> np.ndarray:
        return self.covariance @ self.gradient

    def steeper_than_thought(self, last: _Newton) -> float:
        """How many times faster the gradient fell on the way from the last place than the information there had it."""
        way = self.theta - last.theta
        return float(np.clip(way @ (last.gradient - self.gradient) / (way @ last.information @ way), 1.0, MOST_STEEPER))


def _newton(
    theta: np.ndarray,
    look: Look,
    looked_at: int,
    count: int,
    blocks: list[slice],
    value: float,
    gradient: np.ndarray,
    information: np.ndarray,
) -> _Newton:
    score, squares, times = np.asarray(look.score), np.asarray(look.squares), count / looked_at
    scatter = squares - np.outer(score, score) / looked_at
    whole = information + _shrunk(scatter, blocks, looked_at) * times
    steepness, directions = np.linalg.eigh(whole)
    if steepness[0] <= 0:  # the prior need not fall off on all sides
        whole = directions * np.maximum(np.abs(steepness), LEAST_PART * steepness[-1]) @ directions.T
    height = float(look.evidence) * times + value
    return _Newton(theta, height, score * times + gradient, whole, np.linalg.inv(whole))


def _shrunk(scatter: np.ndarray, blocks: list[slice], looked_at: int) -> np.ndarray:
    """A scatter whose correlations are smaller, those of each site's numbers as much as they look like noise.

    Of many numbers some will seem to hang together among so few members, and the inverse would be far off along them
    (Schäfer and Strimmer 2005). What is left is too large an inverse on average, which is corrected.
    """
    deviations = np.sqrt(np.maximum(np.diag(scatter), np.finfo(float).tiny))
    found = scatter / np.outer(deviations, deviations)
    kept = np.ones(len(found))  # the square root of what is left of correlations between a site's numbers
    for block in blocks:
        apart = found[block, block][~np.eye(block.stop - block.start, dtype=bool)] ** 2
        if apart.sum() > 0:
            kept[block] = np.sqrt(max(1 - ((1 - apart) ** 2).sum() / looked_at / apart.sum(), 0.0))
    found *= np.outer(kept, kept)
    np.fill_diagonal(found, 1.0)
    return found * np.outer(deviations, deviations) / max(1 - ((kept**2).sum() + 1) / looked_at, 0.5)
