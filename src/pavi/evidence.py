"""The evidence of one member of a plate, its own latents averaged out, as a function of the latents outside of plates.

Given the latents outside of plates, members of the outermost plate are independent, so the evidence of a study is a product
over them. For one member,

1. its latents are put where their posterior is highest, by Newton steps;
2. the evidence is the mean of p / q over draws of q (`pavi.proposing`), which follows p around that place. As the latents
   outside move, q moves along: otherwise a few draws would soon outweigh all others;
3. latents further inside are averaged out over points of their prior, as in training with `inner_points`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from pavi.branch import fixed_branch
from pavi.cascade import Draw, Study, cascade
from pavi.compiling import quick_jit
from pavi.elbo import reduced_elbo
from pavi.errors import SettingError
from pavi.families import outside
from pavi.inner import Marginal, inner_of
from pavi.prior import Prior
from pavi.proposing import Draws, axes_of, draw_along
from pavi.template import Kind, Level, Site, Template

# Newton steps to where a member's posterior is highest: the last is shorter than this, in standard deviations of that
# posterior, and there are at most so many. A member is lost where the last is longer than this.
NEAR_TOP, MOST_CLIMBED, LOST = 0.02, 30, 1.0
# What is added to all curvatures, relative to the steepest: where one is next to none, a Newton step would lead far away.
DAMPINGS = (0.0, 0.1, 1.0, 10.0, 100.0, 1000.0)
# The part of a log-density that may be rounding.
ROUNDING = 1e-6
# Directions in which a member's posterior is flatter than this, relative to its steepest, count as this steep.
FLATTEST = 1e-6
# Between what a member's variance may lie, relative to what its density along single axes says.
WIDTHS = (0.25, 4.0)
# Members per number outside of plates, at least.
FEWEST_MEMBERS = 4
# Most numbers of one member's latents: their curvature is a matrix of as many rows.
MOST_NUMBERS = 64


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
    if draws < 4 or draws & (draws - 1):
        raise SettingError(f"polish(num_draws={draws}): expected a power of two, such as 128.")
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
        return Look(*(a + b for a, b in zip(self, other, strict=True)))


class Top(NamedTuple):
    """Where a member's posterior is highest: values, directions of the curvature there, and how steep it falls along each.

    `last` is how long the last step on the way there was, in standard deviations of the posterior.
    """

    values: Any
    directions: Any
    steepness: Any
    last: Any


def _of_tile(
    study: Study, marginal: Marginal, arguments: Any, data: dict[str, Array], seed: Array, one: Callable[..., Any]
) -> Callable[..., Any]:
    """A function of one member's log-density, its index, and more, as one of a tile of members, which have an axis each."""
    levels = {site.name: site.level for site in study.template.observed}
    axes = {name: levels[name].index(marginal.plate) if marginal.plate in levels[name] else None for name in data}
    key = jax.random.wrap_key_data(seed)

    def member(data: dict[str, Array], index: Array, *more: Any) -> Any:
        def log_density(values: Array, theta: Array) -> Float[Array, ""]:
            return _log_density(study, marginal, arguments, theta, values, index, data, key)

        return one(log_density, jax.random.fold_in(jax.random.fold_in(key, 2**31), index), *more)

    def tile(index: Array, *more: Any) -> Any:
        with jax.default_matmul_precision("float32"):
            return jax.vmap(member, in_axes=(axes, 0, *(0 for _ in more)))(data, index, *more)

    return tile


# What is done with a tile of members is compiled in parts, side by side.


