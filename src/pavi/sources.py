"""Data that stay where they are: memory maps, Zarr arrays, lazy xarray and arrays in host memory, read at the members that
are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array

from pavi import rows

# Numbers read together where all data are read once, from first to last.
BLOCK = 2**24


class Stored:
    """An array outside of the device's memory, with the axes of its site's plates in front.

    Args:
        source: a `numpy.memmap` or other array, a Zarr array, or an `xarray.DataArray` that has not been loaded.
    """

    def __init__(self, source: Any):
        self.source = source

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape)

    @property
    def dtype(self) -> Any:
        return self.source.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def chunks(self) -> tuple[int, ...]:
        """Lengths along each axis of the pieces that are stored together, one where that is not known."""
        found = getattr(self.source, "chunks", None)
        if isinstance(self.source, xr.DataArray):
            found = self.source.encoding.get("chunks") if found is None else [lengths[0] for lengths in found]
        return tuple(found) if found is not None and len(found) == self.ndim else (1,) * self.ndim

    def take(self, index: tuple[np.ndarray, ...]) -> np.ndarray:
        """The part at the product of index vectors along the first axes. Beyond the last is the last.

        Index vectors may have an axis in front, for several products one after the other.
        """
        if isinstance(self.source, np.ndarray):
            return rows.read(self.source, index)
        if any(along.ndim > 1 for along in index):
            return np.stack([self.take(each) for each in zip(*index, strict=True)])
        index = tuple(np.minimum(along, size - 1) for along, size in zip(index, self.shape, strict=False))
        if isinstance(self.source, xr.DataArray):
            return self.source[dict(zip(self.source.dims, index, strict=False))].values
        if isinstance(self.source, jax.Array):
            return np.asarray(self.source[np.ix_(*index)])
        rest = tuple(slice(None) for _ in range(self.ndim - len(index)))
        return np.asarray(self.source.oindex[(*index, *rest)])

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """All of it, some slices of the first axis at a time."""
        step = max(1, BLOCK // max(self.size // self.shape[0], 1))
        for start in range(0, self.shape[0], step):
            part = slice(start, min(start + step, self.shape[0]))
            yield part, self.take((np.arange(part.start, part.stop),))

    def mean(self, axes: tuple[int, ...], dtype: Any) -> np.ndarray:
        """The mean over some axes, reading everything once."""
        inner = tuple(axis for axis in axes if axis)
        if 0 not in axes:
            return np.concatenate([part.mean(inner, dtype=dtype) for _, part in self.blocks()])
        sums = [part.sum(0, dtype=dtype).mean(tuple(axis - 1 for axis in inner)) for _, part in self.blocks()]
        return (np.sum(sums, 0) / self.shape[0]).astype(dtype)


def take(array: Any, index: tuple[np.ndarray, ...]) -> Any:
    """The part of an array, stored or not, at the product of index vectors along its first axes."""
    if isinstance(array, Stored):
        return array.take(index)
    return _gathered(array, index) if isinstance(array, jax.Array) else array[np.ix_(*index)]


@jax.jit
def _gathered(array: Array, index: tuple[Array, ...]) -> Array:
    """One compiled function: indexed eagerly, an array takes half a dozen."""
    return array[jnp.ix_(*index)]


def take_each(array: Any, index: list[np.ndarray]) -> np.ndarray:
    """The elements of an array, stored or not, at several places, given by an index vector for each of its first axes."""
    if not isinstance(array, Stored):
        return np.asarray(array[tuple(index)])
    return np.concatenate(
        [
            array.take(tuple(np.array([k]) for k in place)).reshape(1, *array.shape[len(index) :])
            for place in zip(*index, strict=True)
        ]
    )


def load(array: Any) -> Any:
    """All of an array, stored or not, in memory."""
    if not isinstance(array, Stored):
        return array
    return np.concatenate([part for _, part in array.blocks()]) if array.ndim else array.take(())


def is_stored(value: Any) -> bool:
    """Whether data lie outside of memory and are to stay there."""
    if isinstance(value, xr.DataArray):
        return not value.variable._in_memory
    return isinstance(value, np.memmap) or hasattr(value, "oindex")
