"""Training on several devices: rows and data lie along one plate, each device draws members of its own part.

Every device runs the same steps on its own part of the plate, with the same draws of all that the parts share; gradients are
summed. Parts are equal, so members are still drawn with equal chance. With `jax.distributed` the same code runs on several
processes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from pavi.encodings import SetEncoder
from pavi.errors import SettingError
from pavi.families import PAVI, Weights
from pavi.stepping import SHARD, Inputs, Problem, State
from pavi.template import Level, Template
from pavi.train import run_chunk


def number_of(devices: int | Mapping[str, int] | None) -> int:
    """How many devices were asked for, as a number or for a plate."""
    return devices if isinstance(devices, int) else next(iter((devices or {}).values()), 1)


def split_along(template: Template, devices: int | Mapping[str, int]) -> tuple[str, int]:
    """Which plate is split into how many parts: the one named, or the one that most numbers lie along.

    Raises:
        SettingError: if there are not as many devices, or the plate cannot be split evenly.
    """
    named = dict(devices) if isinstance(devices, Mapping) else {}
    count = number_of(devices)
    found = jax.device_count()
    if len(named) > 1 or not 1 <= count <= found:
        raise SettingError(
            f"devices={devices!r}: expected a number up to {found}, the devices there are, or one plate with it."
        )
    sizes = {plate.name: plate.size for plate in template.plates}
    unknown = [plate for plate in named if plate not in sizes]
    if unknown:
        raise SettingError(f"devices={devices!r}: the model has no plate {unknown[0]!r}. Its plates: {list(sizes)}.")
    even = [plate for plate, size in sizes.items() if size % count == 0 and (not named or plate in named)]
    if not even:
        raise SettingError(
            f"devices={devices!r}: expected a plate whose size {count} divides; the sizes are "
            f"{ {plate: sizes[plate] for plate in (named or sizes)} }."
        )

    def numbers(plate: str) -> int:
        return sum(math.prod(site.shape) for site in template.sites if plate in site.level)

    return max(even, key=numbers), count


def sharded(problem: Problem, devices: int | Mapping[str, int]) -> Problem:
    """The problem with one of its plates split over devices, and with as many members per step of it as they divide."""
    plate, count = split_along(problem.template, devices)
    if isinstance(problem.family, PAVI) and isinstance(problem.family.encodings, SetEncoder):
        raise SettingError("devices=...: a SetEncoder needs all members on one device. Use free encodings.")
    if problem.family.whole_plates:
        raise SettingError(f"devices=...: {type(problem.family).__name__} needs all members on one device. Use pavi.PAVI().")
    batch = {name: -(-members // count) * count if name == plate else members for name, members in problem.batch}
    return dataclasses.replace(problem, batch=tuple(batch.items()), shards=(plate, count))


class Sharded:
    """Runs chunks of steps, as `chunk_runner` does, on several devices."""

    def __init__(self, problem: Problem):
        assert problem.shards is not None
        self.plate, count = problem.shards
        self.mesh = Mesh(np.array(jax.devices()[:count]), (SHARD,))

    def __call__(self, problem: Problem, inputs: Inputs, state: State, rates: Any, count: Any) -> tuple[State, Array]:
        specs = self._input_specs(problem, inputs), self._state_specs(state)
        inputs, state = self._place(inputs, specs[0]), self._place(state, specs[1])
        return _compiled(problem, self.mesh, *map(_frozen, specs))(inputs, state, jnp.asarray(rates), jnp.asarray(count))

    def _spec(self, level: Level) -> PartitionSpec:
        return PartitionSpec(*(SHARD if plate == self.plate else None for plate in level))

    def _input_specs(self, problem: Problem, inputs: Inputs) -> Inputs:
        whole = PartitionSpec()
        data = {site.name: self._spec(site.level) for site in problem.template.observed if site.name in inputs.data}
        everything = jax.tree.map(lambda _: whole, inputs._replace(data={}))
        return everything._replace(data=data)

    def _state_specs(self, state: State) -> State:
        everything = jax.tree.map(lambda _: PartitionSpec(), state)
        rows = {level: self._spec(level) for level in state.weights.rows}
        row_optimizer = {
            level: jax.tree.map(lambda _, spec=rows[level]: spec, tree) for level, tree in state.row_optimizer.items()
        }
        return everything._replace(weights=Weights(PartitionSpec(), rows, {}), row_optimizer=row_optimizer)

    def _place(self, tree: Any, specs: Any) -> Any:
        """Puts every array where it belongs; each process gives its own part."""

        def put(leaf: Any, spec: PartitionSpec) -> Any:
            target = NamedSharding(self.mesh, spec)
            if isinstance(leaf, jax.Array) and leaf.sharding == target:
                return leaf
            if jax.process_count() == 1:
                return jax.device_put(leaf, target)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jax.random.wrap_key_data(put(jax.random.key_data(leaf), spec))
            host = np.asarray(leaf)
            return jax.make_array_from_callback(host.shape, target, lambda index: host[index])

        return jax.tree.map(put, tree, specs)


def _frozen(specs: Any) -> tuple:
    leaves, structure = jax.tree.flatten(specs)
    return tuple(leaves), structure


@functools.lru_cache(maxsize=16)
def _compiled(problem: Problem, mesh: Mesh, input_specs: tuple, state_specs: tuple) -> Any:
    inputs, state = (jax.tree.unflatten(structure, leaves) for leaves, structure in (input_specs, state_specs))
    whole = PartitionSpec()
    run = jax.shard_map(
        functools.partial(run_chunk, problem),
        mesh=mesh,
        in_specs=(inputs, state, whole, whole),
        out_specs=(state, whole),
        check_vma=False,
    )
    return jax.jit(run, donate_argnums=1)


def gathered(state: State) -> State:
    """A state with all of its parts together again, for reading."""
    if jax.process_count() == 1:
        return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.devices()[0]), state)
    plain = state._replace(key=jax.random.key_data(state.key))
    everything = jax.tree.map(lambda leaf: jnp.asarray(multihost_utils.process_allgather(leaf, tiled=True)), plain)
    return everything._replace(key=jax.random.wrap_key_data(everything.key))
