"""The cost of a step as the study grows.

    python benchmarks/step_cost.py

One plate of N groups with a local latent, 100 members per step, N from 10^4 to 10^7; beside it NumPyro's AutoNormal on the
same minibatch. Times are medians over interleaved rounds, so that a busy machine disturbs all sizes alike.
"""

from __future__ import annotations

import argparse
import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from tqdm import tqdm

import pavi
from pavi.experiments.stepwise import advance, start

BATCH, POINTS = 100, 5


def random_effects(size: int, x=None, batch: int | None = None):
    def model() -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("group", size, subsample_size=batch, dim=-2):
            theta = numpyro.sample("theta", dist.Normal(mu, 1))
            with numpyro.plate("point", POINTS, dim=-1):
                obs = None if x is None else numpyro.subsample(x, event_dim=0)
                numpyro.sample("x", dist.Normal(theta, 1), obs=obs)

    return model


def bytes_of(tree) -> int:
    return sum(
        leaf.nbytes for leaf in jax.tree.leaves(tree) if hasattr(leaf, "nbytes") and leaf.dtype != jax.dtypes.prng_key
    )


class Pavi:
    def __init__(self, size: int, x: np.ndarray):
        batch = {"group": BATCH, "point": POINTS}
        self.problem, self.inputs, self.state, _ = start(random_effects(size), {"x": x}, pavi.PAVI(), batch)
        self.state = advance(self.problem, self.inputs, self.state, 10)
        rows = (self.state.weights.rows[("group",)], self.state.row_optimizer[("group",)])
        self.memory = bytes_of(rows)

    def time(self, steps: int = 200) -> float:
        started = time.perf_counter()
        self.state = advance(self.problem, self.inputs, self.state, steps)
        return (time.perf_counter() - started) / steps


class Guide:
    def __init__(self, size: int, x: np.ndarray):
        model = random_effects(size, jax.numpy.asarray(x), BATCH)
        self.svi = SVI(model, AutoNormal(model), optax.adam(1e-2), Trace_ELBO(num_particles=8))
        self.state = self.svi.init(jax.random.key(0))
        self.update = jax.jit(self.svi.update, donate_argnums=0)
        self.state, _ = self.update(self.state)

    def time(self) -> float:
        started = time.perf_counter()
        self.state, _ = self.update(self.state)
        jax.block_until_ready(self.state)
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e4, 1e5, 1e6, 1e7])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-guide", action="store_true")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes]
    rng = np.random.default_rng(0)
    runs, guides = {}, {}
    for size in tqdm(sizes, desc="setting up"):
        x = rng.standard_normal((size, POINTS), np.float32)
        runs[size] = Pavi(size, x)
        if not arguments.no_guide:
            guides[size] = Guide(size, x)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    guide_times: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in tqdm(range(arguments.rounds), desc="rounds"):
        for size in sizes:
            times[size].append(runs[size].time())
    for size in tqdm(guides, desc="AutoNormal"):
        guide_times[size] = [guides[size].time() for _ in range(arguments.rounds)]
    base, guide_base = np.median(times[sizes[0]]), np.median(guide_times[sizes[0]] or [np.nan])
    print(f"| groups | PAVI-F ms per step | ratio to {sizes[0]:,} | row memory (MB) | bytes per group", end=" ")
    print("| AutoNormal ms per step | ratio |")
    print("|---|---|---|---|---|---|---|")
    for size in sizes:
        now, guide_now = np.median(times[size]), np.median(guide_times[size] or [np.nan])
        memory = runs[size].memory
        print(
            f"| {size:,} | {1e3 * now:.3f} | {now / base:.2f} | {memory / 1e6:.1f} | {memory / size:.0f} "
            f"| {1e3 * guide_now:.3f} | {guide_now / guide_base:.1f} |"
        )


if __name__ == "__main__":
    main()
