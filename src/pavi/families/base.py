"""What every variational family is: a way to start its weights, and a sampler for one latent of one member."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flowjax.bijections import AbstractBijection
from jaxtyping import Array, Float, PRNGKeyArray

from pavi.branch import Branch
from pavi.cascade import Draw, Sampler, Study
from pavi.errors import SettingError
from pavi.flows import MAF, Flow, PointMass, enter, push
from pavi.packing import Skeleton, pack, skeleton_of
from pavi.prior import Prior
from pavi.template import Level, Site, Template


class Units(NamedTuple):
    """Center and spread, per number, of each latent under the prior and of data and covariates as given.

    Flows and encoders work in these units. A latent may be given a narrower spread than its prior has, so that its posterior
    starts narrower: draws from the prior, which flows push, are measured by `prior_spread`.
    """

    center: Mapping[str, Any]
    spread: Mapping[str, Any]
    prior_spread: Mapping[str, Any] | None = None

    def standardize(self, name: str, value: Array) -> Array:
        return (value - self.center[name]) / self.spread[name]

    def __or__(self, other: Units) -> Units:
        return Units(*({**(mine or {}), **(theirs or {})} for mine, theirs in zip(self, other, strict=True)))


class Weights(NamedTuple):
    """All that training changes: one vector `shared` by every member, and `rows`, arrays of one per member of a level.

    `memory` holds running summaries that training keeps without a gradient, by (observed site, level).
    """

    shared: Any
    rows: Mapping[Level, Any]
    memory: Mapping[tuple[str, Level], Any]

    @property
    def count(self) -> int:
        """Trained numbers: shared weights plus rows."""
        return int(self.shared.size + sum(rows.size for rows in self.rows.values()))


class Glimpse(NamedTuple):
    """A branch of a study with what a family may look at: the model's array arguments and the data of its members."""

    study: Study
    arguments: Any
    branch: Branch
    data: Mapping[str, Array]


@runtime_checkable
class Family(Protocol):
    """A way to build q for a template. Frozen and hashable; holds settings, never weights."""

    @property
    def row_rate(self) -> float:
        """Learning rate of the rows, relative to that of the shared weights."""
        ...

    @property
    def whole_plates(self) -> bool:
        """Whether every step must take all members of every plate."""
        ...

    def init(self, template: Template, rng: np.random.Generator, data: Mapping[str, Any], whole: frozenset[str]) -> Weights:
        """Starting weights for the full study, which may look at its data (plate axes in front).

        `whole` names the plates that every step takes whole.
        """
        ...

    def shapes(self, template: Template, whole: frozenset[str]) -> Weights:
        """Shapes and dtypes of the weights, without making any."""
        ...

    def parts(self, template: Template) -> Mapping[str, slice]:
        """Which of the shared weights are those of one latent alone, by site."""
        ...

    def measure(self, template: Template, data: Mapping[str, Any], arguments: Any) -> Units:
        """Center and spread of the data and covariates that `encode` will look at."""
        ...

    def encode(self, weights: Weights, units: Units, glimpse: Glimpse) -> tuple[Mapping[Level, Any], Mapping]:
        """Encodings of a branch's members, from weights whose rows and memory are those members'; and the new memory."""
        ...

    def sampler(self, template: Template, units: Units, shared: Array) -> Sampler:
        """The function that draws one latent of one member, given the encoding of its level."""
        ...

    def extend(
        self, weights: Weights, kept: Mapping[str, np.ndarray], template: Template, data: Mapping[str, Any]
    ) -> Weights:
        """Weights for a study whose members `kept` names, per plate, from an earlier one (-1 for new ones)."""
        ...

    def settle(self, study: Study, arguments: Any, data: Mapping[str, Any], units: Units, weights: Weights) -> Reading:
        """The trained family as one that needs no data to be read: encodings of all members as rows."""
        ...


