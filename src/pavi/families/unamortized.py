"""The paper's baseline: the same flows, trained the same way, but every member has one of its own (`eq:q_full`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from pavi.cascade import Draw, Sampler
from pavi.families.base import Layout, Shown, Units, Weights, check_flow, draw_through, given_size
from pavi.families.rowed import Rowed
from pavi.flows import MAF, Flow
from pavi.prior import Prior
from pavi.template import Level, Site, Template


@dataclasses.dataclass(frozen=True)
class UnamortizedFlows(Rowed):
    """One full flow per member: stochastic variational inference without plate amortization.

    A member's row holds all weights of its flows, so they move only in the steps that draw the member. Everything
    else (branchings, cascade, optimizer) is PAVI's. Can represent whatever PAVI with the same flow can, at a cost in
    weights and steps that grows with the plates.

    Args:
        flow: one flow for all latent sites, or `{site: flow}` with `...` for the rest.
        condition_on_parents: as in `pavi.PAVI`.

    Example:
        >>> import pavi
        >>> family = pavi.baselines.UnamortizedFlows(flow=pavi.MAF(hidden=(32, 32)))
    """

    flow: Flow | Mapping = MAF()
    condition_on_parents: bool = True

    row_rate: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.flow, Mapping):
            object.__setattr__(self, "flow", MappingProxyType(dict(self.flow)))

    def __hash__(self) -> int:
        flow = tuple(self.flow.items()) if isinstance(self.flow, Mapping) else self.flow
        return hash((flow, self.condition_on_parents))

    def init(self, template: Template, rng: np.random.Generator, data: Mapping[str, Any], whole: frozenset[str]) -> Weights:
        del data, whole
        check_flow(self.flow, template)
        rows = {}
        for level in template.levels:  # all members start alike
            row = self._layout(template, level).init(rng)
            rows[level] = np.broadcast_to(row, (*template.sizes(level), len(row)))
        return Weights(np.zeros(0, jnp.result_type(float)), rows, {})

    def shapes(self, template: Template, whole: frozenset[str]) -> Weights:
        del whole
        dtype = jnp.result_type(float)
        sizes = {level: (*template.sizes(level), self._layout(template, level).size) for level in template.levels}
        rows = {level: jax.ShapeDtypeStruct(shape, dtype) for level, shape in sizes.items()}
        return Weights(jax.ShapeDtypeStruct((0,), dtype), rows, {})

    def parts(self, template: Template) -> Mapping[str, slice]:
        return {}

    def sampler(self, template: Template, units: Units, shared: Array) -> Sampler:
        del shared
        layouts = {level: self._layout(template, level) for level in template.levels}

        def draw(site: Site, prior: Prior, encoding: Array | None, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
            assert encoding is not None
            layout = layouts[site.level]
            flow, bijection = layout.flows[site.name], layout.fill(encoding)[site.name]
            nothing = jnp.zeros(0)
            return draw_through(template, flow, bijection, nothing, units, self._shown, site, prior, given, key)

        return draw

    @property
    def _shown(self) -> Shown:
        return Shown.DISTANCE if self.condition_on_parents else Shown.NOTHING

    def _layout(self, template: Template, level: Level) -> Layout:
        sites = [site for site in template.latents if site.level == level]
        sizes = {site.name: given_size(template, site, self._shown) for site in sites}
        return Layout(self.flow, sites, sizes)
