"""The cascade: one run of the user's model that draws from q and scores both p and q (`eq:q_full`, `eq:q_stoc`).

The cascading family is the prior run forward with a flow after each latent draw, so a single execution of the model
under one NumPyro `Messenger` does everything. The model is shown **one member of each plate**; plates become `vmap`
axes outside, one per plate, so that a value is computed once per member of its own level and no more. Random keys
are folded with the member's index in the study, so a member's draw does not depend on who else was looked at: a
slice of a posterior equals the same slice of the whole, and the reduced ELBO can be compared term by term.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float, Int, PRNGKeyArray
from numpyro.handlers import seed
from numpyro.primitives import Messenger

from pavi.branch import Branch
from pavi.inner import Inner
from pavi.mixing import averaged
from pavi.prior import Prior
from pavi.template import Kind, Level, Site, Template
from pavi.tracing import STACK, Message, show_member


class Hashable:
    """Compares a tree without arrays by its structure and leaves (by identity where a leaf cannot be compared)."""

    def __init__(self, value: Any):
        self.value = value

    def _key(self) -> tuple:
        leaves, structure = jax.tree.flatten(self.value)
        return structure, tuple(leaf if leaf.__hash__ else id(leaf) for leaf in leaves)

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashable) and self._key() == other._key()


# Keys are folded with member indices and with site numbers; this keeps the two apart.
SITE_TAG = 2**31


@dataclasses.dataclass(frozen=True)
class Study:
    """The unchanging part of a problem: a model, its template, and those of its arguments that are not arrays.

    Hashable, so that compiled functions are found again for the same model and shapes.
    """

    model: Callable
    template: Template
    static: Hashable

    def run(self, arrays: Any) -> None:
        args, kwargs = eqx.combine(arrays, self.static.value)
        self.model(*args, **kwargs)


class Draw(NamedTuple):
    """One member's latent: its unconstrained value and log q there; None for a point mass, which has no density.

    `center` is about where q puts it, whatever was drawn: a function of the weights alone.
    """

    value: Float[Array, " size"]
    log_q: Float[Array, ""] | None
    center: Float[Array, " size"]


# Draws one latent of one member: (site, prior, encoding, what was drawn before, key) -> Draw.
Sampler = Callable[[Site, Prior, Any, Mapping[str, Draw], PRNGKeyArray], Draw]


def draw_prior(site: Site, prior: Prior, encoding: Any, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
    """The sampler that draws from the prior itself."""
    del encoding, given
    return Draw(prior.draw(key), None, jnp.zeros(site.size))


class Pass(NamedTuple):
    """What a cascade found, by site, with an axis for each plate of the site's level.

    Values, log p and log q; and for observed sites which of their numbers the model does not mask out.
    """

    values: dict[str, Any]
    unconstrained: dict[str, Any]
    log_p: dict[str, Any]
    log_q: dict[str, Any]
    seen: dict[str, Any]


# Name of the axis of points.
POINTS = "points"
# Chances are kept this far from zero and one.
EDGE = 1e-6


class _Unmixable(ValueError):
    """The mean over points of a density is not of a simple form."""


class _Cascade(Messenger):
    def __init__(
        self,
        template: Template,
        sampler: Sampler,
        encodings: Mapping[Level, Any],
        indices: Mapping[str, Int[Array, ""]],
        data: Mapping[str, Array],
        key: PRNGKeyArray,
        predict: bool,
        inner: Inner | None,
        number: Int[Array, ""] | int,
        mixed: bool,
        sign: Any,
    ):
        super().__init__()
        self.inner, self.number, self.mixed, self.sign = inner, number, mixed, sign
        self.template, self.sampler, self.encodings = template, sampler, encodings
        self.indices, self.data, self.predict = indices, data, predict
        self.keys: dict[Level, PRNGKeyArray] = {(): key}
        self.sites = {site.name: (k, site) for k, site in enumerate(template.sites)}
        self.found = Pass({}, {}, {}, {}, {})
        self.drawn: dict[str, Draw] = {}
        self.model_sizes: dict[str, int] = {}

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "plate":
            self.model_sizes[msg["name"]] = msg["args"][0]
            show_member(msg, self.indices[msg["name"]])
        elif msg["type"] == "sample":
            _, site = self.sites[msg["name"]]
            if site.kind is Kind.LATENT:
                self._latent(site, msg)
            else:
                self._observed(site, msg)
            msg["is_observed"] = True

    def postprocess_message(self, msg: Message) -> None:
        if msg["type"] == "deterministic" and msg["name"] in self.sites:
            _, site = self.sites[msg["name"]]
            self.found.values[site.name] = jnp.asarray(msg["value"]).reshape(site.member_shape)

    def _key(self, site: Site, level: Level | None = None) -> PRNGKeyArray:
        """The key of a site's member, or of its outer one in another level."""
        level = site.level if level is None else level
        for k in range(len(level)):
            if level[: k + 1] not in self.keys:
                self.keys[level[: k + 1]] = jax.random.fold_in(self.keys[level[:k]], self.indices[level[k]])
        return jax.random.fold_in(self.keys[level], SITE_TAG + self.sites[site.name][0])

    def _latent(self, site: Site, msg: Message) -> None:
        fn, counts = _unmasked(msg["fn"])
        prior = Prior.of(fn, None if site.level else self.sign)
        if self.inner is not None and self.inner.holds(site):
            self.drawn[site.name] = self._point(self.inner, site, prior)
            self._note(site, msg, prior, jnp.zeros(()), jnp.zeros(()))
            return
        drawn, log_q, _ = self.drawn[site.name] = self.sampler(
            site, prior, self.encodings.get(site.level), self.drawn, self._key(site)
        )
        _, log_det = prior.constrain(drawn)
        log_p = _scaled(prior.log_probs(drawn), self._scale(site, msg))
        # A member whose prior the model masks out counts in neither sum.
        log_q = jnp.zeros(()) if log_q is None else log_q - log_det
        self._note(site, msg, prior, jnp.where(counts, log_p, 0.0), jnp.where(counts, log_q, 0.0))

    def _point(self, inner: Inner, site: Site, prior: Prior) -> Draw:
        """A point of the prior: p and q are the same there, and each point counts alike.

        Points are shifted at random, all of a member by the same amount. Where their mean acts on chances alone, members
        share them, which makes it one mean for all; elsewhere their errors had better not add up.
        """
        level = inner.shared(self.template) if self.mixed else inner.level
        shift = jax.random.uniform(self._key(site, level), (site.size,))
        chances = (jnp.asarray(inner.chances(self.template)[site.name])[self.number] + shift) % 1.0
        value = prior.quantile(jnp.clip(chances, EDGE, 1 - EDGE))
        return Draw(value, None, value)

    def _note(self, site: Site, msg: Message, prior: Prior, log_p: Array, log_q: Array) -> None:
        drawn = self.drawn[site.name].value
        msg["value"], _ = prior.constrain(drawn)
        self.found.values[site.name] = msg["value"].reshape(site.member_shape)
        self.found.unconstrained[site.name] = drawn
        self.found.log_p[site.name], self.found.log_q[site.name] = log_p, log_q

    def _observed(self, site: Site, msg: Message) -> None:
        fn = msg["fn"]
        if site.kind is Kind.OBSERVED:
            value = fn.sample(self._key(site)) if self.predict else _widened(self.data[site.name]).reshape(fn.shape())
            msg["value"] = value
            self.found.values[site.name] = value.reshape(site.member_shape)
            self.found.seen[site.name] = _seen(fn).reshape(site.member_shape)
        scale = self._scale(site, msg)
        if self.mixed and self.inner is not None and site == self.inner.mixing(self.template):
            if not (scale is None or (isinstance(scale, float) and scale == 1.0)):
                raise _Unmixable  # the mean of a power
            fn = averaged(fn, lambda values: jax.lax.pmean(values, POINTS))
        self.found.log_p[site.name] = _scaled(fn.log_prob(msg["value"]), scale)

    def _scale(self, site: Site, msg: Message) -> Any:
        """The model's own `handlers.scale`, without the factor of each plate for the members it does not show."""
        scale = msg["scale"]
        if scale is None:
            return None
        for plate in site.level:
            scale = scale / self.model_sizes[plate]
        return scale


