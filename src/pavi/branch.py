"""Branchings: the few members of each plate that one step looks at (paper, `sec:plate_branching`).

Every plate is drawn on its own, without replacement; a site sees the product of its plates' drawn members. So
sites are coherent with one another (a member is drawn with its parents), for nested and crossed plates alike. Each
drawn member carries a **weight**, one over the probability that it was drawn, which is what makes sums over a
branch unbiased estimates of sums over the study; a **mask** marks members that only fill up a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pavi.template import Level

# Up to this many drawn members, comparing all pairs is cheaper to compile and to run than sorting.
LARGEST_PAIRWISE = 1024
# Up to this many members, all are shuffled.
SMALL_PLATE = 256


class Branch(eqx.Module):
    """Drawn members per plate, each with its weight and whether it counts."""

    indices: dict[str, Int[Array, " _"]]
    weights: dict[str, Float[Array, " _"]]
    mask: dict[str, Bool[Array, " _"]]

    def at(self, level: Level) -> tuple[Int[Array, " _"], ...]:
        """Member indices along each plate of a level."""
        return tuple(self.indices[plate] for plate in level)

    def weigh(self, level: Level, terms: Float[Array, ...]) -> Float[Array, ""]:
        """Weighted sum over a level of one term per member (`terms` has an axis for each plate)."""
        for plate in reversed(level):
            terms = jnp.where(self.mask[plate], terms, 0.0) @ self.weights[plate]
        return terms


def draw_branch(
    key: PRNGKeyArray,
    sizes: Mapping[str, int],
    batch: Mapping[str, int],
    runs: Mapping[str, int] = MappingProxyType({}),
) -> Branch:
    """Draws `batch[plate]` distinct members of every plate, in time that does not grow with the plates.

    Members of a plate in `runs` are drawn that many side by side, so that data stored in chunks are read in few pieces. All
    runs are equally likely, and so is every member. The last run may go beyond the plate: what is beyond does not count.
    """
    indices, weights, mask = {}, {}, {}
    for k, (plate, size) in enumerate(sizes.items()):
        run = runs.get(plate, 1)
        there, drawn = -(-size // run), batch[plate] // run
        if batch[plate] == size:
            there, drawn, run, first = 1, 1, 1, jnp.arange(size)
        else:
            first = distinct(jax.random.fold_in(key, k), there, drawn)
        indices[plate] = first if run == 1 else (run * first[:, None] + jnp.arange(run)).reshape(-1)
        weights[plate] = jnp.full(indices[plate].shape, there / drawn)
        mask[plate] = indices[plate] < size
    return Branch(indices, weights, mask)


def fixed_branch(indices: Mapping[str, Int[Array, " _"]]) -> Branch:
    """The branch of exactly these members, each counted once."""
    return _equally_weighted(dict(indices), dict.fromkeys(indices, 1.0))


def _equally_weighted(indices: dict[str, Int[Array, " _"]], weights: dict[str, float]) -> Branch:
    return Branch(
        indices,
        {plate: jnp.full(index.shape, weights[plate]) for plate, index in indices.items()},
        {plate: jnp.ones(index.shape, bool) for plate, index in indices.items()},
    )


def distinct(key: PRNGKeyArray, size: int, count: int) -> Int[Array, " count"]:
    """`count` distinct integers below `size`, every subset equally likely, in time that depends on `count` alone.

    The first `count` different ones of draws with replacement, of which there are enough: one in 10^15 times they would run
    out. Where more than a quarter is wanted, all of them are shuffled instead, which is hardly more work. Neither loops,
    since a loop whose end depends on what was drawn makes a GPU wait for its host.
    """
    if size <= max(4 * count, SMALL_PLATE):
        return jax.lax.top_k(jax.random.uniform(key, (size,)), count)[1]
    drawn = jax.random.randint(key, (_enough_draws(size, count),), 0, size)
    new = ~_repeated(drawn)
    place = jnp.where(new, jnp.cumsum(new) - 1, count)
    return jnp.zeros(count, drawn.dtype).at[place].set(drawn, mode="drop")


def _enough_draws(size: int, count: int) -> int:
    """How many draws with replacement surely hold `count` different numbers."""
    draws = count
    while True:
        left_out = math.exp(-draws / size)
        repeats = draws - size * (1 - left_out)
        variance = size * left_out * max(1 - (1 + draws / size) * left_out, 0.0)
        needed = count + math.ceil(repeats + 12 * math.sqrt(variance) + 12)
        if draws >= needed:
            return draws
        draws = needed


def _repeated(drawn: Int[Array, " count"]) -> Bool[Array, " count"]:
    """Whether an equal number stands earlier."""
    if len(drawn) <= LARGEST_PAIRWISE:
        earlier = jnp.tri(len(drawn), k=-1, dtype=bool)
        return ((drawn[:, None] == drawn) & earlier).any(1)
    order = jnp.argsort(drawn, stable=True)
    ordered = drawn[order]
    again = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] == ordered[:-1]])
    return jnp.zeros(len(drawn), bool).at[order].set(again, unique_indices=True)


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


def fit_runs(
    sizes: Mapping[str, int], batch: Mapping[str, int], runs: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Members per step as whole numbers of runs, and the runs of the plates that are not taken whole."""
    rounded = {plate: max(1, round(batch[plate] / run)) * run for plate, run in runs.items()}
    fitting = {plate: min(count, sizes[plate]) for plate, count in {**batch, **rounded}.items()}
    return fitting, {plate: run for plate, run in runs.items() if run > 1 and fitting[plate] < sizes[plate]}
