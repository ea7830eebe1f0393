"""Functional networks of a simulated cohort: 416 million latents through `pavi.fit`.

    python benchmarks/cohort.py --size 0.01      # 100 subjects, 5,941 vertices: for a laptop
    python benchmarks/cohort.py                  # 1,000 subjects, 59,412 vertices: for a large GPU

The model is `pavi.models.parcellation` with labels summed out; a second table has the paper's relaxed form. Two
settings: prior scales as in the paper, and a hard one in which many labels cannot be told. `best` is the accuracy of the
labels one would give knowing the true fingerprints, scales and population logits.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pavi
from pavi.models import Cohort, parcellation, simulate_cohort

SUBJECTS, SESSIONS, VERTICES, FEATURES, NETWORKS = 1000, 2, 59_412, 64, 7
SETTINGS: dict[str, dict[str, float]] = {
    "paper": {},
    "hard": {"fingerprint_scale": 0.1, "population_scale": 1.0, "spread": 0.3},
}
EVALUATED = 20


def best_labels(cohort: Cohort, subjects: np.ndarray) -> Any:
    """Labels given the true fingerprints, scales and population logits; the subjects' own logits averaged out."""
    draws = jax.random.normal(jax.random.key(1), (256, NETWORKS))
    prior = jax.lax.map(
        lambda logits: jax.nn.softmax(logits + cohort.gamma * draws).mean(0), cohort.population_logits, batch_size=1024
    )

    def one(x: Any) -> Any:
        around = ((x[:, None].astype(jnp.float32) - cohort.mu[None, :, None]) ** 2).sum((-2, -1))
        log_norm = x.shape[1] * x.shape[2] * jnp.log(cohort.kappa)
        return (jnp.log(prior) - 0.5 * around / cohort.kappa**2 - log_norm).argmax(-1)

    return jax.lax.map(one, cohort.x[subjects])


def matching(found: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Which true network each found one is, by the correlation of fingerprints, and those correlations."""
    from scipy.optimize import linear_sum_assignment

    correlation = np.corrcoef(found, truth)[: len(found), len(found) :]
    rows, columns = linear_sum_assignment(-correlation)
    return columns, correlation[rows, columns]


def accuracy(fit: pavi.Fit, cohort: Cohort, subjects: np.ndarray) -> tuple[float, np.ndarray]:
    """Share of right labels among some subjects' vertices, and the correlations of the fingerprints."""
    columns, correlations = matching(fit.moments(sites=["mu"], num_samples=64)["mu"].values[0], np.asarray(cohort.mu))
    probs = fit.moments(sites=["label_probs"], where={"subject": subjects}, num_samples=16)["label_probs"].values[0]
    return float((columns[probs.argmax(-1)] == np.asarray(cohort.labels[subjects])).mean()), correlations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=float, default=1.0, help="share of the full number of members")
    parser.add_argument("--steps", type=int, nargs="+", default=[1000, 2000, 4000, 8000])
    parser.add_argument("--batch", type=int, nargs=2, default=[125, 512], help="subjects and vertices per step")
    parser.add_argument("--particles", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(SETTINGS))
    arguments = parser.parse_args()
    share = np.sqrt(arguments.size)
    subjects, vertices = round(SUBJECTS * share), round(VERTICES * share)
    model = parcellation(subjects, SESSIONS, vertices, FEATURES, NETWORKS)
    evaluated = np.arange(min(subjects, EVALUATED))
    batch = {"subject": min(arguments.batch[0], subjects), "vertex": min(arguments.batch[1], vertices)}
    print(f"{jax.devices()[0].device_kind}, {subjects:,} subjects, {vertices:,} vertices, {batch} per step")
    print("| setting | latents | steps | seconds | before the first step | accuracy | best | fingerprints, lowest r |")
    print("|---|---|---|---|---|---|---|---|")
    for name in SETTINGS if arguments.only is None else [arguments.only]:
        cohort = simulate_cohort(subjects, SESSIONS, vertices, FEATURES, NETWORKS, seed=arguments.seed, **SETTINGS[name])
        truth = np.asarray(cohort.labels[evaluated])
        best = float((np.asarray(best_labels(cohort, evaluated)) == truth).mean())
        for steps in arguments.steps:
            started = time.perf_counter()
            fit = pavi.fit(
                model,
                {"x": cohort.x},
                family=pavi.PAVI(flow=pavi.Affine()),
                batch=batch,
                steps=steps,
                num_particles=arguments.particles,
                rng_key=arguments.seed,
                progress_bar=False,
            )
            jax.block_until_ready(fit._weights.shared)
            seconds = time.perf_counter() - started
            found, correlations = accuracy(fit, cohort, evaluated)
            print(
                f"| {name} | {fit.template.num_latents:,} | {steps:,} | {seconds:.1f} | {fit.history['seconds'][0]:.1f} "
                f"| {found:.4f} | {best:.4f} | {correlations.min():.4f} |",
                flush=True,
            )
            del fit


if __name__ == "__main__":
    main()
