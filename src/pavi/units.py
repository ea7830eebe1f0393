"""What the prior says before there are data: where it puts each latent, and how dense it is there."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from pavi.branch import fixed_branch
from pavi.cascade import Draw, Pass, Study, cascade, draw_prior
from pavi.compiling import in_background, quick_jit
from pavi.data import at_branch
from pavi.families import Units
from pavi.prior import Prior
from pavi.template import Site, Template

PRIOR_DRAWS = 256


def prior_units(
    study: Study, arguments: Any, data: dict[str, Array], seed: np.ndarray, values: Mapping[str, Any] = MappingProxyType({})
) -> Units:
    """Center and spread of each latent, by drawing from the prior for a few members spread over the plates.

    Sites with given `values` are centered there, and the others where the prior puts them then.
    """
    draws = draws_of_prior(study, arguments, data, seed, values)
    center, spread = {}, {}
    for name, drawn in draws.items():
        low, middle, high = np.nanquantile(np.asarray(drawn), [0.16, 0.5, 0.84], axis=0)
        half = (high - low) / 2
        usable = np.isfinite(half) & (half > 0)
        center[name] = np.where(np.isfinite(middle), middle, 0.0).astype(drawn.dtype)
        spread[name] = np.where(usable, half, 1.0).astype(drawn.dtype)
    return Units(center, spread, spread)


def draws_of_prior(
    study: Study, arguments: Any, data: dict[str, Array], seed: np.ndarray, values: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Array]:
    """Unconstrained draws of every latent from the prior, with some sites held at given values."""
    return _draws_of_prior(study, arguments, data, seed, *_held_at(study.template, values))


def prior_ahead(study: Study, arguments: Any, data: dict[str, Array], seed: np.ndarray) -> Future:
    """Compiles `draws_of_prior` in the background."""
    return in_background(_draws_of_prior, study, arguments, data, seed, *_held_at(study.template, {}))


def _held_at(template: Template, values: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A value for every latent, and which of them count: whichever do, they are arguments of one compiled function."""
    dtype = jnp.result_type(float)
    latents = template.latents
    held = {site.name: np.asarray(values.get(site.name, np.zeros(site.size)), dtype).reshape(-1) for site in latents}
    return held, {site.name: np.asarray(site.name in values) for site in latents}


def densities_of_prior(study: Study, arguments: Any, seed: np.ndarray) -> dict[str, float]:
    """What each site's log-density usually is where the prior draws latents and data: models that differ differ in these.

    Nothing where some distribution of data has no draws.
    """
    try:
        found = _densities_of_prior(study, arguments, seed, *_held_at(study.template, {}))
    except NotImplementedError:
        return {}
    return {name: float(np.nanmedian(np.asarray(each, np.float64))) for name, each in found.items()}


@quick_jit(static_argnums=(0,))
def _draws_of_prior(
    study: Study,
    arguments: Any,
    data: dict[str, Array],
    seed: Array,
    values: dict[str, Array],
    counts: dict[str, Array],
) -> dict[str, Array]:
    drawn = _passes_of_prior(study, arguments, data, seed, values, counts).unconstrained
    return {name: value.reshape(PRIOR_DRAWS, -1) for name, value in drawn.items()}


@quick_jit(static_argnums=(0,))
def _densities_of_prior(
    study: Study, arguments: Any, seed: Array, values: dict[str, Array], counts: dict[str, Array]
) -> dict[str, Array]:
    log_p = _passes_of_prior(study, arguments, {}, seed, values, counts).log_p
    return {name: value.reshape(PRIOR_DRAWS, -1).sum(-1) for name, value in log_p.items()}


def _passes_of_prior(
    study: Study,
    arguments: Any,
    data: dict[str, Array],
    seed: Array,
    values: dict[str, Array],
    counts: dict[str, Array],
) -> Pass:
    template = study.template

    def sampler(site: Site, prior: Prior, encoding: Any, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
        drawn = draw_prior(site, prior, encoding, given, key)
        return drawn._replace(value=jnp.where(counts[site.name], values[site.name], drawn.value))

    def one(k: Int[Array, ""]) -> Pass:
        indices = {plate.name: (k * plate.size // PRIOR_DRAWS)[None] for plate in template.plates}
        branch = fixed_branch(indices)
        sliced = at_branch(template, data, branch, frozenset()) if data else {}
        key = jax.random.fold_in(jax.random.wrap_key_data(seed), k)
        return cascade(study, arguments, sampler, {}, branch, sliced, key, predict=not data)

    return jax.vmap(one)(jnp.arange(PRIOR_DRAWS))
