"""Answers to compare with: closed forms for Gaussian models, NUTS for the rest."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.handlers import condition, seed, trace
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

# Answers that were found already; those of NUTS, which take it a while, are kept.
KNOWN: dict = {}
NUTS_ANSWERS = Path(__file__).parent / "nuts.json"


def _asked(model: Callable, given: tuple, *more: int) -> tuple:
    """What tells one question from another: a model by its name, and all arrays."""
    arrays = [np.asarray(value) for value in jax.tree.leaves(given)]
    return (model.__qualname__, model.__module__, *more, tuple((array.shape, array.tobytes()) for array in arrays))


class Gaussian(NamedTuple):
    """Exact posterior of a model whose log joint is quadratic: moments by site, and the log evidence."""

    mean: dict[str, np.ndarray]
    sd: dict[str, np.ndarray]
    evidence: float


def gaussian(model: Callable, data: dict, args: tuple = (), kwargs: dict | None = None) -> Gaussian:
    """Solves a linear Gaussian model by the Hessian of its log joint; once for the same model and data."""
    asked = _asked(model, (data, args, kwargs))
    if asked not in KNOWN:
        KNOWN[asked] = _gaussian(model, data, args, kwargs)
    return KNOWN[asked]


def _gaussian(model: Callable, data: dict, args: tuple, kwargs: dict | None) -> Gaussian:
    """In double precision on the host."""
    args, kwargs = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (args, kwargs or {}))
    conditioned = condition(model, {name: jnp.asarray(value) for name, value in data.items()})
    sites = {}

    def run() -> None:
        sites.update(trace(seed(conditioned, 0)).get_trace(*args, **kwargs))

    jax.eval_shape(run)
    latents = {
        n: np.zeros(s["value"].shape, np.float32) for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"]
    }
    flat, unravel = ravel_pytree(latents)

    def log_joint(flat: jax.Array) -> jax.Array:
        return log_density(conditioned, args, kwargs, unravel(flat))[0]

    everything = jax.jit(lambda flat: (log_joint(flat), jax.grad(log_joint)(flat), jax.hessian(log_joint)(flat)))
    value, gradient, hessian = everything(flat)
    precision = -np.asarray(hessian, np.float64)
    covariance = np.linalg.inv(precision)
    mean = covariance @ np.asarray(gradient, np.float64)
    peak = float(value) + 0.5 * mean @ precision @ mean
    evidence = peak + 0.5 * len(mean) * np.log(2 * np.pi) + 0.5 * np.linalg.slogdet(covariance)[1]
    sd = np.sqrt(np.diag(covariance))
    unflat = {name: np.asarray(v) for name, v in unravel(jnp.asarray(mean, flat.dtype)).items()}
    return Gaussian(unflat, {n: np.asarray(v) for n, v in unravel(jnp.asarray(sd, flat.dtype)).items()}, evidence)


class Moments(NamedTuple):
    mean: dict[str, np.ndarray]
    sd: dict[str, np.ndarray]


def nuts(model: Callable, data: dict, args: tuple = (), kwargs: dict | None = None, num_samples: int = 4000) -> Moments:
    """Posterior moments by NUTS, of latent and deterministic sites alike; run once for the same model and data.

    Answers are kept in a file, by the model's source and all it was given: delete it to have them found again.
    """
    asked = repr((inspect.getsource(model), _asked(model, (data, args, kwargs), num_samples)))
    key = hashlib.sha256(asked.encode()).hexdigest()[:16]
    kept = json.loads(NUTS_ANSWERS.read_text()) if NUTS_ANSWERS.exists() else {}
    if key not in kept:
        found = _nuts(model, data, args, kwargs, num_samples)
        kept[key] = [{name: value.tolist() for name, value in part.items()} for part in found]
        NUTS_ANSWERS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return Moments(*({name: np.asarray(value) for name, value in part.items()} for part in kept[key]))


def _nuts(model: Callable, data: dict, args: tuple, kwargs: dict | None, num_samples: int) -> Moments:
    conditioned = condition(model, {name: jnp.asarray(value) for name, value in data.items()})
    mcmc = MCMC(NUTS(conditioned), num_warmup=800, num_samples=num_samples, progress_bar=False)
    mcmc.run(jax.random.key(3), *args, **(kwargs or {}))
    draws = mcmc.get_samples()
    return Moments(
        {name: np.asarray(value.mean(0)) for name, value in draws.items()},
        {name: np.asarray(value.std(0)) for name, value in draws.items()},
    )


def assert_moments(fit, expected, sites, mean_tolerance: float, sd_tolerance: float, num_samples: int = 4000) -> None:
    """Posterior means within a fraction of the exact sd, and sds within a fraction of it."""
    found = fit.moments(num_samples=num_samples, sites=list(sites))
    for name in sites:
        mean, sd = np.asarray(found[name])
        exact_mean = np.asarray(expected.mean[name]).reshape(mean.shape)
        exact_sd = np.asarray(expected.sd[name]).reshape(mean.shape)
        off = np.abs(mean - exact_mean) / exact_sd
        assert off.max() < mean_tolerance, f"{name}: mean off by {off.max():.3f} sd"
        ratio = sd / exact_sd
        assert np.abs(ratio - 1).max() < sd_tolerance, f"{name}: sd ratios {ratio.min():.3f} to {ratio.max():.3f}"


__all__ = ["Gaussian", "Moments", "assert_moments", "gaussian", "nuts"]
