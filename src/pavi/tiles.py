"""Tiles: blocks of members and draws, of one fixed shape, in which a study of any size is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from pavi.branch import choose_batch
from pavi.template import Kind, Level, Site, Template

# Numbers held on the device while one tile is read: on a CPU what its caches hold, on an accelerator many more; where draws
# are made, of which each tile has many, still more if there is memory: one for so many bytes of it.
CPU_TILE, ACCELERATOR_TILE, BYTES_PER_NUMBER = 2**22, 2**27, 128
LARGEST_DRAW_BLOCK = 256

T = TypeVar("T")


class Tile(NamedTuple):
    """Members of each plate to look at: their indices, which of them only fill up the block, and where it lies."""

    indices: dict[str, np.ndarray]
    counts: dict[str, np.ndarray]
    slices: dict[str, slice]
    first: dict[str, bool]


def counts_here(site: Site, tile: Tile) -> bool:
    """A site is read in the tiles that are first along every plate it is not in, so once; not if it has no members."""
    return all(plate in tile.slices for plate in site.level) and all(
        first or plate in site.level for plate, first in tile.first.items()
    )


def tiles(
    template: Template, levels: Sequence[Level], members: Mapping[str, np.ndarray], num_samples: int, observed: bool = True
) -> Iterator[tuple[Tile, slice, np.ndarray]]:
    """Tiles that cover the members of some levels, each with every block of draws.

    Args:
        observed: whether observed sites are drawn or scored in every draw, not just read.
    """
    levels = [level for level in levels if all(len(members[plate]) for plate in level)]
    if not levels:
        return
    needed = [plate.name for plate in template.plates if any(plate.name in level for level in levels)]
    draw_block = min(num_samples, LARGEST_DRAW_BLOCK)
    work: dict[Level, int] = {}
    for site in template.sites:
        level = tuple(plate for plate in site.level if plate in needed)
        times = draw_block if observed or site.kind is not Kind.OBSERVED else 1
        work[level] = work.get(level, 0) + times * max(site.size * 8, int(np.prod(site.member_shape, dtype=int)))
    budget = tile_budget() if draw_block == 1 else draws_budget()
    caps = choose_batch({plate: len(members[plate]) for plate in needed}, work, budget)
    # All tiles have one shape; as many as these caps need may as well be smaller, so that little of the last is empty.
    caps = {plate: -(-len(members[plate]) // -(-len(members[plate]) // cap)) for plate, cap in caps.items()}
    blocks = [[slice(a, min(a + caps[p], len(members[p]))) for a in range(0, len(members[p]), caps[p])] for p in needed]
    for chosen in itertools.product(*blocks):
        slices = dict(zip(needed, chosen, strict=True))
        indices = {plate.name: np.zeros(1, np.int32) for plate in template.plates}
        counts = {plate.name: np.ones(1, bool) for plate in template.plates}
        for plate, part in slices.items():
            index = members[plate][part]
            indices[plate] = np.pad(index, (0, caps[plate] - len(index)), mode="edge").astype(np.int32)
            counts[plate] = np.arange(caps[plate]) < len(index)
        first = {plate: part.start == 0 for plate, part in slices.items()}
        for start in range(0, num_samples, draw_block):
            draws = slice(start, min(start + draw_block, num_samples))
            yield Tile(indices, counts, slices, first), draws, np.arange(start, start + draw_block)


def one_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each asked for before the one before it is used: the device computes while the host reads."""
    waiting: list[T] = []
    for item in items:
        waiting.append(item)
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def draws_budget() -> int:
    """The same where many draws are made of each member."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return max(tile_budget(), stats.get("bytes_limit", 0) // BYTES_PER_NUMBER)


def tile_budget() -> int:
    """Numbers that may be held on the device while one tile is read."""
    return CPU_TILE if jax.default_backend() == "cpu" else ACCELERATOR_TILE
