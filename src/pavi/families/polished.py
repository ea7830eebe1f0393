"""A fitted family whose latents outside of plates are drawn from a joint normal distribution in place of their flows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm
from jaxtyping import Array, Float, PRNGKeyArray

from pavi.cascade import Draw, Sampler
from pavi.families.base import Family, Reading, Units
from pavi.prior import Prior
from pavi.template import Level, Site, Template

# Sets the key of the joint draw apart from those of sites and members.
TOGETHER = 2**30


class Normal(NamedTuple):
    """A normal distribution of all unconstrained numbers outside of plates: its mean, and a factor of its covariance."""

    mean: Float[Array | np.ndarray, " size"]
    factor: Float[Array | np.ndarray, "size size"]


class _Given(NamedTuple):
    """What stands in place of the encoding outside of plates: that encoding, values by site, and log q of them all."""

    row: Any
    values: dict[str, Array]
    log_q: Float[Array, ""]


def outside(template: Template) -> dict[str, slice]:
    """Where each latent outside of plates lies in a vector of all of them."""
    latents = [site for site in template.latents if not site.level]
    ends = np.cumsum([0, *(site.size for site in latents)])
    return {site.name: slice(int(a), int(b)) for site, a, b in zip(latents, ends[:-1], ends[1:], strict=True)}


@dataclasses.dataclass(frozen=True)
class Polished:
    """Reads latents outside of plates from a normal distribution, and all others from a fitted family.

    Flows of the others are still shown how far the values lie from where the fitted family centers them.
    """

    base: Family

    @classmethod
    def of(cls, reading: Reading, normal: Normal) -> Reading:
        family, weights = reading
        flat = jnp.concatenate([jnp.asarray(part).reshape(-1) for part in (weights.shared, *normal)])
        return Reading(cls(family), weights._replace(shared=flat))  # type: ignore[arg-type]

    def together(
        self,
        template: Template,
        units: Units,
        shared: Array,
        encodings: Mapping[Level, Any],
        key: PRNGKeyArray,
        training: bool,
    ) -> dict[Level, Any]:
        """Encodings, with a joint draw of all that is outside of plates beside theirs."""
        del units, training
        places = outside(template)
        size = max(place.stop for place in places.values())
        mean, factor = shared[-size * (size + 1) : -size * size], shared[-size * size :].reshape(size, size)
        noise = jax.random.normal(jax.random.fold_in(key, TOGETHER), (size,))
        drawn = mean + factor @ noise
        log_q = norm.logpdf(noise).sum() - jnp.linalg.slogdet(factor)[1]
        values = {name: drawn[place] for name, place in places.items()}
        return {**encodings, (): _Given(encodings.get(()), values, log_q)}

    def sampler(self, template: Template, units: Units, shared: Array) -> Sampler:
        size = max(place.stop for place in outside(template).values())
        plain = self.base.sampler(template, units, shared[: -size * (size + 1)])

        def draw(site: Site, prior: Prior, encoding: Any, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
            if site.level:
                return plain(site, prior, encoding, given, key)
            first = next(iter(encoding.values))
            log_q = jnp.where(site.name == first, encoding.log_q, 0.0)  # that of all sites together, counted once
            return Draw(encoding.values[site.name], log_q, plain(site, prior, encoding.row, given, key).center)

        return draw
