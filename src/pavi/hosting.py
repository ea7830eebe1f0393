"""Rows in host memory: those of a few steps are on the device at a time.

Which members the coming steps look at is known, so their rows are read while the present steps run, and written back behind
them. So what is read does not yet have what the steps just before made of it. These steps' rows stay on the device, and
where members are the same, a step takes what the last of them made.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pavi import rows as row_ops
from pavi.compiling import step_options
from pavi.stepping import Inputs, Problem, State
from pavi.template import Level

# Rows and the state of their optimizer, by level.
Rows = Mapping[Level, tuple[Any, Any]]
# Members of each plate, step by step.
Members = Mapping[str, np.ndarray]
# Where members of a plate were in earlier steps; -1 where they were not.
Places = Mapping[str, Int[Array, "step earlier member"]]


class Fetched(NamedTuple):
    """Rows of the members of some steps, as they lay on the host, and where these members were just before."""

    rows: Rows
    places: Mapping[str, np.ndarray]


class Hosting:
    """Runs steps, some at a time, on rows that lie in host memory."""

    def __init__(self, problem: Problem, quick: bool):
        self.problem, self.quick = problem, quick
        self._reader, self._writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._rows: Rows = {}
        self._made: Rows | None = None
        self._fetching: Future | None = None
        self._writing: list[Future] = []
        self._lock = Lock()  # held while rows are written, and by who takes them away

    def shapes(self) -> Rows:
        """Shapes and dtypes of all rows in host memory and of the state of their optimizer."""
        problem = self.problem
        every = problem.family.shapes(problem.template, problem.whole).rows
        start = functools.partial(row_ops.init_optimizer, problem.row_optimizer)
        return {level: (rows, jax.eval_shape(start, rows)) for level, rows in every.items() if level in problem.hosted}

    def begin(self, state: State) -> None:
        """Takes over the rows of a state, as they are now."""
        self._rows, self._made, self._fetching = _rows_of(self.problem, state), None, None

    def abandon(self) -> None:
        """Leaves rows as they are after steps that failed: nothing that waits to be written is written any more."""
        for each in self._writing:
            each.cancel()
        with self._lock:
            self._rows = {}
        self._release()

    def _release(self) -> None:
        self._rows, self._made, self._fetching = {}, None, None
        self._writing.clear()

    def run(
        self,
        inputs: Inputs,
        state: State,
        rates: np.ndarray,
        count: int,
        stored: Mapping[str, Any],
        members: Members,
        coming: Future | None,
    ) -> tuple[State, Array]:
        """`count` steps, whose members are given; the ELBO of each.

        Args:
            coming: what begins with the members of the steps after these, if there are any.
        """
        fetched = self._fetch(members, None) if self._fetching is None else self._fetching.result()
        made = jax.tree.map(np.zeros_like, fetched.rows) if self._made is None else self._made
        first = jax.tree.map(lambda array: array[0], fetched.rows)
        run = _runner(self.quick)
        state, elbos, self._made = run(
            self.problem, inputs, _with_rows(state, first), rates, np.int32(count), stored, fetched, made
        )
        # Rows of these steps are written while the next are read: those that are the same are taken from what was made. What
        # the steps before made must have been written by then.
        before = self._writing[-1:]
        self._fetching = None if coming is None else self._reader.submit(self._fetch_after, before, coming, members)
        self._writing.append(self._writer.submit(self._write, members, self._made, count))
        return state, elbos

    def end(self, state: State) -> State:
        """The state with all rows on the host, written."""
        for each in self._writing:
            each.result()
        whole = _with_rows(state, self._rows)
        self._release()
        return whole

    def _fetch_after(self, written: list[Future], coming: Future, before: Members) -> Fetched:
        for each in written:
            each.result()
        return self._fetch(coming.result()[0], before)

    def _fetch(self, members: Members, before: Members | None) -> Fetched:
        fetched = {level: row_ops.read(rows, tuple(members[plate] for plate in level)) for level, rows in self._rows.items()}
        plates = {plate for level in self._rows for plate in level}
        return Fetched(
            fetched,
            {p: _places(members[p], None if before is None else before[p], self.problem.sizes[p]) for p in plates},
        )

    def _write(self, members: Members, made: Rows, count: int) -> None:
        made = jax.device_get(made)  # starts all copies before it waits for one
        for k in range(count):  # of a member that is there twice the last counts
            with self._lock:
                for level, rows in self._rows.items():
                    place = tuple(members[plate][k] for plate in level)
                    row_ops.write(rows, place, jax.tree.map(lambda each: each[k], made[level]))  # noqa: B023 (called at once)


def _rows_of(problem: Problem, state: State) -> dict[Level, tuple]:
    return {level: (state.weights.rows[level], state.row_optimizer[level]) for level in problem.hosted}


def _with_rows(state: State, found: Rows) -> State:
    """A state with other rows and row optimizers of some levels."""
    rows = {**state.weights.rows, **{level: rows for level, (rows, _) in found.items()}}
    optimizer = {**state.row_optimizer, **{level: tree for level, (_, tree) in found.items()}}
    return state._replace(weights=state.weights._replace(rows=rows), row_optimizer=optimizer)


def _places(members: np.ndarray, before: np.ndarray | None, size: int) -> np.ndarray:
    """For each step, where its members were in each of the steps before and in those of its own block; -1 if not there.

    Members beyond the last are none, and a step has not been made before it is run.
    """
    count, length = members.shape
    found = np.full((count, 2 * count, length), -1, np.int32)
    for number, earlier in enumerate([*(() if before is None else before), *members], 0 if before is not None else count):
        order = np.argsort(earlier, kind="stable")
        place = order[np.minimum(np.searchsorted(earlier, members, sorter=order), length - 1)]
        there = (earlier[place] == members) & (members < size)
        there[: max(number - count + 1, 0)] = False
        found[:, number][there] = place[there]
    return found


@functools.cache
def _runner(quick: bool) -> Any:
    return jax.jit(_run, static_argnums=0, donate_argnums=2, compiler_options=step_options(quick))


def _run(
    problem: Problem,
    inputs: Inputs,
    state: State,
    rates: Float[Array, " step"],
    count: Int[Array, ""],
    stored: Mapping[str, Array],
    fetched: Fetched,
    before: Rows,
) -> tuple[State, Float[Array, " step"], Rows]:
    """`count` steps in one compiled loop: the ELBO of each, and the rows that each has made."""
    block = len(rates)

    def body(k: Int[Array, ""], carry: tuple[State, Array, Rows]) -> tuple[State, Array, Rows]:
        state, elbos, made = carry
        rows = {level: _latest(level, fetched, made[level], k) for level in fetched.rows}
        data = {name: each[k] for name, each in stored.items()}
        state, elbo = problem.step(inputs, _with_rows(state, rows), rates[k], **data)
        made = jax.tree.map(lambda all, new: all.at[block + k].set(new), made, _rows_of(problem, state))
        return state, elbos.at[k].set(elbo), made

    made = jax.tree.map(lambda array: jnp.concatenate([array, jnp.zeros_like(array)]), dict(before))
    state, elbos, made = jax.lax.fori_loop(0, count, body, (state, jnp.full(rates.shape, jnp.nan), made))
    return state, elbos, jax.tree.map(lambda array: array[block:], made)


def _latest(level: Level, fetched: Fetched, made: Any, k: Int[Array, ""]) -> Any:
    """The rows of the `k`-th step's members: of the last step that made them, or else as they were fetched."""
    places = [jnp.asarray(fetched.places[plate])[k] for plate in level]
    shapes = [[-1 if axis == own else 1 for axis in range(len(level))] for own in range(len(level))]
    numbers = jnp.arange(1, len(places[0]) + 1).reshape(-1, *[1] * len(level))
    for place, shape in zip(places, shapes, strict=True):
        numbers = jnp.where((place >= 0).reshape(len(place), *shape), numbers, 0)
    number = numbers.max(0)
    step = jnp.maximum(number - 1, 0)
    index = [place[step, jnp.arange(place.shape[1]).reshape(shape)] for place, shape in zip(places, shapes, strict=True)]

    def pick(made: Array, read: Array) -> Array:
        known = (number > 0).reshape(*number.shape, *[1] * (read.ndim - 1 - number.ndim))
        return jnp.where(known, made[(step, *index)], read[k])

    return jax.tree.map(pick, made, fetched.rows[level])
