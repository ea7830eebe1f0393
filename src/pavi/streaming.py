"""Training on data that do not lie on the device: the next steps' data are read while the present steps are computed.

Which members a step looks at follows from the key and the number of the step, so the data of coming steps can be read ahead,
and the result is that of data on the device, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pavi.data import stored_at
from pavi.schedule import LONGEST_CHUNK
from pavi.sources import Stored
from pavi.stepping import Inputs, Problem, State, drawn_at
from pavi.train import chunk_runner

# Bytes of data read ahead, and at most for how many steps.
AHEAD_BYTES = 2**27
MOST_AHEAD = 64


class Streamed:
    """Runs chunks of steps, as `chunk_runner` does, on data that are partly stored elsewhere."""

    def __init__(self, problem: Problem, stored: Mapping[str, Stored], quick: bool):
        self.problem, self.stored, self.quick = problem, dict(stored), quick
        batch = dict(problem.batch)
        each = sum(
            np.prod([batch[plate] for plate in problem.template.site(name).level], dtype=np.int64)
            * np.prod(problem.template.site(name).member_shape, dtype=np.int64)
            * np.dtype(array.dtype).itemsize
            for name, array in stored.items()
        )
        self.block = int(np.clip(AHEAD_BYTES // max(int(each), 1), 2, MOST_AHEAD))
        self._pool = ThreadPoolExecutor(1)
        self._ahead: tuple[tuple, Future] | None = None

    def __call__(
        self, problem: Problem, inputs: Inputs, state: State, rates: np.ndarray, count: np.integer
    ) -> tuple[State, np.ndarray]:
        elbos = np.full(LONGEST_CHUNK, np.nan)
        run = chunk_runner(self.quick)
        key, first = np.asarray(jax.random.key_data(state.key)), int(state.step)
        for start in range(0, int(count), self.block):
            taken = min(self.block, int(count) - start)
            data = self._read(key, first + start)
            # The next block begins where this one ends.
            self._ahead = (key.tobytes(), first + start + taken), self._pool.submit(self._gather, key, first + start + taken)
            some = np.zeros(self.block, np.float32)
            some[:taken] = rates[start : start + taken]
            state, found = run(problem, inputs, state, some, np.int32(taken), data)
            elbos[start : start + taken] = np.asarray(found)[:taken]
        return state, elbos

    def _read(self, key: np.ndarray, first: int) -> dict[str, np.ndarray]:
        if self._ahead is not None and self._ahead[0] == (key.tobytes(), first):
            return self._ahead[1].result()
        return self._gather(key, first)

    def _gather(self, key: np.ndarray, first: int) -> dict[str, np.ndarray]:
        """Data of the members of the next steps, one step after the other."""
        indices = jax.device_get(_members(self.problem, self.block, key, np.int32(first)))
        template = self.problem.template
        each = [
            stored_at(template, self.stored, {plate: index[k] for plate, index in indices.items()})
            for k in range(self.block)
        ]
        return {name: np.stack([data[name] for data in each]) for name in self.stored}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _members(problem: Problem, count: int, key: Array, first: Int[Array, ""]) -> dict[str, Array]:
    """Which members of each plate the next `count` steps look at."""
    wrapped = jax.random.wrap_key_data(key)
    return jax.vmap(lambda number: drawn_at(problem, wrapped, number)[0].indices)(first + jnp.arange(count))


def runner(problem: Problem, stored: Mapping[str, Stored], quick: bool) -> Any:
    """What runs a chunk of steps: all on the device where the data are."""
    return Streamed(problem, stored, quick) if stored else chunk_runner(quick)
