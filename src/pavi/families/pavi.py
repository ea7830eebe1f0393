"""PAVI: one conditional flow per latent site, shared by all members of its plates (paper, `eq:plate_amo`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from pavi.branch import fixed_branch
from pavi.cascade import Draw, Sampler, Study
from pavi.compiling import in_background, quick_jit
from pavi.encodings import FreeEncodings, ReadEncodings, SetEncoder
from pavi.errors import SettingError
from pavi.families.base import (
    Glimpse,
    Layout,
    Reading,
    Shown,
    Units,
    Weights,
    center_of,
    check_flow,
    draw_through,
    given_size,
    score_through,
)
from pavi.families.looking import encode_study, show
from pavi.families.pulling import first_tiles, pull_size, pulls, pulls_of_all
from pavi.flows import MAF, Flow
from pavi.prior import Prior
from pavi.sources import Stored
from pavi.template import Level, Site, Template


@dataclasses.dataclass(frozen=True)
class PAVI:
    """Plate-amortized variational inference: shared conditional flows, one encoding per member.

    Args:
        encodings: where encodings come from: `pavi.FreeEncodings(size=...)`, one trained vector per member (PAVI-F), or
            `pavi.SetEncoder(...)`, computed from the data (PAVI-E).
        flow: one flow for all latent sites, or `{site: flow}` with `...` for the rest.
        condition_on_parents: let each flow see the values its site is given (its parents, and the co-parents drawn
            before it), beside the encoding. Off, it sees them only through the prior it pushes, as in the paper.
        show_centers: of those values, let it see not only how far from their posterior's center they were drawn but also
            that center. By default with a `SetEncoder`: a free encoding can learn what the center means for its member.
        show_pull: let flows of innermost latents, whose data are their member's own, see where the prior of a member lies
            and which way its data pull: the gradient of its log-likelihood there. Worth its cost where steps visit a member
            too seldom for its encoding to learn that. With free encodings only.

    Example:
        >>> import pavi
        >>> family = pavi.PAVI(encodings=pavi.FreeEncodings(size=16), flow=pavi.Affine("tril"))
    """

    encodings: FreeEncodings | SetEncoder = FreeEncodings()
    flow: Any = MAF()
    condition_on_parents: bool = True
    show_centers: bool | None = None
    show_pull: bool = False

    row_rate: ClassVar[float] = 4.0
    whole_plates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        flows = self.flow.values() if isinstance(self.flow, Mapping) else [self.flow]
        if any(not isinstance(flow, Flow) for flow in flows):
            raise SettingError(f"PAVI(flow={self.flow!r}): expected a flow such as pavi.MAF(), or a mapping of flows.")
        if self.show_pull and isinstance(self.encodings, SetEncoder):
            raise SettingError("PAVI(show_pull=True): a SetEncoder sees the data itself. Leave out one of them.")
        if isinstance(self.flow, Mapping):
            object.__setattr__(self, "flow", MappingProxyType(dict(self.flow)))

    def __hash__(self) -> int:
        flow = tuple(self.flow.items()) if isinstance(self.flow, Mapping) else self.flow
        return hash((self.encodings, flow, self.condition_on_parents, self.show_centers, self.show_pull))

    def init(self, template: Template, rng: np.random.Generator, data: Mapping[str, Any], whole: frozenset[str]) -> Weights:
        self.encodings.check(template)
        check_flow(self.flow, template)
        if self.show_pull and not template.innermost:
            raise SettingError("PAVI(show_pull=True): no latent of this model is in all plates of what depends on it.")
        shared = self._layout(template).init(rng)
        memory = {}
        if isinstance(self.encodings, SetEncoder):
            shared = np.concatenate([shared, self.encodings.weights(template, rng)]).astype(shared.dtype)
            sizes = self.encodings.memory_sizes(template, whole)
            memory = {key: np.zeros((*template.sizes(key[1]), size), shared.dtype) for key, size in sizes.items()}
        return Weights(shared, self.encodings.init(template, data), memory)

    def inform(
        self, study: Study, arguments: Any, data: Mapping[str, Any], units: Units, rows: Mapping[Level, Any]
    ) -> Mapping[Level, Any]:
        """Rows to start with once it is known where latents start: shown pulls, they begin with means of these."""
        if not self.show_pull or isinstance(self.encodings, SetEncoder):
            return rows
        template = study.template
        found = pulls_of_all(template, rows, data, partial(_pulls_of_tile, self, study, arguments, units, None))
        # Where the prior lies, the first half, is alike for all members, as far as is known yet.
        return self.encodings.init(
            template, data, {level: each[..., each.shape[-1] // 2 :] for level, each in found.items()}
        )

    def shapes(self, template: Template, whole: frozenset[str]) -> Weights:
        dtype = jnp.result_type(float)
        count, memory = self._layout(template).size, {}
        levels = list(template.levels)
        if isinstance(self.encodings, SetEncoder):
            count += len(self.encodings.weights(template, np.random.default_rng(0)))
            sizes = self.encodings.memory_sizes(template, whole)
            memory = {key: jax.ShapeDtypeStruct((*template.sizes(key[1]), size), dtype) for key, size in sizes.items()}
            levels = self.encodings.unreached(template)
        rows = {
            level: jax.ShapeDtypeStruct((*template.sizes(level), self.encodings.level_size(template, level)), dtype)
            for level in levels
        }
        return Weights(jax.ShapeDtypeStruct((count,), dtype), rows, memory)

    def parts(self, template: Template) -> Mapping[str, slice]:
        return self._layout(template).parts

    def measure(self, template: Template, data: Mapping[str, Any], arguments: Any) -> Units:
        if isinstance(self.encodings, SetEncoder):
            _refuse_stored(data)
            return Units(*self.encodings.measure(template, data, arguments))
        return Units({}, {})

    def encode(
        self, weights: Weights, units: Units, glimpse: Glimpse, centers: Sampler | None = None
    ) -> tuple[Mapping[Level, Any], Mapping]:
        """As in every family; `centers` puts latents where q centers them, if that is not this family's to say."""
        template = glimpse.study.template
        if self.show_pull:
            centers = self.centers(template, units, weights.shared) if centers is None else centers
            return _beside(weights.rows, pulls(glimpse, units, weights.rows, centers)), {}
        if not isinstance(self.encodings, SetEncoder):
            return weights.rows, {}
        flat = weights.shared[self._layout(template).size :]
        view = show(self.encodings, glimpse)
        found, memory = self.encodings.encode(template, flat, units.standardize, view, weights.memory)
        rest = {
            level: jnp.zeros((*map(len, glimpse.branch.at(level)), self.encodings.level_size(template, level)))
            for level in template.levels
            if level not in found and level not in weights.rows
        }
        return {**rest, **weights.rows, **found}, memory

    def settle(self, study: Study, arguments: Any, data: Mapping[str, Any], units: Units, weights: Weights) -> Reading:
        template = study.template
        if self.show_pull:
            return Reading(self, weights._replace(rows=rows_with_pulls(self, study, arguments, data, units, weights)))
        if not isinstance(self.encodings, SetEncoder):
            return Reading(self, weights)
        _refuse_stored(data)
        split = self._layout(template).size
        found = encode_study(self.encodings, study, arguments, data, units, weights.shared[split:])
        rows = {**weights.rows, **found}
        sizes = {level: int(array.shape[-1]) for level, array in rows.items()}
        counts = {level: self.encodings.count_size(template, level) for level in rows}
        family = dataclasses.replace(self, encodings=ReadEncodings(sizes, counts), show_centers=self._shown is Shown.ALL)
        return Reading(family, Weights(weights.shared[:split], rows, {}))

    def extend(
        self, weights: Weights, kept: Mapping[str, np.ndarray], template: Template, data: Mapping[str, Any]
    ) -> Weights:
        rows = FreeEncodings().extend(weights.rows, kept, template, data)
        return Weights(weights.shared, rows, {})

    def sampler(self, template: Template, units: Units, shared: Array) -> Sampler:
        layout = self._layout(template)
        built = layout.fill(shared)

        def draw(site: Site, prior: Prior, encoding: Array | None, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
            assert encoding is not None
            read = self._read(template, site, encoding)
            flow, bijection = layout.flows[site.name], built[site.name]
            return draw_through(template, flow, bijection, read, units, self._shown, site, prior, given, key)

        return draw

    def scorer(self, template: Template, units: Units, shared: Array) -> Sampler:
        """A sampler that takes given values, as `(encoding, {site: value})` in place of the encoding, and scores them."""
        layout = self._layout(template)
        built = layout.fill(shared)

        def score(site: Site, prior: Prior, encoding: Any, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
            row, truth = encoding
            read = self._read(template, site, row)
            return score_through(template, built[site.name], read, units, self._shown, site, prior, given, truth[site.name])

        return score

    def centers(self, template: Template, units: Units, shared: Array) -> Sampler:
        """A sampler that puts latents where q centers them, for those that are not shown a pull."""
        built = self._layout(template).fill(shared)

        def draw(site: Site, prior: Prior, encoding: Array | None, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
            del prior, key
            assert encoding is not None
            read = encoding[: self.encodings.site_size(template, site)]
            center = center_of(template, built[site.name], read, units, self._shown, site, given)
            return Draw(center, None, center)

        return draw

    def _pull_size(self, template: Template, site: Site) -> int:
        return pull_size(template, site.level) if self.show_pull and site in template.innermost else 0

    def _read(self, template: Template, site: Site, encoding: Array) -> Array:
        """What a site's flow is shown of an encoding: the start of its level's row, and the pull after the row, if any."""
        own = encoding[: self.encodings.site_size(template, site)]
        size = self._pull_size(template, site)
        return jnp.concatenate([own, encoding[-size:]]) if size else own

    @property
    def _shown(self) -> Shown:
        if not self.condition_on_parents:
            return Shown.NOTHING
        centers = isinstance(self.encodings, SetEncoder) if self.show_centers is None else self.show_centers
        return Shown.ALL if centers else Shown.DISTANCE

    def _layout(self, template: Template) -> Layout:
        return Layout(
            self.flow,
            template.latents,
            {
                site.name: self.encodings.site_size(template, site)
                + self._pull_size(template, site)
                + given_size(template, site, self._shown)
                for site in template.latents
            },
            {site.name: self.encodings.count_size(template, site.level) for site in template.latents},
        )


@runtime_checkable
class Centered(Protocol):
    """A family that can say where q centers latents."""

    def centers(self, template: Template, units: Units, shared: Array) -> Sampler: ...


def rows_with_pulls(
    family: Centered, study: Study, arguments: Any, data: Mapping[str, Any], units: Units, weights: Weights
) -> dict[Level, Any]:
    """Rows of all members with what they are shown beside them, latents outside being where a family centers them."""
    tile = partial(_pulls_of_tile, family, study, arguments, units, weights.shared)
    return _beside(weights.rows, pulls_of_all(study.template, weights.rows, data, tile))


def pulls_ahead(
    family: Centered, study: Study, arguments: Any, data: Mapping[str, Any], units: Units, weights: Weights
) -> None:
    """Compiles in the background what `rows_with_pulls` will need, for weights of these shapes."""
    template = study.template

    def part(array: Any, level: Level, indices: Mapping[str, np.ndarray]) -> jax.ShapeDtypeStruct:
        here = (*(len(indices[plate]) for plate in level), *array.shape[len(level) :])
        return jax.ShapeDtypeStruct(here, array.dtype)

    for indices in first_tiles(template):
        rows = {level: part(array, level, indices) for level, array in weights.rows.items()}
        shown = {name: part(array, template.site(name).level, indices) for name, array in data.items()}
        in_background(_pulls_of_tile, family, study, arguments, units, weights.shared, rows, shown, indices)


@quick_jit(static_argnums=(0, 1))
def _pulls_of_tile(
    family: Centered,
    study: Study,
    arguments: Any,
    units: Units,
    shared: Array | None,
    rows: dict,
    data: dict,
    indices: dict,
) -> dict[Level, Array]:
    """What members are shown; without weights, with all latents outside at the centers of their units."""
    glimpse = Glimpse(study, arguments, fixed_branch(indices), data)

    def at_units(site: Site, prior: Prior, encoding: Array | None, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
        center = jnp.asarray(units.center[site.name])
        return Draw(center, None, center)

    return pulls(glimpse, units, rows, at_units if shared is None else family.centers(study.template, units, shared))


def _beside(rows: Mapping[Level, Any], shown: Mapping[Level, Any]) -> dict[Level, Any]:
    """Rows followed by what their members are shown, in the levels where they are."""

    def joined(row: Any, pull: Any) -> Any:
        return (np if isinstance(row, np.ndarray) else jnp).concatenate([row, pull], -1)

    return {level: joined(row, shown[level]) if level in shown else row for level, row in rows.items()}


def _refuse_stored(data: Mapping[str, Any]) -> None:
    stored = [name for name, array in data.items() if isinstance(array, Stored)]
    if stored:
        raise SettingError(
            f"A SetEncoder reads all data on the device, but those of {stored} are stored elsewhere. Load them into memory "
            "(numpy.asarray), or use free encodings."
        )
