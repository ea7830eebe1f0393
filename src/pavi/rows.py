"""Rows of big arrays: read a few, update a few, write them back in place.

A *row array* has some leading index axes and holds one vector per index. A step must never touch all rows, so
everything here works on the rows at given indices: an index tuple has one integer vector per leading axis, and
addresses their product. Optimizer state is kept per row too, so a row's moments and step count move only when
the row does.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int, PyTree

Index = tuple[Int[Array, " _"], ...]
HostIndex = tuple[np.ndarray, ...]
# Numbers of rows that are put on the host at a time.
HOST_BLOCK = 2**24
# Rows that one thread reads or writes at a time, and how many threads there are at most.
ROWS_PER_PART, MOST_READERS = 2**14, 16


def gather(rows: PyTree[Array], index: Index) -> PyTree[Array]:
    """The rows at the product of the index vectors, for every array of a tree. Beyond the last row is the last row."""
    if not index:
        return rows
    return jax.tree.map(lambda array: array.at[jnp.ix_(*index)].get(mode="clip"), rows)


def scatter(rows: PyTree[Array], index: Index, values: PyTree[Array]) -> PyTree[Array]:
    """`rows` with the addressed ones replaced. The indices along each axis must be distinct; beyond the last is nothing."""
    if not index:
        return values

    def put(array: Array, new: Array) -> Array:
        return array.at[jnp.ix_(*index)].set(new, unique_indices=True, mode="drop")

    return jax.tree.map(put, rows, values)


def init_optimizer(optimizer: optax.GradientTransformation, rows: Array) -> Any:
    """Optimizer state for every row on its own, as arrays with the rows' leading axes."""
    return _per_row(optimizer.init, rows.ndim - 1)(rows)


def update(optimizer: optax.GradientTransformation, grads: Array, state: Any, rows: Array) -> tuple[Array, Any]:
    """One optimizer update of gathered rows: (updates, new state)."""
    return _per_row(optimizer.update, rows.ndim - 1)(grads, state, rows)


def on_host(optimizer: optax.GradientTransformation, rows: Any, path: str | None = None) -> tuple[np.ndarray, Any]:
    """Rows and their optimizer state as arrays in host memory, or memory maps of files whose names start with `path`."""
    start = jax.jit(lambda part: init_optimizer(optimizer, part))
    names = itertools.count()

    def empty(like: Any) -> np.ndarray:
        shape = (rows.shape[0], *like.shape[1:])
        if path is None:
            return np.empty(shape, like.dtype)
        file = f"{path}-{next(names)}.npy"
        Path(file).unlink(missing_ok=True)  # who still maps one that was there keeps it
        return np.lib.format.open_memmap(file, "w+", like.dtype, shape)

    step = max(1, HOST_BLOCK * rows.shape[0] // max(rows.size, 1))
    first = rows[:1]
    kept = empty(first)
    state = jax.tree.map(empty, jax.eval_shape(start, first))
    for begin in range(0, rows.shape[0], step):
        part = np.asarray(rows[begin : begin + step])
        kept[begin : begin + step] = part
        write(state, (slice(begin, begin + step),), start(part))
    return kept, state


def read(rows: PyTree[np.ndarray], index: HostIndex) -> PyTree[np.ndarray]:
    """`gather` on the host. Index vectors may have axes in front, for several products one after the other."""

    def take(array: np.ndarray) -> np.ndarray:
        array, plates = np.asarray(array), array.shape[: len(index)]
        if not array.size or not array.flags.c_contiguous:
            return array[tuple(np.minimum(along, size - 1) for along, size in zip(_open(index), plates, strict=True))]
        where = np.ravel_multi_index(_open(index), plates, mode="clip")
        every = array.reshape(-1, *array.shape[len(index) :])
        found = np.empty((where.size, *every.shape[1:]), array.dtype)
        flat = where.reshape(-1)
        _in_parts(where.size, lambda part: every.take(flat[part], axis=0, mode="clip", out=found[part]))
        return found.reshape(*where.shape, *every.shape[1:])

    return jax.tree.map(take, rows) if index else rows


def write(rows: PyTree[np.ndarray], index: HostIndex | tuple[slice, ...], values: PyTree[Any]) -> None:
    """`scatter` on the host, in place."""
    if isinstance(index[0], slice):
        jax.tree.map(lambda array, new: array.__setitem__(index, np.asarray(new)), rows, values)
        return

    def put(array: np.ndarray, new: Any) -> None:
        plates, new = array.shape[: len(index)], np.asarray(new, array.dtype)
        inside = [along < size for along, size in zip(index, plates, strict=True)]
        if not all(there.all() for there in inside):
            new = np.ascontiguousarray(new[np.ix_(*inside)])
        within = tuple(along[there] for along, there in zip(index, inside, strict=True))
        if not array.size or not array.flags.c_contiguous:
            array[np.ix_(*within)] = new
            return
        where = np.ravel_multi_index(_open(within), plates).reshape(-1)
        every, new = _items(array, len(index)), _items(new, len(index))
        _in_parts(where.size, lambda part: every.__setitem__(where[part], new[part]))

    jax.tree.map(put, rows, values)


def _open(index: HostIndex) -> tuple[np.ndarray, ...]:
    """Index vectors whose product is what they address when broadcast, like those of `np.ix_`; axes in front stay there."""
    last = len(index) - 1
    return tuple(along.reshape(*along.shape[:-1], *[1] * k, -1, *[1] * (last - k)) for k, along in enumerate(index))


@functools.cache
def _readers() -> ThreadPoolExecutor:
    """Threads that share long readings and writings, on half of the cores: one alone waits for memory most of the time."""
    return ThreadPoolExecutor(max(1, min(MOST_READERS, (os.cpu_count() or 1) // 2)))


def _in_parts(count: int, work: Callable[[slice], Any]) -> None:
    """Does a work of so many rows in parts, side by side."""
    parts = [slice(start, start + ROWS_PER_PART) for start in range(0, count, ROWS_PER_PART)]
    if len(parts) > 1:
        list(_readers().map(work, parts))
    else:
        work(slice(None))


def _items(array: np.ndarray, ndim: int) -> np.ndarray:
    """Rows as items, one after the other, which NumPy moves as a whole: several times faster than number by number."""
    size = array.itemsize * int(np.prod(array.shape[ndim:]))
    return array.reshape(-1).view(np.dtype((np.void, size)))


def _per_row(function: Any, ndim: int) -> Any:
    for _ in range(ndim):
        function = jax.vmap(function)
    return function
