"""The observed arrays: checked against the template, and laid out so that a branch is one gather away.

An array comes in with the shape NumPyro would give its site, or in an `xarray.Dataset` with dims named after plates.
It is kept on the device with the plate axes in front, in the order of the site's level. Coordinates of a Dataset are
kept beside it and label the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array
from numpyro.distributions import constraints

from pavi import rows
from pavi.branch import Branch
from pavi.errors import DataError
from pavi.sources import Stored, is_stored, take
from pavi.template import Level, Site, Template
from pavi.tracing import data_name

# Members on which summaries are fitted; data of more numbers than this are summarized where they are.
MOST_MEASURED = 10_000
MOST_ON_HOST = 2**22
# Runs of neighbours that a step sees of a plate, at least.
FEWEST_RUNS = 8


class Observations(NamedTuple):
    """Observed arrays by site, plate axes in front, with the labels that came along."""

    arrays: dict[str, Array]
    coords: dict[str, np.ndarray]
    event_dims: dict[str, tuple[str, ...]]
    stored: dict[str, Stored] = {}  # noqa: RUF012
    """Data of the sites that are not on the device."""

    @property
    def everything(self) -> dict[str, Any]:
        """All data by site, on the device or stored."""
        return {**self.arrays, **self.stored}

    @property
    def in_memory(self) -> dict[str, np.ndarray]:
        """Data of the sites that are not on the device but in host memory."""
        return {name: array.source for name, array in self.stored.items() if type(array.source) is np.ndarray}

    def loaded(self, place: Callable[[np.ndarray], Any] = jnp.asarray) -> Observations:
        """The same with all that is in host memory on the device, or where it is to be placed."""
        here = {name: place(array) for name, array in self.in_memory.items()}
        stored = {name: array for name, array in self.stored.items() if name not in here}
        return self._replace(arrays={**self.arrays, **here}, stored=stored)


def observe(
    template: Template,
    data: Mapping[str, Any] | xr.Dataset,
    supports: Mapping[str, constraints.Constraint | None],
    on_host: bool = False,
) -> Observations:
    """Checks the data of every observed site and puts it on the device, but for data that are stored elsewhere.

    With `on_host`, arrays in host memory stay there.
    """
    coords, event_dims, arrays, stored = {}, {}, {}, {}
    if isinstance(data, xr.Dataset):
        coords = {str(name): np.asarray(data[name]) for name in data.coords if data[name].dims == (name,)}
    for site in template.observed:
        value = data[str(data_name(site.name, [str(name) for name in data]))]
        if isinstance(value, xr.DataArray):
            array, event_dims[site.name] = _named(template, site, value)
            if not isinstance(data, xr.Dataset):
                coords |= {str(dim): np.asarray(value[dim]) for dim in value.dims if dim in value.coords}
        else:
            array = _positional(template, site, value)
        if isinstance(array, Stored):
            some = take(array, spread_evenly(array.shape[: len(site.level)], MOST_MEASURED))
            _check_values(site, some, supports.get(site.name))
            stored[site.name] = array
            continue
        _check_values(site, array, supports.get(site.name))
        if on_host and not isinstance(array, jax.Array):
            stored[site.name] = Stored(array)
            continue
        arrays[site.name] = jnp.asarray(array)
    for plate in template.plates:
        if plate.name in coords and len(coords[plate.name]) != plate.size:
            raise DataError(
                f"Coordinate {plate.name!r} has {len(coords[plate.name])} labels, but plate {plate.name!r} has "
                f"{plate.size} members."
            )
    return Observations(arrays, coords, event_dims, stored)


def sizes_of(template: Template, data: Mapping[str, Any] | xr.Dataset) -> dict[str, int]:
    """Plate sizes as the data have them, where they have the model's number of axes."""
    sizes: dict[str, int] = {}
    for site in template.observed:
        value = data[str(data_name(site.name, [str(name) for name in data]))]
        if isinstance(value, xr.DataArray):
            sizes |= {plate: int(value.sizes[plate]) for plate in site.level if plate in value.dims}
        elif np.ndim(value) == len(site.shape):
            sizes |= {plate: int(np.shape(value)[axis]) for plate, axis in zip(site.level, site.axes, strict=True)}
    return sizes


def at_branch(template: Template, arrays: Mapping[str, Array], branch: Branch, whole: frozenset[str]) -> dict[str, Array]:
    """The data of a branch's members, of the sites in `arrays`. Plates in `whole` are taken whole and in order."""
    return {
        site.name: arrays[site.name] if set(site.level) <= whole else rows.gather(arrays[site.name], branch.at(site.level))
        for site in template.observed
        if site.name in arrays
    }


