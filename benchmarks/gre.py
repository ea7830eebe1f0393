"""Gaussian random effects: gap to the exact evidence, beside NumPyro's automatic guides.

    python benchmarks/gre.py            # all nine cells, guides included: some minutes
    python benchmarks/gre.py --no-guides --datasets 6

Every fit of PAVI uses default settings, and its row is that of the data set with the largest gap. The guides see the full
data of the first data set in every step; their learning rate is the best of two or three, with cosine decay.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.handlers import condition
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoIAFNormal, AutoMultivariateNormal, AutoNormal
from tqdm import tqdm

import pavi
from pavi.experiments.problems import REGIMES, gre, gre_evidence, simulate_gre

GUIDES = {"AutoNormal": AutoNormal, "AutoMultivariateNormal": AutoMultivariateNormal, "AutoIAFNormal": AutoIAFNormal}
RATES = {
    "AutoNormal": (3e-3, 1e-2, 3e-2),
    "AutoMultivariateNormal": (1e-3, 3e-3, 1e-2),
    "AutoIAFNormal": (1e-3, 3e-3),
}
GUIDE_STEPS = 3000
DIM = 2


def fit_guide(name: str, model, x: np.ndarray, evidence: float) -> tuple[float, float, float]:
    """(gap in nats, seconds, seconds without compilation) of the best learning rate."""
    conditioned = condition(model, {"x": jnp.asarray(x)})
    guide = GUIDES[name](conditioned)

    def run(rate: float):
        schedule = optax.cosine_decay_schedule(rate, GUIDE_STEPS)
        svi = SVI(conditioned, guide, optax.adam(schedule), Trace_ELBO(num_particles=8))
        body = jax.jit(lambda state: jax.lax.scan(lambda s, _: svi.stable_update(s), state, None, length=GUIDE_STEPS)[0])
        started = time.perf_counter()
        params = svi.get_params(jax.block_until_ready(body(svi.init(jax.random.key(0)))))
        seconds = time.perf_counter() - started
        elbo = -float(Trace_ELBO(num_particles=1000).loss(jax.random.key(1), params, conditioned, guide))
        return evidence - elbo, seconds, svi, body

    gap, seconds, svi, body = min((run(rate) for rate in RATES[name]), key=lambda result: result[0])
    started = time.perf_counter()
    jax.block_until_ready(body(svi.init(jax.random.key(0))))
    return gap, seconds, time.perf_counter() - started


def fit_pavi(model, x: np.ndarray, evidence: float, seed: int) -> tuple[float, float, float]:
    started = time.perf_counter()
    fit = pavi.fit(model, {"x": x}, progress_bar=False, rng_key=seed)
    seconds = time.perf_counter() - started
    started = time.perf_counter()
    pavi.fit(model, {"x": x}, progress_bar=False, rng_key=seed)
    again = time.perf_counter() - started
    return evidence - fit.elbo(1000).mean, seconds, again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-guides", action="store_true", help="leave out NumPyro's guides")
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 20, 200])
    parser.add_argument("--datasets", type=int, default=3, help="data sets that PAVI is fitted to, each with its own seed")
    arguments = parser.parse_args()
    cells = [(regime, groups) for regime in REGIMES for groups in arguments.groups]
    lines = []
    for regime, groups in tqdm(cells, desc="cells"):
        points, sigma_x = REGIMES[regime]
        latents = DIM * (groups + 1)
        rows = []
        for seed in range(arguments.datasets):
            model = gre(groups, points, sigma_x, DIM)
            x = simulate_gre(groups, points, sigma_x, DIM, seed)
            evidence = gre_evidence(x, sigma_x)
            rows.append(("PAVI-F (defaults)", evidence, *fit_pavi(model, x, evidence, seed)))
            if seed == 0 and not arguments.no_guides:
                guides = [(name, evidence, *fit_guide(name, model, x, evidence)) for name in GUIDES]
        rows = [max(rows, key=lambda row: row[2])] + ([] if arguments.no_guides else guides)
        for name, evidence, gap, seconds, again in rows:
            lines.append(
                f"| {regime} | {groups} | {evidence:.3f} | {name} | {evidence - gap:.3f} | {gap:.4f} | {gap / latents:.5f} "
                f"| {seconds:.1f} | {again:.1f} |"
            )
    print("| regime | groups | log p(X) | method | ELBO | gap (nats) | gap per latent | seconds | without compiling |")
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
