"""One run of one method on one data set: its ELBO, its weights, and its time by the paper's plateau rule."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from pavi.amortize import amortize
from pavi.api import fit
from pavi.experiments.records import Row
from pavi.families import Family
from pavi.posterior import Posterior

# Draws that an ELBO is estimated with.
ELBO_DRAWS = 1000
# A run has reached its plateau when its ELBO, smoothed over this share of its steps, is short of its mean over the last
# fifth by no more than this many nats per latent number, beyond twice the noise of that fifth.
SMOOTHED, LAST, SHORT = 0.02, 0.2, 0.01


def forget_compiled() -> None:
    """Frees compiled code. A process that runs everything one after the other would otherwise run out of memory maps."""
    jax.clear_caches()
    gc.collect()


def plateau(elbos: np.ndarray, seconds: np.ndarray, latents: int) -> float:
    """Seconds until the ELBO is close to where it ends (paper, `sec:details_arch`, "termination condition")."""
    usable = np.isfinite(elbos)
    elbos, seconds = elbos[usable], seconds[usable]
    width = max(1, int(SMOOTHED * len(elbos)))
    smooth = np.convolve(elbos, np.ones(width) / width, mode="valid")
    end = smooth[-max(1, int(LAST * len(smooth))) :]
    reached = np.flatnonzero(smooth >= end.mean() - 2 * end.std() - SHORT * latents)
    return float(seconds[width - 1 :][reached[0]]) if len(reached) else float(seconds[-1])


def fitted(model: Callable, data: Mapping[str, Any], family: Family, seed: int, **settings: Any) -> tuple[Row, Posterior]:
    """A fit to one data set, with compilation in its time."""
    started = time.perf_counter()
    found = fit(model, data, family=family, rng_key=seed, progress_bar=False, **settings)
    seconds = time.perf_counter() - started
    row = {
        "weights": found.num_weights,
        "steps": len(found.history["step"]),
        "seconds": round(seconds, 2),
        "plateau_seconds": round(plateau(found.history["elbo"], found.history["seconds"], found.template.num_latents), 2),
    }
    return {**evaluated(found), **row}, found


def trained(model: Callable, observed: str, family: Any, seed: int, **settings: Any) -> tuple[Row, Any]:
    """An amortized posterior, and what its training took."""
    started = time.perf_counter()
    found = amortize(model, [observed], family=family, rng_key=seed, progress_bar=False, **settings)
    row = {
        "weights": found.num_weights,
        "steps": len(found.history["step"]),
        "seconds": round(time.perf_counter() - started, 2),
        # The objective is per latent number.
        "plateau_seconds": round(plateau(found.history["elbo"], found.history["seconds"], 1), 2),
    }
    return row, found


def evaluated(posterior: Posterior) -> Row:
    elbo = posterior.elbo(ELBO_DRAWS)
    return {"elbo": round(elbo.mean, 4), "stderr": round(elbo.stderr, 4)}
