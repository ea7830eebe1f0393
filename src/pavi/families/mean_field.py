"""Mean field: every latent of every member is normal and independent of all others."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm
from jaxtyping import Array, PRNGKeyArray

from pavi.cascade import Draw
from pavi.families.base import Units
from pavi.families.parametric import Parametric
from pavi.prior import Prior
from pavi.template import Site

# Posteriors start this much narrower than their priors.
INITIAL_SCALE = 0.1


@dataclasses.dataclass(frozen=True)
class MeanField(Parametric):
    """Independent normals in unconstrained space, one per latent number.

    Can represent posteriors without correlations; misses every dependence of a member on its parents, and so is too narrow
    where there is one.

    Args:
        amortized: regress means and scales of all members of a plate from encodings (plate-amortized mean field).

    Example:
        >>> import pavi
        >>> family = pavi.baselines.MeanField(amortized=True)
    """

    def start(self, site: Site) -> np.ndarray:
        return np.concatenate([np.zeros(site.size), np.full(site.size, np.log(INITIAL_SCALE))])

    def draw(self, site: Site, prior: Prior, parameters: Array, units: Units, key: PRNGKeyArray) -> Draw:
        del prior
        center, spread = units.center[site.name], units.spread[site.name]
        loc, log_scale = center + spread * parameters[: site.size], jnp.log(spread) + parameters[site.size :]
        value = loc + jnp.exp(log_scale) * jax.random.normal(key, (site.size,))
        fixed_loc, fixed_scale = jax.lax.stop_gradient((loc, jnp.exp(log_scale)))  # the path gradient
        return Draw(value, norm.logpdf(value, fixed_loc, fixed_scale).sum(), loc)
