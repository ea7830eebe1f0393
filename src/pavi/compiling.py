"""Compiling for speed of compilation, where that is what a user waits for.

XLA's full effort on a training step takes longer than most fits then run. Functions that run for a short while are therefore
compiled with its costliest parts off: on a CPU two that halve the compilation and slow the result by about a fifth; on
a GPU the trying out of many ways to multiply matrices. Long fits get the full effort.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

_QUICK: dict[str, dict[str, Any]] = {
    "cpu": {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False},
    "gpu": {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
}


@functools.cache
def quick_options() -> dict[str, Any] | None:
    """Compiler options for quick compilation; None where this XLA does not know them."""
    options = _QUICK.get(jax.default_backend())
    if options is None:
        return None
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except Exception:  # whatever this XLA says to options it does not know
        return None
    return options


class QuickJit:
    """`jax.jit` with quick compilation, decided at the first call, when the backend is known."""

    def __init__(self, function: Callable, static_argnums: tuple[int, ...]):
        functools.update_wrapper(self, function)
        self._jitted = functools.cache(
            lambda: jax.jit(function, static_argnums=static_argnums, compiler_options=quick_options())
        )

    def __call__(self, *args: Any) -> Any:
        return self._jitted()(*args)

    def lower(self, *args: Any) -> Any:
        return self._jitted().lower(*args)


def quick_jit(static_argnums: tuple[int, ...]) -> Callable[[Callable], QuickJit]:
    """Decorator for functions whose compilation outlasts their running."""
    return lambda function: QuickJit(function, static_argnums)


def in_background(function: Any, *args: Any) -> Future:
    """Compiles a jitted function for arguments like these, in a thread; later calls then find it compiled."""
    pool = ThreadPoolExecutor(1)
    compiling = pool.submit(lambda: function.lower(*args).compile())
    pool.shutdown(wait=False)
    return compiling
