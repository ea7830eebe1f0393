"""What the data of a member say of its innermost latents: where their prior lies, and which way the data pull from there.

With all latents outside at their centers, the gradient of a member's log-likelihood by its own latents, at the prior's
center, is found by running the model once. A flow that is shown both knows most of what to make of a member's data, however
seldom a step visits the member and refines its encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from pavi.cascade import Draw, Sampler, cascade
from pavi.families.base import Glimpse, Units
from pavi.prior import Prior
from pavi.sources import take
from pavi.template import Level, Site, Template
from pavi.tiles import tiles


def pulled_levels(template: Template) -> frozenset[Level]:
    """The levels whose members' data are their own."""
    return frozenset(site.level for site in template.innermost)


def pull_size(template: Template, level: Level) -> int:
    """How many numbers a member of a level is shown."""
    return 2 * sum(site.size for site in template.innermost if site.level == level)


def pulls(glimpse: Glimpse, units: Units, rows: Mapping[Level, Array], centers: Sampler) -> dict[Level, Array]:
    """For each such level, numbers per member: first prior centers, then pulls of its latents, in the prior's units.

    `centers` is the sampler that puts a latent where q centers it.
    """
    study, arguments, branch, data = glimpse
    template = study.template
    inner = {level: [site for site in template.innermost if site.level == level] for level in pulled_levels(template)}

    def sampler(site: Site, prior: Prior, encoding: Any, given: Mapping[str, Draw], key: PRNGKeyArray) -> Draw:
        row, moved = encoding
        if site.name not in moved:
            return centers(site, prior, row, given, key)
        value = prior.center() + moved[site.name]
        return Draw(value, None, value)

    def log_likelihood(moved: dict[Level, dict[str, Array]]) -> tuple[Float[Array, ""], dict[str, Array]]:
        encodings = {level: (row, moved.get(level, {})) for level, row in rows.items()}
        found = cascade(study, arguments, sampler, encodings, branch, data, jax.random.key(0))
        terms = [log_p.sum() for name, log_p in found.log_p.items() if name not in found.log_q]
        return sum(terms, start=jnp.zeros(())), found.unconstrained

    still = {
        level: {site.name: jnp.zeros((*map(len, branch.at(level)), site.size)) for site in sites}
        for level, sites in inner.items()
    }
    gradient, values = jax.grad(log_likelihood, has_aux=True)(still)

    def shown(sites: list[Site]) -> Array:
        centers = [units.standardize(site.name, values[site.name]) for site in sites]
        # Pulls may differ by orders of magnitude: large ones count by their logarithms.
        each = [jnp.arcsinh(gradient[site.level][site.name] * units.spread[site.name]) for site in sites]
        return jnp.concatenate([*centers, *each], -1)

    return {level: shown(sites) for level, sites in inner.items()}


def pulls_of_all(
    template: Template, rows: Mapping[Level, Any], data: Mapping[str, Any], tile: Callable[..., Mapping[Level, Array]]
) -> dict[Level, Any]:
    """What all members of such levels are shown, found in tiles of bounded size. It lies where the rows lie.

    `tile` finds what members are shown from rows, data and indices.
    """
    found = {}
    for level in pulled_levels(template):
        xp = np if isinstance(rows[level], np.ndarray) else jnp
        shown = xp.zeros((*template.sizes(level), pull_size(template, level)), rows[level].dtype)
        for indices in _tiles(template, level):
            rows_here = {other: _at(array, other, indices) for other, array in rows.items()}
            data_here = {name: _at(array, template.site(name).level, indices) for name, array in data.items()}
            part = tile(rows_here, data_here, indices)[level]
            if isinstance(shown, np.ndarray):
                shown[tuple(slice(indices[plate][0], indices[plate][-1] + 1) for plate in level)] = part
            else:
                shown = _put(shown, part, tuple(indices[plate][0] for plate in level))
        found[level] = shown
    return found


def first_tiles(template: Template) -> list[dict[str, np.ndarray]]:
    """Indices of the members of the first tile of each such level; all other tiles are as large."""
    return [next(_tiles(template, level)) for level in pulled_levels(template)]


def _tiles(template: Template, level: Level) -> Iterator[dict[str, np.ndarray]]:
    """Indices of neighbours in tiles of one shape, in which all members of a level lie: the last may overlap others."""
    sizes = {plate.name: plate.size for plate in template.plates}
    members = {plate: np.arange(size) for plate, size in sizes.items()}
    for tile, _, _ in tiles(template, [level], members, 1):
        lengths = {plate: len(index) for plate, index in tile.indices.items()}
        starts = {plate: min(part.start, sizes[plate] - lengths[plate]) for plate, part in tile.slices.items()}
        yield tile.indices | {p: np.arange(start, start + lengths[p], dtype=np.int32) for p, start in starts.items()}


def _at(array: Any, level: Level, indices: Mapping[str, np.ndarray]) -> Any:
    return take(array, tuple(indices[plate] for plate in level)) if level else array


@partial(jax.jit, donate_argnums=0)
def _put(whole: Array, part: Array, place: tuple) -> Array:
    return jax.lax.dynamic_update_slice(whole, part, (*place, 0))
