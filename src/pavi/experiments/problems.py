"""The models of the paper's experiments, data drawn from them, and exact answers.

The paper leaves the noise scales and the points per group open: choices are stated here.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

SIGMA_1, SIGMA_2 = 1.0, 2.0
# Points per group and their noise.
REGIMES = {"informative": (10, 0.3), "balanced": (5, 1.0), "weak": (3, 3.0)}


def gre(num_groups: int, num_points: int, sigma_x: float, dim: int) -> Callable:
    """Gaussian random effects (paper, `eq:GRE`)."""

    def model() -> None:
        mu = numpyro.sample("mu", dist.Normal(jnp.zeros(dim), SIGMA_2).to_event(1))
        with numpyro.plate("group", num_groups, dim=-2):
            theta = numpyro.sample("theta", dist.Normal(mu, SIGMA_1).to_event(1))
            with numpyro.plate("point", num_points, dim=-1):
                numpyro.sample("x", dist.Normal(theta, sigma_x).to_event(1))

    return model


def simulate_gre(num_groups: int, num_points: int, sigma_x: float, dim: int, seed: int) -> np.ndarray:
    return gre_truth(num_groups, num_points, sigma_x, dim, seed)[2]


def gre_truth(num_groups: int, num_points: int, sigma_x: float, dim: int, seed: int) -> tuple[np.ndarray, ...]:
    """A draw of mu, theta and the data."""
    rng = np.random.default_rng(seed)
    mu = SIGMA_2 * rng.normal(size=dim)
    theta = mu + SIGMA_1 * rng.normal(size=(num_groups, dim))
    return mu, theta, (theta[:, None] + sigma_x * rng.normal(size=(num_groups, num_points, dim))).astype(np.float32)


def gre_evidence(x: np.ndarray, sigma_x: float) -> float:
    """Exact log p(X): each dimension is one Gaussian whose covariance is three nested blocks.

    Its eigenvectors are the deviations within groups, the group means around their mean, and the overall mean.
    """
    x = x.astype(np.float64)
    groups, points, dim = x.shape
    within = sigma_x**2
    between = within + points * SIGMA_1**2
    overall = between + groups * points * SIGMA_2**2
    means = x.mean(1)
    quadratic = (
        ((x - means[:, None]) ** 2).sum() / within
        + points * ((means - means.mean(0)) ** 2).sum() / between
        + groups * points * (means.mean(0) ** 2).sum() / overall
    )
    log_det = groups * (points - 1) * np.log(within) + (groups - 1) * np.log(between) + np.log(overall)
    return float(-0.5 * (quadratic + dim * (log_det + groups * points * np.log(2 * np.pi))))


def hierarchical_variance(num_groups: int = 15, num_points: int = 15, dim: int = 2) -> Callable:
    """Parents as the variances of their children (paper, `eq:HV`), with the logarithm of the paper's X as data."""

    def model() -> None:
        top = numpyro.sample("theta_2", dist.LogNormal(jnp.zeros(dim), 1.0).to_event(1))
        with numpyro.plate("group", num_groups, dim=-2):
            variance = numpyro.sample("theta_1", dist.LogNormal(0.0, jnp.sqrt(top)).to_event(1))
            with numpyro.plate("point", num_points, dim=-1):
                numpyro.sample("x", dist.Normal(0.0, jnp.sqrt(variance)).to_event(1))

    return model


def gaussian_mixture(num_groups: int = 20, num_points: int = 10, dim: int = 2, components: int = 3) -> Callable:
    """A Gaussian mixture with random effects (paper, `eq:GM`), labels summed out. The paper leaves the scales open."""

    def model() -> None:
        centers = numpyro.sample("theta_2", dist.Normal(jnp.zeros((components, dim)), 2.0).to_event(2))
        with numpyro.plate("group", num_groups, dim=-2):
            weights = numpyro.sample("pi", dist.Dirichlet(jnp.ones(components)))
            means = numpyro.sample("theta_1", dist.Normal(centers, 0.5).to_event(2))
            with numpyro.plate("point", num_points, dim=-1):
                each = dist.Normal(means, 0.3).to_event(1)
                numpyro.sample("x", dist.MixtureSameFamily(dist.Categorical(probs=weights), each))

    return model


def gre_posterior(x: np.ndarray, sigma_x: float, num_samples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draws of mu and theta from the exact posterior of Gaussian random effects."""
    rng = np.random.default_rng(seed)
    groups, points, dim = x.shape
    means = x.astype(np.float64).mean(1)
    within = 1 / (points / sigma_x**2)  # variance of a group's mean around theta
    precision = 1 / SIGMA_2**2 + groups / (SIGMA_1**2 + within)
    center = means.sum(0) / (SIGMA_1**2 + within) / precision
    mu = center + rng.normal(size=(num_samples, dim)) / np.sqrt(precision)
    local = 1 / SIGMA_1**2 + 1 / within
    theta_mean = (mu[:, None] / SIGMA_1**2 + means / within) / local
    return mu, theta_mean + rng.normal(size=(num_samples, groups, dim)) / np.sqrt(local)


def simulate(model: Callable, seed: int, site: str = "x") -> np.ndarray:
    """Data drawn from a model's prior."""
    with numpyro.handlers.seed(rng_seed=seed), numpyro.handlers.trace() as trace:
        model()
    return np.asarray(trace[site]["value"])
