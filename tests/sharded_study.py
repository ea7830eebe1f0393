"""A small study fitted on several devices, as a program of its own: prints its ELBOs and moments as JSON.

python sharded_study.py DEVICES GROUPS_PER_STEP STEPS [ADDRESS PROCESSES PROCESS]
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

X = np.random.default_rng(0).normal(1.0, 1.5, size=(16, 6, 2)).astype(np.float32)


def model():
    mu = numpyro.sample("mu", dist.Normal(np.zeros(2), 3).to_event(1))
    groups, points = numpyro.plate("group", 16, dim=-2), numpyro.plate("point", 6, dim=-1)
    with groups:
        theta = numpyro.sample("theta", dist.Normal(mu, 1).to_event(1))
    with points:
        shift = numpyro.sample("shift", dist.Normal(0, 1))
    with groups, points:
        numpyro.sample("x", dist.Normal(theta + shift[..., None], 1).to_event(1))


def main() -> None:
    devices, batch, steps = map(int, sys.argv[1:4])
    if len(sys.argv) > 4:
        address, processes, process = sys.argv[4], int(sys.argv[5]), int(sys.argv[6])
        jax.distributed.initialize(address, processes, process)
    import pavi

    settings = {"batch": {"group": batch, "point": 6}, "steps": steps, "progress_bar": False}
    family = pavi.PAVI(flow=pavi.Affine())
    fit = pavi.fit(model, {"x": X}, family=family, devices={"group": devices}, **settings)
    moments = fit.moments(num_samples=200)
    result = {
        "elbos": fit.history["elbo"].tolist(),
        "elbo": fit.elbo(256).mean,
        "mu": moments["mu"].values.tolist(),
        "theta": moments["theta"].values.tolist(),
        "skipped": fit.skipped,
    }
    if jax.process_index() == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
