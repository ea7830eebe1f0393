"""The ELBO on a branch: an unbiased estimate of the full one (paper, `eq:ELBO_stoc`, `sec:no_bias`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from pavi.branch import Branch
from pavi.cascade import Pass, Sampler, Study, cascade
from pavi.template import Level, Template


def reduced_elbo(
    study: Study,
    arrays: Any,
    sampler: Sampler,
    encodings: Mapping[Level, Any],
    branch: Branch,
    data: Mapping[str, Array],
    key: PRNGKeyArray,
    share: Callable[[Level], float] = lambda level: 1.0,
) -> Float[Array, ""]:
    """ELBO^r[t]: one draw of q over the branch, each term weighted by one over the chance that its member was drawn."""
    return weigh(study.template, branch, cascade(study, arrays, sampler, encodings, branch, data, key), share)


def weigh(
    template: Template, branch: Branch, found: Pass, share: Callable[[Level], float] = lambda level: 1.0
) -> Float[Array, ""]:
    """Sum over sites and members of weight * (log p - log q), each level counted by its share."""
    total = jnp.zeros(())
    for site in template.sites:
        if site.name in found.log_p:
            log_ratio = found.log_p[site.name] - found.log_q.get(site.name, 0.0)
            total = total + share(site.level) * branch.weigh(site.level, log_ratio)
    return total
