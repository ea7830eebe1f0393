"""Branchings: the few members of each plate that one step looks at (paper, `sec:plate_branching`).

Every plate is drawn on its own, without replacement; a site sees the product of its plates' drawn members. So
sites are coherent with one another (a member is drawn with its parents), for nested and crossed plates alike. Each
drawn member carries a **weight**, one over the probability that it was drawn, which is what makes sums over a
branch unbiased estimates of sums over the study; a **mask** marks members that only fill up a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pavi.template import Level


class Branch(eqx.Module):
    """Drawn members per plate, each with its weight and whether it counts."""

    indices: dict[str, Int[Array, " members"]]
    weights: dict[str, Float[Array, " members"]]
    mask: dict[str, Bool[Array, " members"]]

    def at(self, level: Level) -> tuple[Int[Array, " members"], ...]:
        """Member indices along each plate of a level."""
        return tuple(self.indices[plate] for plate in level)

    def weigh(self, level: Level, terms: Float[Array, "..."]) -> Float[Array, ""]:
        """Weighted sum over a level of one term per member (`terms` has an axis for each plate)."""
        for plate in reversed(level):
            terms = jnp.where(self.mask[plate], terms, 0.0) @ self.weights[plate]
        return terms


def draw_branch(key: PRNGKeyArray, sizes: Mapping[str, int], batch: Mapping[str, int]) -> Branch:
    """Draws `batch[plate]` distinct members of every plate, in time that does not grow with the plates."""
    keys = jax.random.split(key, max(len(sizes), 1))
    indices = {
        plate: jnp.arange(size) if batch[plate] == size else distinct(plate_key, size, batch[plate])
        for plate_key, (plate, size) in zip(keys, sizes.items(), strict=False)
    }
    return _equally_weighted(indices, {plate: sizes[plate] / batch[plate] for plate in sizes})


def fixed_branch(indices: Mapping[str, Int[Array, " members"]]) -> Branch:
    """The branch of exactly these members, each counted once."""
    return _equally_weighted(dict(indices), dict.fromkeys(indices, 1.0))


def _equally_weighted(indices: dict[str, Int[Array, " members"]], weights: dict[str, float]) -> Branch:
    return Branch(
        indices,
        {plate: jnp.full(index.shape, weights[plate]) for plate, index in indices.items()},
        {plate: jnp.ones(index.shape, bool) for plate, index in indices.items()},
    )


def distinct(key: PRNGKeyArray, size: int, count: int) -> Int[Array, " count"]:
    """`count` distinct integers below `size`, every subset equally likely, in time that depends on `count` alone.

    Draws with replacement, then redraws repeats until none is left. The procedure treats all labels alike, so the
    resulting set is uniform. A plate less than twice the count is permuted instead, which is no more work.
    """
    if 2 * count > size:
        return jnp.sort(jax.random.permutation(key, size)[:count])

    def repeats(drawn: Int[Array, " count"]) -> Bool[Array, " count"]:
        return jnp.concatenate([jnp.zeros(1, bool), drawn[1:] == drawn[:-1]])

    def redraw(state: tuple[PRNGKeyArray, Int[Array, " count"]]) -> tuple[PRNGKeyArray, Int[Array, " count"]]:
        key, drawn = state
        key, subkey = jax.random.split(key)
        fresh = jax.random.randint(subkey, (count,), 0, size)
        return key, jnp.sort(jnp.where(repeats(drawn), fresh, drawn))

    key, subkey = jax.random.split(key)
    drawn = jnp.sort(jax.random.randint(subkey, (count,), 0, size))
    return jax.lax.while_loop(lambda state: repeats(state[1]).any(), redraw, (key, drawn))[1]


def choose_batch(plates: Mapping[str, int], work: Mapping[Level, int], budget: int) -> dict[str, int]:
    """Members per plate: one cap for all plates, as large as the `budget` of numbers per step allows.

    Args:
        work: how many numbers one member costs, for each level of the model.
        budget: numbers a step may touch.
    """

    def cost(cap: int) -> int:
        return sum(each * math.prod(min(plates[plate], cap) for plate in level) for level, each in work.items())

    low, high = 1, max(plates.values(), default=1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle - 1)
    return {plate: min(size, low) for plate, size in plates.items()}
