"""Gaussian random effects: gap to the exact evidence, beside NumPyro's automatic guides.

    python benchmarks/gre.py            # all nine cells, guides included: some minutes
    python benchmarks/gre.py --no-guides

Every fit of PAVI uses default settings. The guides see the full data in every step; their learning rate is the best of
four, with cosine decay, and they may take as many steps as they need.
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
from models import gre, gre_evidence, simulate_gre

REGIMES = {"informative": (10, 0.3), "balanced": (5, 1.0), "weak": (3, 3.0)}
GUIDES = {"AutoNormal": AutoNormal, "AutoMultivariateNormal": AutoMultivariateNormal, "AutoIAFNormal": AutoIAFNormal}
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
GUIDE_STEPS = 4000
DIM = 2


def fit_guide(guide_class: type, model, x: np.ndarray, evidence: float) -> tuple[float, float, float]:
    """(gap in nats, seconds, seconds without compilation) of the best learning rate."""
    best = (np.inf, 0.0, 0.0)
    for rate in RATES:
        conditioned = condition(model, {"x": jnp.asarray(x)})
        guide = guide_class(conditioned)
        svi = SVI(
            conditioned, guide, optax.adam(optax.cosine_decay_schedule(rate, GUIDE_STEPS)), Trace_ELBO(num_particles=8)
        )
        started = time.perf_counter()
        svi.run(jax.random.key(0), 1, progress_bar=False)
        result = svi.run(jax.random.key(0), GUIDE_STEPS, progress_bar=False, stable_update=True)
        jax.block_until_ready(result.params)
        seconds = time.perf_counter() - started
        started = time.perf_counter()
        jax.block_until_ready(svi.run(jax.random.key(0), GUIDE_STEPS, progress_bar=False, stable_update=True).params)
        again = time.perf_counter() - started
        elbo = -float(Trace_ELBO(num_particles=1000).loss(jax.random.key(1), result.params, conditioned, guide))
        if evidence - elbo < best[0]:
            best = (evidence - elbo, seconds, again)
    return best


def fit_pavi(model, x: np.ndarray, evidence: float) -> tuple[float, float, float]:
    started = time.perf_counter()
    fit = pavi.fit(model, {"x": x}, progress_bar=False)
    seconds = time.perf_counter() - started
    started = time.perf_counter()
    pavi.fit(model, {"x": x}, progress_bar=False)
    again = time.perf_counter() - started
    return evidence - fit.elbo(1000).mean, seconds, again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-guides", action="store_true", help="leave out NumPyro's guides")
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 20, 200])
    arguments = parser.parse_args()
    cells = [(regime, groups) for regime in REGIMES for groups in arguments.groups]
    lines = []
    for regime, groups in tqdm(cells, desc="cells"):
        points, sigma_x = REGIMES[regime]
        model = gre(groups, points, sigma_x, DIM)
        x = simulate_gre(groups, points, sigma_x, DIM, seed=0)
        evidence = gre_evidence(x, sigma_x)
        latents = DIM * (groups + 1)
        rows = {"PAVI-F (defaults)": fit_pavi(model, x, evidence)}
        if not arguments.no_guides:
            rows |= {name: fit_guide(guide, model, x, evidence) for name, guide in GUIDES.items()}
        for name, (gap, seconds, again) in rows.items():
            lines.append(
                f"| {regime} | {groups} | {evidence:.3f} | {name} | {evidence - gap:.3f} | {gap:.4f} | {gap / latents:.5f} "
                f"| {seconds:.1f} | {again:.1f} |"
            )
    print("| regime | groups | log p(X) | method | ELBO | gap (nats) | gap per latent | seconds | without compiling |")
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
