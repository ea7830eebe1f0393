"""Compilation is paid once: a second fit of the same shapes compiles nothing, and the model is run a handful of times.

python benchmarks/retracing.py
"""

from __future__ import annotations

import logging
import time

import jax

import pavi
from pavi.experiments.problems import gre, simulate_gre


class Compilations(logging.Handler):
    """Counts what JAX says it compiles."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "Finished XLA compilation" in record.getMessage()


def measure(steps: int | None) -> list[tuple[int, int, float]]:
    """(runs of the model, compilations, seconds) of three fits: the first, the same again, and with other data."""
    inner, runs = gre(20, 5, 1.0, 2), 0

    def model() -> None:
        nonlocal runs
        runs += 1
        inner()

    rows = []
    logger, handler = logging.getLogger("jax"), Compilations()
    for handler_ in list(logger.handlers):
        logger.removeHandler(handler_)
    logger.addHandler(handler)
    logger.propagate = False
    with jax.log_compiles():
        for seed in (0, 0, 1):
            runs, handler.count = 0, 0
            started = time.perf_counter()
            pavi.fit(model, {"x": simulate_gre(20, 5, 1.0, 2, seed)}, steps=steps, rng_key=seed, progress_bar=False)
            rows.append((runs, handler.count, time.perf_counter() - started))
    logger.removeHandler(handler)
    return rows


def main() -> None:
    print("| steps | fit | runs of the model | compilations | seconds |")
    print("|---|---|---|---|---|")
    for steps in (100, 5000):
        for name, (runs, compilations, seconds) in zip(("first", "again", "other data"), measure(steps), strict=True):
            print(f"| {steps} | {name} | {runs} | {compilations} | {seconds:.1f} |")


if __name__ == "__main__":
    main()
