"""What a fit will take, before anything is compiled: members per step, weights, and bytes on the device."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from pavi.errors import SettingError
from pavi.families import PAVI, Family
from pavi.reading import check_batch, members_per_step, split_arguments
from pavi.stepping import default_optimizers, first_state
from pavi.template import Template
from pavi.tracing import data_name, trace

# Numbers a step holds per number that it touches: layers of a flow, forward and backward.
STEP_COST = 12
# Part of a device's memory that a fit may plan with.
USABLE = 0.9


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a fit will take. Printing it shows a table.

    Attributes:
        num_latents: latent numbers of the study.
        num_weights: trained numbers: shared weights and rows.
        num_rows: members with an encoding of their own.
        batch: members per step of each plate.
        data_bytes: observed data and the model's array arguments.
        state_bytes: weights, rows and the state of their optimizer.
        temporary_bytes: what one step needs beside these, about.
        step_bytes: bytes that one step must read and write: data and rows of its members.
        memory: bytes that the device has for them.
    """

    template: Template
    num_latents: int
    num_weights: int
    num_rows: int
    batch: Mapping[str, int]
    data_bytes: int
    state_bytes: int
    temporary_bytes: int
    step_bytes: int
    memory: int

    @property
    def device_bytes(self) -> int:
        """Bytes on the device at the peak."""
        return self.data_bytes + self.state_bytes + self.temporary_bytes

    @property
    def fits(self) -> bool:
        return self.device_bytes <= self.memory

    def __str__(self) -> str:
        batch = ", ".join(f"{count:,} of {self.template.plate(plate).size:,} {plate}" for plate, count in self.batch.items())
        rows = [
            ("latent numbers", f"{self.num_latents:,}"),
            ("trained numbers", f"{self.num_weights:,}"),
            ("members with an encoding", f"{self.num_rows:,}"),
            ("members per step", batch or "the whole study"),
            ("data", _size(self.data_bytes)),
            ("weights, rows, optimizer", _size(self.state_bytes)),
            ("one step beside these", _size(self.temporary_bytes)),
            ("device in all", f"{_size(self.device_bytes)} of {_size(self.memory)}"),
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
    memory: int | None = None,
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
        memory: bytes the device has; by default what it says of itself.

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
    template, _ = trace(model, [str(name) for name in data], tuple(model_args), model_kwargs)
    check_batch(template, batch)
    family = PAVI() if family is None else family
    chosen, _ = members_per_step(template, batch, num_particles)
    whole = frozenset(plate for plate, count in chosen.items() if count == template.plate(plate).size)
    weights = family.shapes(template, whole)
    _, arguments = split_arguments(tuple(model_args), dict(model_kwargs or {}))
    state = jax.eval_shape(
        lambda weights, seed: first_state(*default_optimizers(family.row_rate), weights, seed),
        weights,
        jax.ShapeDtypeStruct((2,), np.uint32),
    )
    arrays = {site.name: data[str(data_name(site.name, [str(name) for name in data]))] for site in template.observed}
    step_bytes = _bytes(weights.shared)
    touched = 0
    for site in template.observed:
        members = int(np.prod([chosen[plate] for plate in site.level], dtype=np.int64))
        numbers = int(np.prod(site.member_shape, dtype=np.int64))
        step_bytes += members * numbers * np.dtype(arrays[site.name].dtype).itemsize
        touched += members * numbers
    for level, rows in state.weights.rows.items():
        members = int(np.prod([chosen[plate] for plate in level], dtype=np.int64))
        per_member = (_bytes(rows) + _bytes(state.row_optimizer[level])) // int(
            np.prod(template.sizes(level), dtype=np.int64)
        )
        step_bytes += 2 * members * per_member
    for site in template.latents:
        members = int(np.prod([chosen[plate] for plate in site.level], dtype=np.int64))
        touched += members * num_particles * (site.size * STEP_COST + 64)
    found = Plan(
        template=template,
        num_latents=template.num_latents,
        num_weights=weights.count,
        num_rows=sum(int(np.prod(rows.shape[:-1], dtype=np.int64)) for rows in weights.rows.values()),
        batch=chosen,
        data_bytes=sum(int(np.prod(np.shape(a), dtype=np.int64)) * np.dtype(a.dtype).itemsize for a in arrays.values())
        + _bytes(arguments),
        state_bytes=_bytes((state.weights, state.optimizer, state.row_optimizer)),
        temporary_bytes=int(touched) * 4,
        step_bytes=int(step_bytes),
        memory=device_memory() if memory is None else memory,
    )
    if not found.fits:
        raise SettingError(
            f"This fit does not fit on the device:\n{found}\nTake smaller encodings (pavi.FreeEncodings(size=...)), a "
            "smaller dtype for the data, or fewer members per step (batch=...)."
        )
    return found


def device_memory() -> int:
    """Bytes of memory that a fit may use on the default device."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(USABLE * stats["bytes_limit"])
    return int(USABLE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _bytes(tree: Any) -> int:
    total = 0
    for leaf in jax.tree.leaves(tree):
        itemsize = 4 if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.dtype(leaf.dtype).itemsize
        total += int(np.prod(leaf.shape, dtype=np.int64)) * itemsize
    return total


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
