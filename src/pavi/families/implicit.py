"""Unbiased implicit variational inference (Titsias and Ruiz 2019)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jax.scipy.stats import norm
from jaxtyping import Array, Float, PRNGKeyArray

from pavi.cascade import Draw, Sampler, Study
from pavi.families.base import Glimpse, Reading, Units, Weights
from pavi.families.whole import Whole
from pavi.flows import Perceptron
from pavi.packing import Skeleton, pack, skeleton_of
from pavi.prior import Prior
from pavi.template import Level, Site, Template

# The posterior starts this much narrower than the prior.
INITIAL_SCALE = 0.1
# Embeddings that the density is averaged over: to follow training, and to bound the ELBO at the end.
FOLLOWED, AVERAGED = 16, 512
NOISE = 2**30
# Sizes of embeddings and hidden layers as the paper chose them, by the number of latents up to which they are used.
USUAL = ((10, 3, (32, 32)), (100, 6, (64, 64)), (None, 9, (128, 128)))


@dataclasses.dataclass(frozen=True)
class UIVI(Whole):
    """A normal whose mean and scales a network draws from noise, over the whole latent space at once.

    A small embedding is drawn from a standard normal; a network maps it to a mean and a scale for every latent number; the
    latents are normal given these. The mixture over embeddings has no closed density. Its gradient is estimated without bias
    from draws of the embedding given the latents, by a short run of Hamiltonian Monte Carlo in every step.

    Can represent correlations along as many directions as the embedding has, whatever the plates; knows nothing of the
    model's structure, so its weights grow with the latents times the width of the network, and it needs whole plates in
    every step. The ELBO that is reported is a lower bound on its own: the density is averaged over a finite number of
    embeddings, the right one among them.

    Args:
        embedding: numbers in the embedding; by default 3, 6 or 9 by the number of latents.
        hidden: widths of the network's hidden layers; by default (32, 32), (64, 64) or (128, 128).
        burn_in: Hamiltonian steps that are thrown away.
        chain: Hamiltonian steps that are averaged over.
        leapfrogs: leapfrog steps in each.
        step_size: of a leapfrog step.

    Example:
        >>> import pavi
        >>> family = pavi.baselines.UIVI(embedding=6, hidden=(64, 64))
    """

    embedding: int | None = None
    hidden: tuple[int, ...] | None = None
    burn_in: int = 5
    chain: int = 5
    leapfrogs: int = 5
    step_size: float = 0.1

    def init(self, template: Template, rng: np.random.Generator, data: Mapping[str, Any], whole: frozenset[str]) -> Weights:
        del data, whole
        return Weights(pack(self._network(template, rng)).astype(jnp.result_type(float)), {}, {})

    def shapes(self, template: Template, whole: frozenset[str]) -> Weights:
        del whole
        return Weights(jax.ShapeDtypeStruct((self._skeleton(template).size,), jnp.result_type(float)), {}, {})

    def measure(self, template: Template, data: Mapping[str, Any], arguments: Any) -> Units:
        return Units({}, {})

    def encode(self, weights: Weights, units: Units, glimpse: Glimpse) -> tuple[Mapping[Level, Any], Mapping]:
        return {}, {}

    def settle(self, study: Study, arguments: Any, data: Mapping[str, Any], units: Units, weights: Weights) -> Reading:
        return Reading(self, weights)

    def together(
        self,
        template: Template,
        units: Units,
        shared: Array,
        encodings: Mapping[Level, Any],
        key: PRNGKeyArray,
        training: bool,
    ) -> dict[Level, dict[str, tuple[Array, Array]]]:
        """All latents of the study and their log-density: the values of each site, and what it adds to log q.

        The joint density has no terms per member: all of it is put on the first member of the first site.
        """
        del encodings
        keys = jax.random.split(jax.random.fold_in(key, NOISE), 4)
        network = self._skeleton(template).fill(shared)
        noise = jax.random.normal(keys[0], (self._embedding(template),))
        loc, log_scale = _split(network(noise))
        value = loc + jnp.exp(log_scale) * jax.random.normal(keys[1], loc.shape)
        fixed, point = jax.lax.stop_gradient((network, value))
        others = jax.random.normal(keys[2], (FOLLOWED if training else AVERAGED, *noise.shape))
        densities = jax.vmap(lambda noise: _log_density(fixed, noise, point))(jnp.concatenate([noise[None], others]))
        total = logsumexp(densities) - jnp.log(len(densities))
        slope = self._slope(fixed, noise, point, keys[3]) if training else jnp.zeros_like(value)
        slopes = slope * (value - point)
        return _by_site(template, units, value, slopes, total)

    def sampler(self, template: Template, units: Units, shared: Array) -> Sampler:
        del template, units, shared

        def draw(site: Site, prior: Prior, encoding: Any, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
            del prior, given, key
            value, log_q = encoding[site.name]
            return Draw(value, log_q, jax.lax.stop_gradient(value))

        return draw

    def _slope(self, network: Perceptron, noise: Array, value: Array, key: PRNGKeyArray) -> Float[Array, " latents"]:
        """The gradient of log q by the value: that of the normal, averaged over embeddings given the value."""

        def energy(noise: Array) -> Float[Array, ""]:
            return -norm.logpdf(noise).sum() - _log_density(network, noise, value)

        force = jax.grad(energy)

        def move(noise: Array, key: PRNGKeyArray) -> tuple[Array, Array]:
            momentum_key, accept_key = jax.random.split(key)
            first = jax.random.normal(momentum_key, noise.shape)
            momentum, moved = first - 0.5 * self.step_size * force(noise), noise
            for k in range(self.leapfrogs):
                moved = moved + self.step_size * momentum
                momentum = momentum - (self.step_size if k < self.leapfrogs - 1 else 0.5 * self.step_size) * force(moved)
            change = energy(noise) + 0.5 * (first**2).sum() - energy(moved) - 0.5 * (momentum**2).sum()
            accepted = jnp.log(jax.random.uniform(accept_key)) < change  # false where the change is not finite
            noise = jnp.where(accepted, moved, noise)
            return noise, noise

        # The chain starts at the very embedding that made the value: a draw from where it is headed.
        _, visited = jax.lax.scan(move, noise, jax.random.split(key, self.burn_in + self.chain))

        def by_value(noise: Array) -> Array:
            loc, log_scale = _split(network(noise))
            return (loc - value) * jnp.exp(-2 * log_scale)

        return jax.vmap(by_value)(visited[self.burn_in :]).mean(0)

    def _embedding(self, template: Template) -> int:
        return self.embedding or _usual(template)[0]

    def _network(self, template: Template, rng: np.random.Generator) -> Perceptron:
        count = template.num_latents
        hidden = _usual(template)[1] if self.hidden is None else self.hidden
        network = Perceptron(rng, [self._embedding(template), *hidden, 2 * count])
        network.layers[-1].bias[count:] = np.log(INITIAL_SCALE)
        return network

    def _skeleton(self, template: Template) -> Skeleton:
        return _skeleton(self, template)


def _usual(template: Template) -> tuple[int, tuple[int, ...]]:
    return next((size, hidden) for most, size, hidden in USUAL if most is None or template.num_latents <= most)


def _split(parameters: Array) -> tuple[Array, Array]:
    loc, log_scale = jnp.split(parameters, 2)
    return loc, log_scale


def _log_density(network: Perceptron, noise: Array, value: Array) -> Float[Array, ""]:
    loc, log_scale = _split(network(noise))
    return norm.logpdf(value, loc, jnp.exp(log_scale)).sum()


def _by_site(
    template: Template, units: Units, value: Array, slopes: Array, total: Array
) -> dict[Level, dict[str, tuple[Array, Array]]]:
    """Splits a vector of all latents into sites and members, each back in its own units."""
    found: dict[Level, dict[str, tuple[Array, Array]]] = {level: {} for level in template.levels}
    start = 0
    for number, site in enumerate(template.latents):
        shape = (*template.sizes(site.level), site.size)
        part = slice(start, start + int(np.prod(shape)))
        start = part.stop
        spread = units.spread[site.name]
        log_q = slopes[part].reshape(shape).sum(-1) - jnp.log(spread).sum()
        if number == 0:
            log_q = log_q.at[(0,) * len(site.level)].add(total)
        found[site.level][site.name] = (units.center[site.name] + spread * value[part].reshape(shape), log_q)
    return found


@functools.lru_cache(maxsize=64)
def _skeleton(family: UIVI, template: Template) -> Skeleton:
    return skeleton_of(family._network(template, np.random.default_rng(0)))
