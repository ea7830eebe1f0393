"""What tells a fit from another one: checksums of its arrays, and what its model makes of them.

A fit may go on from a checkpoint on another machine, with its data elsewhere. So checksums are the same wherever an array
lies, and what follows from computing is compared up to rounding.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt

from pavi.cascade import Study
from pavi.data import Observations, some_of
from pavi.errors import LoadError
from pavi.units import densities_of_prior

# Numbers of an array in host memory that are summed at a time.
BLOCK = 2**22
# Log-densities that differ by less than this, and by less than this part of them, may differ by rounding.
TOLERANCE = 1e-3


class Identity(NamedTuple):
    """What two fits must agree in for one to go on where the other stopped: texts by name, and log-densities by site.

    What one of them does not know is not compared.
    """

    texts: Mapping[str, str]
    densities: Mapping[str, float]

    def check(self, kept: Mapping[str, Any], folder: str | os.PathLike) -> None:
        """Refuses what a folder keeps of a fit with another identity, given as a mapping."""
        difference = self.difference(Identity(**kept))
        if difference is not None:
            raise LoadError(
                f"What {str(folder)!r} holds is of another fit. {difference}\nGive another folder, or delete this one."
            )

    def difference(self, kept: Identity) -> str | None:
        """How a fit that was kept differs from this one, if it does."""
        for name in self.texts.keys() & kept.texts.keys():
            if self.texts[name] != kept.texts[name]:
                return f"Its {name}:\n{kept.texts[name]}\nthat of this fit:\n{self.texts[name]}"
        for site in self.densities.keys() & kept.densities.keys():
            before, now = kept.densities[site], self.densities[site]
            if not np.isclose(before, now, TOLERANCE, TOLERANCE, equal_nan=True):
                return (
                    f"Its model: where the prior draws, the log-density of {site!r} is usually {before:.6g}, in this fit "
                    f"{now:.6g}. A prior, a number or a covariate is not what it was."
                )
        return None

    def and_also(self, **texts: str) -> Identity:
        """The same with more to agree in."""
        return self._replace(texts={**self.texts, **{name.replace("_", " "): text for name, text in texts.items()}})


def identity_of_study(study: Study, arguments: Any, observations: Observations, seed: np.ndarray) -> Identity:
    """What makes a study the same. Data that lie in memory are read whole, others at some members."""
    texts = {
        "model": str(study.template),
        "arguments": digest(jax.tree.leaves(arguments)),
        "data": digest(some_of(study.template, observations)),
        "random key": str(seed.tolist()),
    }
    here = {**observations.arrays, **observations.in_memory}
    if here.keys() == observations.everything.keys():
        texts["data as a whole"] = digest(here[name] for name in sorted(here))
    return Identity(texts, densities_of_prior(study, arguments, seed))


def digest(arrays: Iterable[Any]) -> str:
    """A short text that differs where arrays do, wherever they lie."""
    found = hashlib.sha256()
    for array in arrays:
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        found.update(f"{array.shape} {jax.dtypes.canonicalize_dtype(array.dtype)} {checksum(array)};".encode())
    return found.hexdigest()[:16]


def checksum(array: Any) -> int:
    """The sum of an array's numbers, as whole numbers of 32 bits, each times an odd number that tells its place.

    It is exact, so it is the same on every device, and no single number can change unseen.
    """
    if isinstance(array, jax.Array):
        return int(_summed(array))
    array, total = np.atleast_1d(array), 0
    each = max(array[:1].size, 1)
    for start in range(0, len(array), max(1, BLOCK // each)):
        part = array[start : start + max(1, BLOCK // each)]
        part = np.ascontiguousarray(part, jax.dtypes.canonicalize_dtype(array.dtype)).reshape(-1)
        place = np.arange(start * each, start * each + part.size, dtype=np.uint64).astype(np.uint32)
        total += int(np.dot(_bits(part, part.view), 2 * place + np.uint32(1)))
    return total % 2**32


@jax.jit
def _summed(array: Array) -> UInt[Array, ""]:
    place, stride = jnp.zeros(array.shape, jnp.uint32), 1
    for axis in reversed(range(array.ndim)):
        place = place + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis) * np.uint32(stride)
        stride = stride * array.shape[axis] % 2**32
    bits = _bits(array, lambda dtype: jax.lax.bitcast_convert_type(array, dtype))
    return (bits * (2 * place + np.uint32(1))).sum(dtype=jnp.uint32)


def _bits(array: Any, as_dtype: Any) -> Any:
    """The numbers of an array as whole numbers of 32 bits."""
    if array.dtype == bool:
        return array.astype(np.uint32)
    bits = as_dtype(np.dtype(f"uint{8 * array.dtype.itemsize}"))
    if array.dtype.itemsize == 8:
        bits = bits ^ (bits >> np.uint64(32))
    return bits.astype(np.uint32)
