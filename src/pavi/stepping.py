"""One training step: a pure `init` / `step` pair and the records they work on.

A step draws a branch, gathers the rows and the data of its members, differentiates the reduced ELBO, and writes back the
shared weights and just those rows (paper, algorithm 2). Nothing in it grows with the study.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pavi import data as observed_data
from pavi import rows as row_ops
from pavi.branch import Branch, draw_branch
from pavi.cascade import Study, cascade
from pavi.elbo import reduced_elbo
from pavi.errors import SettingError
from pavi.families import Family, Glimpse, Joint, Units, Weights
from pavi.inner import Inner
from pavi.mesh import SHARD, Shards
from pavi.sources import Stored
from pavi.template import Level, Template

# A number of a gradient counts as at most this many times what it usually is: a draw far off its posterior may have one that
# is larger by many orders, and Adam would take no more steps until it has forgotten it.
LARGEST_SURPRISE = 30.0
SHARED_RATE = 5e-3


def _adam(b1: float, b2: float) -> optax.GradientTransformation:
    """Adam that is not thrown by a few gradients out of all proportion."""
    plain = optax.scale_by_adam(b1=b1, b2=b2)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def bounded(grad: Array, square: Array) -> Array:
            usual = jnp.sqrt(square / (1 - b2**state.count))
            return jnp.where(square > 0, jnp.clip(grad, -LARGEST_SURPRISE * usual, LARGEST_SURPRISE * usual), grad)

        return plain.update(jax.tree.map(bounded, grads, state.nu), state, params)

    return optax.GradientTransformation(plain.init, update)


# With a short memory of squared gradients: they fall by orders of magnitude as the posterior narrows.
ADAM = _adam(b1=0.9, b2=0.95)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything a compiled step depends on besides arrays. Equal problems share their compiled steps."""

    study: Study
    family: Family
    batch: tuple[tuple[str, int], ...]
    num_particles: int
    optimizer: optax.GradientTransformation
    row_optimizer: optax.GradientTransformation
    shards: Shards | None = None
    """A plate that is split over devices; a step then runs on one part of it."""
    runs: tuple[tuple[str, int], ...] = ()
    """Plates whose members are drawn several side by side, and how many."""
    hosted: frozenset[Level] = frozenset()
    """Levels whose rows lie in host memory; a step is given those of its members."""
    inner: Inner | None = None
    """A level whose latents are averaged out over points of their prior for all but their own flows."""
    folder: str | None = dataclasses.field(default=None, compare=False)
    """Where such rows are memory maps; by default they are in memory."""

    @property
    def template(self) -> Template:
        return self.study.template

    @property
    def sizes(self) -> dict[str, int]:
        return {plate.name: plate.size for plate in self.template.plates}

    @property
    def parts(self) -> int:
        """Over how many devices a step runs."""
        return 1 if self.shards is None else self.shards.parts

    def share(self, level: Level) -> float:
        """What one device counts of a level: all of what only it has, else its part."""
        return 1.0 if self.shards is None or self.shards.plate in level else 1 / self.parts

    @property
    def whole(self) -> frozenset[str]:
        """The plates whose members are all taken in every step."""
        sizes = self.sizes
        if self.shards is not None:
            sizes[self.shards.plate] = self.shards.parts * self.shards.length
        return frozenset(plate for plate, count in self.batch if count == sizes[plate])

    def step(
        self, inputs: Inputs, state: State, rate: Float[Array, ""], /, **stored: Array
    ) -> tuple[State, Float[Array, ""]]:
        return step(self, inputs, state, rate, stored)


class Bounds(NamedTuple):
    """Two bounds of the evidence from the same draws: the ELBO, and the one with an inner level averaged out."""

    elbo: Float[Array, ""]
    averaged: Float[Array, ""]


class Inputs(NamedTuple):
    """The arrays a step reads and does not change."""

    arguments: Any
    data: dict[str, Array]
    units: Units
    paces: Float[Array | np.ndarray, " weights"] | float = 1.0
    """What the rates of the shared weights are multiplied by, each: zero holds a weight."""
    row_paces: dict[Level, Any] = {}  # noqa: RUF012 (of a tuple)
    """What the rates of a level's rows are multiplied by."""


