"""What families of plain distributions share: every member has a vector of parameters per site, its own or regressed.

Without amortization a member's row holds its parameters. With it, rows are encodings and one regressor per site, shared by
all members, maps an encoding to parameters: plate amortization, which the paper says is not tied to flows.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from pavi.cascade import Draw, Sampler
from pavi.encodings import FreeEncodings
from pavi.families.base import Units, Weights
from pavi.families.rowed import Rowed
from pavi.flows import Conditioner
from pavi.packing import Skeleton, pack, skeleton_of
from pavi.prior import Prior
from pavi.template import Level, Site, Template

# Hidden widths of a regressor, beside its linear part.
HIDDEN = (32, 32)


@dataclasses.dataclass(frozen=True)
class Parametric(Rowed):
    """A family in which a latent's distribution is made of a vector of parameters.

    Args:
        amortized: regress the parameters of all members of a plate from encodings, one per member.
    """

    amortized: bool = False

    row_rate: ClassVar[float] = 4.0

    @abstractmethod
    def start(self, site: Site) -> np.ndarray:
        """Parameters that a site starts with."""

    @abstractmethod
    def draw(
        self, site: Site, prior: Prior, parameters: Float[Array, " parameters"], units: Units, key: PRNGKeyArray
    ) -> Draw:
        """Draws a latent of one member."""

    def init(self, template: Template, rng: np.random.Generator, data: Mapping[str, Any], whole: frozenset[str]) -> Weights:
        del whole
        dtype = jnp.result_type(float)
        if self.amortized:
            networks = [pack(self._regressor(template, site, rng)) for site in template.latents]
            return Weights(np.concatenate(networks).astype(dtype), FreeEncodings().init(template, data), {})
        rows = {}
        for level in template.levels:
            row = np.concatenate([self.start(site) for site in template.latents if site.level == level]).astype(dtype)
            rows[level] = np.broadcast_to(row, (*template.sizes(level), len(row)))
        return Weights(np.zeros(0, dtype), rows, {})

    def shapes(self, template: Template, whole: frozenset[str]) -> Weights:
        del whole
        dtype = jnp.result_type(float)
        rows = {
            level: jax.ShapeDtypeStruct((*template.sizes(level), self._row_size(template, level)), dtype)
            for level in template.levels
        }
        count = sum(part.stop - part.start for part in self.parts(template).values())
        return Weights(jax.ShapeDtypeStruct((count,), dtype), rows, {})

    def parts(self, template: Template) -> Mapping[str, slice]:
        if not self.amortized:
            return {}
        ends = np.cumsum([self._skeleton(template, site).size for site in template.latents])
        sizes = [self._skeleton(template, site).size for site in template.latents]
        return {
            site.name: slice(int(end) - size, int(end))
            for site, end, size in zip(template.latents, ends, sizes, strict=True)
        }

    def sampler(self, template: Template, units: Units, shared: Array) -> Sampler:
        parts = self.parts(template)
        networks = {
            site.name: self._skeleton(template, site).fill(shared[parts[site.name]])
            for site in template.latents
            if self.amortized
        }

        def draw(site: Site, prior: Prior, encoding: Array | None, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
            del given
            assert encoding is not None
            if self.amortized:
                return self.draw(site, prior, networks[site.name](encoding), units, key)
            before = [other for other in template.latents if other.level == site.level]
            first = sum(len(self.start(other)) for other in before[: before.index(site)])
            return self.draw(site, prior, encoding[first : first + len(self.start(site))], units, key)

        return draw

    def _row_size(self, template: Template, level: Level) -> int:
        if self.amortized:
            return FreeEncodings().level_size(template, level)
        return sum(len(self.start(site)) for site in template.latents if site.level == level)

    def _regressor(self, template: Template, site: Site, rng: np.random.Generator) -> Conditioner:
        size, start = self._row_size(template, site.level), self.start(site)
        weight = rng.normal(size=(size, len(start))) / size
        weight[:, site.size :] = 0.0  # the encoding moves the center from the start
        return Conditioner(rng, weight, start, HIDDEN)

    def _skeleton(self, template: Template, site: Site) -> Skeleton:
        return _skeleton(self, template, site)


@functools.lru_cache(maxsize=256)
def _skeleton(family: Parametric, template: Template, site: Site) -> Skeleton:
    return skeleton_of(family._regressor(template, site, np.random.default_rng(0)))
