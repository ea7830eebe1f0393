"""The template: what a study looks like, apart from how many members it has.

A NumPyro model with plates is a *template* that the plates repeat (paper, `sec:HBMs`). It holds **sites** (the
model's `sample` and `deterministic` statements) and **plates** (groups, subjects, vertices). The plates around a
site are its **level**, a tuple of plate names, outermost first; `()` is the global level. Everything that differs
between members of a plate is indexed by its level; everything else is shared.

The records here are frozen, hashable and checked when made. `pavi.tracing` reads them off a model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from enum import Enum

from pavi.errors import ModelError

Level = tuple[str, ...]

# A co-parent (not a parent) with more numbers than this is left out of `Site.given`: it would cost every member of
# the site a wide input for a dependence that data on many members has usually made weak.
LARGEST_CO_PARENT = 64


class Kind(Enum):
    """What a site is to the inference."""

    LATENT = "latent"
    OBSERVED = "observed"
    FACTOR = "factor"
    DETERMINISTIC = "deterministic"


@dataclasses.dataclass(frozen=True)
class Plate:
    """A set of conditionally independent members: `size` is Card(P), `dim` NumPyro's batch dimension."""

    name: str
    size: int
    dim: int


@dataclasses.dataclass(frozen=True)
class Site:
    """One statement of the model, repeated over the plates of its `level`.

    Attributes:
        shape: the shape of the site's array in the full study, as NumPyro would draw it.
        axes: for each plate of `level`, which axis of that array it runs along.
        event_ndim: how many trailing axes of `shape` are event axes (0 where unknown).
        size: numbers needed to describe one member without constraints (0 unless latent).
        parents: the latent sites whose values its distribution depends on, through any computation.
        given: the earlier latents its posterior depends on: its parents and, through shared children, the
            co-parents; what the flow of this site is conditioned on.
        masked: whether the model may mask out part of an observed site.
        mixes: whether the density of an observed site, averaged over logits, is of the same form: see `pavi.mixing`.
    """

    name: str
    kind: Kind
    level: Level
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    event_ndim: int = 0
    size: int = 0
    parents: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    distribution: str = ""
    support: str = ""
    masked: bool = False
    mixes: bool = False

    @property
    def member_shape(self) -> tuple[int, ...]:
        """Shape of one member's value: `shape` without the plate axes."""
        return tuple(n for axis, n in enumerate(self.shape) if axis not in self.axes)

    @property
    def display_shape(self) -> tuple[int, ...]:
        """`member_shape` without the axes of length one that only keep a place for a plate the site is not in."""
        batch_ndim = len(self.shape) - self.event_ndim
        return tuple(n for axis, n in enumerate(self.shape) if axis not in self.axes and (axis >= batch_ndim or n > 1))


