"""What `inner_points` mend: a spread whose posterior is known, since the data say nothing of it.

    python benchmarks/inner_points.py

Logits of groups have a spread tau, log-normal, and each group tosses one coin. Heads are as likely as tails for any tau, so
the posterior of log tau is its prior: mean 0, standard deviation 1. The flow of a group's logit is affine, but its posterior
is skewed, more so the larger tau is. The ELBO therefore prefers a small tau, the more so the more groups there are.
"""

from __future__ import annotations

import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import pavi

FAMILY = pavi.PAVI(flow=pavi.Affine())


def coins(groups: int) -> None:
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("group", groups):
        theta = numpyro.sample("theta", dist.Normal(0.0, tau))
        numpyro.sample("x", dist.Bernoulli(logits=theta))


def main() -> None:
    print(f"{jax.devices()[0].device_kind}. Exact: mean 0, sd 1.\n")
    print("| groups | points | mean of log tau | sd | seconds |\n|---|---|---|---|---|")
    for groups in (100, 1_000, 10_000):
        data = {"x": np.random.default_rng(0).integers(0, 2, size=groups)}
        for points in (0, 64, 1024):
            started = time.perf_counter()
            settings = {"family": FAMILY, "steps": 4000, "num_particles": 2, "batch": {"group": min(groups, 1000)}}
            fit = pavi.fit(coins, data, model_args=(groups,), inner_points=points, progress_bar=False, **settings)
            seconds = time.perf_counter() - started
            log_tau = np.log(fit.sample(4000, sites=["tau"])["tau"].values)
            print(f"| {groups:,} | {points:,} | {log_tau.mean():.2f} | {log_tau.std():.2f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
