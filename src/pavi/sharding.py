"""Training on several devices: rows and data lie along one plate, each device draws members of its own part.

Every device runs the same steps on its own part of the plate, with the same draws of all that the parts share; gradients are
summed. Parts are equal, or differ by one member, whose chance to be drawn its weight makes up for. Data that are stored
elsewhere are read for each part. With `jax.distributed` the same code runs on several processes, each of which reads what
its own devices need.
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
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from pavi.compiling import step_options
from pavi.encodings import SetEncoder
from pavi.errors import SettingError
from pavi.families import PAVI
from pavi.inner import Inner
from pavi.mesh import SHARD, Shards
from pavi.sources import Stored
from pavi.stepping import Inputs, Problem, State, drawn_at, state_specs
from pavi.streaming import Source, Streamed, read_at
from pavi.template import Template
from pavi.train import run_chunk


def number_of(devices: int | Mapping[str, int] | None) -> int:
    """How many devices were asked for, as a number or for a plate."""
    return devices if isinstance(devices, int) else next(iter((devices or {}).values()), 1)


def split_along(template: Template, devices: int | Mapping[str, int], inner: Inner | None = None) -> Shards:
    """`split_plate` over devices that there are.

    Raises:
        SettingError: if there are not as many, or some process would have none.
    """
    count, found = number_of(devices), jax.device_count()
    if count > found:
        raise SettingError(
            f"devices={devices!r}: expected a number up to {found}, the devices there are, or one plate with it."
        )
    idle = set(range(jax.process_count())) - {device.process_index for device in jax.devices()[:count]}
    if idle:
        raise SettingError(
            f"devices={devices!r}: {len(idle)} of the {jax.process_count()} processes would have none. Take all "
            f"{jax.device_count()} (devices=jax.device_count()), or start fewer processes."
        )
    return split_plate(template, devices, inner)


def split_plate(template: Template, devices: int | Mapping[str, int], inner: Inner | None = None) -> Shards:
    """Which plate is split into how many parts: the one named, or the one that most numbers lie along.

    Raises:
        SettingError: if no plate has as many members, or none whose members can be apart: all that depends on a member that
            is averaged out over points must be on one device.
    """
    named, count = dict(devices) if isinstance(devices, Mapping) else {}, number_of(devices)
    if len(named) > 1 or count < 1:
        raise SettingError(f"devices={devices!r}: expected a number of devices, at least 1, or one plate with it.")
    sizes = {plate.name: plate.size for plate in template.plates}
    unknown = [plate for plate in named if plate not in sizes]
    if unknown:
        raise SettingError(f"devices={devices!r}: the model has no plate {unknown[0]!r}. Its plates: {list(sizes)}.")
    together = set() if inner is None else inner.below(template)
    if together & set(named):
        raise SettingError(
            f"devices={devices!r}: with inner_points, members of {inner and inner.level} are averaged over with all that "
            f"depends on them, so {sorted(together)} cannot be split over devices. Name another plate."
        )
    large = [p for p, size in sizes.items() if size >= count and p not in together and (not named or p in named)]
    if not large:
        raise SettingError(
            f"devices={devices!r}: expected a plate of at least {count} members; the sizes are "
            f"{ {plate: sizes[plate] for plate in (named or sizes)} }."
        )

    def numbers(plate: str) -> int:
        return sum(math.prod(site.shape) for site in template.sites if plate in site.level)

    plate = max(large, key=numbers)
    return Shards(plate, count, sizes[plate])


def sharded(problem: Problem, devices: int | Mapping[str, int]) -> Problem:
    """The problem with one of its plates split over devices, and as many members of it per step on each of them."""
    shards = split_along(problem.template, devices, problem.inner)
    if isinstance(problem.family, PAVI) and isinstance(problem.family.encodings, SetEncoder):
        raise SettingError("devices=...: a SetEncoder needs all members on one device. Use free encodings.")
    if problem.family.whole_plates:
        raise SettingError(f"devices=...: {type(problem.family).__name__} needs all members on one device. Use pavi.PAVI().")
    return split_problem(problem, shards)


def split_problem(problem: Problem, shards: Shards) -> Problem:
    """The problem on parts of a plate, with as many of its members per step on each of them."""
    batch, runs = dict(problem.batch), dict(problem.runs)
    each = math.ceil(batch[shards.plate] / shards.parts)
    if shards.plate in runs:  # as long as one device draws members, and still within a chunk
        asked = runs.pop(shards.plate)
        run = next(length for length in range(min(asked, each), 0, -1) if asked % length == 0)
        each = round(each / run) * run
        runs |= {shards.plate: run} if run > 1 else {}
    if each >= shards.length:
        each = shards.length
        runs.pop(shards.plate, None)
    batch[shards.plate] = each * shards.parts
    return dataclasses.replace(problem, batch=tuple(batch.items()), runs=tuple(runs.items()), shards=shards)


class Sharded:
    """Runs chunks of steps, as `chunk_runner` does, on several devices.

    Args:
        stored: data that are stored elsewhere, or in host memory.
        streamed: whether these are read ahead of the steps. Else they are put on the devices, a part on each.
        quick: whether to compile quickly.
    """

    def __init__(self, problem: Problem, stored: Mapping[str, Stored], streamed: bool, quick: bool):
        assert problem.shards is not None
        self.shards, self.quick = problem.shards, quick
        self.stored = dict(stored)
        self._held = {} if streamed else {name: self._lay_out(problem, name, array) for name, array in stored.items()}
        source = functools.partial(self._source, problem)
        self._streamed = Streamed(problem, stored, source, self._run) if stored and streamed else None
        self._inputs: tuple[Inputs, Inputs] | None = None

    def __call__(self, problem: Problem, inputs: Inputs, state: State, rates: Any, count: Any) -> tuple[State, Any]:
        run = self._run if self._streamed is None else self._streamed
        return run(problem, self._on_all(problem, inputs), state, rates, count)

    def _lay_out(self, problem: Problem, name: str, array: Any) -> Array:
        return self.shards.lay_out(array, problem.template.site(name).level)

    def _on_all(self, problem: Problem, inputs: Inputs) -> Inputs:
        """Inputs on the devices, with all data that do not come step by step."""
        if self._inputs is None or self._inputs[0] is not inputs:
            data = {name: self._lay_out(problem, name, array) for name, array in inputs.data.items()} | self._held
            rest = jax.tree.map(lambda leaf: self.shards.put(leaf, PartitionSpec()), inputs._replace(data={}))
            self._inputs = inputs, rest._replace(data=data)
        return self._inputs[1]

    def _run(
        self,
        problem: Problem,
        inputs: Inputs,
        state: State,
        rates: Any,
        count: Any,
        stored: Mapping[str, Array] | None = None,
    ) -> tuple[State, Array]:
        stored = dict(stored or {})
        everything = jax.tree.map(lambda _: PartitionSpec(), inputs._replace(data={}))
        specs = (
            everything._replace(data={name: self._spec(problem, name) for name in inputs.data}),
            state_specs(self.shards, state),
            {name: self._step_spec(problem, name) for name in stored},
        )
        state = jax.tree.map(self.shards.put, state, specs[1])
        run = _compiled(problem, self.shards, self.quick, *map(_frozen, specs))
        return run(inputs, state, jnp.asarray(rates), jnp.asarray(count), stored)

    def _spec(self, problem: Problem, name: str) -> PartitionSpec:
        return self.shards.spec(problem.template.site(name).level)

    def _step_spec(self, problem: Problem, name: str) -> PartitionSpec:
        return PartitionSpec(None, *self._spec(problem, name))

    def _source(self, problem: Problem, count: int) -> Source:
        """Reads the data of so many steps, for each device those of the members that it draws."""
        template, batch = problem.template, dict(problem.batch)
        wanted = {}
        for name in self.stored:
            site = template.site(name)
            shape = (count, *(batch[plate] for plate in site.level), *site.member_shape)
            wanted[name] = shape, NamedSharding(self.shards.mesh, self._step_spec(problem, name))

        def read(members: Any) -> tuple[dict[str, np.ndarray], Any]:
            drawn, found = jax.device_get(members), {}
            for name, (shape, target) in wanted.items():
                parts = {_begins(index): index for index in target.addressable_devices_indices_map(shape).values()}
                found[name] = {begin: self._part(problem, name, drawn, index) for begin, index in parts.items()}
            return {}, found

        def put(found: Any) -> dict[str, Array]:
            def put_site(name: str, shape: tuple[int, ...], target: NamedSharding) -> Array:
                return jax.make_array_from_callback(shape, target, lambda index: found[name][_begins(index)])

            return {name: put_site(name, *each) for name, each in wanted.items()}

        return Source(functools.partial(_members, problem, count), read, put)

    def _part(self, problem: Problem, name: str, drawn: Mapping[str, np.ndarray], index: Any) -> np.ndarray:
        """The data of one site that one device is to have, of several steps."""
        level, plate = problem.template.site(name).level, self.shards.plate
        start = index[1 + level.index(plate)].start if plate in level else None
        device = (start or 0) // (dict(problem.batch)[plate] // self.shards.parts)
        indices = {each: members[device] for each, members in drawn.items()}
        indices[plate] = indices[plate] + self.shards.firsts[device]
        return read_at(problem, {name: self.stored[name]}, indices, len(indices[plate]))[name]


def _begins(index: tuple[slice, ...] | None) -> tuple[int, ...]:
    """Where a part of an array begins along each axis."""
    return tuple(along.start or 0 for along in index or ())


@functools.partial(jax.jit, static_argnums=(0, 1))
def _members(problem: Problem, count: int, key: Array, first: Int[Array, ""]) -> dict[str, Array]:
    """Which members the next `count` steps look at on each device, which has an axis of its own in front."""
    wrapped = jax.random.wrap_key_data(key)

    def on_one(_: Array) -> dict[str, Array]:
        return jax.vmap(lambda number: drawn_at(problem, wrapped, number)[0].indices)(first + jnp.arange(count))

    return jax.vmap(on_one, axis_name=SHARD)(jnp.arange(problem.parts))


def _frozen(specs: Any) -> tuple:
    leaves, structure = jax.tree.flatten(specs)
    return tuple(leaves), structure


@functools.lru_cache(maxsize=16)
def _compiled(
    problem: Problem, shards: Shards, quick: bool, input_specs: tuple, state_specs: tuple, stored_specs: tuple
) -> Any:
    inputs, state, stored = (
        jax.tree.unflatten(structure, leaves) for leaves, structure in (input_specs, state_specs, stored_specs)
    )
    whole = PartitionSpec()
    run = jax.shard_map(
        functools.partial(run_chunk, problem),
        mesh=shards.mesh,
        in_specs=(inputs, state, whole, whole, stored),
        out_specs=(state, whole),
        check_vma=False,
    )
    return jax.jit(run, donate_argnums=1, compiler_options=step_options(quick))


def gathered(problem: Problem, state: State) -> State:
    """A state with all of its parts together again, for reading: rows in host memory, and gone from the devices."""
    assert problem.shards is not None
    gather, rows = problem.shards.gather, {}
    for level, array in state.weights.rows.items():
        rows[level] = gather(array, level)
        for leaf in jax.tree.leaves((array, state.row_optimizer[level])):
            leaf.delete()
    shared = jnp.asarray(gather(state.weights.shared, ()))
    skipped = jnp.asarray(gather(state.skipped, ()))
    weights = state.weights._replace(shared=shared, rows=rows)
    return state._replace(weights=weights, row_optimizer={}, skipped=skipped)
