"""Training on data or rows that do not lie on the device.

Which members a step looks at follows from the key and the number of the step, so the data of coming steps can be read ahead,
while the present steps are computed; the result is that of data on the device, up to rounding. So are rows in host memory
(`pavi.hosting`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pavi.ahead import steps_ahead
from pavi.data import stored_at
from pavi.hosting import Hosting
from pavi.sources import Stored
from pavi.stepping import Inputs, Problem, State, drawn_at
from pavi.train import chunk_runner


class Source(NamedTuple):
    """Where the data of steps come from.

    JAX is asked for members, and given data, in the thread that trains: settings of JAX may hold for that thread alone.
    """

    members: Callable[[np.ndarray, np.integer], Any]
    """The members that a block of steps looks at, from a key and the number of the first step."""
    read: Callable[[Any], tuple[Mapping[str, np.ndarray], Any]]
    """The same on the host, and the data of these members."""
    put: Callable[[Any], Any] = lambda data: data
    """Puts data where steps look for them."""


class Streamed:
    """Runs chunks of steps on data or rows that are partly stored elsewhere.

    Args:
        stored: such data.
        source: reads their data for so many steps.
        run: runs a few steps, whose data it is given after the other arguments of `chunk_runner`.
        hosting: runs them instead where rows lie in host memory.
    """

    def __init__(
        self,
        problem: Problem,
        stored: Mapping[str, Stored],
        source: Callable[[int], Source],
        run: Callable[..., tuple[State, Any]],
        hosting: Hosting | None = None,
    ):
        self.run, self.hosting = run, hosting
        rows = {} if hosting is None else hosting.shapes()
        self.block = steps_ahead(problem.template, dict(problem.batch), stored, rows)
        self.source = source(self.block)
        self._pool = ThreadPoolExecutor(1)
        self._ahead: tuple[tuple, Future] | None = None

    def __call__(
        self, problem: Problem, inputs: Inputs, state: State, rates: np.ndarray, count: np.integer
    ) -> tuple[State, np.ndarray]:
        if self.hosting is None:
            return self._steps(problem, inputs, state, rates, int(count))
        try:
            self.hosting.begin(state)
            state, elbos = self._steps(problem, inputs, state, rates, int(count))
            return self.hosting.end(state), elbos
        except BaseException:
            self.hosting.abandon()
            raise

    def _steps(
        self, problem: Problem, inputs: Inputs, state: State, rates: np.ndarray, count: int
    ) -> tuple[State, np.ndarray]:
        elbos: list[Any] = []
        key, first = np.asarray(jax.random.key_data(state.key)), int(state.step)
        for start in range(0, count, self.block):
            taken = min(self.block, count - start)
            indices, data = self._next(key, first + start)
            # The next block begins where this one ends.
            coming = self._read_ahead(key, first + start + taken)
            some = np.zeros(self.block, np.float32)
            some[:taken] = rates[start : start + taken]
            if self.hosting is None:
                state, found = self.run(problem, inputs, state, some, np.int32(taken), data)
            else:
                last = start + taken == count
                state, found = self.hosting.run(inputs, state, some, taken, data, indices, None if last else coming)
            elbos.append(found)
            jax.block_until_ready(elbos[-2:-1])  # the device goes on, while no more than two blocks of data lie there
        return state, np.concatenate(elbos)

    def _read_ahead(self, key: np.ndarray, first: int) -> Future:
        coming = self._pool.submit(self.source.read, self.source.members(key, np.int32(first)))
        self._ahead = (key.tobytes(), first), coming
        return coming

    def _next(self, key: np.ndarray, first: int) -> tuple[Mapping[str, np.ndarray], Any]:
        if self._ahead is None or self._ahead[0] != (key.tobytes(), first):
            self._read_ahead(key, first)
        assert self._ahead is not None
        indices, data = self._ahead[1].result()
        return indices, self.source.put(data)


def read_at(
    problem: Problem, stored: Mapping[str, Stored], indices: Mapping[str, np.ndarray], count: int
) -> dict[str, np.ndarray]:
    """The stored data of so many steps, one after the other, at the members of each."""
    found = stored_at(problem.template, stored, indices)
    whole = {name: array for name, array in found.items() if not problem.template.site(name).level}
    return found | {name: np.broadcast_to(array, (count, *array.shape)) for name, array in whole.items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _members(problem: Problem, count: int, key: Array, first: Int[Array, ""]) -> dict[str, Array]:
    """Which members of each plate the next `count` steps look at."""
    wrapped = jax.random.wrap_key_data(key)
    return jax.vmap(lambda number: drawn_at(problem, wrapped, number)[0].indices)(first + jnp.arange(count))


def runner(problem: Problem, stored: Mapping[str, Stored], quick: bool) -> Any:
    """What runs a chunk of steps on one device: all on it where data and rows are there."""
    if not stored and not problem.hosted:
        return chunk_runner(quick)

    def source(count: int) -> Source:
        def read(members: Any) -> tuple[Mapping[str, np.ndarray], Any]:
            indices = jax.device_get(members)
            return indices, read_at(problem, stored, indices, count)

        return Source(functools.partial(_members, problem, count), read)

    hosting = Hosting(problem, quick) if problem.hosted else None
    return Streamed(problem, stored, source, chunk_runner(quick), hosting)
