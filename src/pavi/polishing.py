"""Polishing: posteriors that follow the evidence, with latents inside plates averaged out member by member.

Training follows a bound. It falls short of the evidence by what flows cannot express, member by member, and where single
members say little of a spread, that is more than the data say. Here the evidence itself is followed (`pavi.evidence`).

The gradients of the members' log evidences, their *scores*, add up to that of the whole, and the scatter of scores is
the information they carry (Berndt, Hall, Hall and Hausman 1974). Newton steps with both lead to the posterior's mode, first
on a few of the members, then on more, at last on all. With many members the posterior is normal, and its covariance the
inverse of that information and the prior's. Members' own posteriors are normal as well, around what their draws have for a
mean, which moves with the latents outside of plates.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits
from tqdm.auto import tqdm

from pavi.evidence import Look
from pavi.families import Normal, Units, outside
from pavi.members import Members

# So many members per number outside of plates, or this many in all, are looked at first; then this many times more.
FIRST_MEMBERS, FIRST_IN_ALL, MORE_MEMBERS = 10, 1000, 4
# In standard deviations of the posterior: the last step is shorter than this, and the last on some of the members.
SETTLED, NEAR = 0.25, 1.0
# Near the top a step is shorter than this part of the one before it, but for noise.
SHRINKING = 0.5
# Prior standard deviations that a number moves at most in one step. A step after which the log posterior is lower by this
# many nats is taken back and shortened, this often at most.
LONGEST_STEP, LARGEST_FALL, SHORTENED, MOST_SHORTENED = 1.0, 5.0, 0.3, 6
# Heights that differ by less than so many times their rounding may as well be the same. Rounding is that of the whole: a
# number outside of plates, such as a spread, is rounded for all members alike.
ROUNDINGS = 2.0
# Information in a direction is at least this part of that in the direction of most.
LEAST_PART = 1e-7
MOST_ROUNDS = 30
# A way tells that there is less information than thought if it is longer than this, in standard deviations of the
# posterior, and the gradient falls by at least this part of what the information has it.
LONG_WAY, LEAST_FALL = 2.0, 0.01
# Draws that count, of those made, below which a member's posterior is too far from what they are drawn from.
FEWEST_COUNTING = 0.5
# Cores that matrices of the numbers outside of plates are solved with: several would wait for each other, and all for the
# compiler.
SOLVING_CORES = 1


def polish(members: Members, theta: np.ndarray, units: Units, progress_bar: bool) -> tuple[Normal | None, bool]:
    """The posterior of what is outside of plates, and of the members' latents, as normal distributions; whether it settled.

    None, with a warning, where members' posteriors are too far from normal for that.

    Args:
        theta: where to start.
        units: of the latents: where their prior puts them, and how widely.
    """
    with (
        threadpool_limits(SOLVING_CORES),
        tqdm(disable=not progress_bar, desc="polishing", unit="member", dynamic_ncols=True, leave=False) as bar,
    ):
        return _Search(members, units, bar).run(theta)


class _Search:
    """The search for the posterior's mode, on a part of the members that grows."""

    def __init__(self, members: Members, units: Units, bar: tqdm):
        self.members, self.bar = members, bar
        self.places = outside(members.study.template)
        self.center, self.spread = (
            np.concatenate([np.ravel(each[name]) for name in self.places]).astype(np.float64)
            for each in (units.center, units.prior_spread or units.spread)
        )
        self.order = np.random.default_rng(0).permutation(members.count)
        self.looked_at = min(max(FIRST_MEMBERS * len(self.center), FIRST_IN_ALL), members.count)

    def run(self, theta: np.ndarray) -> tuple[Normal | None, bool]:
        here = self._newton(self._first(theta.astype(np.float64)))
        last: _Newton | None = None
        before = np.inf
        for _ in range(MOST_ROUNDS):
            step = here.step(LONGEST_STEP * self.spread, last, list(self.places.values()))
            moved = float(np.abs(step / np.sqrt(np.diag(here.covariance))).max())
            self.bar.set_postfix_str(f"next step {moved:.2f} posterior sd", refresh=False)
            settled = moved < SETTLED or _is_noise(moved, before)
            if self.looked_at == self.members.count and settled:
                break
            if self.looked_at < self.members.count and moved < NEAR * np.sqrt(self.members.count / self.looked_at):
                self.looked_at = min(MORE_MEMBERS * self.looked_at, self.members.count)
                here, last, before = self._newton(self._at(here.theta + step)), None, np.inf
                continue
            there = self._along(here, step)
            if there is None:
                step = np.zeros_like(step)
                break
            here, last, before = self._newton(there), here, moved
        else:
            step = np.zeros_like(here.theta)
        unsettled = self.looked_at < self.members.count or not settled
        if self.looked_at < self.members.count:
            self.looked_at, step = self.members.count, np.zeros_like(step)
            here = self._newton(self._at(here.theta))
        if here.counting < FEWEST_COUNTING:
            warnings.warn(
                f"Only {here.counting:.0%} of the draws of members' latents count: their posteriors are too far from normal "
                "for polishing, and the fit stays as it was. Train it longer instead, with `inner_points` if there are "
                "latents further inside.",
                stacklevel=4,
            )
            return None, False
        if unsettled:
            warnings.warn(
                f"Polishing ended with a step to go that would move a number by {moved:.1f} posterior standard deviations: "
                "the posterior may not be settled. Train longer before polishing, or polish again.",
                stacklevel=4,
            )
        factor, found = np.linalg.cholesky(here.covariance), self.members.posteriors(here.theta, step)
        return Normal(here.theta + step, factor, found), not unsettled

    def _first(self, theta: np.ndarray) -> _Place:
        """Where the search begins: where the fit is, but for sites that the evidence would rather have at their start.

        A bound may drive a spread to nothing, and from there no step would lead back.
        """
        best, known = self._at(theta), self.members.known()
        for place in self.places.values():
            tried = best.theta.copy()
            tried[place] = self.center[place]
            found = self._at(tried)
            if found.height > best.height + LARGEST_FALL + self._hidden(best.height):
                best, known = found, self.members.known()
            else:
                self.members.recall(known)
        return best

    def _along(self, here: _Newton, step: np.ndarray) -> _Place | None:
        """The place that a step leads to, the step shortened as long as that is lower; None where all are."""
        known = self.members.known()
        for number in range(MOST_SHORTENED):
            there = self._at(here.theta + step * SHORTENED**number)
            if _rise(here, there, self._hidden(here.height)) >= -LARGEST_FALL:
                return there
            self.members.recall(known)
        return None

    def _hidden(self, height: float) -> float:
        """Differences between heights that rounding may hide."""
        return ROUNDINGS * float(np.finfo(self.members.values.dtype).eps) * abs(height)

    def _at(self, theta: np.ndarray) -> _Place:
        """A place, and how high the log posterior is there, as far as the members that are looked at tell."""
        look = self.members.look(theta, np.sort(self.order[: self.looked_at]), self.bar)
        value, gradient, information = self.members.outside(theta)
        height = float(look.evidence) * self._times + value
        return _Place(theta, height, look.score * self._times + gradient, look, information)

    @property
    def _times(self) -> float:
        return self.members.count / self.looked_at

    def _newton(self, place: _Place) -> _Newton:
        """The log posterior around a place that was looked at last."""
        look = place.look
        scatter = look.squares - np.outer(look.score, look.score) / self.looked_at
        kept = _kept(scatter, list(self.places.values()), self.looked_at)
        whole = _definite(place.information + _shrunk(scatter, kept, self.looked_at) * self._times)
        free = _definite(place.information + _shrunk(scatter, np.ones_like(kept), self.looked_at) * self._times)
        return _Newton(
            place.theta,
            place.height,
            place.gradient,
            whole,
            np.linalg.inv(free),
            float(look.counting) / self.looked_at,
        )


