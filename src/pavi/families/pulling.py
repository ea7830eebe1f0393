"""What the data of a member say of its innermost latents: where their prior lies, and which way the data pull from there.

With all latents outside at their centers, the gradient of a member's log-likelihood by its own latents, at the prior's
center, is found by running the model once. A flow that is shown both needs no encoding of its own to know what to make of
a member's data, however seldom a step visits the member.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from pavi.branch import choose_batch
from pavi.cascade import Draw, Prior, Sampler, cascade
from pavi.families.base import Glimpse, Units, Weights
from pavi.sources import take
from pavi.template import Level, Site, Template

# Numbers of data and latents held on the device while members are shown in tiles.
TILE_BUDGET = 2**24


def pulled_levels(template: Template) -> frozenset[Level]:
    """The levels whose members' data are their own."""
    return frozenset(site.level for site in template.innermost)


def pull_size(template: Template, level: Level) -> int:
    """How many numbers a member of a level is shown."""
    return 2 * sum(site.size for site in template.innermost if site.level == level)


def pulls(glimpse: Glimpse, units: Units, rows: Mapping[Level, Array], centers: Sampler) -> dict[Level, Array]:
    """For each such level, an array of numbers per member: prior centers and pulls of its latents, in the prior's units.

    `centers` is the sampler that puts a latent where q centers it.
    """
    study, arguments, branch, data = glimpse
    template = study.template
    levels = pulled_levels(template)
    inner = {level: [site for site in template.innermost if site.level == level] for level in levels}

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

    def shown(site: Site) -> list[Array]:
        # Pulls may differ by orders of magnitude: large ones count by their logarithms.
        pull = jnp.arcsinh(gradient[site.level][site.name] * units.spread[site.name])
        return [units.standardize(site.name, values[site.name]), pull]

    return {level: jnp.concatenate([part for site in sites for part in shown(site)], -1) for level, sites in inner.items()}


def with_pulls(
    template: Template, weights: Weights, data: Mapping[str, Any], tile: Callable[..., Mapping[Level, Array]]
) -> dict[Level, Any]:
    """Rows of all members, followed, in such levels, by what members are shown, which is found in tiles of bounded size.

    `tile` finds what members are shown from rows, data and indices. Where rows lie on the host, so do the new ones.
    """
    found = dict(weights.rows)
    for level in pulled_levels(template):
        sizes = dict(zip(level, template.sizes(level), strict=True))
        numbers = sum(int(np.prod(site.member_shape, dtype=int)) for site in template.sites if set(site.level) <= set(level))
        caps = choose_batch(sizes, {level: numbers}, TILE_BUDGET)
        rows = weights.rows[level]
        xp = np if isinstance(rows, np.ndarray) else jnp
        shown = xp.zeros((*rows.shape[:-1], pull_size(template, level)), rows.dtype)
        for firsts in itertools.product(*(range(0, size, caps[plate]) for plate, size in sizes.items())):
            indices = {plate.name: np.zeros(1, np.int32) for plate in template.plates}
            for first, (plate, size) in zip(firsts, sizes.items(), strict=True):
                # The last tile reaches back into the one before, so that all have one shape.
                first = min(first, size - caps[plate])
                indices[plate] = np.arange(first, first + caps[plate], dtype=np.int32)
            at = {name: tuple(indices[plate] for plate in template.site(name).level) for name in data}
            rows_here = {
                other: take(array, tuple(indices[plate] for plate in other)) if other else array
                for other, array in weights.rows.items()
            }
            data_here = {name: take(array, at[name]) if at[name] else array for name, array in data.items()}
            place = tuple(slice(int(indices[plate][0]), int(indices[plate][-1]) + 1) for plate in level)
            part = tile(rows_here, data_here, indices)[level]
            if isinstance(shown, np.ndarray):
                shown[place] = part
            else:
                shown = _put(shown, part, tuple(np.int32(along.start) for along in place))
        found[level] = xp.concatenate([rows, shown], -1)
    return found


@partial(jax.jit, donate_argnums=0)
def _put(whole: Array, part: Array, place: tuple) -> Array:
    return jax.lax.dynamic_update_slice(whole, part, (*place, 0))
