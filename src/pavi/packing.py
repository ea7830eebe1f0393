"""Networks as one flat vector of trainable numbers, beside a structure that never changes.

A flat vector is cheap to update, to save and to hand around; the structure is hashable and compiled away.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# In what order weights come in what is saved; a version of the package reads only what has its own.
FORMAT = 2


class Skeleton(NamedTuple):
    """A network's structure apart from its trainable arrays, which travel as one flat vector."""

    structure: Any
    static: Any
    shapes: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def fill(self, flat: Float[Array, " weights"]) -> Any:
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        parts = [flat[end - math.prod(shape) : end].reshape(shape) for end, shape in zip(ends, self.shapes, strict=True)]
        return eqx.combine(jax.tree.unflatten(self.structure, parts), self.static)


def skeleton_of(network: Any) -> Skeleton:
    """The structure of a network."""
    params, static = eqx.partition(network, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(params)
    return Skeleton(structure, static, tuple(leaf.shape for leaf in leaves))


def pack(network: Any) -> np.ndarray:
    """The trainable numbers of a network as one flat vector."""
    leaves = jax.tree.leaves(eqx.filter(network, eqx.is_inexact_array))
    return np.concatenate([np.asarray(leaf).ravel() for leaf in leaves])


def fill_randomly(rng: np.random.Generator, shapes: Any) -> Any:
    """Arrays for a tree of shapes, each scaled by its last axis: starting weights drawn on the host."""

    def draw(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return (rng.normal(size=leaf.shape) / np.sqrt(leaf.shape[-1])).astype(jnp.result_type(float))

    return jax.tree.map(draw, shapes, is_leaf=lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
