"""Draws of a member's latents, for its evidence: along each of their axes as its density falls off there.

Around the place where the density is highest, axes are chosen along which its curvature is that of independent numbers. The
density is followed along each of them, on both sides, so that a posterior which falls off steeply on one side and slowly
on the other is drawn from as it is. Where latents are independent or jointly normal, draws are those of the posterior,
a little widened.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from pavi.cascade import EDGE
from pavi.inner import net

# Where the density along an axis is looked at, in standard deviations as the curvature has them. It ends at the last.
_SIDE = (0.6, 1.6, 3.2, 7.0, 30.0)
KNOTS = np.array([*(-s for s in reversed(_SIDE)), 0.0, *_SIDE], np.float32)
# Densities along axes are drawn from to the power of one over this, so that draws lie a little more widely.
WIDENED = 1.15
# Between what log-densities along an axis lie, relative to that at the top.
LOWEST, HIGHEST = -60.0, 10.0


class Draws(NamedTuple):
    """Draws along axes: how far along each, their log-densities there, the axes, and the variance along each."""

    noise: Any
    log_density: Any
    axes: Any
    variances: Any

    @property
    def offsets(self) -> Float[Array, "draw size"]:
        return self.noise @ self.axes.T


def axes_of(directions: Float[Array, "size size"], steepness: Float[Array, " size"]) -> Float[Array, "size axis"]:
    """Axes along which latents are independent, one standard deviation long, as columns.

    The numbers that are known best come first: an axis holds one of them and what those that come later make of it, so that
    where many are independent each has an axis of its own.
    """
    covariance = directions / steepness @ directions.T
    order = jnp.argsort(jnp.diag(covariance))
    factor = jnp.linalg.cholesky(covariance[order][:, order])
    return jnp.zeros_like(factor).at[order].set(factor)


def draw_along(
    log_density: Callable[[Array], Array], top: Array, axes: Float[Array, "size axis"], draws: int, key: PRNGKeyArray
) -> Draws:
    """Draws along axes: a net of points, shifted at random, and its mirror image."""

    offsets = (axes.T[:, None] * jnp.asarray(KNOTS)[:, None]).reshape(-1, top.size)
    found, gradients = jax.vmap(jax.value_and_grad(log_density))(top + offsets)
    found = found.reshape(-1, KNOTS.size)
    slopes = (gradients.reshape(-1, KNOTS.size, top.size) * axes.T[:, None]).sum(-1)
    knots, heights = jax.vmap(_hull)(found - found[:, KNOTS.size // 2, None], slopes)
    heights = heights / WIDENED
    size = top.size
    half = (net(draws // 2, size) + jax.random.uniform(key, (size,))) % 1.0
    chances = jnp.clip(jnp.concatenate([half, 1 - half]), EDGE, 1 - EDGE)
    noise, log_q = jax.vmap(_along_one, (0, 0, 1), 1)(knots, heights, chances)
    # Along one axis draws tell the variance well: they are a net, and the density that they are to have is known.
    weights = jax.nn.softmax((WIDENED - 1) * log_q, 0)
    variances = (weights * (noise - (weights * noise).sum(0)) ** 2).sum(0)
    return Draws(noise, log_q.sum(1), axes, variances)


def _hull(heights: Float[Array, " knot"], slopes: Float[Array, " knot"]) -> tuple[Array, Array]:
    """Places and heights between which a log-density of given heights and slopes at knots is near a straight line.

    Between knots there is the place where tangents meet: a concave density lies below them. Where they do not meet there,
    the place in the middle, on the straight line between knots.
    """
    seen = jnp.isfinite(heights) & jnp.isfinite(slopes)
    heights = jnp.where(seen, jnp.clip(heights, LOWEST, HIGHEST), LOWEST)
    slopes = jnp.where(seen, slopes, 0.0)
    knots = jnp.asarray(KNOTS)
    lengths = jnp.diff(knots)
    falls = slopes[:-1] - slopes[1:]
    part = (jnp.diff(heights) - slopes[1:] * lengths) / jnp.where(falls > 0, falls, 1.0) / lengths
    meet = (falls > 0) & (part > 0) & (part < 1)
    part = jnp.where(meet, part, 0.5)
    between = heights[:-1] + jnp.where(meet, slopes[:-1] * lengths, jnp.diff(heights)) * part

    def woven(ours: Array, between: Array) -> Array:
        return jnp.append(jnp.stack([ours[:-1], between], 1).reshape(-1), ours[-1])

    return woven(knots, knots[:-1] + part * lengths), woven(heights, between)


def _along_one(
    knots: Float[Array, " knot"], heights: Float[Array, " knot"], chances: Float[Array, " draw"]
) -> tuple[Array, Array]:
    """Draws along one axis, and their log-densities: between knots the logarithm of the density is a straight line."""
    lengths, rises = jnp.diff(knots), jnp.diff(heights)
    flat = jnp.abs(rises) < 1e-3
    slopes = jnp.where(flat, 1.0, rises)
    masses = lengths * jnp.exp(heights[:-1]) * jnp.where(flat, 1 + 0.5 * rises, jnp.expm1(slopes) / slopes)
    ends = jnp.cumsum(masses)
    reached = chances * ends[-1]
    piece = (reached[:, None] > ends[:-1]).sum(1)
    part = (reached - (ends - masses)[piece]) / masses[piece]
    rise = slopes[piece]
    within = jnp.where(flat[piece], part, jnp.log1p(part * jnp.expm1(rise)) / rise)
    within = jnp.clip(within, 0.0, 1.0)
    noise = knots[piece] + within * lengths[piece]
    return noise, heights[piece] + within * rises[piece] - jnp.log(ends[-1])