@runtime_checkable
class Joint(Protocol):
    """A family whose members cannot be drawn one by one: some of their randomness is drawn for all of them together."""

    def together(
        self,
        template: Template,
        units: Units,
        shared: Array,
        encodings: Mapping[Level, Any],
        key: PRNGKeyArray,
        training: bool,
    ) -> Mapping[Level, Any]:
        """What the sampler is given in place of the encodings: for all members of the study, in one draw."""
        ...


@runtime_checkable
class Informed(Protocol):
    """A family whose rows start from more than the data once it is known where latents start."""

    def inform(
        self, study: Study, arguments: Any, data: Mapping[str, Any], units: Units, rows: Mapping[Level, Any]
    ) -> Mapping[Level, Any]:
        """Rows to start with, for latents that start at the centers of the units."""
        ...


class Reading(NamedTuple):
    """A family and its weights, ready to be read for any slice."""

    family: Family
    weights: Weights


class Shown(Enum):
    """What a flow is shown of each value its site is given."""

    NOTHING = 0
    DISTANCE = 1
    """How far from where q puts it it was drawn."""
    ALL = 2
    """That, and where q puts it: for flows that serve members or studies between which this differs untold."""


def given_size(template: Template, site: Site, shown: Shown) -> int:
    """How many numbers a flow is shown of the values its site is given."""
    return shown.value * sum(template.site(name).size for name in site.given)


def draw_through(
    template: Template,
    flow: Flow,
    bijection: AbstractBijection,
    encoding: Array,
    units: Units,
    shown: Shown,
    site: Site,
    prior: Prior,
    given: Mapping[str, Draw],
    key: PRNGKeyArray,
) -> Draw:
    """Draws from the conditional prior and pushes the draw through a flow, in the prior's units (`eq:q_full`)."""
    scale = Scale.of(units, site)
    center = center_of(template, bijection, encoding, units, shown, site, given)
    parts = _condition(template, units, shown, site, encoding, given)
    if isinstance(flow, PointMass):
        point, condition = enter(bijection, parts)
        value, _ = point.transform_and_log_det(jnp.zeros(site.size), condition)
        return Draw(scale.value(value), None, center)
    drawn = None
    if site.given and shown is not Shown.NOTHING:
        held = {name: draw._replace(center=jax.lax.stop_gradient(draw.center)) for name, draw in given.items()}
        drawn = _condition(template, units, shown, site, jax.lax.stop_gradient(encoding), held)
    base = scale.base(prior.draw(key))
    value, log_q = push(
        bijection, flow.path(site.size), base, parts, drawn, lambda base: prior.log_prob(scale.prior_value(base))
    )
    return Draw(scale.value(value), log_q - scale.log_det, center)


def score_through(
    template: Template,
    bijection: AbstractBijection,
    encoding: Array,
    units: Units,
    shown: Shown,
    site: Site,
    prior: Prior,
    given: Mapping[str, Draw],
    value: Array,
) -> Draw:
    """A given value with its log-density under the prior pushed through a flow."""
    scale = Scale.of(units, site)
    inverse, condition = enter(bijection, _condition(template, units, shown, site, encoding, given))
    base, log_det = inverse.inverse_and_log_det((value - scale.center) / scale.spread, condition)
    center = center_of(template, bijection, encoding, units, shown, site, given)
    return Draw(value, prior.log_prob(scale.prior_value(base)) + log_det - scale.log_det, center)


class Scale(NamedTuple):
    """The units of one site: those of prior draws, which go into its flow, and those of values, which come out."""

    center: Array
    spread: Array
    prior_spread: Array

    @classmethod
    def of(cls, units: Units, site: Site) -> Scale:
        spread = units.spread[site.name]
        return cls(units.center[site.name], spread, (units.prior_spread or {}).get(site.name, spread))

    def base(self, value: Array) -> Array:
        return (value - self.center) / self.prior_spread

    def prior_value(self, base: Array) -> Array:
        return self.center + self.prior_spread * base

    def value(self, pushed: Array) -> Array:
        return self.center + self.spread * pushed

    @property
    def log_det(self) -> Array:
        """What the change of units adds to the logarithm of the flow's determinant."""
        return jnp.log(self.spread / self.prior_spread).sum()


