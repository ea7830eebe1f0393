"""Where a fit starts, and which of several starts is worth going on with.

Models with several like components (mixtures) have many optima, in most of which two components share a cluster and
another has none. So a fit may be started several times; every start trains for some steps on the same branches with the
same noise, and the one with the best ELBO goes on. The first start is at the prior's center. The others are at centers of
clusters of the data (a mixture fitted by scikit-learn) for a latent that is made of *several of what is
observed*, along with their spreads for a positive latent of as many numbers; or at draws from the prior for all latents
outside of plates where there is no such latent.

Flows work in units whose center a start can choose: the posterior then starts around it. The latents below start where
the prior puts them given these values.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from sklearn.mixture import GaussianMixture

from pavi.branch import fixed_branch
from pavi.cascade import Draw, Study, cascade, draw_prior
from pavi.compiling import in_background, quick_jit
from pavi.data import at_branch, spread_evenly
from pavi.errors import SettingError
from pavi.prior import Prior
from pavi.sources import take, take_each
from pavi.template import Site, Template

# Starts of a model that looks like a mixture, where the caller does not say.
USUAL_STARTS = 4
# Steps for which started latents are held, then let go; the last are scored.
HELD_STEPS, TRIAL_STEPS, SCORED_STEPS = 100, 200, 50
# What the rate of a latent that was started somewhere is multiplied by once it is not held.
STARTED_PACE = 0.1
# Observed elements that are clustered, and of these how many make a mean.
MOST_CLUSTERED = 100_000
MOST_AVERAGED = 64
# Rounds of fitting a mixture, and the gain per element (nats) below which they end: clusters that overlap take many.
CLUSTER_ROUNDS, CLUSTER_GAIN = 300, 1e-6
# Mixtures have many optima as well: so many are fitted to some of the elements, and the best to all.
CLUSTER_TRIES, CLUSTER_TRIED, CLUSTER_TRY_GAIN = 10, 10_000, 1e-4
# How well clusters tell a spread, as a share of it; and at how many members a latent is tried as their spread.
SPREAD_KNOWN, SPREAD_TRIED = 0.1, 256


class Start(NamedTuple):
    """Where a latent starts, in unconstrained space, and the spread it is measured by (at most the prior's)."""

    value: Any
    spread: float = np.inf


def components(template: Template) -> dict[str, str]:
    """Latents outside of plates that are made of several of what is observed, each with the observed site."""
    found = {}
    for latent in template.latents:
        for observed in template.observed:
            tail = latent.member_shape[1:]
            real = "Real()" in latent.support and "Real()" in observed.support
            if not latent.level and tail and latent.member_shape[0] > 1 and real and _ends_with(observed, tail):
                found[latent.name] = observed.name
    return found


def usual_starts(template: Template) -> int:
    """How often a fit is started when it is not told."""
    return USUAL_STARTS if components(template) else 1


def unconstrain(study: Study, arguments: Any, init: Mapping[str, Any], data: Mapping[str, Array]) -> dict[str, Start]:
    """Starting values that the caller gave by site, checked and mapped to unconstrained space."""
    known = {site.name: site for site in study.template.latents}
    for name, value in init.items():
        if name not in known:
            raise SettingError(
                f"init names {name!r}, which is no latent site of the model. Its latent sites: {list(known)}."
            )
        if np.shape(value) not in (known[name].member_shape, known[name].display_shape):
            raise SettingError(
                f"init[{name!r}] has shape {np.shape(value)}: expected that of one member, {known[name].display_shape}. All "
                "members of a plate start at the same value."
            )
    given = {name: jnp.asarray(value, jnp.result_type(float)) for name, value in init.items()}

    def sampler(site: Site, prior: Prior, encoding: Any, before: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
        if site.name not in given:
            return draw_prior(site, prior, encoding, before, key)
        value = prior.transform.inv(given[site.name].reshape(prior.fn.shape())).reshape(-1)
        return Draw(value, None, value)

    @jax.jit
    def first_members(arguments: Any, data: Mapping[str, Array]) -> dict[str, Array]:
        branch = fixed_branch({plate.name: jnp.zeros(1, jnp.int32) for plate in study.template.plates})
        sliced = at_branch(study.template, data, branch, frozenset())
        key = jax.random.key(0)
        return cascade(study, arguments, sampler, {}, branch, sliced, key, predict=not data).unconstrained

    found = first_members(arguments, dict(data)) if init else {}
    values = {name: Start(found[name].reshape(-1)) for name in init}
    for name, start in values.items():
        if not np.isfinite(start.value).all():
            raise SettingError(f"init[{name!r}] is not inside the support of its prior, {known[name].distribution}.")
    return values


def other_start(
    study: Study, arguments: Any, data: Mapping[str, Any], draws: Mapping[str, Array], number: int
) -> dict[str, Start]:
    """Where latents outside of plates start, for the `number`-th start after the first.

    Args:
        draws: draws of every latent from the prior, one axis in front.
    """
    clustered = components(study.template)
    if not clustered:
        return {site.name: Start(np.asarray(draws[site.name][number])) for site in study.template.latents if not site.level}
    values: dict[str, Start] = {}
    spreads: dict[int, np.ndarray] = {}
    for name, observed in clustered.items():
        site = study.template.site(name)
        # Where there are fewer means than components, elements; where even these are too few, no start.
        for way in (number, 1):
            points, vectors = _points(study.template.site(observed), data[observed], site, way)
            if len(points) >= site.member_shape[0]:
                values[name], within = _clusters(site, points, number)
                if vectors:
                    spreads[len(within)] = within * np.sqrt(vectors)
                break
    return {**values, **_spreads(study, arguments, data, values, spreads)} if values else {}


def spreads_ahead(study: Study, arguments: Any, data: Mapping[str, Any]) -> None:
    """Compiles in the background what tries the spreads of clusters, before there are any."""
    template = study.template
    clustered = [template.site(name) for name in components(template)]
    sites = _spread_sites(template, {site.member_shape[0] for site in clustered})
    if sites:
        centers = {site.name: np.zeros(site.size, np.float32) for site in clustered}
        given = {site.name: np.zeros(site.member_shape) for site in sites}
        some = {
            site.name: jax.ShapeDtypeStruct((SPREAD_TRIED, *site.member_shape), data[site.name].dtype)
            for site in template.observed
        }
        in_background(_try_spread, study, arguments, _tried(template), some, centers, given, dict.fromkeys(given, False))


def _spread_sites(template: Template, counts: Container[int]) -> list[Site]:
    """Latents outside of plates that may be spreads of so many clusters."""
    return [
        site
        for site in template.latents
        if not site.level and site.member_shape and site.member_shape[0] in counts and "Positive" in site.support
    ]


def _tried(template: Template) -> dict[str, np.ndarray]:
    """Members at which spreads are tried, along each plate."""
    return {plate.name: np.arange(SPREAD_TRIED) * plate.size // SPREAD_TRIED for plate in template.plates}


def _spreads(
    study: Study, arguments: Any, data: Mapping[str, Any], values: Mapping[str, Start], spreads: Mapping[int, np.ndarray]
) -> dict[str, Start]:
    """The latent, if any, that the spreads of clusters make the data likeliest for, started there."""
    given = {}
    for site in _spread_sites(study.template, spreads):
        within = spreads[site.member_shape[0]]
        given[site.name] = np.broadcast_to(within.reshape(-1, *[1] * (len(site.member_shape) - 1)), site.member_shape)
    if not given:
        return {}
    template, members = study.template, _tried(study.template)
    some = {site.name: take_each(data[site.name], [members[plate] for plate in site.level]) for site in template.observed}
    centers = {name: np.asarray(start.value, np.float32) for name, start in values.items()}
    found = {
        name: _try_spread(study, arguments, members, some, centers, given, {other: other == name for other in given})
        for name in (None, *given)
    }
    best = max(found, key=lambda name: np.nan_to_num(float(found[name][0]), nan=-np.inf))
    return {} if best is None else {best: Start(np.asarray(found[best][1][best]), SPREAD_KNOWN)}


@quick_jit(static_argnums=(0,))
def _try_spread(
    study: Study,
    arguments: Any,
    members: dict[str, Array],
    data: dict[str, Array],
    centers: dict[str, Array],
    given: dict[str, Array],
    chosen: dict[str, Array],
) -> tuple[Array, dict[str, Array]]:
    """The mean log-likelihood of some members with latents drawn from the prior, but for given ones where chosen; and these
    in unconstrained space."""

    def sampler(site: Site, prior: Prior, encoding: Any, before: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
        drawn = draw_prior(site, prior, encoding, before, key)
        if site.name in centers:
            value = centers[site.name].reshape(-1)
        elif site.name in given:
            wanted = prior.transform.inv(given[site.name].reshape(prior.fn.shape())).reshape(-1)
            value = jnp.where(chosen[site.name], wanted, drawn.value)
        else:
            return drawn
        return Draw(value, None, value)

    def one(key: PRNGKeyArray, index: dict[str, Array], data: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        shown = {
            name: value.reshape(*[1] * len(study.template.site(name).level), *value.shape) for name, value in data.items()
        }
        branch = fixed_branch({plate: number[None] for plate, number in index.items()})
        found = cascade(study, arguments, sampler, {}, branch, shown, key)
        likelihood = sum(found.log_p[site.name].sum() for site in study.template.observed)
        return likelihood, {name: found.unconstrained[name].reshape(-1) for name in given}

    likelihoods, found = jax.vmap(one)(jax.random.split(jax.random.key(0), SPREAD_TRIED), members, data)
    return likelihoods.mean(), jax.tree.map(lambda values: values[0], found)


def _points(observed: Site, array: Any, site: Site, number: int) -> tuple[np.ndarray, int]:
    """What is clustered in a start: observed elements, and in every other start their means over a plate.

    Elements may be too noisy to cluster, and means too mixed. Several vectors of one element are averaged: so many, or none
    where means over a plate say nothing about spreads.
    """
    plates, tail = len(observed.level), len(site.member_shape) - 1
    averaged = (number // 2 - 1) % plates if number % 2 == 0 and plates > 1 else None
    kept = [axis for axis in range(plates) if axis != averaged]
    most = MOST_CLUSTERED if averaged is None else MOST_CLUSTERED // MOST_AVERAGED
    index = dict(zip(kept, spread_evenly(tuple(array.shape[axis] for axis in kept), most), strict=True))
    if averaged is not None:
        index[averaged] = spread_evenly((array.shape[averaged],), MOST_AVERAGED)[0]
    values = np.asarray(take(array, tuple(index[axis] for axis in range(plates))), np.float64)
    over = tuple(range(plates, values.ndim - tail)) + (() if averaged is None else (averaged,))
    vectors = math.prod(values.shape[plates : values.ndim - tail]) if averaged is None else 0
    return values.mean(over).reshape(-1, math.prod(site.member_shape[1:])), vectors


def _clusters(site: Site, points: np.ndarray, seed: int) -> tuple[Start, np.ndarray]:
    """Centers of clusters, on the scale of the differences between them, and the standard deviations within.

    A mixture of round normals is fitted along the leading principal components, as many as there are components: noise in
    all the other directions would drown the clusters.
    """
    count = site.member_shape[0]
    middle = points.mean(0)
    _, vectors = np.linalg.eigh((points - middle).T @ (points - middle))
    leading = vectors[:, -count:]
    shown = (points - middle) @ leading
    settings: dict[str, Any] = {"covariance_type": "spherical", "max_iter": CLUSTER_ROUNDS, "random_state": seed}
    few = shown[np.random.default_rng(seed).permutation(len(shown))[:CLUSTER_TRIED]]
    tried = GaussianMixture(count, **settings, tol=CLUSTER_TRY_GAIN, n_init=CLUSTER_TRIES, init_params="k-means++").fit(few)
    mixture = GaussianMixture(
        count,
        **settings,
        tol=CLUSTER_GAIN,
        means_init=tried.means_,
        weights_init=tried.weights_,
        precisions_init=tried.precisions_,
    )
    centers = middle + mixture.fit(shown).means_ @ leading.T
    return Start(centers.reshape(-1), float(centers.std(0).mean()) or np.inf), np.sqrt(mixture.covariances_)


def _ends_with(observed: Site, tail: tuple[int, ...]) -> bool:
    shape = observed.member_shape
    return len(shape) >= len(tail) and shape[len(shape) - len(tail) :] == tail
