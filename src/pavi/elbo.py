"""The ELBO on a branch, an unbiased estimate of the full one (paper, `eq:ELBO_stoc`, `sec:no_bias`); and a tighter bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pavi.branch import Branch
from pavi.cascade import Inner, Pass
from pavi.template import Level, Template


def reduced_elbo(
    template: Template, branch: Branch, found: Pass, share: Callable[[Level], float] = lambda level: 1.0
) -> Float[Array, ""]:
    """ELBO^r[t] of one draw of q over a branch, each level counted by its share.

    Every log p - log q is weighted by one over the chance that its member was drawn.
    """
    total = jnp.zeros(())
    for site in template.sites:
        if site.name in found.log_p:
            log_ratio = found.log_p[site.name] - found.log_q.get(site.name, 0.0)
            total = total + share(site.level) * branch.weigh(site.level, log_ratio)
    return total


# Nats by which a bound is corrected at most: early in training a few draws may outweigh the others by any factor.
LARGEST_CORRECTION = 0.02


class Bounds(NamedTuple):
    """Two bounds of the evidence from the same draws: the ELBO, and one that averages over the draws of an inner level."""

    elbo: Float[Array, ""]
    tight: Float[Array, ""]


def bounds(
    template: Template, branch: Branch, found: Pass, inner: Inner, share: Callable[[Level], float] = lambda level: 1.0
) -> Bounds:
    """Both bounds of a pass in which the latents of an inner level were drawn several times.

    For each member of that level the mean of p / q over its draws estimates what it adds to the evidence, and twice its
    logarithm less the mean of those of both halves of the draws is off by the inverse square of their number only.
    """
    outer, members = jnp.zeros(()), jnp.zeros(())
    for site in template.sites:
        if site.name in found.log_p:
            log_ratio = found.log_p[site.name] - found.log_q.get(site.name, 0.0)
            if not inner.holds(site):
                outer = outer + share(site.level) * branch.weigh(site.level, log_ratio)
                continue
            within = tuple(axis for axis, plate in enumerate(site.level) if plate not in inner.level)
            members = members + log_ratio.sum(within)
    whole, halves = _log_mean_exp(members), _log_mean_exp(members.reshape(*members.shape[:-1], 2, -1))
    tight = whole + jnp.minimum(whole - halves.mean(-1), LARGEST_CORRECTION)
    inside = [share(inner.level) * branch.weigh(inner.level, each) for each in (members.mean(-1), tight)]
    return Bounds(outer + inside[0], outer + inside[1])


def _log_mean_exp(terms: Float[Array, "*batch draw"]) -> Float[Array, " *batch"]:
    return jax.nn.logsumexp(terms, -1) - jnp.log(terms.shape[-1])