class State(NamedTuple):
    """The arrays a step changes."""

    weights: Weights
    optimizer: Any
    row_optimizer: dict[Level, Any]
    key: PRNGKeyArray
    step: Int[Array, ""]
    skipped: Int[Array, ""]


@functools.cache
def default_optimizers(row_rate: float) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Optimizers of the shared weights and of the rows, whose learning rate is `row_rate` times the shared one."""
    return optax.chain(ADAM, optax.scale(-SHARED_RATE)), optax.chain(ADAM, optax.scale(-row_rate * SHARED_RATE))


def init(problem: Problem, data: Mapping[str, Any], seed: np.ndarray, start: int = 0) -> State:
    """The state before the first step. `seed` is the data of a JAX key; other starts have other weights."""
    weights = problem.family.init(
        problem.template, np.random.default_rng([*seed, start]), in_pieces(problem, data), problem.whole
    )
    return place(problem, weights, seed)


def in_pieces(problem: Problem, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Data to be read piece by piece, which gives rows on the host, where the device is not to hold all of them."""
    if not problem.hosted and problem.shards is None:
        return data
    return {name: array if isinstance(array, Stored) else Stored(array) for name, array in data.items()}


def place(problem: Problem, weights: Weights, seed: np.ndarray) -> State:
    """The state before the first step from given weights, each of its arrays where the problem wants it."""
    if problem.shards is not None:
        return _placed_on_all(problem, problem.shards, weights, seed)
    hosted = {level: rows for level, rows in weights.rows.items() if level in problem.hosted}
    rest = {level: rows for level, rows in weights.rows.items() if level not in problem.hosted}
    state = first_state(problem.optimizer, problem.row_optimizer, weights._replace(rows=rest), seed)
    rows, optimizer = dict(state.weights.rows), dict(state.row_optimizer)
    if hosted and any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state.optimizer)):
        raise SettingError(
            "optimizer=...: its state holds a random key per row, and rows are to lie in host memory, where keys cannot. "
            "Take an optimizer without random numbers, or placement='device'."
        )
    for level, array in hosted.items():
        rows[level], optimizer[level] = row_ops.on_host(
            problem.row_optimizer, array, problem.folder and os.path.join(problem.folder, "-".join(level))
        )
    return state._replace(weights=state.weights._replace(rows=rows), row_optimizer=optimizer)


def _placed_on_all(problem: Problem, shards: Shards, weights: Weights, seed: np.ndarray) -> State:
    """The state before the first step, laid out on several devices: none ever holds more than its own part."""
    rows = {level: shards.lay_out(array, level) for level, array in weights.rows.items()}
    weights = weights._replace(shared=shards.put(weights.shared, PartitionSpec()), rows=rows)
    make = partial(_first_state, problem.optimizer, problem.row_optimizer)
    specs = state_specs(shards, jax.eval_shape(make, weights, seed))
    places = jax.tree.map(partial(NamedSharding, shards.mesh), specs)
    return jax.jit(make, out_shardings=places, donate_argnums=0)(weights, seed)


def state_specs(shards: Shards, state: State) -> State:
    """How each array of a state is split over devices."""
    everything = jax.tree.map(lambda _: PartitionSpec(), state)
    rows = {level: shards.spec(level) for level in state.weights.rows}
    row_optimizer = {
        level: jax.tree.map(lambda _, spec=rows[level]: spec, tree) for level, tree in state.row_optimizer.items()
    }
    return everything._replace(weights=everything.weights._replace(rows=rows), row_optimizer=row_optimizer)


def _first_state(
    optimizer: optax.GradientTransformation, row_optimizer: optax.GradientTransformation, weights: Weights, seed: Array
) -> State:
    """The state before the first step from given weights, which it takes over: their buffers are gone afterwards."""
    zero = jnp.zeros((), jnp.int32)
    row_states = {level: row_ops.init_optimizer(row_optimizer, rows) for level, rows in weights.rows.items()}
    key = jax.random.wrap_key_data(seed)
    return State(weights, optimizer.init(weights.shared), row_states, key, zero, zero)


first_state = jax.jit(_first_state, static_argnums=(0, 1), donate_argnums=2)