@quick_jit(static_argnums=(0, 1))
def climb_tile(
    study: Study,
    marginal: Marginal,
    arguments: Any,
    data: dict[str, Array],
    seed: Array,
    theta: Array,
    index: Array,
    values: Array,
) -> Top:
    """Where the latents of a tile of members are likeliest, found by Newton steps from given values."""

    def one(log_density: Callable[..., Array], key: PRNGKeyArray, start: Array) -> Top:
        def far(state: tuple[Top, Array]) -> Array:
            return (state[1] < MOST_CLIMBED) & (state[0].last > NEAR_TOP)

        def climb(state: tuple[Top, Array]) -> tuple[Top, Array]:
            before, steps = state

            def slope(values: Array) -> tuple[Array, Array]:
                found = jax.grad(log_density)(values, theta)
                return found, found

            curvature, gradient = jax.jacfwd(slope, has_aux=True)(before.values)
            steepness, directions = jnp.linalg.eigh(-curvature)
            steepness = jnp.abs(steepness)
            steepness = jnp.maximum(steepness, FLATTEST * steepness.max())
            damped = directions.T @ gradient / (steepness + jnp.array(DAMPINGS)[:, None] * steepness.max())
            tried = before.values + jnp.concatenate([jnp.zeros((1, damped.shape[1])), damped @ directions.T])
            heights = jax.vmap(log_density, (0, None))(tried, theta)
            # The whole step is taken unless it leads down by more than rounding.
            heights = heights.at[1].add(ROUNDING * jnp.abs(heights[1]))
            best = jnp.argmax(jnp.where(jnp.isfinite(heights), heights, -jnp.inf))
            last = jnp.sqrt((damped[0] ** 2 * steepness).sum())
            # From where no step leads up, none ever will.
            return Top(tried[best], directions, steepness, last), jnp.where(best == 0, MOST_CLIMBED, steps + 1)

        # The curvature is that of the place before the last step, which was short.
        nowhere = Top(start, jnp.eye(start.size), jnp.ones(start.size), jnp.full((), jnp.inf))
        return jax.lax.while_loop(far, climb, (nowhere, jnp.zeros((), jnp.int32)))[0]

    return _of_tile(study, marginal.coarse, arguments, data, seed, one)(index, values)


@quick_jit(static_argnums=(0, 1))
def lean_tile(
    study: Study,
    marginal: Marginal,
    arguments: Any,
    data: dict[str, Array],
    seed: Array,
    theta: Array,
    index: Array,
    top: Array,
    along: Array,
) -> Float[Array, "member size"]:
    """How the tops of a tile of members move with theta, along a direction for each, times the curvature.

    This is what the implicit function theorem says of them.
    """

    def one(log_density: Callable[..., Array], key: PRNGKeyArray, top: Array, along: Array) -> Array:
        def slope(theta: Array) -> Array:
            return jax.jvp(lambda values: log_density(values, theta), (top,), (along,))[1]

        return jax.grad(slope)(theta)

    return _of_tile(study, marginal.coarse, arguments, data, seed, one)(index, top, along)


@quick_jit(static_argnums=(0, 1))
def draw_tile(
    study: Study,
    marginal: Marginal,
    arguments: Any,
    data: dict[str, Array],
    seed: Array,
    theta: Array,
    index: Array,
    top: Top,
) -> Draws:
    """Draws of the latents of a tile of members around their tops."""

    def one(log_density: Callable[..., Array], key: PRNGKeyArray, top: Top) -> Draws:
        axes = axes_of(top.directions, top.steepness)
        return draw_along(lambda values: log_density(values, theta), top.values, axes, marginal.draws, key)

    return _of_tile(study, marginal.coarse, arguments, data, seed, one)(index, top)


class Weighed(NamedTuple):
    """What draws around their tops say of a tile of members.

    Log evidences; their gradients as long as tops stay, and the directions that tops would have to move in for the rest of
    them; which part of the draws counts; and mean and factor of the covariance of each one's posterior.
    """

    evidence: Any
    staying: Any
    along: Any
    counting: Any
    normal: Any


def _shortfall(terms: Float[Array, " draw"]) -> Float[Array, ""]:
    """By how much the logarithm of a mean of draws falls short of that of their expectation, on average.

    This is half the relative variance of the mean. What members fall short of adds up, and depends on what is outside of
    plates. Two halves of the draws tell the variance: it falls about with the square of the number of points of a net, so
    that of the mean is a twelfth of the mean square of the difference between halves.
    """
    halves = jax.nn.softmax(terms).reshape(2, 2, -1).sum((0, 2))  # each is a net of points and its mirror image
    return 0.5 * (2 * (halves[0] - halves[1])) ** 2 / 12


