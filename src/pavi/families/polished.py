"""Latents outside of plates, and those of one plate, drawn from given normal distributions in place of their flows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jax.scipy.stats import norm
from jaxtyping import Array, Float, PRNGKeyArray

from pavi.cascade import Draw, Sampler, Study
from pavi.families.base import Family, Glimpse, Reading, Units, Weights
from pavi.families.pavi import PAVI, pulls_ahead, rows_with_pulls
from pavi.inner import Marginal
from pavi.prior import Prior
from pavi.template import Level, Site, Template

# Sets the key of the joint draw apart from those of sites and members.
TOGETHER = 2**30


class Normal(NamedTuple):
    """A normal distribution of all unconstrained numbers outside of plates: its mean, and a lower factor of its covariance.

    And those of each member of a plate, given these: where its mean lies and a lower factor of its covariance, then how
    the mean moves with each number outside of plates, all in one vector.
    """

    mean: Float[Array | np.ndarray, " size"]
    factor: Float[Array | np.ndarray, "size size"]
    members: Float[Array | np.ndarray, "member numbers"]


def outside(template: Template) -> dict[str, slice]:
    """Where each latent outside of plates lies in a vector of all of them."""
    latents = [site for site in template.latents if not site.level]
    ends = np.cumsum([0, *(site.size for site in latents)])
    return {site.name: slice(int(a), int(b)) for site, a, b in zip(latents, ends[:-1], ends[1:], strict=True)}


@dataclasses.dataclass(frozen=True)
class Polished:
    """A family in which latents outside of plates and those of one plate have given normal distributions.

    All others are as in another family. The numbers outside of plates follow the other family's shared weights; those of
    members are memory, which training reads and leaves as it is.
    """

    base: Family
    marginal: Marginal

    @property
    def row_rate(self) -> float:
        return self.base.row_rate

    @property
    def whole_plates(self) -> bool:
        return self.base.whole_plates

    @property
    def _level(self) -> Level:
        return (self.marginal.plate,)

    @property
    def _members(self) -> tuple[str, Level]:
        return "normals", self._level

    def add(self, weights: Weights, normal: Normal) -> Weights:
        """The weights of the other family with normal distributions beside them."""
        parts = [np.asarray(part, weights.shared.dtype).reshape(-1) for part in (weights.shared, *normal[:2])]
        shared = jnp.asarray(np.concatenate(parts))
        return weights._replace(shared=shared, memory={**weights.memory, self._members: normal.members})

    def strip(self, template: Template, weights: Weights) -> Weights:
        """The weights of the other family alone."""
        memory = {key: each for key, each in weights.memory.items() if key != self._members}
        return weights._replace(shared=_split(template, weights.shared)[0], memory=memory)

    def normal(self, template: Template, weights: Weights) -> Normal:
        """The normal distributions that these weights hold."""
        _, mean, factor = _split(template, weights.shared)
        return Normal(mean, factor, weights.memory[self._members])

    def init(self, template: Template, rng: np.random.Generator, data: Mapping[str, Any], whole: frozenset[str]) -> Weights:
        weights, shapes = self.base.init(template, rng, data, whole), self.shapes(template, whole)
        size = _size(template)
        members = np.zeros(shapes.memory[self._members].shape, weights.shared.dtype)
        return self.add(weights, Normal(np.zeros(size), np.eye(size), members))

    def shapes(self, template: Template, whole: frozenset[str]) -> Weights:
        weights = self.base.shapes(template, whole)
        size, own, dtype = _size(template), self.marginal.size(template), weights.shared.dtype
        count = weights.shared.shape[0] + size * (size + 1)
        members = jax.ShapeDtypeStruct((*template.sizes(self._level), own * (1 + own + size)), dtype)
        return weights._replace(
            shared=jax.ShapeDtypeStruct((count,), dtype), memory={**weights.memory, self._members: members}
        )

    def parts(self, template: Template) -> Mapping[str, slice]:
        return self.base.parts(template)

    def measure(self, template: Template, data: Mapping[str, Any], arguments: Any) -> Units:
        return self.base.measure(template, data, arguments)

    def encode(self, weights: Weights, units: Units, glimpse: Glimpse) -> tuple[Mapping[Level, Any], Mapping]:
        template, members = glimpse.study.template, weights.memory[self._members]
        stripped = self.strip(template, weights)
        if self._pulled is None:
            encodings, memory = self.base.encode(stripped, units, glimpse)
        else:
            stripped = stripped._replace(rows={**stripped.rows, self._level: members})
            encodings, memory = self._pulled.encode(stripped, units, glimpse, self.centers(template, units, weights.shared))
        return {**encodings, self._level: members}, {**memory, self._members: members}

    def centers(self, template: Template, units: Units, shared: Array) -> Sampler:
        """A sampler that puts latents outside of plates and those of the plate where they are centered."""
        del units
        mean, places = jax.lax.stop_gradient(_split(template, shared)[1]), outside(template)
        own = self.marginal.latents(template)
        starts = dict(zip([site.name for site in own], np.cumsum([0, *(site.size for site in own)]), strict=False))

        def draw(site: Site, prior: Prior, encoding: Any, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
            del prior, given, key
            start = starts.get(site.name)
            center = mean[places[site.name]] if start is None else encoding[start : start + site.size]
            return Draw(center, None, center)

        return draw

    @property
    def _pulled(self) -> PAVI | None:
        """The other family, if it shows which way data pull."""
        return self.base if isinstance(self.base, PAVI) and self.base.show_pull else None

    def extend(
        self, weights: Weights, kept: Mapping[str, np.ndarray], template: Template, data: Mapping[str, Any]
    ) -> Weights:
        """Weights for other members, whose normal distributions are yet to be found."""
        extended = self.base.extend(self.strip(template, weights), kept, template, data)
        members = np.zeros(self.shapes(template, frozenset()).memory[self._members].shape, weights.shared.dtype)
        return self.add(extended, self.normal(template, weights)._replace(members=members))

    def settle(self, study: Study, arguments: Any, data: Mapping[str, Any], units: Units, weights: Weights) -> Reading:
        template, weights = study.template, weights._replace(shared=np.asarray(weights.shared))
        normal = self.normal(template, weights)
        stripped = self.strip(template, weights)
        if self._pulled is None:
            family, settled = self.base.settle(study, arguments, data, units, stripped)
        else:
            shown = weights._replace(rows={**stripped.rows, self._level: normal.members}, memory={})
            rows = rows_with_pulls(self, study, arguments, data, units, shown)
            family, settled = self.base, stripped._replace(rows=rows)
        found = Polished(family, self.marginal)
        rows = {**settled.rows, self._level: normal.members}
        return Reading(found, found.add(settled, normal)._replace(rows=rows, memory={}))

    def settle_ahead(
        self, study: Study, arguments: Any, data: Mapping[str, Any], units: Units, whole: frozenset[str]
    ) -> None:
        """Compiles in the background what `settle` will need."""
        if self._pulled is not None:
            weights = self.shapes(study.template, whole)
            rows = {**weights.rows, self._level: weights.memory[self._members]}
            pulls_ahead(self, study, arguments, data, units, weights._replace(rows=rows))

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
        mean, factor = (jax.lax.stop_gradient(jnp.asarray(part)) for part in _split(template, shared)[1:])
        noise = jax.random.normal(jax.random.fold_in(key, TOGETHER), mean.shape)
        drawn = mean + jnp.matmul(factor, noise, precision="highest")
        log_q = norm.logpdf(noise).sum() - jnp.log(jnp.diagonal(factor)).sum()
        draws = {
            # The density of all sites together is counted once.
            name: Draw(drawn[place], log_q if place.start == 0 else jnp.zeros(()), mean[place])
            for name, place in outside(template).items()
        }
        return {**encodings, (): draws}

    def sampler(self, template: Template, units: Units, shared: Array) -> Sampler:
        plain = self.base.sampler(template, units, _split(template, shared)[0])

        def draw(site: Site, prior: Prior, encoding: Any, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
            if not site.level:
                return encoding[site.name]
            if site.level != self._level:
                return plain(site, prior, encoding, given, key)
            return _draw_member(self.marginal.latents(template), list(outside(template)), site, encoding, given, key)

        return draw


def _draw_member(
    latents: list[Site],
    globally: list[str],
    site: Site,
    numbers: Float[Array, " numbers"],
    given: Mapping[str, Draw],
    key: PRNGKeyArray,
) -> Draw:
    """One latent of a member, given those of its latents that were drawn before it and all that is outside of plates."""
    before = latents[: latents.index(site)]
    start, size = sum(other.size for other in before), sum(other.size for other in latents)
    center, factor, slopes = jnp.split(numbers, [size, size * (1 + size)])
    factor, slopes = factor.reshape(size, size), slopes.reshape(size, -1)
    moved = jnp.concatenate([given[name].value - given[name].center for name in globally])
    mean = center + jnp.matmul(slopes, moved, precision="highest")
    here = slice(start, start + site.size)
    noise = jax.random.normal(key, (site.size,))
    value = mean[here] + jnp.matmul(factor[here, here], noise, precision="highest")
    if before:
        off = jnp.concatenate([given[other.name].value for other in before]) - mean[:start]
        known = solve_triangular(factor[:start, :start], off, lower=True)
        value = value + jnp.matmul(factor[here, :start], known, precision="highest")
    log_q = norm.logpdf(noise).sum() - jnp.log(jnp.diagonal(factor)[here]).sum()
    return Draw(value, log_q, center[here])


def _size(template: Template) -> int:
    return sum(site.size for site in template.latents if not site.level)


def _split(template: Template, shared: Array | np.ndarray) -> tuple[Any, Any, Any]:
    """The shared weights of the other family, and the mean and factor of the normal distribution behind them."""
    size = _size(template)
    own = len(shared) - size * (size + 1)
    return shared[:own], shared[own : own + size], shared[own + size :].reshape(size, size)
