"""Compiling for speed of compilation, where that is what a user waits for.

XLA's full effort on a training step takes longer than most fits then run. Functions that run for a short while are therefore
compiled with its costliest parts off: on a CPU two that halve the compilation and slow the result by about a fifth; on
a GPU the trying out of many ways to multiply matrices, of which XLA's model of the card chooses one instead: untold, it
would cut products into tiles of 16 x 8, many times slower for the long and narrow ones of flows. Long fits get the full
effort, and so do moments on a GPU, where it takes no longer.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any

import jax


class Purpose(Enum):
    """What a function is for that is to be compiled quickly."""

    ONCE = "runs for a short while"
    STEPS = "training steps: their many small products are far slower without Triton"
    READING = "goes over all members of a study"


_QUICK: dict[str, dict[Purpose, dict[str, Any]]] = {
    "cpu": {each: {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False} for each in Purpose},
    "gpu": {
        Purpose.ONCE: {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
        Purpose.STEPS: {"xla_gpu_autotune_level": 0, "xla_gpu_experimental_cost_model_gemm_tiling_default": True},
        Purpose.READING: {},
    },
}

# Share of the memory maps a process may have, above which compiled functions are forgotten.
MOST_MAPS = 0.5


@functools.cache
def quick_options(purpose: Purpose = Purpose.ONCE) -> dict[str, Any] | None:
    """Compiler options for quick compilation, of which this XLA knows; None for none."""
    options = _QUICK.get(jax.default_backend(), {}).get(purpose, {})
    return {name: value for name, value in options.items() if _is_known(name, value)} or None


@functools.cache
def _is_known(option: str, value: Any) -> bool:
    try:
        jax.jit(lambda x: x, compiler_options={option: value}).lower(0.0).compile()
    except Exception:  # whatever this XLA says to options it does not know
        return False
    return True


class QuickJit:
    """`jax.jit` with quick compilation, decided at the first call, when the backend is known."""

    def __init__(self, function: Callable, static_argnums: tuple[int, ...], purpose: Purpose):
        functools.update_wrapper(self, function)
        self._jitted = functools.cache(
            lambda: jax.jit(function, static_argnums=static_argnums, compiler_options=quick_options(purpose))
        )

    def __call__(self, *args: Any) -> Any:
        return self._jitted()(*args)

    def lower(self, *args: Any) -> Any:
        return self._jitted().lower(*args)


def quick_jit(static_argnums: tuple[int, ...], purpose: Purpose = Purpose.ONCE) -> Callable[[Callable], QuickJit]:
    """Decorator for functions whose compilation outlasts their running."""
    return lambda function: QuickJit(function, static_argnums, purpose)


@functools.cache
def _tracing() -> ThreadPoolExecutor:
    """The thread in which functions are traced one after the other: Python runs one at a time anyway."""
    return ThreadPoolExecutor(1)


def in_background(function: Any, *args: Any) -> Future:
    """Compiles a jitted function for arguments like these; later calls then find it compiled.

    Functions are traced in the order in which they come, and compiled side by side.
    """
    compiled: Future = Future()

    def attempt(step: Callable[[], Any]) -> None:
        try:
            step()
        except BaseException as error:
            compiled.set_exception(error)

    def trace() -> None:
        lowered = function.lower(*args)
        finish = functools.partial(attempt, lambda: compiled.set_result(lowered.compile()))
        threading.Thread(target=finish).start()

    _tracing().submit(attempt, trace)
    return compiled


def finish_tracing() -> None:
    """Waits until nothing is traced in the background any more: models may share more than we know with what comes next."""
    _tracing().submit(lambda: None).result()


def spare_maps() -> None:
    """Forgets compiled functions where their memory maps come near the most that Linux gives a process (65,530 by default).

    XLA crashes when there are none left, which some two hundred fits of different models in one process come to.
    """
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        used = Path("/proc/self/maps").read_text().count("\n")
    except OSError:  # not Linux
        return
    if used > MOST_MAPS * most:
        jax.clear_caches()
