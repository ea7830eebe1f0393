"""Encodings computed from data (PAVI-E, paper `sec:PAVI-E_details`): a network reads the data of a member's descendants.

For each observed site the network starts at the site's own level and contracts one plate at a time, towards every level
that has latents (the maximum branching of the reversed plate-level graph, see `contractions`). What it knows of a member
has two parts:

- **moments**: means, spreads and counts of the data below the member, computed, not learned. In a Gaussian model they are
  all there is to know, and they are exact for sets of any size;
- **features**: learned, by a perceptron on each observed element and a Set Transformer at each contraction.

Of a **count**, networks see one over it, which hardly changes beyond the largest set of training; its logarithm, which
grows without end, goes to the flows apart, for their scales alone (see `Flow.build`).

**Moving summaries.** In a step most children of a member are not drawn, so a summary of the drawn ones is not the summary
that inference will use (the paper's bias of PAVI-E, `sec:no_bias`). So a running average over steps stands in for the
summary of all children; the gradient goes through the drawn ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from pavi.branch import Branch
from pavi.encodings.attention import SetTransformer
from pavi.encodings.free import FreeEncodings
from pavi.errors import SettingError
from pavi.flows.networks import Linear, Perceptron, as_weight
from pavi.packing import Skeleton, pack, skeleton_of
from pavi.template import Level, Site, Template

# Spreads are kept beside means while a member has at most this many moments.
MOST_MOMENTS = 32
# Standardized data pass unchanged up to this size; beyond it they grow like a logarithm.
SQUASH = 4.0
SMALLEST_VARIANCE = 1e-6
LARGEST = 1e8
# One over a count is shown this many times smaller, so that what it does is learned slowly.
COUNT_GAIN = 0.1
# Elements from which the scale of the data is read.
MOST_MEASURED = 100_000


class View(NamedTuple):
    """What an encoder is shown of a branch: data of observed sites, which of them count, and covariates of members."""

    branch: Branch
    data: Mapping[str, Array]
    seen: Mapping[str, Array]
    covariates: Mapping[str, Array]


class Known(NamedTuple):
    """What is known of each member of a level: moments and features, and whether it has any data.

    Moments are as they are, so that spreads of any size keep their meaning; networks see them squashed. Some of them are
    logarithms of counts.
    """

    moments: Float[Array, "*members moment"]
    features: Float[Array, "*members feature"]
    present: Bool[Array, "*members"]

    def seen(self, counts: Sequence[int]) -> Float[Array, "*members seen"]:
        """What networks see; `counts` says which moments are counts."""
        where = np.array(counts, int)
        moments = (
            self.moments.at[..., where].set(COUNT_GAIN * jnp.exp(-self.moments[..., where])) if counts else self.moments
        )
        return jnp.concatenate([_squashed(moments), self.features], -1)


class Contraction(NamedTuple):
    """One step of the recursion: from a level to the level without one of its plates."""

    source: Level
    plate: str
    target: Level


def contractions(template: Template, site: Site) -> tuple[Contraction, ...]:
    """The steps that lead from an observed site to every level above it that has latents, each from the nearest known."""
    known = [site.level]
    steps = []
    for level in sorted(template.levels, key=len, reverse=True):
        if level in known or not set(level) <= set(site.level):
            continue
        source = min((other for other in known if set(level) < set(other)), key=len)
        for plate in [plate for plate in reversed(source) if plate not in level]:
            target = tuple(other for other in source if other != plate)
            steps.append(Contraction(source, plate, target))
            known.append(target)
            source = target
    return tuple(dict.fromkeys(steps))


class Contract(eqx.Module):
    """Summarizes a set of members by their moments, their number and a Set Transformer."""

    enter: Linear
    transformer: SetTransformer
    leave: Perceptron
    counts: tuple[int, ...] = eqx.field(static=True)
    """Which moments of the members are counts."""

    def __init__(self, rng: np.random.Generator, moments: int, counts: tuple[int, ...], settings: SetEncoder):
        self.counts = counts
        wide = moments + settings.size
        weight = rng.normal(size=(wide, settings.width)) / np.sqrt(wide)
        self.enter = Linear(as_weight(weight), as_weight(np.zeros(settings.width)))
        self.transformer = SetTransformer(rng, settings.width, settings.heads, settings.inducing)
        self.leave = Perceptron(rng, [settings.width, *settings.hidden, settings.size], open=True)

    def summarize(self, known: Known, weights: Float[Array, " member"]) -> Float[Array, " summary"]:
        """Number of members, means and variances of their moments, pooled features."""
        weights = jnp.where(known.present, weights, 0.0)
        total = weights.sum()
        share = weights / jnp.maximum(total, 1e-6)
        mean = share @ known.moments
        variance = share @ (known.moments - mean) ** 2 if _keeps_spread(len(mean)) else jnp.zeros(0)
        pooled = self.transformer(jax.vmap(self.enter)(known.seen(self.counts)), known.present)
        return jnp.concatenate([total[None], mean, variance, pooled])

    def known(self, summary: Float[Array, " summary"], moments: int) -> Known:
        """What a summary of members with so many moments says of their parent."""
        total, mean = summary[0], summary[1 : 1 + moments]
        parts = [mean]
        rest = summary[1 + moments :]
        if _keeps_spread(moments):
            parts.append(jnp.where(total > 1.5, 0.5 * jnp.log(rest[:moments] + SMALLEST_VARIANCE), 0.0))
            rest = rest[moments:]
        parts.append(jnp.log(jnp.maximum(total, 0.5))[None])
        return Known(jnp.concatenate(parts), jnp.tanh(self.leave(rest)), total > 0)


def _keeps_spread(moments: int) -> bool:
    return 2 * moments <= MOST_MOMENTS


class SiteEncoder(eqx.Module):
    """The networks of one observed site."""

    element: Perceptron
    contracts: tuple[Contract, ...]


@dataclasses.dataclass(frozen=True)
class SetEncoder:
    """Encodings read off the data by a network with set attention, so that new members need no training.

    Levels that no data can reach get free encodings.

    Args:
        size: learned features per observed site, beside the moments of its data.
        hidden: widths of the perceptrons.
        width: width of the attention blocks.
        heads: attention heads.
        inducing: inducing points of each Set Transformer.
        covariates: names of the model's keyword arguments that the network may see, with the level (or the one plate)
            whose members they describe, e.g. `{"dose": "subject"}`: arrays of one number per member.
        memory: share of the newest step in the running average that stands in for children not drawn; 1 for none.

    Example:
        >>> import pavi
        >>> family = pavi.PAVI(encodings=pavi.SetEncoder(size=8))
    """

    size: int = 8
    hidden: tuple[int, ...] = (32,)
    width: int = 32
    heads: int = 4
    inducing: int = 4
    covariates: Mapping = dataclasses.field(default_factory=dict)
    memory: float = 0.02

    def __post_init__(self) -> None:
        if min(self.size, self.width, self.heads, self.inducing) < 1 or self.width % self.heads:
            raise SettingError(
                f"{self!r}: expected a size, a width, heads and inducing points of at least 1, and a width that the heads "
                "divide."
            )
        if not 0 < self.memory <= 1:
            raise SettingError(f"SetEncoder(memory={self.memory}): expected a share above 0 and up to 1.")
        object.__setattr__(self, "hidden", tuple(self.hidden))
        levels = {name: (level,) if isinstance(level, str) else tuple(level) for name, level in self.covariates.items()}
        object.__setattr__(self, "covariates", MappingProxyType(levels))

    def __hash__(self) -> int:
        numbers = (self.size, self.hidden, self.width, self.heads, self.inducing, self.memory)
        return hash((numbers, tuple(self.covariates.items())))

    def check(self, template: Template) -> None:
        """Refuses covariates of plates that the model does not have."""
        known = {plate.name for plate in template.plates}
        for name, level in self.covariates.items():
            if not set(level) <= known or not level:
                raise SettingError(
                    f"SetEncoder(covariates={{{name!r}: {level}}}): the model has the plates {sorted(known)} only."
                )

    def site_size(self, template: Template, site: Site) -> int:
        """How many numbers of its level's encoding a site reads: all."""
        return self.level_size(template, site.level)

    def level_size(self, template: Template, level: Level) -> int:
        """Numbers per member of a level."""
        if level in self.unreached(template):
            return FreeEncodings().level_size(template, level)
        found = 0
        for site in template.observed:
            moments = self._moments(template, site)
            if level in moments:
                found += len(self._counts(template, site)[level]) + moments[level] + self.size
        return found

    def count_size(self, template: Template, level: Level) -> int:
        """How many numbers at the start of a level's encoding are logarithms of counts."""
        return sum(len(self._counts(template, site).get(level, ())) for site in template.observed)

    def init(self, template: Template, data: Mapping[str, Any]) -> dict[Level, np.ndarray]:
        """Free encodings of the levels that no data reach."""
        del data
        free = {level: (*template.sizes(level), self.level_size(template, level)) for level in self.unreached(template)}
        return {level: np.zeros(shape, jnp.result_type(float)) for level, shape in free.items()}

    def weights(self, template: Template, rng: np.random.Generator) -> np.ndarray:
        """Starting weights of the networks, as one flat vector."""
        return np.concatenate([pack(self._network(template, site, rng)) for site in template.observed] or [np.zeros(0)])

    def measure(self, template: Template, data: Mapping[str, Any], arguments: Any) -> tuple[dict, dict]:
        """Center and spread of the data (plate axes in front) and of the covariates, by quantiles."""
        center, spread = {}, {}
        arrays = {}
        for site in template.observed:
            values = np.asarray(data[site.name])
            size = int(np.prod(site.member_shape, dtype=int))
            values = values.reshape(-1, size)
            some = values[:: max(1, len(values) // MOST_MEASURED)]
            arrays[site.name] = np.asarray(unconstrained(site, jnp.asarray(some)))
        for name in self.covariates:
            arrays[name] = self._covariate(template, arguments, name).reshape(-1, 1)
        for name, values in arrays.items():
            low, middle, high = np.quantile(values, [0.16, 0.5, 0.84], axis=0)
            half = np.where(high > low, (high - low) / 2, np.maximum(values.std(0), 1e-3))
            center[name], spread[name] = as_weight(middle), as_weight(half)
        return center, spread

    def _covariate(self, template: Template, arguments: Any, name: str) -> np.ndarray:
        """The values of a covariate, checked."""
        self.check(template)
        level, known = self.covariates[name], arguments[1]
        if known.get(name) is None:
            raise SettingError(
                f"SetEncoder(covariates=...): {name!r} is no array among the model's keyword arguments. "
                f"Arrays in model_kwargs: {sorted(key for key, value in known.items() if value is not None)}."
            )
        value, sizes = np.asarray(known[name]), template.sizes(level)
        if value.ndim != len(sizes) or any(found < size for found, size in zip(value.shape, sizes, strict=True)):
            raise SettingError(
                f"SetEncoder(covariates={{{name!r}: {level}}}): expected one number per member, shape {sizes}, found shape "
                f"{value.shape}."
            )
        return value

    def memory_sizes(self, template: Template, whole: frozenset[str]) -> dict[tuple[str, Level], int]:
        """Which running summaries are kept, (site, level): numbers per member. Only where a plate is subsampled."""
        if self.memory == 1:
            return {}
        sizes = {}
        for site in template.observed:
            moments = self._moments(template, site)
            for step in contractions(template, site):
                if step.plate not in whole:
                    spread = moments[step.source] if _keeps_spread(moments[step.source]) else 0
                    sizes[site.name, step.target] = 1 + 1 + moments[step.source] + 2 * spread + self.width
        return sizes

    def encode(
        self,
        template: Template,
        weights: Float[Array, " weights"],
        standardize: Any,
        view: View,
        memory: Mapping[tuple[str, Level], Array],
    ) -> tuple[dict[Level, Array], dict[tuple[str, Level], Array]]:
        """Encodings of a branch's members per level, and the running summaries brought up to date."""
        found: dict[str, dict[Level, Known]] = {}
        kept = {}
        for site, network in self.networks(template, weights):
            known = {site.level: self.elements(network, site, standardize, view)}
            for step, contract in zip(contractions(template, site), network.contracts, strict=True):
                old = memory.get((site.name, step.target))
                weight = jnp.where(view.branch.mask[step.plate], view.branch.weights[step.plate], 0.0)
                known[step.target], new = self.contract(contract, step, known[step.source], weight, old)
                if new is not None:
                    kept[site.name, step.target] = new
            found[site.name] = known
        return self.encodings(template, found), kept

    def encodings(self, template: Template, found: Mapping[str, Mapping[Level, Known]]) -> dict[Level, Array]:
        """Encodings per level from what is known by observed site: logarithms of counts, then what networks see."""
        encodings = {}
        for level in template.levels:
            reached = [site for site in template.observed if level in found[site.name]]
            known = [(found[site.name][level], self._counts(template, site)[level]) for site in reached]
            parts = [each.moments[..., np.array(counts, int)] for each, counts in known]
            parts += [each.seen(counts) for each, counts in known]
            if parts:
                encodings[level] = jnp.concatenate(parts, -1)
        return encodings

    def elements(self, network: SiteEncoder, site: Site, standardize: Any, view: View) -> Known:
        """What the data of each observed element say."""
        plates = len(site.level)
        values = unconstrained(site, view.data[site.name])
        lead = values.shape[:plates]
        values = standardize(site.name, values.reshape(*lead, -1))
        present = jnp.ones(lead, bool)
        parts = [values]
        if site.masked:
            seen = view.seen[site.name].reshape(*lead, -1)
            present = seen.any(-1)
            parts = [jnp.where(seen, values, 0.0), seen.astype(values.dtype)]
        for name, level in self.covariates.items():
            if set(level) <= set(site.level):
                given = view.covariates[name]
                shape = [given.shape[level.index(plate)] if plate in level else 1 for plate in site.level]
                given = standardize(name, given.reshape(*shape, 1))
                parts.append(jnp.broadcast_to(given, (*lead, given.shape[-1])))
        moments = jnp.clip(jnp.concatenate(parts, -1), -LARGEST, LARGEST)
        features = network.element
        for _ in lead:
            features = jax.vmap(features)
        return Known(moments, jnp.tanh(features(_squashed(moments))), present)

    def contract(
        self, contract: Contract, step: Contraction, known: Known, weight: Float[Array, " member"], old: Array | None
    ) -> tuple[Known, Array | None]:
        """Summarizes over one plate, for all members of the other plates of a level."""
        axis = step.source.index(step.plate)
        moments = known.moments.shape[-1]
        known = jax.tree.map(lambda array: jnp.moveaxis(array, axis, len(step.target)), known)
        summarize, read = contract.summarize, functools.partial(contract.known, moments=moments)
        for _ in step.target:
            summarize, read = jax.vmap(summarize, in_axes=(0, None)), jax.vmap(read)
        summary = summarize(known, weight)
        if old is None:
            return read(summary), None
        # Beside the running summary: the variance of the drawn sets' means around theirs, and the number of visits, by
        # which the first ones are averaged evenly. What the drawn sets vary in themselves and among themselves is all.
        means = slice(1, 1 + moments)
        spread = slice(1 + moments, 1 + 2 * moments if _keeps_spread(moments) else 1 + moments)
        size = summary.shape[-1]
        before, between, visits = old[..., :size], old[..., size:-1], old[..., -1:]
        share = jnp.maximum(1 / (1 + visits), self.memory)
        change = jax.lax.stop_gradient(summary) - before
        running = before + share * change
        if between.shape[-1]:
            between = (1 - share) * (between + share * change[..., means] ** 2)
        whole = (running + summary - jax.lax.stop_gradient(summary)).at[..., spread].add(between)
        return read(whole), jnp.concatenate([running, between, visits + 1], -1)

    def networks(self, template: Template, weights: Array) -> list[tuple[Site, SiteEncoder]]:
        """The networks of each observed site, with their weights in place."""
        built, start = [], 0
        for site in template.observed:
            skeleton = self._skeleton(template, site)
            built.append((site, skeleton.fill(weights[start : start + skeleton.size])))
            start += skeleton.size
        return built

    def _skeleton(self, template: Template, site: Site) -> Skeleton:
        with jax.ensure_compile_time_eval():
            return skeleton_of(self._network(template, site, np.random.default_rng(0)))

    def _network(self, template: Template, site: Site, rng: np.random.Generator) -> SiteEncoder:
        moments, counts = self._moments(template, site), self._counts(template, site)
        element = Perceptron(rng, [moments[site.level], *self.hidden, self.size], open=True)
        steps = contractions(template, site)
        return SiteEncoder(element, tuple(Contract(rng, moments[s.source], counts[s.source], self) for s in steps))

    def _moments(self, template: Template, site: Site) -> dict[Level, int]:
        """How many moments are known at each level that a site reaches."""
        numbers = int(np.prod(site.member_shape, dtype=int))
        moments = {site.level: numbers * (2 if site.masked else 1) + self._covariate_numbers(site)}
        for step in contractions(template, site):
            before = moments[step.source]
            moments[step.target] = before * (2 if _keeps_spread(before) else 1) + 1
        return moments

    def _counts(self, template: Template, site: Site) -> dict[Level, tuple[int, ...]]:
        """Which moments are logarithms of counts, at each level that a site reaches."""
        moments = self._moments(template, site)
        counts: dict[Level, tuple[int, ...]] = {site.level: ()}
        for step in contractions(template, site):
            counts[step.target] = (*counts[step.source], moments[step.target] - 1)
        return counts

    def _covariate_numbers(self, site: Site) -> int:
        return sum(set(level) <= set(site.level) for level in self.covariates.values())

    def unreached(self, template: Template) -> list[Level]:
        """The levels that no data reach, which get free encodings."""
        reached = [site.level for site in template.observed]
        return [level for level in template.levels if not any(set(level) <= set(other) for other in reached)]


def unconstrained(site: Site, value: Array) -> Array:
    """Data on a scale without bounds, where the support is one that a simple map opens."""
    value = value.astype(jnp.result_type(float))
    support = site.support.lower()
    if "integernonnegative(" in support:
        return jnp.log1p(value)
    if "positive(" in support and "integer" not in support:
        return jnp.log(jnp.maximum(value, 1e-30))
    if "unitinterval(" in support:
        clipped = jnp.clip(value, 1e-6, 1 - 1e-6)
        return jnp.log(clipped) - jnp.log1p(-clipped)
    return value


def _squashed(values: Array | np.ndarray) -> Array:
    size = jnp.abs(values)
    return jnp.where(size <= SQUASH, values, jnp.sign(values) * (SQUASH + jnp.log1p(jnp.maximum(size - SQUASH, 0.0))))
