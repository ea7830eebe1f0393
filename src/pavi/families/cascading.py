"""Cascading flows (Ambrogioni, Silvestri and van Gerven 2021)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm
from jaxtyping import Array, Float, PRNGKeyArray

from pavi.cascade import Draw, Sampler, Study
from pavi.families.base import Glimpse, Reading, Scale, Units, Weights
from pavi.families.whole import Whole
from pavi.flows import Highway, Path, push
from pavi.packing import Skeleton, pack, skeleton_of
from pavi.prior import Prior
from pavi.sources import load
from pavi.template import Level, Site, Template

# Log-scales that the auxiliary variables' distribution r starts with: those of auxiliary noise after a flow at its start.
INITIAL_LOG_SCALE = -1.0
NOISE = 2**30


@dataclasses.dataclass(frozen=True)
class CascadingFlows(Whole):
    """A highway flow for every member of every site, which pushes the prior, with auxiliary variables for coupling.

    Each latent is drawn from its prior given its parents and pushed, together with a vector of auxiliary noise, through a
    highway flow of its own. The noise of children is passed back to their parents' noise before anything is drawn: so
    parents and children depend on each other both ways. Auxiliary variables are scored by a mean-field normal r, which makes
    the bound valid, and looser the more they are used.

    Can bend and stretch the prior of each member; a child leans on its parents as the prior says, stretched with it, which
    is not quite what normal hierarchies ask for. Its weights grow with the plates, and every step takes whole plates.

    Args:
        auxiliary: auxiliary numbers per latent.
        sample_amortized: let the weights of each flow depend linearly on the mean of the data below its member, for
            `pavi.amortize`. Plates then keep the sizes that it was trained with.

    Example:
        >>> import pavi
        >>> family = pavi.baselines.CascadingFlows(auxiliary=8)
    """

    auxiliary: int = 8
    sample_amortized: bool = False

    def init(self, template: Template, rng: np.random.Generator, data: Mapping[str, Any], whole: frozenset[str]) -> Weights:
        del rng, data, whole
        parts = []
        for level in template.levels:
            row = np.concatenate([self._start(template, site) for site in template.latents if site.level == level])
            parts.append(np.broadcast_to(row, (*template.sizes(level), len(row))).reshape(-1))
        return Weights(np.concatenate(parts).astype(jnp.result_type(float)), {}, {})

    def shapes(self, template: Template, whole: frozenset[str]) -> Weights:
        del whole
        count = sum(int(np.prod((*template.sizes(level), self._row_size(template, level)))) for level in template.levels)
        return Weights(jax.ShapeDtypeStruct((count,), jnp.result_type(float)), {}, {})

    def measure(self, template: Template, data: Mapping[str, Any], arguments: Any) -> Units:
        if not self.sample_amortized:
            return Units({}, {})
        center, spread = {}, {}
        for site in template.observed:
            values = np.asarray(load(data[site.name]), np.float32).reshape(-1, int(np.prod(site.member_shape, dtype=int)))
            center[site.name], spread[site.name] = values.mean(0), np.maximum(values.std(0), 1e-6)
        return Units(center, spread)

    def encode(self, weights: Weights, units: Units, glimpse: Glimpse) -> tuple[Mapping[Level, Any], Mapping]:
        if weights.rows:  # settled
            return weights.rows, {}
        return self._rows(glimpse.study.template, weights.shared, units, glimpse.data), {}

    def settle(self, study: Study, arguments: Any, data: Mapping[str, Any], units: Units, weights: Weights) -> Reading:
        arrays = {name: jnp.asarray(load(array)) for name, array in data.items()}
        rows = self._rows(study.template, weights.shared, units, arrays)
        return Reading(self, Weights(jnp.zeros(0), rows, {}))

    def together(
        self,
        template: Template,
        units: Units,
        shared: Array,
        encodings: Mapping[Level, Any],
        key: PRNGKeyArray,
        training: bool,
    ) -> dict[Level, dict[str, _Coupled]]:
        """Auxiliary noise of all members, passed back from children to parents."""
        del shared, units, training
        found: dict[Level, dict[str, _Coupled]] = {level: {} for level in template.levels}
        noises: dict[str, Array] = {}
        for number, site in reversed(list(enumerate(template.latents))):
            flat = encodings[site.level][..., self._place(template, site)]
            head = flat.shape[:-1]
            drawn = jax.random.normal(jax.random.fold_in(key, NOISE + number), (*head, self.auxiliary))
            shift = jnp.zeros_like(drawn)
            for k, child in enumerate(_children(template, site)):
                gain = flat[..., (2 + k) * self.auxiliary : (3 + k) * self.auxiliary]
                shift += gain * _onto(template, noises[child.name], child.level, site.level)
            noises[site.name] = drawn + shift
            found[site.level][site.name] = _Coupled(flat, noises[site.name], shift)
        return found

    def sampler(self, template: Template, units: Units, shared: Array) -> Sampler:
        del shared

        def draw(site: Site, prior: Prior, encoding: Any, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
            del given
            flat, noise, shift = encoding[site.name]
            scale, nothing = Scale.of(units, site), jnp.zeros(0)
            loc, log_scale = flat[: self.auxiliary], flat[self.auxiliary : 2 * self.auxiliary]
            first = (2 + len(_children(template, site))) * self.auxiliary
            bijection = _skeleton(site.size + self.auxiliary).fill(flat[first:])

            def log_base(base: Array) -> Float[Array, ""]:
                own = prior.log_prob(scale.prior_value(base[: site.size]))
                return own + norm.logpdf(base[site.size :], shift).sum()

            base = jnp.concatenate([scale.base(prior.draw(key)), noise])
            # No path gradient: on CPUs with few cores, batched triangular solves in a compiled loop can wait for each other
            # forever.
            pushed, log_q = push(bijection, Path.NONE, base, [nothing], None, log_base)
            log_r = norm.logpdf(pushed[site.size :], loc, jnp.exp(log_scale)).sum()
            return Draw(scale.value(pushed[: site.size]), log_q - scale.log_det - log_r, scale.value(jnp.zeros(site.size)))

        return draw

    def _start(self, template: Template, site: Site) -> np.ndarray:
        """Parameters that a member of a site starts with: those of r, gains of its children's noise, its flow's."""
        gains = np.zeros(len(_children(template, site)) * self.auxiliary)
        scored = np.concatenate([np.zeros(self.auxiliary), np.full(self.auxiliary, INITIAL_LOG_SCALE)])
        own = np.concatenate([scored, gains, pack(Highway(site.size + self.auxiliary))])
        slopes = np.zeros(len(own) * self._seen(template) if self.sample_amortized else 0)
        return np.concatenate([own, slopes])

    def _row_size(self, template: Template, level: Level) -> int:
        return sum(
            self._site_size(template, site) * self._folds(template) for site in template.latents if site.level == level
        )

    def _site_size(self, template: Template, site: Site) -> int:
        return (2 + len(_children(template, site))) * self.auxiliary + _skeleton(site.size + self.auxiliary).size

    def _folds(self, template: Template) -> int:
        """How many numbers are trained for each parameter: itself, and its slopes on the data."""
        return 1 + (self._seen(template) if self.sample_amortized else 0)

    def _seen(self, template: Template) -> int:
        return sum(int(np.prod(site.member_shape, dtype=int)) for site in template.observed)

    def _place(self, template: Template, site: Site) -> slice:
        """Where a site's parameters lie among those of its level."""
        level = [other for other in template.latents if other.level == site.level]
        first = sum(self._site_size(template, other) for other in level[: level.index(site)])
        return slice(first, first + self._site_size(template, site))

    def _rows(self, template: Template, shared: Array, units: Units, data: Mapping[str, Array]) -> dict[Level, Array]:
        """The parameters of every member, per level, side by side for its sites."""
        rows, start = {}, 0
        for level in template.levels:
            shape = (*template.sizes(level), self._row_size(template, level))
            flat = shared[start : start + int(np.prod(shape))].reshape(shape)
            start += int(np.prod(shape))
            rows[level] = self._on_data(template, level, flat, units, data) if self.sample_amortized else flat
        return rows

    def _on_data(
        self, template: Template, level: Level, flat: Array, units: Units, data: Mapping[str, Array]
    ) -> Float[Array, "*plates parameters"]:
        means = []
        for site in template.observed:
            values = data[site.name].reshape(*data[site.name].shape[: len(site.level)], -1)
            means.append(_onto(template, units.standardize(site.name, values), site.level, level))
        mean, parts, first = jnp.concatenate(means, -1), [], 0
        for site in template.latents:
            if site.level == level:
                size, folds = self._site_size(template, site), self._folds(template)
                own, slopes = jnp.split(flat[..., first : first + size * folds], [size], -1)
                parts.append(own + jnp.einsum("...pk,...k->...p", slopes.reshape(*own.shape, folds - 1), mean))
                first += size * folds
        return jnp.concatenate(parts, -1)


class _Coupled(NamedTuple):
    """A member's parameters, its auxiliary noise, and how much of that came from its children."""

    parameters: Array
    noise: Array
    shift: Array


def _children(template: Template, site: Site) -> list[Site]:
    return [other for other in template.latents if site.name in other.given]


def _onto(template: Template, values: Array, source: Level, target: Level) -> Array:
    """Values of the members of one level as those of another see them: means over plates that it is not in."""
    over = tuple(axis for axis, plate in enumerate(source) if plate not in target)
    kept = [plate for plate in source if plate in target]
    mean = values.mean(over)
    shape = (*(template.plate(plate).size if plate in kept else 1 for plate in target), values.shape[-1])
    return jnp.broadcast_to(mean.reshape(shape), (*template.sizes(target), values.shape[-1]))


@functools.lru_cache(maxsize=64)
def _skeleton(dim: int) -> Skeleton:
    return skeleton_of(Highway(dim))
