"""Polishing: the posterior of latents outside of plates, with those inside averaged out member by member.

Training follows a bound. It falls short of the evidence by what flows cannot express, member by member, and where single
members say little of a spread, that is more than the data say. Here the evidence itself is followed. Given the latents
outside of plates, members of a plate are independent, so it is a product over them. For one member,

1. its latents are put where their posterior is highest, by Newton steps;
2. the evidence is the mean of p / q over draws of q, Student's t distribution around that place with the curvature found
   there. As the latents outside move, q moves along: otherwise a few draws would soon outweigh all others;
3. latents further inside are averaged out over points of their prior, as in training with `inner_points`.

The gradients of the members' log evidences, their *scores*, add up to that of the whole, and the scatter of scores is
the information they carry (Berndt, Hall, Hall and Hausman 1974). Newton steps with both lead to the posterior's mode. With
many members the posterior is normal, and its covariance the inverse of that information and the prior's.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray
from scipy.special import gammaln
from scipy.stats import chi2, qmc
from tqdm.auto import tqdm

from pavi import data as observed_data
from pavi.branch import fixed_branch
from pavi.cascade import EDGE, Draw, Study, cascade
from pavi.compiling import quick_jit
from pavi.data import Observations
from pavi.elbo import reduced_elbo
from pavi.errors import SettingError
from pavi.families import Normal, outside
from pavi.inner import Inner, inner_of
from pavi.prior import Prior
from pavi.template import Kind, Level, Site, Template
from pavi.tiles import tile_budget

# Newton steps to where a member's posterior is highest: the last is shorter than this, in standard deviations of that
# posterior, and there are at most so many.
NEAR_TOP, MOST_CLIMBED = 0.1, 20
# Lengths of a Newton step that are tried.
LENGTHS = (1.0, 0.3, 0.05)
# Directions in which a member's posterior is flatter than this, relative to its steepest, count as this steep.
FLATTEST = 1e-6
# Degrees of freedom of members' draws.
TAILS = 10.0
# Members per number outside of plates, at least; and so many, or this many in all, are looked at until a step is small.
FEWEST_MEMBERS, FIRST_MEMBERS, FIRST_IN_ALL = 4, 10, 1000
# In standard deviations of the posterior: the last step is shorter than this, and the last before all members are looked at.
SETTLED, NEAR = 0.25, 1.0
# Prior standard deviations that a number moves at most in one step. A step after which the log posterior is lower by this
# many nats, and this part of it, which may be rounding, is taken back by half.
LONGEST_STEP, LARGEST_FALL, LEAST_PART = 10.0, 5.0, 1e-7
MOST_ROUNDS = 20
# Draws that count, of those made, below which the normal distribution of a member does not fit.
FEWEST_COUNTING = 0.3
# Most numbers of one member's latents: their curvature is a matrix of as many rows.
MOST_NUMBERS = 64


class Marginal(NamedTuple):
    """How latents inside plates are averaged out: those of one plate by draws, those further inside over points."""

    plate: str
    inner: Inner | None
    draws: int

    def latents(self, template: Template) -> list[Site]:
        return [site for site in template.latents if site.level == (self.plate,)]


def marginal_of(template: Template, draws: int, points: int) -> Marginal:
    """How the latents of a model are averaged out.

    Raises:
        SettingError: if they cannot be: members of the outermost plate must be independent given what is outside of plates.
    """
    why = None
    levels = [level for level in template.levels if level]
    level: Level = min(levels, key=len, default=())
    deeper = [other for other in levels if other != level]
    astray = [
        s.name for s in template.sites if s.level and s.kind is not Kind.DETERMINISTIC and not set(level) <= set(s.level)
    ]
    size = sum(site.size for site in template.latents if site.level == level)
    count = sum(site.size for site in template.latents if not site.level)
    if not count:
        why = "it has no latent outside of plates"
    elif len(level) != 1:
        why = f"its outermost latents inside plates are in {level or 'none'}; expected a single plate"
    elif astray:
        why = f"{astray} are not in the plate {level[0]!r} of the other latents, so its members are not independent"
    elif len(deeper) > 1:
        why = f"inside the plate {level[0]!r} there are latents of several levels, {deeper}; expected one"
    elif size > MOST_NUMBERS:
        why = f"a member of the plate {level[0]!r} has {size} latent numbers; expected at most {MOST_NUMBERS}"
    elif template.sizes(level)[0] < FEWEST_MEMBERS * count:
        why = (
            f"the plate {level[0]!r} has {template.sizes(level)[0]} members for {count} numbers outside of plates; expected "
            f"{FEWEST_MEMBERS} times as many: with fewer the posterior need not be normal, and the flows describe it better"
        )
    if why is not None:
        raise SettingError(f"This model cannot be polished: {why}.")
    if draws < 2 or draws & (draws - 1):
        raise SettingError(f"polish(num_draws={draws}): expected a power of two, such as 16.")
    return Marginal(level[0], inner_of(template, points) if deeper else None, draws)


def _log_density(
    study: Study,
    marginal: Marginal,
    arguments: Any,
    theta: Array,
    values: Array,
    index: Array,
    data: Mapping[str, Array],
    key: PRNGKeyArray,
    everywhere: bool = False,
) -> Float[Array, ""]:
    """What one member adds to log p, its latents and those outside at given unconstrained values.

    With `everywhere`, what is outside of plates adds instead.
    """
    template, plate = study.template, marginal.plate
    given = {name: theta[place] for name, place in outside(template).items()}
    start = 0
    for site in marginal.latents(template):
        given[site.name] = values[start : start + site.size]
        start += site.size

    def sampler(site: Site, prior: Prior, encoding: Any, before: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
        del prior, encoding, before, key
        return Draw(given[site.name], jnp.zeros(()), given[site.name])

    branch = fixed_branch({p.name: index[None] if p.name == plate else jnp.arange(p.size) for p in template.plates})
    levels = {site.name: site.level for site in template.observed}
    shown = {
        name: jnp.expand_dims(each, levels[name].index(plate)) if plate in levels[name] else each
        for name, each in data.items()
    }
    found = cascade(study, arguments, sampler, {}, branch, shown, key, inner=marginal.inner)
    return reduced_elbo(template, branch, found, lambda level: float(bool(level) != everywhere), marginal.inner)


class Look(NamedTuple):
    """Sums over the members looked at: of log evidences, scores, outer products of scores, and parts of draws that count."""

    evidence: Any
    score: Any
    squares: Any
    counting: Any

    def plus(self, other: Look) -> Look:
        return Look(*(np.asarray(a, np.float64) + np.asarray(b, np.float64) for a, b in zip(self, other, strict=True)))


@quick_jit(static_argnums=(0, 1))
def _look(
    study: Study,
    marginal: Marginal,
    arguments: Any,
    theta: Array,
    values: Array,
    index: Array,
    counts: Array,
    data: dict[str, Array],
    seed: Array,
) -> tuple[Look, Array]:
    """Looks at a tile of members, their latents first at given values; these are moved to where they are likeliest."""
    template, key = study.template, jax.random.wrap_key_data(seed)
    levels = {site.name: site.level for site in template.observed}
    axes = {name: levels[name].index(marginal.plate) if marginal.plate in levels[name] else None for name in data}
    looked = jax.vmap(functools.partial(_look_at, study, marginal, arguments, theta, key), in_axes=(0, 0, axes))
    evidence, scores, counting, values = looked(values, index, data)
    # A member whose evidence is not finite says nothing.
    usable = counts & jnp.isfinite(evidence) & jnp.isfinite(scores).all(-1)
    scores = jnp.where(usable[:, None], scores, 0.0)
    with jax.default_matmul_precision("float32"):
        squares = scores.T @ scores
    found = (jnp.where(usable, evidence, 0.0).sum(), scores.sum(0), squares, jnp.where(usable, counting, 0.0).sum())
    return Look(*found), values


def _look_at(
    study: Study,
    marginal: Marginal,
    arguments: Any,
    theta: Array,
    key: PRNGKeyArray,
    start: Array,
    index: Array,
    data: dict[str, Array],
) -> tuple[Array, Array, Array, Array]:
    """One member's log evidence, its gradient, which part of the draws counts, and where its latents are likeliest."""

    def log_density(values: Array, theta: Array) -> Float[Array, ""]:
        return _log_density(study, marginal, arguments, theta, values, index, data, key)

    def curved(values: Array) -> tuple[Array, Array]:
        """Directions of the curvature, and how steep the posterior falls along each."""
        steepness, directions = jnp.linalg.eigh(-jax.hessian(log_density)(values, theta))
        steepness = jnp.abs(steepness)
        return directions, jnp.maximum(steepness, FLATTEST * steepness.max())

    def ahead(values: Array, theta: Array, directions: Array, steepness: Array) -> Array:
        """The Newton step."""
        return directions @ (directions.T @ jax.grad(log_density)(values, theta) / steepness)

    def climbing(state: tuple[Array, Array, Array]) -> Array:
        _, steps, last = state
        return (steps < MOST_CLIMBED) & (last > NEAR_TOP)

    def climb(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        values, steps, _ = state
        directions, steepness = curved(values)
        step = ahead(values, theta, directions, steepness)
        tried = values + jnp.array((0.0, *LENGTHS))[:, None] * step
        heights = jax.vmap(log_density, (0, None))(tried, theta)
        best = jnp.argmax(jnp.where(jnp.isfinite(heights), heights, -jnp.inf))
        return tried[best], steps + 1, jnp.sqrt(((directions.T @ step) ** 2 * steepness).sum())

    top, _, _ = jax.lax.while_loop(climbing, climb, (start, jnp.zeros((), jnp.int32), jnp.full((), jnp.inf)))
    directions, steepness = curved(top)
    noise, log_q = _noise(marginal.draws, top.size, jax.random.fold_in(jax.random.fold_in(key, 2**31), index))

    def log_weights(theta: Array) -> Float[Array, " draws"]:
        # One more Newton step: as theta moves, so does the top, at the rate that the implicit function theorem says.
        moved = top + ahead(top, theta, directions, steepness)
        drawn = moved + noise / jnp.sqrt(steepness) @ directions.T
        return jax.vmap(log_density, (0, None))(drawn, theta) - log_q

    def evidence(theta: Array) -> tuple[Array, Array]:
        terms = log_weights(theta)
        whole = jax.nn.logsumexp(terms)
        counting = jnp.exp(2 * whole - jax.nn.logsumexp(2 * terms)) / marginal.draws
        return whole - jnp.log(marginal.draws) - 0.5 * jnp.log(steepness).sum(), counting

    (found, counting), score = jax.value_and_grad(evidence, has_aux=True)(theta)
    return found, score, counting, top


def _noise(draws: int, size: int, key: PRNGKeyArray) -> tuple[Float[Array, "draw size"], Float[Array, " draw"]]:
    """Draws of Student's t around zero and their log-densities: a net of points, shifted at random, and its mirror image.

    Its tails are longer than a normal distribution's, so that skewed posteriors do not lie outside of it.
    """
    net = _net(draws // 2, size + 1)
    chances = jnp.clip((net + jax.random.uniform(key, (size + 1,))) % 1.0, EDGE, 1 - EDGE)
    table = _chi_squares()
    radius = jnp.sqrt(TAILS / jnp.interp(chances[:, -1], jnp.linspace(0.0, 1.0, len(table)), table))
    half = jax.scipy.stats.norm.ppf(chances[:, :-1]) * radius[:, None]
    noise = jnp.concatenate([half, -half])
    constant = gammaln((TAILS + size) / 2) - gammaln(TAILS / 2) - 0.5 * size * np.log(TAILS * np.pi)
    return noise, constant - 0.5 * (TAILS + size) * jnp.log1p((noise**2).sum(-1) / TAILS)


@functools.cache
def _chi_squares() -> Float[np.ndarray, " chance"]:
    """Quantiles of the chi-squared distribution at evenly spaced chances."""
    return chi2.ppf(np.clip(np.linspace(0, 1, 4097), EDGE, 1 - EDGE), TAILS).astype(np.float32)


@functools.lru_cache(maxsize=16)
def _net(points: int, size: int) -> Float[np.ndarray, "point size"]:
    return qmc.Sobol(size, scramble=True, seed=1).random(points).astype(np.float32)


@quick_jit(static_argnums=(0, 1))
def _outside(
    study: Study, marginal: Marginal, arguments: Any, theta: Array, data: dict[str, Array], seed: Array
) -> tuple[Array, Array, Array]:
    """The log prior outside of plates, and of data there are outside of plates; its gradient and curvature."""
    size = sum(site.size for site in marginal.latents(study.template))

    def log_density(theta: Array) -> Array:
        index, key = jnp.zeros((), jnp.int32), jax.random.wrap_key_data(seed)
        return _log_density(study, marginal, arguments, theta, jnp.zeros(size), index, data, key, everywhere=True)

    return log_density(theta), jax.grad(log_density)(theta), jax.hessian(log_density)(theta)


class Members:
    """The members of the plate, in tiles of one size, with where their latents are likeliest as far as is known."""

    def __init__(self, study: Study, marginal: Marginal, arguments: Any, observations: Observations, seed: np.ndarray):
        self.study, self.marginal, self.arguments = study, marginal, arguments
        self.observations, self.seed = observations, seed
        template = study.template
        self.count = template.plate(marginal.plate).size
        self.values = np.zeros((self.count, sum(site.size for site in marginal.latents(template))), jnp.result_type(float))
        self.known = np.zeros(self.count, bool)
        self.tile = int(np.clip(tile_budget() // self._numbers(), 1, self.count))

    def _numbers(self) -> int:
        """Numbers that are held while one member is looked at, about."""
        template, (plate, inner, draws) = self.study.template, self.marginal
        work = {(): 0} if inner is None else inner.work(template)
        held = sum(draws * math.prod(template.sizes(_without(level, plate))) * each for level, each in work.items())
        for site in template.sites:
            if plate in site.level and site.kind is not Kind.DETERMINISTIC:
                inside = math.prod(template.sizes(_without(site.level, plate)))
                held += inside * (draws * 8 * max(site.size, 1) + math.prod(site.member_shape))
        return held

    def look(
        self, theta: np.ndarray, members: np.ndarray, start: Callable[[np.ndarray], np.ndarray], bar: tqdm | None = None
    ) -> Look:
        """Looks at some members; `start` says where the latents of those that are seen for the first time begin."""
        total = None
        for first in range(0, len(members), self.tile):
            chosen = members[first : first + self.tile]
            index = np.pad(chosen, (0, self.tile - len(chosen)), mode="edge")
            if not self.known[index].all():
                self.values[index] = np.where(self.known[index, None], self.values[index], start(index))
            look, values = _look(
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
            self.values[chosen] = np.asarray(values)[: len(chosen)]
            self.known[chosen] = True
            total = look if total is None else total.plus(look)
            if bar is not None:
                bar.update(len(chosen))
        assert total is not None
        return total

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
        found = _outside(self.study, self.marginal, self.arguments, jnp.asarray(theta, self.values.dtype), one, self.seed)
        value, gradient, curvature = (np.asarray(each, np.float64) for each in found)
        return float(value), gradient, -curvature


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
    order = np.random.default_rng(0).permutation(count)
    looked_at = min(max(FIRST_MEMBERS * size, FIRST_IN_ALL), count)
    best: tuple[float, np.ndarray] | None = None
    with tqdm(disable=not progress_bar, desc="polishing", unit="member", dynamic_ncols=True, leave=False) as bar:
        for _ in range(MOST_ROUNDS):
            look = members.look(theta, np.sort(order[:looked_at]), start, bar)
            found = _newton(look, looked_at, count, *members.outside(theta))
            if best is not None and found.height < best[0] - LARGEST_FALL * (1 + LEAST_PART * abs(best[0])):
                theta = (theta + best[1]) / 2
                continue
            best = found.height, theta
            step = found.step * min(1.0, LONGEST_STEP / np.abs(found.step / spread).max())
            theta = theta + step
            moved = np.abs(step / np.sqrt(np.diag(found.covariance))).max()
            bar.set_postfix_str(f"last step {moved:.2f} posterior sd", refresh=False)
            if looked_at == count and moved < SETTLED:
                break
            if moved < NEAR * np.sqrt(count / looked_at) and looked_at < count:
                looked_at, best = count, None
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
    """The height of the log posterior, its covariance, and the step to its mode, as far as some of the members tell."""

    height: float
    covariance: np.ndarray
    step: np.ndarray


def _newton(look: Look, looked_at: int, count: int, value: float, gradient: np.ndarray, information: np.ndarray) -> _Newton:
    score, squares, times = np.asarray(look.score), np.asarray(look.squares), count / looked_at
    scatter = (squares - np.outer(score, score) / looked_at) * times
    # The inverse of a scatter of so few members is too large on average.
    scatter /= max(1 - (len(score) + 1) / looked_at, 0.5)
    covariance = np.linalg.inv(scatter + information)
    return _Newton(float(look.evidence) * times + value, covariance, covariance @ (score * times + gradient))
