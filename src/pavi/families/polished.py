"""Latents outside of plates drawn from a given joint normal distribution in place of their flows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm
from jaxtyping import Array, Float, PRNGKeyArray

from pavi.cascade import Draw, Sampler, Study
from pavi.families.base import Family, Glimpse, Reading, Units, Weights
from pavi.prior import Prior
from pavi.template import Level, Site, Template

# Sets the key of the joint draw apart from those of sites and members.
TOGETHER = 2**30


class Normal(NamedTuple):
    """A normal distribution of all unconstrained numbers outside of plates: its mean, and a lower factor of its covariance.

    `center` is where flows of other latents, which are shown how far values lie from there, were trained to take it to be.
    """

    mean: Float[Array | np.ndarray, " size"]
    factor: Float[Array | np.ndarray, "size size"]
    center: Float[Array | np.ndarray, " size"]


def outside(template: Template) -> dict[str, slice]:
    """Where each latent outside of plates lies in a vector of all of them."""
    latents = [site for site in template.latents if not site.level]
    ends = np.cumsum([0, *(site.size for site in latents)])
    return {site.name: slice(int(a), int(b)) for site, a, b in zip(latents, ends[:-1], ends[1:], strict=True)}


@dataclasses.dataclass(frozen=True)
class Polished:
    """A family in which latents outside of plates have a given normal distribution, and all others are as in another family.

    The numbers of the normal distribution follow the other family's shared weights, and are not trained.
    """

    base: Family

    @property
    def row_rate(self) -> float:
        return self.base.row_rate

    @property
    def whole_plates(self) -> bool:
        return self.base.whole_plates

    @staticmethod
    def add(weights: Weights, normal: Normal) -> Weights:
        """The weights of the other family with a normal distribution behind them."""
        parts = [jnp.asarray(part, weights.shared.dtype).reshape(-1) for part in (weights.shared, *normal)]
        return weights._replace(shared=jnp.concatenate(parts))

    @staticmethod
    def strip(template: Template, weights: Weights) -> Weights:
        """The weights of the other family alone."""
        return weights._replace(shared=_split(template, weights.shared)[0])

    def init(self, template: Template, rng: np.random.Generator, data: Mapping[str, Any], whole: frozenset[str]) -> Weights:
        size = _size(template)
        zeros = np.zeros(size)
        return self.add(self.base.init(template, rng, data, whole), Normal(zeros, np.eye(size), zeros))

    def shapes(self, template: Template, whole: frozenset[str]) -> Weights:
        weights = self.base.shapes(template, whole)
        count = weights.shared.shape[0] + _size(template) * (_size(template) + 2)
        return weights._replace(shared=jax.ShapeDtypeStruct((count,), weights.shared.dtype))

    def parts(self, template: Template) -> Mapping[str, slice]:
        return self.base.parts(template)

    def measure(self, template: Template, data: Mapping[str, Any], arguments: Any) -> Units:
        return self.base.measure(template, data, arguments)

    def encode(self, weights: Weights, units: Units, glimpse: Glimpse) -> tuple[Mapping[Level, Any], Mapping]:
        return self.base.encode(self.strip(glimpse.study.template, weights), units, glimpse)

    def extend(
        self, weights: Weights, kept: Mapping[str, np.ndarray], template: Template, data: Mapping[str, Any]
    ) -> Weights:
        normal = _split(template, weights.shared)[1]
        return self.add(self.base.extend(self.strip(template, weights), kept, template, data), normal)

    def settle(self, study: Study, arguments: Any, data: Mapping[str, Any], units: Units, weights: Weights) -> Reading:
        template = study.template
        family, settled = self.base.settle(study, arguments, data, units, self.strip(template, weights))
        return Reading(Polished(family), self.add(settled, _split(template, weights.shared)[1]))

    def together(
        self,
        template: Template,
        units: Units,
        shared: Array,
        encodings: Mapping[Level, Any],
        key: PRNGKeyArray,
        training: bool,
    ) -> dict[Level, Any]:
        """Encodings, with a joint draw of all that is outside of plates in place of theirs."""
        del units, training
        mean, factor, center = (jax.lax.stop_gradient(jnp.asarray(part)) for part in _split(template, shared)[1])
        noise = jax.random.normal(jax.random.fold_in(key, TOGETHER), mean.shape)
        drawn = mean + jnp.matmul(factor, noise, precision="highest")
        log_q = norm.logpdf(noise).sum() - jnp.log(jnp.diagonal(factor)).sum()
        draws = {
            # The density of all sites together is counted once.
            name: Draw(drawn[place], log_q if place.start == 0 else jnp.zeros(()), center[place])
            for name, place in outside(template).items()
        }
        return {**encodings, (): draws}

    def sampler(self, template: Template, units: Units, shared: Array) -> Sampler:
        plain = self.base.sampler(template, units, _split(template, shared)[0])

        def draw(site: Site, prior: Prior, encoding: Any, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
            return plain(site, prior, encoding, given, key) if site.level else encoding[site.name]

        return draw


def _size(template: Template) -> int:
    return sum(site.size for site in template.latents if not site.level)


def _split(template: Template, shared: Array) -> tuple[Array, Normal]:
    """The shared weights of the other family, and the normal distribution behind them."""
    size = _size(template)
    own, mean, factor, center = jnp.split(shared, np.cumsum([len(shared) - size * (size + 2), size, size * size]))
    return own, Normal(mean, factor.reshape(size, size), center)