def stored_at(template: Template, stored: Mapping[str, Stored], indices: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The stored data at the product of some members of each plate, read now; indices may have an axis of steps in front."""
    return {
        name: array.take(tuple(np.asarray(indices[plate]) for plate in template.site(name).level))
        for name, array in stored.items()
    }


def usual_runs(template: Template, stored: Mapping[str, Stored], batch: Mapping[str, int]) -> dict[str, int]:
    """How many members to draw side by side where data are stored in chunks: so many that a step reads few chunks.

    A run lies within a chunk, and a step still sees several of each plate.
    """
    runs: dict[str, int] = {}
    for name, array in stored.items():
        for plate, chunk in zip(template.site(name).level, array.chunks, strict=False):
            most = min(chunk, batch[plate] // FEWEST_RUNS)
            run = next((length for length in range(most, 1, -1) if chunk % length == 0), 1)
            runs[plate] = max(run, runs.get(plate, 1))
    return {plate: run for plate, run in runs.items() if run > 1}


def some_of(template: Template, observations: Observations) -> list[np.ndarray]:
    """Data of some members of every observed site, spread evenly."""
    everything = observations.everything
    return [
        np.asarray(take(everything[site.name], spread_evenly(template.sizes(site.level), MOST_MEASURED)))
        for site in template.observed
    ]


def summarize(
    template: Template,
    arrays: Mapping[str, Any],
    level: Level,
    size: int,
    more: Mapping[Level, Any] = MappingProxyType({}),
) -> Any:
    """What the data say of each member of a level, in at most `size` standardized numbers: an array (*sizes, numbers).

    Means over the other plates of every observed site that the level's members have a part of; their leading principal
    components where there are more than `size`. The map is found on some members. Large data are never copied: they are
    mapped where they are, a slice of the first plate at a time. What `more` is known of members of some levels comes first.
    """
    if not level:
        return np.zeros((*template.sizes(level), 0), np.float32)

    def means(sources: Iterable[tuple[Level, Any]]) -> list[Any]:
        found = []
        for own, array in sources:
            if set(level) <= set(own):
                others = tuple(k for k, plate in enumerate(own) if plate not in level)
                array = array if isinstance(array, Stored) or array.size > MOST_ON_HOST else np.asarray(array)
                found.append(_mean(array, others) if others else array)
        return found

    known = _summary(template, means(more.items()), level, size)
    rest = size - known.shape[-1]
    data = _summary(template, means((site.level, arrays[site.name]) for site in template.observed if rest), level, rest)
    return _flat([known, data], len(level)) if known.shape[-1] else data


def _summary(template: Template, means: list[Any], level: Level, size: int) -> Any:
    """Numbers per member, standardized; their leading principal components where there are more than `size`."""
    sizes = template.sizes(level)
    if not means:
        return np.zeros((*sizes, 0), np.float32)
    index = spread_evenly(sizes, MOST_MEASURED)
    some = _flat([np.asarray(take(mean, index), np.float32) for mean in means], len(level))
    some = some.reshape(-1, some.shape[-1])
    center, spread = some.mean(0), some.std(0)
    matrix = np.diag(np.where(spread > 1e-6, 1 / np.maximum(spread, 1e-6), 0.0))
    if some.shape[1] > size:
        standardized = (some - center) @ matrix
        _, vectors = np.linalg.eigh(standardized.T @ standardized)
        matrix = matrix @ vectors[:, : -size - 1 : -1]
        spread = ((some - center) @ matrix).std(0)
        matrix = matrix * np.where(spread > 1e-6, 1 / np.maximum(spread, 1e-6), 0.0)
    matrix, offset = matrix.astype(np.float32), (-center @ matrix).astype(np.float32)
    if any(isinstance(mean, Stored) for mean in means):
        # One is as long as the level along its first axis, and so are all: they are read side by side.
        parts = []
        for part, _ in next(mean for mean in means if isinstance(mean, Stored)).blocks():
            index = (np.arange(part.start, part.stop),)
            parts.append(_flat([np.asarray(take(mean, index), np.float32) for mean in means], len(level)) @ matrix + offset)
        return np.concatenate(parts)
    if all(isinstance(mean, np.ndarray) for mean in means):
        return _flat(means, len(level)).astype(np.float32) @ matrix + offset
    return _project([jnp.asarray(mean) for mean in means], matrix, offset, len(level) - 1)


def _mean(array: Any, axes: tuple[int, ...]) -> Any:
    """The mean over some axes; of data on a device without a copy of them, a slice of the first axis at a time."""
    if not isinstance(array, jax.Array):
        return array.mean(axes, dtype=np.float32)
    return _sliced_mean(array, axes)


@partial(jax.jit, static_argnums=1)
def _sliced_mean(array: Array, axes: tuple[int, ...]) -> Array:
    inner = tuple(axis - 1 for axis in axes if axis)

    def one(part: Array) -> Array:
        return part.astype(jnp.float32).mean(inner)

    if 0 not in axes:
        return jax.lax.map(one, array)
    start = jnp.zeros(jax.eval_shape(one, array[0]).shape, jnp.float32)
    return jax.lax.scan(lambda total, part: (total + one(part), None), start, array)[0] / array.shape[0]


def _flat(means: list, plates: int) -> Any:
    """Arrays of some plates side by side, with one axis for what each member has."""
    xp = np if all(isinstance(mean, np.ndarray) for mean in means) else jnp
    return xp.concatenate([mean.reshape(*mean.shape[:plates], -1) for mean in means], -1)


@partial(jax.jit, static_argnums=3)
def _project(means: list[Array], matrix: Array, offset: Array, plates: int) -> Array:
    return jax.lax.map(lambda parts: _flat(parts, plates).astype(jnp.float32) @ matrix + offset, means)


def spread_evenly(sizes: tuple[int, ...], most: int) -> tuple[np.ndarray, ...]:
    """Indices along each axis, evenly spread, whose product has about `most` members or all."""
    chosen: list[np.ndarray] = []
    left, axes = most, sorted(range(len(sizes)), key=lambda axis: sizes[axis])
    counts = {}
    for k, axis in enumerate(axes):
        counts[axis] = max(1, min(sizes[axis], int(left ** (1 / (len(axes) - k)))))
        left = max(1, left // counts[axis])
    for axis, size in enumerate(sizes):
        chosen.append(np.arange(counts[axis]) * size // counts[axis])
    return tuple(chosen)


def _named(template: Template, site: Site, value: xr.DataArray) -> tuple[Any, tuple[str, ...]]:
    missing = [plate for plate in site.level if plate not in value.dims]
    if is_stored(value) and not missing:
        rest = tuple(str(dim) for dim in value.dims if dim not in site.level)
        stored = value.transpose(*site.level, *rest)
        _check_stored(template, site, stored.shape)
        return Stored(stored), rest
    if missing:
        raise DataError(
            f"Data of site {site.name!r} has dims {value.dims}, but lacks the plate(s) {missing}. In a Dataset, name the "
            f"dims after the plates: expected {site.level}."
        )
    rest = tuple(str(dim) for dim in value.dims if dim not in site.level)
    array = np.asarray(value.transpose(*site.level, *rest))
    expected = (*template.sizes(site.level), *site.display_shape)
    if array.shape != expected:
        raise DataError(
            f"Data of site {site.name!r} has sizes {dict(zip((*site.level, *rest), array.shape, strict=True))}, "
            f"expected {dict(zip(site.level, template.sizes(site.level), strict=True))} for its plates and "
            f"{site.display_shape} for the rest."
        )
    return array.reshape(*template.sizes(site.level), *site.member_shape), rest


def _positional(template: Template, site: Site, value: Any) -> Any:
    if is_stored(value):
        _check_stored(template, site, tuple(value.shape))
        return Stored(value)
    array = value if isinstance(value, jax.Array | np.ndarray) else np.asarray(value)
    squeezed = _squeezed(site)
    if array.shape not in (site.shape, squeezed):
        plates = ", ".join(f"{plate} ({template.plate(plate).size})" for plate in site.level) or "none"
        raise DataError(
            f"Data of site {site.name!r} has shape {array.shape}, but the model draws it with shape {site.shape}. Its "
            f"plates, outermost first: {plates}; one member has shape {site.member_shape}. Reshape or transpose the data, "
            "or pass an xarray.Dataset with dims named after the plates."
        )
    return array.reshape(site.shape).transpose(*site.axes, *(k for k in range(len(site.shape)) if k not in site.axes))


def _check_stored(template: Template, site: Site, shape: tuple[int, ...]) -> None:
    expected = (*template.sizes(site.level), *site.member_shape)
    if shape != expected:
        raise DataError(
            f"Data of site {site.name!r} are stored in shape {shape}. Data that are read where they lie must have the axes "
            f"of the plates {site.level} in front, then those of one member: shape {expected}. Store them that way."
        )


def _squeezed(site: Site) -> tuple[int, ...]:
    """The site's shape without the axes of length one that hold a place for plates it is not in."""
    batch_ndim = len(site.shape) - site.event_ndim
    return tuple(n for k, n in enumerate(site.shape) if k in site.axes or k >= batch_ndim or n > 1)


def _check_values(site: Site, array: Any, support: constraints.Constraint | None) -> None:
    xp = jnp if isinstance(array, jax.Array) else np
    if not xp.issubdtype(array.dtype, np.number) and array.dtype != bool:
        raise DataError(f"Data of site {site.name!r} has dtype {array.dtype}; expected numbers.")
    if xp.issubdtype(array.dtype, np.inexact):
        bad = _count(array, lambda part: ~xp.isfinite(part))
        if bad:
            raise DataError(
                f"Data of site {site.name!r} has {bad} value(s) that are NaN or infinite, of {array.size}. Fill them with "
                "any valid number and mark them missing with `numpyro.handlers.mask` or `obs_mask` around the site."
            )
    if support is None or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(support)):
        return
    outside = _count(array, lambda part: ~xp.asarray(support(part)))
    if outside:
        raise DataError(
            f"Data of site {site.name!r} has {outside} value(s) outside the support of {site.distribution} ({support}). "
            "Check the units or the coding of the data, or the distribution of the site."
        )


def _count(array: Any, wrong: Callable[[Any], Any]) -> int:
    """How many numbers are wrong; on a device without a copy of the array."""
    if isinstance(array, jax.Array):
        return (
            int(jax.jit(lambda array: wrong(array).sum())(array)) if array.size > MOST_ON_HOST else int(wrong(array).sum())
        )
    return int(wrong(array).sum())
