"""Compiling for speed of compilation, where that is what a user waits for.

XLA's full effort on a training step takes longer than most fits then run. On a CPU, functions that run for a short while are
therefore compiled with its two costliest parts off, which halves the compilation and slows the result by about a fifth;
long fits get the full effort.

On a GPU nothing is tuned by trial: what wins differs from run to run, so a fit would not be the same twice, nor one that
goes on from a checkpoint that which was never cut off. For the same reason steps add nothing up in whatever order it comes.
They make up for it by running what does not depend on each other side by side, and compile faster.
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
    """What a function is for."""

    ONCE = "runs for a short while"
    READING = "goes over all members of a study"
    STEPS = "training steps of a short fit"
    LONG = "training steps of a long one"


_QUICK_CPU = {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False}
# Untold, XLA would cut products into tiles of 16 x 8, many times slower for the long and narrow ones of flows.
_UNTUNED_GPU = {"xla_gpu_autotune_level": 0, "xla_gpu_experimental_cost_model_gemm_tiling_default": True}
_STEPS_GPU = {"xla_gpu_deterministic_ops": True, "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
_OPTIONS: dict[str, dict[Purpose, dict[str, Any]]] = {
    "cpu": {Purpose.ONCE: _QUICK_CPU, Purpose.READING: _QUICK_CPU, Purpose.STEPS: _QUICK_CPU},
    "gpu": {
        Purpose.ONCE: {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
        Purpose.READING: _UNTUNED_GPU,
        Purpose.STEPS: _STEPS_GPU,
        Purpose.LONG: _STEPS_GPU,
    },
}

# Share of the memory maps a process may have, above which compiled functions are forgotten.
MOST_MAPS = 0.5


@functools.cache
def compiler_options(purpose: Purpose) -> dict[str, Any] | None:
    """Compiler options for a purpose, of which this XLA knows; None for none."""
    options = _OPTIONS.get(jax.default_backend(), {}).get(purpose, {})
    return {name: value for name, value in options.items() if _is_known(name, value)} or None


@functools.cache
def _is_known(option: str, value: Any) -> bool:
    try:
        jax.jit(lambda x: x, compiler_options={option: value}).lower(0.0).compile()
    except Exception:  # whatever this XLA says to options it does not know
        return False
    return True


def step_options(quick: bool) -> dict[str, Any] | None:
    """Compiler options for training steps, of a fit that will be short or not."""
    return compiler_options(Purpose.STEPS if quick else Purpose.LONG)


class QuickJit:
    """`jax.jit` with options for a purpose, decided at the first call, when the backend is known."""

    def __init__(self, function: Callable, static_argnums: tuple[int, ...], purpose: Purpose):
        functools.update_wrapper(self, function)
        self._jitted = functools.cache(
            lambda: jax.jit(function, static_argnums=static_argnums, compiler_options=compiler_options(purpose))
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
