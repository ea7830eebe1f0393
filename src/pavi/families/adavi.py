"""ADAVI: automatic dual amortized variational inference (Rouillard and Wassermann 2022)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, PRNGKeyArray

from pavi.cascade import Draw, Sampler
from pavi.encodings import SetEncoder
from pavi.errors import ModelError, SettingError
from pavi.families.base import Units, Weights
from pavi.families.pavi import PAVI
from pavi.flows import MAF
from pavi.prior import Prior
from pavi.template import Site, Template


@dataclasses.dataclass(frozen=True)
class ADAVI(PAVI):
    """A hierarchical set encoder with mean-field flows, for pyramidal models; made for `pavi.amortize`.

    One flow per site, shared by all members of its plates as in PAVI, pushes a standard normal given the member's encoding:
    never its parents' values. Can represent any shape of a member's own posterior, and no dependence between latents, so it
    is too narrow where members hang together. Only for *pyramidal* models: plates nested in one another, sites that depend
    on their own level or the one above, all data at the bottom. Every step takes whole plates.

    Args:
        encodings: a `pavi.SetEncoder`.
        flow: one flow for all latent sites, or `{site: flow}` with `...` for the rest.

    Example:
        >>> import numpyro, numpyro.distributions as dist, pavi
        >>> def model():
        ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
        ...     with numpyro.plate("item", 10):
        ...         numpyro.sample("x", dist.Normal(mu, 1))
        >>> amortized = pavi.amortize(model, ["x"], family=pavi.baselines.ADAVI(), steps=10, progress_bar=False)
    """

    encodings: Any = SetEncoder()
    flow: Any = MAF()
    condition_on_parents: bool = False

    whole_plates: ClassVar[bool] = True

    __hash__ = PAVI.__hash__

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.condition_on_parents:
            raise SettingError("ADAVI(condition_on_parents=True): its flows never see parents. Use pavi.PAVI().")

    def init(self, template: Template, rng: np.random.Generator, data: Mapping[str, Any], whole: frozenset[str]) -> Weights:
        _check_pyramid(template)
        return super().init(template, rng, data, whole)

    def sampler(self, template: Template, units: Units, shared: Array) -> Sampler:
        return _from_normals(super().sampler(template, units, shared), units)

    def scorer(self, template: Template, units: Units, shared: Array) -> Sampler:
        return _from_normals(super().scorer(template, units, shared), units)


def _from_normals(sampler: Sampler, units: Units) -> Sampler:
    """A sampler that is shown a normal in place of every site's prior, as wide as that is."""
    spreads = units.prior_spread or units.spread

    def draw(site: Site, prior: Prior, encoding: Any, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
        del prior
        normal = dist.Normal(units.center[site.name], spreads[site.name]).to_event(1)
        return sampler(site, Prior.of(normal), encoding, given, key)

    return draw


def _check_pyramid(template: Template) -> None:
    """Refuses models that are no chain of nested levels, each depending on itself and the one above, data at the bottom."""
    sites = {site.name: site for site in (*template.latents, *template.observed)}
    levels = sorted({site.level for site in sites.values()}, key=len)
    nested = all(set(small) < set(large) for small, large in itertools.pairwise(levels))
    bottom = all(site.level == levels[-1] for site in template.observed)
    skipped = [
        f"{site.name!r} on {parent!r}"
        for site in sites.values()
        for parent in site.parents
        if parent in sites and levels.index(site.level) - levels.index(sites[parent].level) > 1
    ]
    if not nested or not bottom or skipped:
        raise ModelError(
            "ADAVI is for pyramidal models: plates nested in one another, sites that depend on their own level or the one "
            "above, and all data at the bottom. Found sites at the levels "
            f"{[level or '()' for level in levels]}, data at {sorted({site.level for site in template.observed})}"
            f"{', and dependences that skip a level: ' + ', '.join(skipped) if skipped else ''}. Use pavi.PAVI(), which "
            "takes any plates."
        )