@quick_jit(static_argnums=(0, 1))
def weigh_tile(
    study: Study,
    marginal: Marginal,
    arguments: Any,
    data: dict[str, Array],
    seed: Array,
    theta: Array,
    index: Array,
    top: Top,
    drawn: Draws,
) -> Weighed:
    """Evidences of a tile of members, by draws around their tops."""

    def one(log_density: Callable[..., Array], key: PRNGKeyArray, top: Top, drawn: Draws) -> Weighed:
        def evidence(values: Array, theta: Array) -> tuple[Array, Array]:
            terms = jax.vmap(log_density, (0, None))(values + drawn.offsets, theta) - drawn.log_density
            mean = jax.nn.logsumexp(terms) - jnp.log(marginal.draws)
            return mean + _shortfall(terms) - 0.5 * jnp.log(top.steepness).sum(), terms

        (found, terms), (by_top, by_theta) = jax.value_and_grad(evidence, (0, 1), has_aux=True)(top.values, theta)
        weights = jax.nn.softmax(terms)
        middle = weights @ drawn.noise
        # The density along the axes says how wide the posterior is along each, the draws how wide in all.
        width = (weights @ (drawn.noise - middle) ** 2 / drawn.variances).mean()
        covariance = drawn.axes * (jnp.clip(width, *WIDTHS) * drawn.variances) @ drawn.axes.T
        normal = jnp.concatenate([top.values + drawn.axes @ middle, jnp.linalg.cholesky(covariance).reshape(-1)])
        # Draws around a place that is not the top say nothing.
        counting = jnp.where(top.last < LOST, 1 / (weights**2).sum() / marginal.draws, 0.0)
        along = top.directions @ (top.directions.T @ by_top / top.steepness)
        return Weighed(found, by_theta, along, counting, normal)

    return _of_tile(study, marginal, arguments, data, seed, one)(index, top, drawn)


@quick_jit(static_argnums=())
def sum_tile(weighed: Weighed, moving: Array, counts: Array) -> Look:
    """Sums over the members of a tile that count; but evidences, which in all may have more digits than a number here.

    Members whose top was not found have no score. Their evidence is what it seems to be, at worst the lowest of all:
    otherwise places where members are lost would seem better than they are.
    """
    scores, known = weighed.staying + moving, jnp.isfinite(weighed.evidence)
    usable = counts & known & jnp.isfinite(scores).all(-1) & (weighed.counting > 0)
    scores = jnp.where(usable[:, None], scores, 0.0)
    lowest = jnp.where(known, weighed.evidence, jnp.inf).min()
    evidence = jnp.where(counts, jnp.where(known, weighed.evidence, lowest), 0.0)
    counting = jnp.where(usable, weighed.counting, 0.0).sum()
    return Look(evidence, scores.sum(0), jnp.matmul(scores.T, scores, precision="highest"), counting)


@quick_jit(static_argnums=())
def normals_of_tile(weighed: Weighed, top: Top, mixed: list[Array], step: Array) -> Array:
    """Posteriors of a tile of members (`pavi.families.polished`), after a step of theta.

    Args:
        mixed: what `lean_tile` says of each of their numbers.
    """
    parts = top.directions, 1 / top.steepness, top.directions, jnp.stack(mixed)
    slopes = jnp.einsum("mik,mk,mjk,jms->mis", *parts, precision="highest")
    mean = jnp.matmul(slopes, step, precision="highest")
    return jnp.concatenate([weighed.normal.at[:, : mean.shape[1]].add(mean), slopes.reshape(len(mean), -1)], 1)


@partial(jax.jit, donate_argnums=0)
def with_tile(whole: Array, part: Array, index: Array) -> Array:
    """What members have, with that of a tile of them put in its place. A member that is there twice has the same twice."""
    return whole.at[index].set(part)


@quick_jit(static_argnums=(0, 1))
def look_outside(
    study: Study, marginal: Marginal, arguments: Any, data: dict[str, Array], seed: Array, theta: Array
) -> tuple[Array, Array, Array]:
    """The log prior outside of plates, and of data there are outside of plates; its gradient and curvature."""
    values = jnp.zeros(marginal.size(study.template))

    def log_density(theta: Array) -> Array:
        index, key = jnp.zeros((), jnp.int32), jax.random.wrap_key_data(seed)
        return _log_density(study, marginal, arguments, theta, values, index, data, key, everywhere=True)

    def slope(theta: Array) -> tuple[Array, tuple[Array, Array]]:
        value, found = jax.value_and_grad(log_density)(theta)
        return found, (value, found)

    curvature, (value, gradient) = jax.jacfwd(slope, has_aux=True)(theta)
    return value, gradient, curvature