def _scaled(log_prob: Array, scale: Any) -> Float[Array, ""]:
    return (log_prob if scale is None else log_prob * scale).sum()


def _unmasked(fn: dist.Distribution) -> tuple[dist.Distribution, Any]:
    """A latent's prior without `handlers.mask`, and whether the member counts.

    A mask that differs within one member cannot remove part of its joint density; the prior then stays on the
    masked numbers, whose posterior is the prior, which adds nothing to the ELBO either.
    """
    counts: Any = True
    while isinstance(fn, dist.MaskedDistribution):
        mask = jnp.asarray(fn._mask)
        if mask.size == 1:
            counts = counts & mask.reshape(())
        fn = fn.base_dist.expand(fn.batch_shape)
    return fn, counts


def _seen(fn: dist.Distribution) -> Array:
    """Which numbers of an observed value count, in the shape of the value."""
    shape, seen = fn.shape(), jnp.ones((), bool)
    while isinstance(fn, dist.MaskedDistribution | dist.ExpandedDistribution | dist.Independent):
        if isinstance(fn, dist.MaskedDistribution):
            mask = jnp.asarray(fn._mask)
            seen = seen & mask.reshape(*mask.shape, *(1,) * len(fn.event_shape))
        fn = fn.base_dist
    return jnp.broadcast_to(seen, shape)


