"""Memory: what arrays take, and what a device has."""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Part of a device's memory that a fit may plan with.
USABLE = 0.9
# What a GPU's library keeps for a step's products of matrices that run side by side, 32 MiB each, about.
GPU_WORKSPACES = 2**29


def in_all(*trees: Any) -> int:
    """Bytes of all arrays of trees, or of what has their shape and dtype."""

    def size(leaf: Any) -> int:
        return 4 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.dtype(leaf.dtype).itemsize

    return sum(math.prod(leaf.shape) * size(leaf) for leaf in jax.tree.leaves(trees))


def free_memory() -> int:
    """Bytes of memory that the default device has left for more arrays."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return device_memory() - stats.get("bytes_in_use", 0)


def device_memory() -> int:
    """Bytes of memory that a fit may use on the default device."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(USABLE * stats["bytes_limit"])
    return int(USABLE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def workspace_bytes() -> int:
    """Bytes that libraries of the default device keep while steps run, about."""
    return GPU_WORKSPACES if jax.default_backend() == "gpu" else 0