class _Place(NamedTuple):
    """A place and the log posterior there: its height and gradient, what members say of it, and the prior's information."""

    theta: np.ndarray
    height: float
    gradient: np.ndarray
    look: Look
    information: np.ndarray


class _Newton(NamedTuple):
    """The log posterior as far as some of the members tell.

    Its height, gradient, information with correlations shrunk, covariance without, and which part of draws counts.
    """

    theta: np.ndarray
    height: float
    gradient: np.ndarray
    information: np.ndarray
    covariance: np.ndarray
    counting: float

    def step(self, longest: np.ndarray, last: _Newton | None, blocks: list[slice]) -> np.ndarray:
        """A Newton step. Numbers that would move too far move as far as they may, and the others as they then would.

        Args:
            longest: how far each number may move.
            last: the place before this one, looked at with the same members.
            blocks: the places of each site.
        """
        information = self.information if last is None else _as_found(self, last, blocks)
        step = np.linalg.solve(information, self.gradient)
        free = np.abs(step) < longest
        step = np.clip(step, -longest, longest)
        pull = self.gradient - information @ np.where(free, 0.0, step)
        step[free] = np.linalg.solve(information[np.ix_(free, free)], pull[free])
        return np.clip(step, -longest, longest)


def _rise(here: _Newton, there: _Place, hidden: float) -> float:
    """How much higher the log posterior is there; where that is hidden by rounding, as the slopes at both ends have it."""
    rise = there.height - here.height
    if abs(rise) > hidden:
        return rise
    return float((here.gradient + there.gradient) @ (there.theta - here.theta)) / 2


