"""Rows of big arrays: read a few, update a few, write them back in place.

A *row array* has some leading index axes and holds one vector per index. A step must never touch all rows, so
everything here works on the rows at given indices: an index tuple has one integer vector per leading axis, and
addresses their product. Optimizer state is kept per row too, so a row's moments and step count move only when
the row does.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

Index = tuple[Int[Array, " _"], ...]


def gather(rows: PyTree[Array], index: Index) -> PyTree[Array]:
    """The rows at the product of the index vectors, for every array of a tree."""
    if not index:
        return rows
    return jax.tree.map(lambda array: array[jnp.ix_(*index)], rows)


def scatter(rows: PyTree[Array], index: Index, values: PyTree[Array]) -> PyTree[Array]:
    """`rows` with the addressed ones replaced. The indices along each axis must be distinct."""
    if not index:
        return values
    return jax.tree.map(lambda array, new: array.at[jnp.ix_(*index)].set(new, unique_indices=True), rows, values)


def init_optimizer(optimizer: optax.GradientTransformation, rows: Array) -> Any:
    """Optimizer state for every row on its own, as arrays with the rows' leading axes."""
    return _per_row(optimizer.init, rows.ndim - 1)(rows)


def update(optimizer: optax.GradientTransformation, grads: Array, state: Any, rows: Array) -> tuple[Array, Any]:
    """One optimizer update of gathered rows: (updates, new state)."""
    return _per_row(optimizer.update, rows.ndim - 1)(grads, state, rows)


def _per_row(function: Any, ndim: int) -> Any:
    for _ in range(ndim):
        function = jax.vmap(function)
    return function
