"""The ELBO on a branch, an unbiased estimate of the full one (paper, `eq:ELBO_stoc`, `sec:no_bias`)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pavi.branch import Branch
from pavi.cascade import Pass
from pavi.inner import Inner
from pavi.template import Kind, Level, Template


def reduced_elbo(
    template: Template,
    branch: Branch,
    found: Pass,
    share: Callable[[Level], float] = lambda level: 1.0,
    inner: Inner | None = None,
) -> Float[Array, ""]:
    """ELBO^r[t] of one draw of q over a branch, each level counted by its share.

    Every log p - log q is weighted by one over the chance that its member was drawn. With `inner`, a member of that level
    adds the logarithm of its likelihood's mean over the points that its latents were put at.
    """
    total, members = jnp.zeros(()), jnp.zeros(())
    for site in template.sites:
        if site.name not in found.log_p or share(site.level) == 0:
            continue
        if inner is None or not inner.holds(site):
            log_ratio = found.log_p[site.name] - found.log_q.get(site.name, 0.0)
            total = total + share(site.level) * branch.weigh(site.level, log_ratio)
        elif site.kind is not Kind.LATENT:
            within = tuple(axis for axis, plate in enumerate(site.level) if plate not in inner.level)
            members = members + found.log_p[site.name].sum(within)
    if inner is None or share(inner.level) == 0:
        return total
    if members.ndim > len(inner.level):
        members = jax.nn.logsumexp(members, -1) - jnp.log(inner.points)
    return total + share(inner.level) * branch.weigh(inner.level, members)