def _widened(value: Array) -> Array:
    """Data kept in half precision are computed with in full: sums of their squares would lose the very differences."""
    half = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4
    return value.astype(jnp.float32) if half else value


def cascade(
    study: Study,
    arrays: Any,
    sampler: Sampler,
    encodings: Mapping[Level, Any],
    branch: Branch,
    data: Mapping[str, Array],
    key: PRNGKeyArray,
    *,
    predict: bool = False,
    inner: Inner | None = None,
    sign: Float[Array, ""] | float | None = None,
) -> Pass:
    """Runs the model over a branch.

    Args:
        arrays: the array part of the model's arguments.
        encodings: per level, arrays (or trees of them) for the branch's members, with its plates' axes in front.
        data: per observed site, its values at the branch's members, laid out the same way.
        predict: draw the observed sites instead of taking their data.
        inner: put the latents of one level at points of their prior; an axis for these comes after those of the plates. A
            site whose density can be averaged over points as a whole has none: its log p is that of the average.
        sign: minus one mirrors the draws of global latents.
    """
    template = study.template

    def member(encodings: dict, indices: dict, data: dict, number: Int[Array, ""] | int = 0, mixed: bool = False) -> Pass:
        handler = _Cascade(template, sampler, encodings, indices, data, key, predict, inner, number, mixed, sign)
        with STACK, seed(rng_seed=key), handler:
            study.run(arrays)
        return handler.found

    run: Callable[..., Pass] = member
    if inner is not None:
        run = _over_points(member, template, inner)
    for plate in reversed(template.plates):
        run = _over_plate(run, template, plate.name)
    # On accelerators products of matrices are rounded to ten bits by default: too coarse for narrow posteriors.
    with jax.default_matmul_precision("float32"):
        return run(dict(encodings), dict(branch.indices), dict(data))


def _over_plate(run: Callable[..., Pass], template: Template, plate: str) -> Callable[..., Pass]:
    """Maps a run over one plate: what lives in the plate gets an axis, what does not is computed once."""

    def axis(level: Level) -> int | None:
        return 0 if plate in level else None

    levels = {site.name: site.level for site in template.sites}

    def mapped(encodings: dict, indices: dict, data: dict) -> Pass:
        in_axes = (
            {level: axis(level) for level in encodings},
            {name: axis((name,)) for name in indices},
            {name: axis(levels[name]) for name in data},
        )
        out_axes = _found_axes(template, lambda site: axis(site.level))
        return jax.vmap(run, in_axes=in_axes, out_axes=out_axes)(encodings, indices, data)

    return mapped


def _over_points(run: Callable[..., Pass], template: Template, inner: Inner) -> Callable[..., Pass]:
    """Maps a run over points of an inner level; what does not depend on them is computed once."""

    def axis(site: Site) -> int | None:
        return 0 if inner.holds(site) else None

    every = _found_axes(template, axis)
    averaged = {name: None if template.site(name).kind is not Kind.LATENT else each for name, each in every.log_p.items()}

    def over(run: Callable[..., Pass], out_axes: Pass) -> Pass:
        return jax.vmap(run, out_axes=out_axes, axis_name=POINTS)(jnp.arange(inner.points))

    def mapped(encodings: dict, indices: dict, data: dict) -> Pass:
        at_point = partial(run, encodings, indices, data)
        if inner.mixing(template) is not None:
            # What still differs between points after averaging has no place in the result, so this cannot go wrong unseen.
            with suppress(ValueError):
                return over(partial(at_point, mixed=True), every._replace(log_p=averaged))
        return over(at_point, every)

    return mapped


def _found_axes(template: Template, axis: Callable[[Site], int | None]) -> Pass:
    """Where the results of a mapped run have their new axis, if they have one."""
    latents = {site.name: axis(site) for site in template.latents}
    scored = {site.name: axis(site) for site in template.sites if site.kind is not Kind.DETERMINISTIC}
    valued = {site.name: axis(site) for site in template.sites if site.kind is not Kind.FACTOR}
    return Pass(valued, latents, scored, latents, {site.name: axis(site) for site in template.observed})