def _is_noise(moved: float, before: float) -> bool:
    """Whether a step is so short, and yet not much shorter than the one before it, that more would only follow noise."""
    return SHRINKING * before < moved < NEAR


def _as_found(here: _Newton, last: _Newton, blocks: list[slice]) -> np.ndarray:
    """The information here, changed to agree with how far each site's gradient fell on the way (a BFGS update of each).

    Far from the top the scatter of scores is mostly that of how much members have to say of a number, not of what they say.
    """
    way, fall, found = here.theta - last.theta, last.gradient - here.gradient, here.information.copy()
    for block in blocks:
        own, step = found[block, block], way[block]
        thought = own @ step
        fell = fall[block] - found[block] @ way + thought
        # On a short way a gradient that hardly falls may be noise, and once it has changed its sign there is more
        # information here than there was on the way. One that falls too fast makes steps go back and forth.
        on_the_way = step @ thought > LONG_WAY**2 and step @ here.gradient[block] > 0
        least = LEAST_FALL if on_the_way else 1.0
        if step @ fell > least * (step @ thought) > 0:
            own += np.outer(fell, fell) / (step @ fell) - np.outer(thought, thought) / (step @ thought)
    return _definite(found)


def _definite(information: np.ndarray) -> np.ndarray:
    """An information that is positive in all directions: a prior need not fall off on all sides."""
    steepness, directions = np.linalg.eigh(information)
    if steepness[0] > 0:
        return information
    return directions * np.maximum(np.abs(steepness), LEAST_PART * steepness[-1]) @ directions.T


def _kept(scatter: np.ndarray, blocks: list[slice], looked_at: int) -> np.ndarray:
    """The square root of what is kept of correlations between each site's numbers: less, the more they look like noise.

    Of many numbers some will seem to hang together among so few members, and the inverse would be far off along them
    (Schäfer and Strimmer 2005).
    """
    deviations = np.sqrt(np.maximum(np.diag(scatter), np.finfo(float).tiny))
    found = scatter / np.outer(deviations, deviations)
    kept = np.ones(len(found))
    for block in blocks:
        apart = found[block, block][~np.eye(block.stop - block.start, dtype=bool)] ** 2
        if apart.sum() > 0:
            kept[block] = np.sqrt(max(1 - ((1 - apart) ** 2).sum() / looked_at / apart.sum(), 0.0))
    return kept


def _shrunk(scatter: np.ndarray, kept: np.ndarray, looked_at: int) -> np.ndarray:
    """A scatter of which parts of its correlations are kept. Its inverse is too large on average, which is corrected."""
    found = scatter * np.outer(kept, kept)
    np.fill_diagonal(found, np.diag(scatter))
    return found / max(1 - ((kept**2).sum() + 1) / looked_at, 0.5)