@dataclasses.dataclass(frozen=True)
class Template:
    """Sites and plates of a model, in the order the model states them. Printing it shows the hierarchy."""

    plates: tuple[Plate, ...]
    sites: tuple[Site, ...]

    def __post_init__(self) -> None:
        latent_levels = {site.name: set(site.level) for site in self.latents}
        for site in self.sites:
            if site.kind is Kind.DETERMINISTIC:
                continue
            for parent in site.parents:
                extra = latent_levels[parent] - set(site.level)
                if extra:
                    raise ModelError(
                        f"Site {site.name!r} (level {site.level}) depends on {parent!r}, which lives in the plate(s) "
                        f"{sorted(extra)} that {site.name!r} is not in. A member must only depend on its own plates' "
                        f"members. Put {site.name!r} inside the plate(s), or compute a summary of {parent!r} that is "
                        "a latent of its own."
                    )
        if not self.latents:
            raise ModelError(
                "The model has no latent site: every `numpyro.sample` statement is observed, so there is nothing to "
                "infer. Leave the sites to be inferred out of `data`, and give them no `obs`."
            )

    @property
    def latents(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if site.kind is Kind.LATENT)

    @property
    def observed(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if site.kind is Kind.OBSERVED)

    @property
    def deterministics(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if site.kind is Kind.DETERMINISTIC)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels with at least one latent site (paper, `sec:PAVI-F_details`), in order of appearance."""
        return tuple(dict.fromkeys(site.level for site in self.latents))

    @property
    def innermost(self) -> tuple[Site, ...]:
        """Latents in plates on which only sites of their own level depend: each member has data of its own."""

        def closed(site: Site) -> bool:
            children = [child for child in self.sites if child.kind is not Kind.DETERMINISTIC and site.name in child.parents]
            own = all(child.level == site.level for child in children)
            return bool(children) and own and all(closed(child) for child in children if child.kind is Kind.LATENT)

        return tuple(site for site in self.latents if site.level and closed(site))

    def plate(self, name: str) -> Plate:
        return next(plate for plate in self.plates if plate.name == name)

    def site(self, name: str) -> Site:
        return next(site for site in self.sites if site.name == name)

    def sizes(self, level: Level) -> tuple[int, ...]:
        """Full cardinalities of a level's plates."""
        return tuple(self.plate(name).size for name in level)

    def resized(self, sizes: Mapping[str, int]) -> Template:
        """The same model with other plate sizes."""
        plates = tuple(dataclasses.replace(plate, size=sizes.get(plate.name, plate.size)) for plate in self.plates)
        sites = []
        for site in self.sites:
            shape = list(site.shape)
            for plate, axis in zip(site.level, site.axes, strict=True):
                shape[axis] = sizes.get(plate, shape[axis])
            sites.append(dataclasses.replace(site, shape=tuple(shape)))
        return Template(plates, tuple(sites))

    def num_members(self, site: Site) -> int:
        """N_i: how many ground variables the full study has of this site."""
        return math.prod(self.sizes(site.level))

    @property
    def num_latents(self) -> int:
        """How many unconstrained numbers the posterior is over."""
        return sum(self.num_members(site) * site.size for site in self.latents)

    def __str__(self) -> str:
        lines = [f"Template: {self.num_latents:,} latent numbers in {len(self.latents)} sites"]
        lines += [f"  plate {plate.name}: {plate.size:,} members (dim {plate.dim})" for plate in self.plates]
        rows = [
            (
                site.kind.value,
                site.name,
                "x".join(str(n) for n in site.display_shape) or "scalar",
                " x ".join(site.level) or "(global)",
                site.distribution,
                ", ".join(site.parents) or "-",
            )
            for site in self.sites
        ]
        header = ("kind", "site", "shape", "level", "distribution", "parents")
        widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]
        lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in [header, *rows]]
        return "\n".join(lines)


def condition_sites(sites: tuple[Site, ...]) -> tuple[Site, ...]:
    """The sites with `Site.given` filled in, by eliminating the latents from last to first on the moral graph.

    In a model with one plate the result is the exact dependence structure of the posterior. With several plates,
    a neighbour that lives in a plate the site is not in is left out (the paper's "horizontal" dependence).
    """
    latents = [site.name for site in sites if site.kind is Kind.LATENT]
    order = {name: k for k, name in enumerate(latents)}
    by_name = {site.name: site for site in sites}
    neighbours: dict[str, set[str]] = {name: set() for name in latents}

    def connect(names: Sequence[str]) -> None:
        for name in names:
            neighbours[name] |= set(names) - {name}

    for site in sites:
        if site.kind is not Kind.DETERMINISTIC:
            connect([*site.parents, *([site.name] if site.kind is Kind.LATENT else [])])
    filled: dict[str, tuple[str, ...]] = {}
    for name in reversed(latents):
        earlier = sorted((other for other in neighbours[name] if order[other] < order[name]), key=order.__getitem__)
        connect(earlier)
        site = by_name[name]
        filled[name] = tuple(
            other
            for other in earlier
            if set(by_name[other].level) <= set(site.level)
            and (other in site.parents or by_name[other].size <= LARGEST_CO_PARENT)
        )
    return tuple(dataclasses.replace(site, given=filled.get(site.name, ())) for site in sites)
