"""What a fit will take, before anything is compiled: members per step, weights, and bytes on the device."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import jax
import numpy as np
import xarray as xr

from pavi.ahead import bytes_ahead
from pavi.errors import SettingError
from pavi.families import PAVI, Family, Polished, Weights
from pavi.families.pulling import pull_size, pulled_levels
from pavi.inner import Inner, Marginal
from pavi.memory import device_memory, in_all, workspace_bytes
from pavi.mesh import Shards
from pavi.reading import check_batch, check_points, members_per_step, split_arguments
from pavi.sharding import split_plate
from pavi.sources import is_stored
from pavi.starting import usual_starts
from pavi.stepping import State, default_optimizers, first_state
from pavi.template import Level, Site, Template
from pavi.tracing import data_name, trace

# Numbers a step holds per number that it touches: layers of a flow, forward and backward.
STEP_COST = 12
# The same for a number of a point.
POINT_COST = 3
# What XLA says when memory has run out, and what helps.
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED", "Out of memory"
SMALLER = (
    "Take smaller encodings (pavi.FreeEncodings(size=...)), a smaller dtype for the data, data in a memory map or in Zarr, "
    "rows in a memory map (placement=folder), or fewer members per step (batch=...)."
)


class Place(Enum):
    """Where arrays lie while a fit trains."""

    DEVICE = "on the device"
    HOST = "in host memory, a step's members at a time on the device"
    STORED = "where they are stored, read ahead of the steps"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a fit will take. Printing it shows a table. With several devices bytes are those of each.

    Attributes:
        num_latents: latent numbers of the study.
        num_weights: trained numbers: shared weights and rows.
        num_rows: members with an encoding of their own.
        batch: members per step of each plate.
        encoding_sizes: numbers of one encoding, by level.
        data_bytes: observed data and the model's array arguments.
        state_bytes: weights, rows and the state of their optimizer.
        temporary_bytes: what one step needs beside these, about; or the end of a fit, where that is more.
        step_bytes: bytes that one step must read and write: data and rows of its members.
        memory: bytes that the device has for them.
        data_place: where the data lie.
        rows_place: where rows and the state of their optimizer lie.
        stored_bytes: of the data, those that do not come to the device whole.
        ahead_bytes: on the device, of what is read for some steps at a time.
        rows_bytes: of the state, those of the rows.
        devices: over how many devices the study is split.
    """

    template: Template
    num_latents: int
    num_weights: int
    num_rows: int
    batch: Mapping[str, int]
    encoding_sizes: Mapping[Level, int]
    data_bytes: int
    state_bytes: int
    temporary_bytes: int
    step_bytes: int
    memory: int
    data_place: Place
    rows_place: Place
    stored_bytes: int
    rows_bytes: int
    ahead_bytes: int = 0
    devices: int = 1

    @property
    def device_bytes(self) -> int:
        """Bytes on the device at the peak."""
        elsewhere = self.stored_bytes + (self.rows_bytes if self.rows_place is Place.HOST else 0)
        return self.data_bytes + self.state_bytes + self.temporary_bytes + self.ahead_bytes - elsewhere

    @property
    def fits(self) -> bool:
        return self.device_bytes <= self.memory

    def __str__(self) -> str:
        batch = ", ".join(f"{count:,} of {self.template.plate(plate).size:,} {plate}" for plate, count in self.batch.items())
        sizes = ", ".join(f"{size} ({' x '.join(level) or 'global'})" for level, size in self.encoding_sizes.items())
        rows = [
            ("latent numbers", f"{self.num_latents:,}"),
            ("trained numbers", f"{self.num_weights:,}"),
            ("members with an encoding", f"{self.num_rows:,}"),
            ("numbers of an encoding", sizes or "none"),
            ("members per step", batch or "the whole study"),
            ("data", f"{_size(self.data_bytes)}, {self.data_place.value}"),
            ("weights, rows, optimizer", f"{_size(self.state_bytes)}, {self.rows_place.value}"),
            ("one step beside these", _size(self.temporary_bytes)),
            *([("read ahead of the steps", _size(self.ahead_bytes))] if self.ahead_bytes else []),
            (
                "device in all" if self.devices == 1 else f"each of {self.devices} devices",
                f"{_size(self.device_bytes)} of {_size(self.memory)}",
            ),
            ("read and written per step", _size(self.step_bytes)),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def plan(
    model: Callable,
    data: Mapping[str, Any] | xr.Dataset,
    *,
    model_args: tuple = (),
    model_kwargs: Mapping[str, Any] | None = None,
    family: Family | None = None,
    batch: Mapping[str, int] | None = None,
    num_particles: int = 8,
    inner_points: int = 0,
    starts: int | None = None,
    polish: bool | Mapping[str, Any] = False,
    memory: int | None = None,
    placement: str | os.PathLike | None = None,
    devices: int | Mapping[str, int] | None = None,
) -> Plan:
    """What `pavi.fit` with the same arguments will take; nothing is compiled, and nothing of the study's size allocated.

    Args:
        model: a NumPyro model.
        data: as in `pavi.fit`; only shapes and dtypes are read, so `jax.ShapeDtypeStruct` will do.
        model_args: passed to the model.
        model_kwargs: passed to the model.
        family: the variational family; `pavi.PAVI()` by default.
        batch: members per step, by plate; chosen by size for the plates not named.
        num_particles: Monte Carlo samples per step.
        inner_points: as in `pavi.fit`.
        starts: as in `pavi.fit`.
        polish: as in `pavi.fit`.
        memory: bytes the device has, or each of several; by default what it says of itself.
        placement: as in `pavi.fit`; by default data and rows lie on the device as far as there is room.
        devices: as in `pavi.fit`, but they need not be there.

    Raises:
        SettingError: where it cannot fit.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, pavi
        >>> def model():
        ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
        ...     with numpyro.plate("group", 10_000_000):
        ...         theta = numpyro.sample("theta", dist.Normal(mu, 1))
        ...         numpyro.sample("x", dist.Normal(theta, 1))
        >>> plan = pavi.plan(model, {"x": jax.ShapeDtypeStruct((10_000_000,), "float32")}, batch={"group": 1000})
        >>> plan.num_latents
        10000001
        >>> round(plan.device_bytes / 1e9, 1)
        1.0
    """
    names = [str(name) for name in data]
    template, _ = trace(model, names, tuple(model_args), model_kwargs)
    family = family or PAVI()
    inner = check_points(inner_points, template, family)
    batch = check_batch(template, batch, family)
    _, arguments = split_arguments(tuple(model_args), dict(model_kwargs or {}))
    polished = polished_family(family, polish)
    starts = usual_starts(template) if starts is None else starts
    shards = None if devices is None else split_plate(template, devices, inner)
    settings = num_particles, memory, placement, inner, polished, starts, shards
    return make_plan(template, arguments, data, family, batch, *settings)


def polished_family(family: Family, polish: bool | Mapping[str, Any]) -> Family | None:
    """The family that latents further inside have after polishing, if there is any."""
    if isinstance(polish, Mapping):
        return polish.get("family") or family
    return family if polish else None


def make_plan(
    template: Template,
    arguments: Any,
    data: Mapping[str, Any] | xr.Dataset,
    family: Family,
    batch: Mapping[str, int] | None,
    num_particles: int,
    memory: int | None = None,
    placement: str | os.PathLike | None = None,
    inner: Inner | None = None,
    polished: Family | None = None,
    starts: int = 1,
    shards: Shards | None = None,
) -> Plan:
    """What `plan` says, for a model that has been read.

    Rows and data are put on the device while there is room; then data stay on the host, which can be read ahead of the
    steps; then rows do as well.
    """
    if shards is not None and placement not in (None, "device"):
        raise SettingError(
            f"placement={os.fspath(placement)!r}: rows lie on the devices where there are several. Leave out one of the two."
        )
    chosen, _ = members_per_step(template, batch, num_particles, inner)
    whole = frozenset(plate for plate, count in chosen.items() if count == template.plate(plate).size)
    weights = family.shapes(template, whole)
    state = jax.eval_shape(
        lambda weights, seed: first_state(*default_optimizers(family.row_rate), weights, seed),
        weights,
        jax.ShapeDtypeStruct((2,), np.uint32),
    )
    arrays = {site.name: data[str(data_name(site.name, [str(name) for name in data]))] for site in template.observed}
    arrays = {name: array if hasattr(array, "dtype") else np.asarray(array) for name, array in arrays.items()}
    sizes = {name: math.prod(np.shape(array)) * np.dtype(array.dtype).itemsize for name, array in arrays.items()}

    def part(level: Level, count: int) -> int:
        """Of so many bytes of a level, those of one device."""
        if shards is None or shards.plate not in level:
            return count
        return -(-count * shards.length // shards.size)

    parts = {site.name: part(site.level, sizes[site.name]) for site in template.observed}
    stored = sum(parts[name] for name, array in arrays.items() if is_stored(array))
    movable = sum(parts[name] for name, array in arrays.items() if _is_movable(array)) - stored
    # An array on the device whose axes are in another order is there twice: as it came, and as steps read it. It is there as
    # a whole beside the part that a device has of it.
    on_device = [site for site in template.observed if isinstance(arrays[site.name], jax.Array)]
    doubled = sum(sizes[s.name] for s in on_device if not _in_order(s))
    doubled += sum(sizes[s.name] for s in on_device if shards is not None)
    here = chosen if shards is None else chosen | {shards.plate: -(-chosen[shards.plate] // shards.parts)}
    step_bytes, temporary_bytes = _of_a_step(template, arrays, state, here, num_particles, inner)
    rows_of = {level: (rows, state.row_optimizer[level]) for level, rows in state.weights.rows.items()}
    rows_bytes = sum(part(level, in_all(each)) for level, each in rows_of.items() if level)
    state_bytes = in_all(state.weights._replace(rows={}), state.optimizer, rows_of.get(())) + rows_bytes
    if shards is None:  # else, when training ends, rows come together elsewhere if there is no room
        temporary_bytes = max(temporary_bytes, pull_bytes(template, family, weights))
        if polished is not None:
            temporary_bytes = max(temporary_bytes, _polish_bytes(template, polished, weights, whole, state_bytes))

    def ahead(elsewhere: Callable[[Any], bool], hosted: bool) -> int:
        """Bytes of what is read ahead, if data of some kind, and rows or not, do not lie on the device."""
        away = {name: array for name, array in arrays.items() if elsewhere(array)}
        rows = {level: each for level, each in rows_of.items() if level and hosted}
        return bytes_ahead(template, chosen, here, away, rows)

    # Starts begin from a copy of the first rows on the device.
    copied = sum(part(level, in_all(rows)) for level, rows in weights.rows.items()) if starts > 1 else 0
    found = Plan(
        template=template,
        num_latents=template.num_latents,
        num_weights=weights.count,
        num_rows=sum(math.prod(rows.shape[:-1]) for rows in weights.rows.values()),
        batch=chosen,
        encoding_sizes={level: rows.shape[-1] for level, rows in weights.rows.items()},
        data_bytes=sum(parts.values()) + doubled + in_all(arguments),
        state_bytes=state_bytes,
        temporary_bytes=max(temporary_bytes, copied),
        step_bytes=step_bytes,
        memory=device_memory() if memory is None else memory,
        data_place=Place.STORED if stored else Place.DEVICE,
        rows_place=Place.DEVICE,
        stored_bytes=stored,
        rows_bytes=rows_bytes,
        ahead_bytes=ahead(is_stored, False),
        devices=1 if shards is None else shards.parts,
    )
    data_on_host = both_on_host = found
    if movable:
        data_on_host = both_on_host = dataclasses.replace(
            found, data_place=Place.HOST, stored_bytes=stored + movable, ahead_bytes=ahead(_is_movable, False)
        )
    if rows_bytes and shards is None:  # several devices hold their own rows
        both_on_host = dataclasses.replace(
            data_on_host,
            rows_place=Place.HOST,
            temporary_bytes=temporary_bytes,
            ahead_bytes=ahead(_is_movable, True),
        )
    every = (found, data_on_host, both_on_host)
    choices = every if placement is None else every[:1] if placement == "device" else every[-1:]
    for choice in choices:
        if choice.fits:
            return choice
    raise SettingError(f"This fit does not fit on the device:\n{choices[-1]}\n{SMALLER}")


def _of_a_step(
    template: Template,
    arrays: Mapping[str, Any],
    state: State,
    batch: Mapping[str, int],
    num_particles: int,
    inner: Inner | None,
) -> tuple[int, int]:
    """Bytes that a step must read and write, and about what it needs beside them."""

    def members(level: Level) -> int:
        return math.prod(batch[plate] for plate in level)

    moved, touched = in_all(state.weights.shared), 0
    for site in template.observed:
        numbers = members(site.level) * math.prod(site.member_shape)
        moved += numbers * np.dtype(arrays[site.name].dtype).itemsize
        touched += numbers
    for level, rows in state.weights.rows.items():
        per_member = (in_all(rows) + in_all(state.row_optimizer[level])) // math.prod(template.sizes(level))
        moved += 2 * members(level) * per_member
    for site in template.latents:
        touched += members(site.level) * num_particles * (site.size * STEP_COST + 64)
    for level, numbers in ({} if inner is None else inner.work(template)).items():
        touched += members(level) * num_particles * numbers * POINT_COST
    return moved, 4 * touched + workspace_bytes()


def pull_bytes(template: Template, family: Family, weights: Weights) -> int:
    """What it takes to put pulls of all members beside their rows, when training has ended."""
    if not isinstance(family, PAVI) or not family.show_pull:
        return 0
    sizes = {level: pull_size(template, level) for level in pulled_levels(template)}
    return sum(
        math.prod(weights.rows[level].shape[:-1]) * (2 * size + weights.rows[level].shape[-1]) * 4
        for level, size in sizes.items()
    )


def _polish_bytes(template: Template, family: Family, before: Weights, whole: frozenset[str], state_bytes: int) -> int:
    """What a polished fit needs beside data and state: the rows of the fit before and those that training started from, and
    posteriors of members; or at its end pulls beside the rows, when the optimizer is gone."""
    plates = [level[0] for level in template.levels if len(level) == 1]
    if not plates:
        return 0
    weights = Polished(family, Marginal(plates[0], None, 2)).shapes(template, whole)
    new = in_all(weights.rows)
    kept = in_all(before.rows) + new + 2 * in_all(weights.memory)
    return max(kept, kept + new + pull_bytes(template, family, weights) - state_bytes)


def _is_movable(array: Any) -> bool:
    """Whether data are not on the device already."""
    return not isinstance(array, jax.Array)


def _in_order(site: Site) -> bool:
    """Whether the axes of a site's plates come first, in the order of its level."""
    return site.axes == tuple(range(len(site.axes)))


@contextmanager
def enough_memory(planned: Plan) -> Iterator[None]:
    """Within, running out of memory is an error that says what was planned and what to do."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and not any(sign in str(error) for sign in OUT_OF_MEMORY):
            raise
        where = f"of the host ({error})" if isinstance(error, MemoryError) else "of the device"
        raise SettingError(
            f"Memory {where} ran out. This was the plan:\n{planned}\nOther programs, or arrays of yours, may hold memory "
            f"there. {SMALLER}"
        ) from error


def folder_of(placement: str | os.PathLike | None) -> str | None:
    """The folder that a placement names, which is made if need be."""
    if placement is None or placement in ("device", "host"):
        return None
    try:
        os.makedirs(placement, exist_ok=True)
    except OSError as error:
        raise SettingError(
            f"placement={str(placement)!r}: expected 'device', 'host', or a folder to keep rows in, which this cannot be "
            f"({error})."
        ) from error
    return os.fspath(placement)


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
