"""A plate that is split over devices: which of its members lie on which device, and arrays laid out that way.

Every device has a part of the plate, as long as the others' or shorter by one member. Arrays have the same length on all of
them, so where parts differ the last member of the shorter ones is there twice; it does not count.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from pavi.sources import take
from pavi.template import Level

# Name of the axis of devices.
SHARD = "shard"
# Numbers that are gathered from other processes at a time.
GATHERED = 2**26


class Shards(NamedTuple):
    """A plate of some size, split into so many parts."""

    plate: str
    parts: int
    size: int

    @property
    def length(self) -> int:
        """Members of the longest part."""
        return -(-self.size // self.parts)

    @property
    def counts(self) -> np.ndarray:
        """Members of each part."""
        return self.size // self.parts + (np.arange(self.parts) < self.size % self.parts)

    @property
    def firsts(self) -> np.ndarray:
        """The first member of each part."""
        return np.cumsum(self.counts) - self.counts

    @property
    def members(self) -> np.ndarray:
        """The members that arrays hold, one part after the other."""
        there = np.minimum(np.arange(self.length), self.counts[:, None] - 1)
        return (self.firsts[:, None] + there).reshape(-1)

    @property
    def places(self) -> np.ndarray:
        """Where arrays hold each member, for the first time."""
        return np.concatenate([part * self.length + np.arange(count) for part, count in enumerate(self.counts)])

    @property
    def layout(self) -> str:
        """How arrays hold the members: equal parts of a plate, however many, hold them one after the other."""
        return f"in {self.parts} uneven parts" if self.size % self.parts else "one after the other"

    @property
    def mesh(self) -> Mesh:
        return _mesh(self.parts)

    def spec(self, level: Level) -> PartitionSpec:
        """How an array with the axes of a level in front is split."""
        return PartitionSpec(*(SHARD if plate == self.plate else None for plate in level))

    def put(self, leaf: Any, spec: PartitionSpec) -> jax.Array:
        """An array of the lengths that it has on all devices together, put where it belongs; each process gives its part."""
        target = NamedSharding(self.mesh, spec)
        if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(target, leaf.ndim):
            return leaf
        if jax.process_count() == 1:
            return jax.device_put(leaf, target)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(self.put(jax.random.key_data(leaf), spec))
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, target, lambda index: host[index])

    def lay_out(self, array: Any, level: Level) -> jax.Array:
        """An array of all members, stored or not, put on the devices: each is given its own part and no more."""
        if self.plate not in level:
            return self.put(take(array, tuple(np.arange(size) for size in array.shape[: len(level)])), PartitionSpec())
        axis = level.index(self.plate)
        shape = (*array.shape[:axis], self.parts * self.length, *array.shape[axis + 1 :])
        target = NamedSharding(self.mesh, self.spec(level))
        if isinstance(array, jax.Array):
            whole = array if shape == array.shape else jnp.take(array, self.members, axis)
            return self.put(whole, self.spec(level))

        def part(index: Any) -> np.ndarray:
            along = [np.arange(size) for size in array.shape[: len(level)]]
            along[axis] = self.members[index[axis]]
            return take(array, tuple(along))

        return jax.make_array_from_callback(shape, target, part)

    def gather(self, leaf: jax.Array, level: Level) -> np.ndarray:
        """An array that is laid out on the devices, copied to host memory, with every member once.

        Between processes it goes through the devices, some of each part at a time: none need have room for all of it.
        """
        if self.plate not in level:
            return np.array(leaf)
        axis = level.index(self.plate)
        if jax.process_count() == 1:
            return np.take(np.asarray(leaf), self.places, axis)
        before, after = leaf.shape[:axis], leaf.shape[axis + 1 :]
        found = np.empty((*before, self.parts, self.length, *after), leaf.dtype)
        some = min(max(1, GATHERED * self.length // leaf.size), self.length)
        for start in range(0, self.length, some):
            first = min(start, self.length - some)
            piece = _piece(leaf, first, some, self, level)
            there = multihost_utils.process_allgather(piece, tiled=True).reshape(*before, self.parts, some, *after)
            found[(*(slice(None),) * (axis + 1), slice(first, first + some))] = there
        return np.take(found.reshape(leaf.shape), self.places, axis)


def agreed(flag: bool) -> bool:
    """Whether it is so in any process, for what all must do together or not at all."""
    return bool(np.any(multihost_utils.process_allgather(np.array(flag)))) if jax.process_count() > 1 else flag


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _piece(leaf: Array, first: Int[Array, ""], count: int, shards: Shards, level: Level) -> Array:
    """The same members of each part of an array, which stay where they are."""

    def own(part: Array, first: Int[Array, ""]) -> Array:
        return jax.lax.dynamic_slice_in_dim(part, first, count, level.index(shards.plate))

    spec = shards.spec(level)
    return jax.shard_map(own, mesh=shards.mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)(leaf, first)


@functools.cache
def _mesh(parts: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:parts]), (SHARD,))
