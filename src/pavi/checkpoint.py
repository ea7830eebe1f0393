"""Checkpoints of a fit in training, with Orbax: written whole or not at all, and read back to the bit.

A checkpoint holds all that training carries from one chunk of steps to the next: weights, rows, optimizer, random key,
step, the units that flows work in, the ELBOs so far and where the schedule stands. Which members a step looks at follows
from the key and the step. The last two are kept, so that one can be lost.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pavi.errors import LoadError, SettingError
from pavi.identity import Identity, digest
from pavi.mesh import agreed
from pavi.schedule import Schedule, Stop
from pavi.stepping import Inputs, State

# Seconds between checkpoints, and how many are kept.
INTERVAL = 60.0
KEPT = 2


class Progress(NamedTuple):
    """What a checkpoint brings back: the inputs and state of training, ELBOs and seconds so far."""

    inputs: Inputs
    state: State
    elbos: np.ndarray
    seconds: np.ndarray
    stop: Stop | None


class Keeper:
    """Writes checkpoints of one fit to a folder, and reads them back.

    Args:
        folder: where; made if need be.
        identity: what fits must agree in to be the same.
        together: whether all processes train one fit, and so must write its checkpoints together.
        first: of the weights that training starts from, if it is not their initial ones: from others it starts anew.
    """

    def __init__(
        self, folder: str | os.PathLike, identity: Identity, together: bool = False, first: Sequence[np.ndarray] = ()
    ):
        try:
            import orbax.checkpoint as ocp
        except ImportError as error:
            raise SettingError("checkpoint=... needs Orbax: install the `checkpoint` extra.") from error
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._ocp, self.identity, self._together, self._first = ocp, identity, together, digest(first)
        self.folder = Path(folder).absolute()
        if self.folder.exists() and not self.folder.is_dir():
            raise SettingError(f"checkpoint={str(folder)!r} is a file; expected a folder, or a path to make one at.")
        if jax.process_count() > 1 and not together:
            raise SettingError(
                f"checkpoint={str(folder)!r}: this is one of {jax.process_count()} processes, which Orbax lets write "
                "checkpoints together only. Fit on all of their devices (devices=jax.device_count()), or leave out "
                "`jax.distributed.initialize`."
            )
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=True, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._last = time.monotonic()

    def write(
        self,
        inputs: Inputs,
        state: State,
        elbos: list[np.ndarray],
        seconds: list[np.ndarray],
        schedule: Schedule,
        stop: Stop | None,
    ) -> None:
        """Writes a checkpoint, if the last one is old enough or training is over."""
        due = time.monotonic() - self._last >= INTERVAL
        if stop is None and not (agreed(due) if self._together else due):
            return
        meta = {
            "identity": self.identity._asdict(),
            "first": self._first,
            "decay": schedule.decay,
            "reason": schedule.reason.name,
            "early": schedule.early,
            "pace": schedule.pace,
            "stop": None if stop is None else stop.name,
        }
        history = {"elbos": np.concatenate(elbos), "seconds": np.concatenate(seconds)}
        save, json = self._ocp.args.StandardSave, self._ocp.args.JsonSave
        composite = self._ocp.args.Composite(
            state=save(_named(_plain(state))),
            inputs=save(_named((inputs.units, inputs.paces))),
            history=save(history),
            meta=json(meta),
        )
        self._manager.save(int(state.step), args=composite, force=True)
        self._manager.wait_until_finished()
        self._last = time.monotonic()

    def read(self, inputs: Inputs, state: State, schedule: Schedule) -> Progress | None:
        """The newest checkpoint that can be read, if there is any, in the form of given inputs and state.

        Raises:
            LoadError: if the folder belongs to another fit, or none of its checkpoints can be read.
        """
        failures: list[int] = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                progress = self._read(step, inputs, state, schedule)
            except LoadError:
                raise
            except Exception as error:
                failures.append(step)
                warnings.warn(f"Checkpoint {step} in {str(self.folder)!r} cannot be read ({error}).", stacklevel=2)
                continue
            for broken in failures:
                self._manager.delete(broken)
            if progress is None:
                self.clear()
            return progress
        if failures:
            raise LoadError(
                f"None of the checkpoints {failures} in {str(self.folder)!r} can be read. Delete the folder to start over, "
                "or give another one."
            )
        return None

    def check(self) -> None:
        """Refuses a folder of another fit, before anything is done that takes long."""
        for step in self._manager.all_steps():
            try:
                meta = self._meta(step)
            except Exception:
                continue  # `read` will say so
            self.identity.check(meta["identity"], self.folder)

    def clear(self) -> None:
        """Deletes all checkpoints: those of an attempt that failed."""
        for step in self._manager.all_steps():
            self._manager.delete(step)

    def _meta(self, step: int) -> dict[str, Any]:
        return self._manager.restore(step, args=self._ocp.args.Composite(meta=self._ocp.args.JsonRestore()))["meta"]

    def _read(self, step: int, inputs: Inputs, state: State, schedule: Schedule) -> Progress | None:
        restore, meta = self._ocp.args.StandardRestore, self._meta(step)
        self.identity.check(meta["identity"], self.folder)
        if meta["first"] != self._first:
            warnings.warn(
                f"The checkpoints in {str(self.folder)!r} started from other weights than those there are now: training "
                "starts anew.",
                stacklevel=2,
            )
            return None
        plain = _plain(state)
        found = self._manager.restore(
            step,
            args=self._ocp.args.Composite(
                state=restore(_abstract(_named(plain))),
                inputs=restore(_abstract(_named((inputs.units, inputs.paces)))),
                history=restore(),
            ),
        )
        units, paces = _unnamed((inputs.units, inputs.paces), found["inputs"])
        plain = _unnamed(plain, found["state"])
        schedule.decay = None if meta["decay"] is None else tuple(meta["decay"])
        schedule.reason, schedule.early, schedule.pace = Stop[meta["reason"]], meta["early"], meta["pace"]
        stop = None if meta["stop"] is None else Stop[meta["stop"]]
        history = {name: np.asarray(values, np.float64) for name, values in found["history"].items()}
        again = plain._replace(key=jax.random.wrap_key_data(plain.key))
        return Progress(inputs._replace(units=units, paces=paces), again, history["elbos"], history["seconds"], stop)


def _plain(state: State) -> State:
    """A state with its random key as numbers."""
    return state._replace(key=jax.random.key_data(state.key))


def _named(tree: Any) -> dict[str, Any]:
    """The arrays of a tree, by number. Those in host memory stay there."""
    leaves = enumerate(jax.tree.leaves(tree))
    return {f"{k:04d}": leaf if isinstance(leaf, np.ndarray) else jnp.asarray(leaf) for k, leaf in leaves}


def _unnamed(like: Any, arrays: Mapping[str, Any]) -> Any:
    leaves, structure = jax.tree.flatten(like)
    found = [arrays[f"{k:04d}"] for k in range(len(leaves))]
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, np.memmap):
            leaf[...] = found[k]
            found[k] = leaf
    return jax.tree.unflatten(structure, found)


def _abstract(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: array
        if isinstance(array, np.ndarray)
        else jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        for name, array in arrays.items()
    }
