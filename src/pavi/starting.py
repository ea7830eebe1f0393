"""Where a fit starts, and which of several starts is worth going on with.

Models with several like components (mixtures) have many optima, in most of which two components share a cluster and
another has none. So a fit may be started several times; every start trains for some steps on the same branches with the
same noise, and the one with the best ELBO goes on. The first start is at the prior's center. The others are at centers of
clusters of the data (a mixture fitted by scikit-learn) for a latent that is made of *several of what is
observed*, and at draws from the prior for the other latents outside of plates.

Flows work in units whose center a start can choose: the posterior then starts around it. The latents below start where
the prior puts them given these values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from sklearn.mixture import GaussianMixture

from pavi.branch import fixed_branch
from pavi.cascade import Draw, Prior, Study, cascade, draw_prior
from pavi.data import at_branch, spread_evenly
from pavi.errors import SettingError
from pavi.sources import take
from pavi.template import Site, Template

# Starts of a model that looks like a mixture, where the caller does not say.
USUAL_STARTS = 4
# Steps for which all latents outside of plates are held, then those that were started, then none; the last are scored.
HELD_STEPS, STARTED_STEPS, TRIAL_STEPS, SCORED_STEPS = 200, 100, 100, 50
# What the rate of a latent that was started somewhere is multiplied by once it is not held.
STARTED_PACE = 0.1
# Observed elements that are clustered, and of these how many make a mean.
MOST_CLUSTERED = 100_000
MOST_AVERAGED = 64
# Rounds of fitting a mixture, and the gain per element (nats) below which they end: clusters that overlap take many.
CLUSTER_ROUNDS, CLUSTER_GAIN = 300, 1e-5
# Mixtures have many optima as well: so many are fitted to some of the elements, and the best to all.
CLUSTER_TRIES, CLUSTER_TRIED, CLUSTER_TRY_GAIN = 10, 10_000, 1e-4


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


def other_start(template: Template, data: Mapping[str, Any], draws: Mapping[str, Array], number: int) -> dict[str, Start]:
    """Where latents outside of plates start, for the `number`-th start after the first.

    Args:
        draws: draws of every latent from the prior, one axis in front.
    """
    clustered = components(template)
    values: dict[str, Start] = {}
    for site in template.latents:
        if site.name in clustered:
            observed = template.site(clustered[site.name])
            # Where there are fewer means than components, elements; where even these are too few, no start.
            for way in (number, 1):
                points = _points(observed, data[observed.name], site, way)
                if len(points) >= site.member_shape[0]:
                    values[site.name] = _clusters(site, points, number)
                    break
        elif not site.level and not clustered:
            values[site.name] = Start(np.asarray(draws[site.name][number]))
    return values


def _points(observed: Site, array: Any, site: Site, number: int) -> np.ndarray:
    """What is clustered in a start: observed elements, and in every other start their means over a plate.

    Elements may be too noisy to cluster, and means too mixed. Several vectors of one element are averaged.
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
    return values.mean(over).reshape(-1, math.prod(site.member_shape[1:]))


def _clusters(site: Site, points: np.ndarray, seed: int) -> Start:
    """Centers of clusters, on the scale of the differences between them.

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
    return Start(centers.reshape(-1), float(centers.std(0).mean()) or np.inf)


def _ends_with(observed: Site, tail: tuple[int, ...]) -> bool:
    shape = observed.member_shape
    return len(shape) >= len(tail) and shape[len(shape) - len(tail) :] == tail