def _condition(
    template: Template,
    units: Units,
    shown: Shown,
    site: Site,
    encoding: Array,
    given: Mapping[str, Draw],
    centered: bool = False,
) -> list[Array]:
    """What a flow is shown, a part for each level that it comes from: the encoding, then what its site is given.

    Shown a value itself, whose posterior may be narrow and far from the prior's center, a flow could hardly tell it from a
    constant, and the slope on it would take thousands of steps to be told apart from the offset. So it is shown distances
    from centers; they come last, and are left out where they are zero.
    """
    pieces = [(site.level, encoding)]
    levels = {name: template.site(name).level for name in site.given}
    if shown is Shown.ALL:
        pieces += [(levels[name], units.standardize(name, given[name].center)) for name in site.given]
    if shown is not Shown.NOTHING and not centered:
        pieces += [(levels[name], (given[name].value - given[name].center) / units.spread[name]) for name in site.given]
    runs = itertools.groupby(pieces, key=lambda piece: piece[0])
    return [jnp.concatenate([piece for _, piece in run]) for _, run in runs]


def center_of(
    template: Template,
    bijection: AbstractBijection,
    encoding: Array,
    units: Units,
    shown: Shown,
    site: Site,
    given: Mapping[str, Draw],
) -> Array:
    """Where a flow puts the prior's center, given the centers of what it is given."""
    centered, condition = enter(bijection, _condition(template, units, shown, site, encoding, given, centered=True))
    value, _ = centered.transform_and_log_det(jnp.zeros(site.size), condition)
    return Scale.of(units, site).value(value)


@functools.lru_cache(maxsize=256)
def skeleton(flow: Flow, dim: int, cond_dim: int, counts: int) -> Skeleton:
    """The structure of a flow for a site of some size, built once."""
    with jax.ensure_compile_time_eval():
        return skeleton_of(flow.build(np.random.default_rng(0), dim, cond_dim, counts))


class Layout:
    """Which flow each site has, and where its weights lie in a flat vector of all of them."""

    def __init__(
        self,
        flow: Flow | Mapping,
        sites: Sequence[Site],
        cond_sizes: Mapping[str, int],
        counts: Mapping[str, int] = MappingProxyType({}),
    ):
        self.flows = {site.name: flow_of(flow, site) for site in sites}
        self.sizes = {site.name: (site.size, cond_sizes[site.name], counts.get(site.name, 0)) for site in sites}
        self.sites = tuple(sites)
        self.skeletons = {name: skeleton(self.flows[name], *sizes) for name, sizes in self.sizes.items()}

    @property
    def size(self) -> int:
        """Weights of all flows together."""
        return sum(found.size for found in self.skeletons.values())

    def init(self, rng: np.random.Generator) -> np.ndarray:
        return np.concatenate([pack(self.flows[name].build(rng, *sizes)) for name, sizes in self.sizes.items()])

    def fill(self, flat: Float[Array, " weights"]) -> dict[str, AbstractBijection]:
        return {name: self.skeletons[name].fill(flat[part]) for name, part in self.parts.items()}

    @property
    def parts(self) -> dict[str, slice]:
        """Where the weights of each site lie."""
        ends = np.cumsum([self.skeletons[site.name].size for site in self.sites])
        return {
            s.name: slice(int(end) - self.skeletons[s.name].size, int(end)) for s, end in zip(self.sites, ends, strict=True)
        }


def flow_of(flow: Flow | Mapping, site: Site) -> Flow:
    """The flow chosen for a site."""
    if isinstance(flow, Flow):
        return flow
    return flow.get(site.name, flow.get(..., MAF()))


def check_flow(flow: Flow | Mapping, template: Template) -> None:
    """Refuses flows for sites the model does not have."""
    if isinstance(flow, Mapping):
        known = [site.name for site in template.latents]
        unknown = [name for name in flow if name is not ... and name not in known]
        if unknown:
            raise SettingError(
                f"flow=...: {unknown} is no latent site of the model. Its latent sites: {known}; use `...` for the rest."
            )
