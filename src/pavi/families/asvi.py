"""Automatic structured variational inference: the prior run forward with its parameters updated (Ambrogioni et al. 2021)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, PRNGKeyArray
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to

from pavi.cascade import Draw
from pavi.errors import SettingError
from pavi.families.base import Units
from pavi.families.parametric import Parametric
from pavi.prior import Prior
from pavi.template import Site

# Parameters that a scalar distribution may have.
MOST_PARAMETERS = 3
# Trained scales start this much narrower than the prior is, and the prior's parameters with this logit of their weight.
INITIAL_SCALE, INITIAL_LOGIT = 0.1, -1.0


@dataclasses.dataclass(frozen=True)
class ASVI(Parametric):
    """Convex updates of the prior's parameters: each becomes a weighted mean of the prior's and of a trained value.

    A latent keeps the distribution that the model gives it, with the parameters `w * prior's + (1 - w) * trained`: one
    weight and one trained value per parameter. As the prior's parameters depend on the parents, so does q, which is
    exact for normal hierarchies with known spreads. It cannot change the family of a distribution, nor correlate
    latents that are independent given their parents. For latents made of scalar distributions (`Normal`, `Gamma`, ...).

    Args:
        amortized: regress weights and values of all members of a plate from encodings (plate-amortized ASVI).

    Example:
        >>> import pavi
        >>> family = pavi.baselines.ASVI()
    """

    def start(self, site: Site) -> np.ndarray:
        values, logits = np.zeros(MOST_PARAMETERS * site.size), np.full(MOST_PARAMETERS * site.size, INITIAL_LOGIT)
        return np.concatenate([values, logits])

    def draw(self, site: Site, prior: Prior, parameters: Array, units: Units, key: PRNGKeyArray) -> Draw:
        values, logits = parameters.reshape(2, MOST_PARAMETERS, site.size)
        fn = _updated(site, prior.fn, values, jax.nn.sigmoid(logits), units)
        fixed = _updated(site, prior.fn, *jax.lax.stop_gradient((values, jax.nn.sigmoid(logits))), units)
        updated, scored = Prior.of(fn), Prior.of(fixed)
        value = updated.draw(key)
        center = units.center[site.name] + units.spread[site.name] * values[0]
        return Draw(value, scored.log_prob(value), center)


def _updated(site: Site, fn: dist.Distribution, values: Array, weights: Array, units: Units) -> dist.Distribution:
    """A distribution like the prior, with updated parameters."""
    if isinstance(fn, dist.Independent):
        return _updated(site, fn.base_dist, values, weights, units).to_event(fn.reinterpreted_batch_ndims)
    shape = fn.batch_shape
    while isinstance(fn, dist.ExpandedDistribution):
        fn = fn.base_dist
    names = list(fn.arg_constraints)
    known = [constraints.real, constraints.positive, constraints.nonnegative, constraints.unit_interval]
    scalar = not fn.event_shape and int(np.prod(shape, dtype=int)) == site.size
    smooth = set(names) <= set(fn.reparametrized_params) and all(fn.arg_constraints[name] in known for name in names)
    if not scalar or not smooth or not 1 <= len(names) <= MOST_PARAMETERS:
        raise SettingError(
            f"ASVI cannot update the prior of site {site.name!r}, a {type(fn).__name__}: expected a distribution of scalars "
            "that can be reparameterized, with real, positive or unit parameters. Use pavi.PAVI() or MeanField()."
        )
    real = [name for name in names if fn.arg_constraints[name] is constraints.real]
    ordered = [*real[:1], *(name for name in names if name not in real[:1])]  # the location comes first, if there is one
    updated: dict[str, Any] = {}
    for k, name in enumerate(ordered):
        if name in real:
            trained = units.center[site.name] + units.spread[site.name] * values[k]
        elif name == "scale":
            trained = INITIAL_SCALE * units.spread[site.name] * jnp.exp(values[k])
        else:
            trained = biject_to(fn.arg_constraints[name])(values[k])
        weight = weights[k].reshape(shape)
        updated[name] = weight * jnp.broadcast_to(getattr(fn, name), shape) + (1 - weight) * trained.reshape(shape)
    return type(fn)(**updated)