def drawn_at(problem: Problem, key: PRNGKeyArray, number: Int[Array, ""]) -> tuple[Branch, PRNGKeyArray]:
    """The branch that a step looks at, and the key of its noise. On one of several devices: of its own part of the plate."""
    branch_key, noise_key = jax.random.split(jax.random.fold_in(key, number))
    sizes, batch, runs = problem.sizes, dict(problem.batch), dict(problem.runs)
    if problem.shards is None:
        return draw_branch(branch_key, sizes, batch, runs), noise_key
    plate, part, shards = problem.shards.plate, jax.lax.axis_index(SHARD), problem.shards
    own_key = jax.random.fold_in(jax.random.fold_in(branch_key, len(sizes)), part)
    drawn = batch.pop(plate) // shards.parts
    del sizes[plate]
    branch = draw_branch(branch_key, sizes, batch, runs)

    def own(size: int) -> Branch:
        return draw_branch(own_key, {plate: size}, {plate: drawn}, runs)

    if drawn == shards.length:  # all of them
        here = own(shards.length)
        here = Branch(here.indices, here.weights, {plate: here.indices[plate] < jnp.asarray(shards.counts)[part]})
    else:
        here = own(shards.length)
        if shards.size % shards.parts:
            full = jnp.asarray(shards.counts)[part] == shards.length
            here = jax.tree.map(partial(jnp.where, full), here, own(shards.length - 1))
    return Branch(branch.indices | here.indices, branch.weights | here.weights, branch.mask | here.mask), noise_key


def _in_study(problem: Problem, branch: Branch) -> Branch:
    """A branch with the indices that its members have in the whole study.

    What goes beyond a plate stands for its last member: covariates beyond the last are NaN, and so would its gradients be,
    though it does not count.
    """
    indices, padded = dict(branch.indices), [plate for plate, _ in problem.runs]
    if problem.shards is not None:
        plate, firsts = problem.shards.plate, jnp.asarray(problem.shards.firsts, jnp.int32)
        indices[plate] = indices[plate] + firsts[jax.lax.axis_index(SHARD)]
        padded.append(plate)
    sizes = problem.sizes
    indices |= {plate: jnp.minimum(indices[plate], sizes[plate] - 1) for plate in padded}
    return Branch(indices, branch.weights, branch.mask)


def _summed(problem: Problem, value: Array, shared_grad: Array, row_grads: dict[Level, Array]) -> tuple:
    """Sums over devices: the ELBO, and the gradients of what they share."""
    if problem.shards is None:
        return value, shared_grad, row_grads
    plate = problem.shards.plate
    rows = {level: grad if plate in level else jax.lax.psum(grad, SHARD) for level, grad in row_grads.items()}
    return jax.lax.psum(value, SHARD), jax.lax.psum(shared_grad, SHARD), rows


