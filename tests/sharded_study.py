"""A small study fitted on several devices, by a program of its own: it reads how, and prints ELBOs and moments as JSON."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from functools import cache, partial

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import pavi
import pavi.checkpoint
import pavi.mesh

# How lines with answers begin; the runtime prints as well.
ANSWER = "ANSWER "
AGES = np.linspace(0.5, 1.5, 17, dtype=np.float32)
X = np.random.default_rng(0).normal(1.0, 1.5, size=(17, 6, 2)).astype(np.float32)


def model(size=16):
    mu = numpyro.sample("mu", dist.Normal(np.zeros(2), 3).to_event(1))
    groups, points = numpyro.plate("group", size, dim=-2), numpyro.plate("point", 6, dim=-1)
    with groups:
        theta = numpyro.sample("theta", dist.Normal(mu, 1).to_event(1))
    with points:
        shift = numpyro.sample("shift", dist.Normal(0, 1))
    with groups, points:
        each = numpyro.sample("each", dist.Normal(theta + shift[..., None], 0.5).to_event(1))
        numpyro.sample("x", dist.Normal(each, 1).to_event(1))


def alone(size=16):
    """Groups whose data are their own."""
    mu = numpyro.sample("mu", dist.Normal(np.zeros(2), 3).to_event(1))
    with numpyro.plate("group", size):
        theta = numpyro.sample("theta", dist.Normal(mu, 1).to_event(1))
        numpyro.sample("x", dist.Normal(theta[..., None, :] + np.zeros((6, 1)), 1).to_event(2))


def aged(size, ages):
    """Groups with a covariate, and data of their own."""
    mu = numpyro.sample("mu", dist.Normal(np.zeros(2), 3).to_event(1))
    with numpyro.plate("group", size):
        center = mu * numpyro.subsample(ages, event_dim=0)[..., None]
        theta = numpyro.sample("theta", dist.Normal(center, 1).to_event(1))
        numpyro.sample("x", dist.Normal(theta[..., None, :] + np.zeros((6, 1)), 1).to_event(2))


def family(pull=False):
    """Linear flows, which compile faster than those with hidden layers."""
    return pavi.PAVI(flow=pavi.Affine(hidden=()), show_pull=pull)


@cache
def study(kind, groups):
    """One object for each study, so that what was compiled for it serves again."""
    return partial(kind, groups)


def parser() -> argparse.ArgumentParser:
    """What a study can be told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("devices", type=int)
    parser.add_argument("batch", type=int, help="groups per step")
    parser.add_argument("steps", type=int)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--stored", help="data in a memory map of this name")
    parser.add_argument("--runs", type=int, help="groups drawn side by side")
    parser.add_argument("--aged", action="store_true", help="groups have a covariate, in a model of its own")
    parser.add_argument("--gathered", type=int, default=2**26, help="numbers that processes gather at a time")
    parser.add_argument("--pull", action="store_true", help="flows are shown which way data pull, in the other model")
    parser.add_argument("--elbo", action="store_true", help="say that of the full study as well")
    parser.add_argument("--checkpoint", help="folder")
    parser.add_argument("--interval", type=float, default=60.0, help="seconds between checkpoints, of the first process")
    return parser


def fitted(told: argparse.Namespace) -> dict:
    """ELBOs and moments of a study, as told."""
    if jax.process_index() == 0:
        pavi.checkpoint.INTERVAL = told.interval
    pavi.mesh.GATHERED = told.gathered
    batch = {"group": told.batch} | ({} if told.pull or told.aged else {"point": 6})
    settings = {"batch": batch, "steps": told.steps, "progress_bar": False}
    settings |= {"runs": {"group": told.runs}} if told.runs else {}
    x = X[: told.groups]
    if told.stored:
        own = f"{told.stored}.{jax.process_index()}.npy"
        np.save(own, x)
        os.replace(own, told.stored)  # another process may be reading it
        x = np.load(told.stored, mmap_mode="r")
    fit = pavi.fit(
        study(aged if told.aged else alone if told.pull else model, told.groups),
        {"x": x},
        model_args=(AGES[: told.groups],) if told.aged else (),
        family=family(told.pull),
        devices={"group": told.devices},
        checkpoint=told.checkpoint,
        **settings,
    )
    moments = fit.moments(num_samples=200)
    return {
        "elbos": fit.history["elbo"].tolist(),
        "elbo": fit.elbo(256).mean if told.elbo else None,
        "mu": moments["mu"].values.tolist(),
        "theta": moments["theta"].values.tolist(),
        "skipped": fit.skipped,
    }


def main() -> None:
    """Fits one study after the other, a line each."""
    if sys.argv[1:]:  # address, processes, and which one this is
        jax.distributed.initialize(sys.argv[1], *map(int, sys.argv[2:]))
    for line in sys.stdin:
        try:
            found = fitted(parser().parse_args(shlex.split(line)))
        except pavi.PaviError as error:
            found = {"error": str(error)}
        print(ANSWER + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
