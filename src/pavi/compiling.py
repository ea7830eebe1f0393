"""Compiling for speed of compilation, where that is what a user waits for.

On a CPU, XLA's full effort on a training step takes several seconds, longer than most fits then run. Functions that run
for a short while are therefore compiled with two of its costliest parts off, which halves the compilation and slows the
result by about a fifth. Long fits and accelerators get the full effort.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

_QUICK = {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False}


@functools.cache
def quick_options() -> dict[str, Any] | None:
    """Compiler options for quick compilation; None on accelerators and where this XLA does not know them."""
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda x: x, compiler_options=_QUICK).lower(0.0).compile()
    except Exception:  # whatever this XLA says to options it does not know
        return None
    return _QUICK


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