def _particles(problem: Problem, key: PRNGKeyArray) -> tuple[Array, Array | None]:
    """Keys of the particles, and their signs where there are some.

    Beside inner points, every other particle mirrors the global draws of the one before it, on the same noise
    elsewhere. What both have in common then cancels from what members' flows are told to make of the global draws.
    """
    count = problem.num_particles
    if problem.inner is None or count % 2:
        return jax.random.split(key, count), None
    return jnp.repeat(jax.random.split(key, count // 2), 2), jnp.tile(jnp.array([1.0, -1.0]), count // 2)


def step(
    problem: Problem,
    inputs: Inputs,
    state: State,
    rate: Float[Array, ""],
    stored: Mapping[str, Array] = MappingProxyType({}),
) -> tuple[State, Float[Array, ""]]:
    """One training step at a fraction `rate` of the optimizers' learning rates; returns the reduced ELBO too.

    `stored` are the data, at this step's members, of the sites that are not among the inputs.

    A step whose ELBO or gradient is not finite changes nothing but the count of skipped steps.
    """
    template, whole = problem.template, problem.whole
    branch, noise_key = drawn_at(problem, state.key, state.step)
    here = {level for level in state.weights.rows if level in problem.hosted or set(level) <= whole}
    index = {level: () if level in here else branch.at(level) for level in state.weights.rows}
    rows = {level: row_ops.gather(array, index[level]) for level, array in state.weights.rows.items()}
    row_states = {level: row_ops.gather(tree, index[level]) for level, tree in state.row_optimizer.items()}
    sliced = {**observed_data.at_branch(template, inputs.data, branch, whole), **stored}
    # The barrier keeps the reading apart from what is made of it: mostly the same bits, wherever rows and data come from.
    branch, rows, sliced = jax.lax.optimization_barrier((branch, rows, sliced))

    memory_index = {key: () if set(key[1]) <= whole else branch.at(key[1]) for key in state.weights.memory}
    memory = {key: row_ops.gather(array, memory_index[key]) for key, array in state.weights.memory.items()}
    branch = _in_study(problem, branch)
    glimpse = Glimpse(problem.study, inputs.arguments, branch, sliced)

    def loss(shared: Array, rows: dict[Level, Array]) -> tuple[Bounds, Any]:
        encodings, new_memory = problem.family.encode(Weights(shared, rows, memory), inputs.units, glimpse)
        sampler = problem.family.sampler(template, inputs.units, shared)

        def particle(key: PRNGKeyArray, sign: Array | None) -> Bounds:
            shown = encodings
            if isinstance(problem.family, Joint):
                shown = problem.family.together(template, inputs.units, shared, encodings, key, training=True)

            def bound(inner: Inner | None) -> Array:
                run = partial(cascade, problem.study, inputs.arguments, sampler, shown, branch, sliced, key, sign=sign)
                return reduced_elbo(template, branch, run(inner=inner), problem.share, inner)

            elbo = bound(None)
            return Bounds(elbo, elbo if problem.inner is None else bound(problem.inner))

        found = jax.vmap(particle)(*_particles(problem, noise_key))
        return jax.tree.map(lambda each: -each.mean(), found), new_memory

    losses, pull_back, new_memory = jax.vjp(loss, state.weights.shared, rows, has_aux=True)
    one, better = jnp.ones_like(losses.elbo), jnp.zeros_like(losses.elbo)
    if problem.inner is not None:
        # The bound with members averaged out is the one to follow, unless points miss where their likelihoods lie.
        both = losses if problem.shards is None else jax.lax.psum(losses, SHARD)
        better = (both.averaged < both.elbo).astype(better.dtype)
    value = jnp.where(better > 0, losses.averaged, losses.elbo)
    shared_grad, row_grads = pull_back(Bounds(one - better, better))
    if problem.inner is not None:
        # The members' own flows have no part in it, and stay with the ELBO.
        inner_shared, inner_rows = pull_back(Bounds(one, jnp.zeros_like(one)))
        for name, part in problem.family.parts(template).items():
            if problem.inner.holds(template.site(name)):
                shared_grad = shared_grad.at[part].set(inner_shared[part])
        row_grads = {
            level: inner_rows[level] if set(problem.inner.level) <= set(level) else grad for level, grad in row_grads.items()
        }
    value, shared_grad, row_grads = _summed(problem, value, shared_grad, row_grads)
    # Zero times a number is zero exactly when the number is finite. Squares must be too: Adam keeps them, and never forgets
    # one that is not.
    finite = jnp.isfinite(value + sum((0.0 * (leaf * leaf)).sum() for leaf in jax.tree.leaves((shared_grad, row_grads))))
    if problem.shards is not None:
        finite = jax.lax.pmin(finite.astype(jnp.int32), SHARD) > 0

    def kept(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    shared = state.weights.shared
    updates, optimizer_state = problem.optimizer.update(shared_grad, state.optimizer, shared)
    new_rows, new_row_states = {}, {}
    for level, old in rows.items():
        row_updates, row_state = row_ops.update(problem.row_optimizer, row_grads[level], row_states[level], old)
        row_rate = rate * inputs.row_paces[level] if level in inputs.row_paces else rate
        new_rows[level] = row_ops.scatter(state.weights.rows[level], index[level], kept(old + row_rate * row_updates, old))
        row_state = kept(row_state, row_states[level])
        new_row_states[level] = row_ops.scatter(state.row_optimizer[level], index[level], row_state)
    new_memories = {
        key: row_ops.scatter(array, memory_index[key], kept(new_memory[key], memory[key]))
        for key, array in state.weights.memory.items()
    }
    new_state = State(
        Weights(kept(shared + rate * inputs.paces * updates, shared), new_rows, new_memories),
        kept(optimizer_state, state.optimizer),
        new_row_states,
        state.key,
        state.step + 1,
        state.skipped + ~finite,
    )
    return new_state, -value
