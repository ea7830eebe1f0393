"""Training on data or rows that do not lie on the device.

Which members a step looks at follows from the key and the number of the step, so the data of coming steps can be read ahead,
while the present steps are computed; the result is that of data on the device, up to rounding. Rows in host memory are
handed to each step and taken back from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pavi import rows as row_ops
from pavi.data import stored_at
from pavi.schedule import LONGEST_CHUNK
from pavi.sources import Stored
from pavi.stepping import Inputs, Problem, State, drawn_at
from pavi.template import Level
from pavi.train import chunk_runner

# Bytes of data read ahead, and at most for how many steps.
AHEAD_BYTES = 2**27
MOST_AHEAD = 64


# Reads the data of the next steps: (key, first step, how many) -> members of each plate, and data by site, step by step.
Reader = Callable[[np.ndarray, int, int], tuple[Mapping[str, np.ndarray], Mapping[str, Any]]]


class Streamed:
    """Runs chunks of steps on data or rows that are partly stored elsewhere.

    Args:
        stored: such data.
        run: runs a few steps, whose data it is given after the other arguments of `chunk_runner`.
        read: reads their data.
    """

    def __init__(self, problem: Problem, stored: Mapping[str, Stored], run: Callable[..., tuple[State, Any]], read: Reader):
        self.problem, self.run, self.read = problem, run, read
        batch = dict(problem.batch)
        each = sum(
            np.prod([batch[plate] for plate in problem.template.site(name).level], dtype=np.int64)
            * np.prod(problem.template.site(name).member_shape, dtype=np.int64)
            * np.dtype(array.dtype).itemsize
            for name, array in stored.items()
        )
        # Rows that one step writes the next one reads, so these take a step at a time.
        self.block = 1 if problem.hosted else int(np.clip(AHEAD_BYTES // max(int(each), 1), 2, MOST_AHEAD))
        self._pool = ThreadPoolExecutor(1)
        self._ahead: tuple[tuple, Future] | None = None

    def __call__(
        self, problem: Problem, inputs: Inputs, state: State, rates: np.ndarray, count: np.integer
    ) -> tuple[State, np.ndarray]:
        elbos = np.full(LONGEST_CHUNK, np.nan)
        hosted = {level: (state.weights.rows[level], state.row_optimizer[level]) for level in problem.hosted}
        key, first = np.asarray(jax.random.key_data(state.key)), int(state.step)
        for start in range(0, int(count), self.block):
            taken = min(self.block, int(count) - start)
            indices, data = self._next(key, first + start)
            # The next block begins where this one ends.
            after = first + start + taken
            self._ahead = (key.tobytes(), after), self._pool.submit(self.read, key, after, self.block)
            some = np.zeros(self.block, np.float32)
            some[:taken] = rates[start : start + taken]
            places = {level: tuple(indices[plate][0] for plate in level) for level in hosted}
            shown = _with_rows(state, {level: row_ops.read(hosted[level], places[level]) for level in hosted})
            state, found = self.run(problem, inputs, shown, some, np.int32(taken), data)
            for level, place in places.items():
                row_ops.write(hosted[level], place, (state.weights.rows[level], state.row_optimizer[level]))
            elbos[start : start + taken] = np.asarray(found)[:taken]
        return _with_rows(state, hosted), elbos

    def _next(self, key: np.ndarray, first: int) -> tuple[Mapping[str, np.ndarray], Mapping[str, Any]]:
        if self._ahead is not None and self._ahead[0] == (key.tobytes(), first):
            return self._ahead[1].result()
        return self.read(key, first, self.block)


def read_at(
    problem: Problem, stored: Mapping[str, Stored], indices: Mapping[str, np.ndarray], count: int
) -> dict[str, np.ndarray]:
    """The stored data of so many steps, one after the other, at the members of each."""
    each = [stored_at(problem.template, stored, {plate: index[k] for plate, index in indices.items()}) for k in range(count)]
    return {name: np.stack([data[name] for data in each]) for name in stored}


def _with_rows(state: State, found: Mapping[Level, tuple]) -> State:
    """A state with other rows and row optimizers of some levels."""
    rows = {**state.weights.rows, **{level: rows for level, (rows, _) in found.items()}}
    optimizer = {**state.row_optimizer, **{level: tree for level, (_, tree) in found.items()}}
    return state._replace(weights=state.weights._replace(rows=rows), row_optimizer=optimizer)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _members(problem: Problem, count: int, key: Array, first: Int[Array, ""]) -> dict[str, Array]:
    """Which members of each plate the next `count` steps look at."""
    wrapped = jax.random.wrap_key_data(key)
    return jax.vmap(lambda number: drawn_at(problem, wrapped, number)[0].indices)(first + jnp.arange(count))


def runner(problem: Problem, stored: Mapping[str, Stored], quick: bool) -> Any:
    """What runs a chunk of steps on one device: all on it where data and rows are there."""
    if not stored and not problem.hosted:
        return chunk_runner(quick)

    def read(key: np.ndarray, first: int, count: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        indices = jax.device_get(_members(problem, count, key, np.int32(first)))
        return indices, read_at(problem, stored, indices, count)

    return Streamed(problem, stored, chunk_runner(quick), read)
