"""Sample amortization (PAVI-E(sa)): train once on simulated studies, infer for fresh ones without optimization.

    python benchmarks/amortized.py                # about ten minutes on two cores

Gaussian random effects, D=2. Four tables: gap to the exact evidence on fresh data sets; one network applied to 2, 20, 200
and 2,000 groups; training time and weights against the size of the study; calibration of every site by the uniformity of
the ranks of the truth among posterior draws (simulation-based calibration, chi-square test).
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from scipy import stats
from tqdm import tqdm

import pavi
from gre import DIM
from pavi.experiments.problems import REGIMES, gre, gre_evidence, gre_truth, simulate_gre

DRAWS, BINS = 99, 10


def train(regime: str, groups: int, batch: int, steps: int | None) -> pavi.Amortized:
    points, sigma_x = REGIMES[regime]
    return pavi.amortize(gre(groups, points, sigma_x, DIM), ["x"], batch={"group": batch}, steps=steps, progress_bar=False)


def gaps(amortized: pavi.Amortized, regime: str, groups: int, count: int) -> list[float]:
    """Nats per latent below the exact evidence, on fresh data sets."""
    points, sigma_x = REGIMES[regime]
    found = []
    for seed in range(1000, 1000 + count):
        x = simulate_gre(groups, points, sigma_x, DIM, seed)
        found.append((gre_evidence(x, sigma_x) - amortized.infer({"x": x}).elbo(256).mean) / (DIM * (groups + 1)))
    return found


def fresh(steps: int | None, count: int) -> dict[tuple[str, int], pavi.Amortized]:
    print(
        "| regime | groups | trained on at most | gap per latent, mean | largest | data sets | training seconds | weights |"
    )
    print("|---|---|---|---|---|---|---|---|")
    kept = {}
    for regime in ("informative", "balanced"):
        for groups, batch in ((20, 5), (200, 20)):
            amortized = train(regime, groups, batch, steps)
            found = gaps(amortized, regime, groups, count)
            print(
                f"| {regime} | {groups} | {batch} groups | {np.mean(found):.4f} | {np.max(found):.4f} | {count} "
                f"| {amortized.history['seconds'][-1]:.0f} | {amortized.num_weights:,} |",
                flush=True,
            )
            kept[regime, groups] = amortized
    return kept


def many_sizes(networks: dict[str, pavi.Amortized], count: int) -> None:
    print("\n| regime | groups | gap per latent, mean | largest | seconds of inference after compilation |")
    print("|---|---|---|---|---|")
    for regime, amortized in networks.items():
        points, sigma_x = REGIMES[regime]
        for groups in (2, 20, 200, 2000):
            found = gaps(amortized, regime, groups, count)
            x = simulate_gre(groups, points, sigma_x, DIM, 0)
            started = time.perf_counter()
            amortized.infer({"x": x})
            seconds = time.perf_counter() - started
            print(f"| {regime} | {groups:,} | {np.mean(found):.4f} | {np.max(found):.4f} | {seconds:.2f} |", flush=True)


def growth(steps: int) -> None:
    print(f"\n| groups | weights | seconds of {steps} training steps, compilation included |")
    print("|---|---|---|")
    for groups in (20, 200, 2000):
        amortized = train("balanced", groups, 20, steps)
        print(f"| {groups:,} | {amortized.num_weights:,} | {amortized.history['seconds'][-1]:.1f} |", flush=True)


def calibration(networks: dict[tuple[str, int], pavi.Amortized], studies: int) -> None:
    print("\n| regime | groups | trained on at most | site | studies | chi-square p | p of the spread alone |")
    print("|---|---|---|---|---|---|---|")
    for (regime, trained), amortized in networks.items():
        points, sigma_x = REGIMES[regime]
        for groups in sorted({20, trained}):
            ranks: dict[str, list] = {"mu": [], "theta": []}
            for seed in tqdm(range(5000, 5000 + studies), desc="studies", leave=False):
                mu, theta, x = gre_truth(groups, points, sigma_x, DIM, seed)
                member = seed % groups
                draws = amortized.infer({"x": x}).sample(DRAWS, where={"group": [member]}, rng_key=seed)
                ranks["mu"].append((draws["mu"].values[0] < mu).sum(0))
                ranks["theta"].append((draws["theta"].values[0, :, 0] < theta[member]).sum(0))
            for site, found in ranks.items():
                flat = np.concatenate(found)
                counts = np.histogram(flat, BINS, (0, DRAWS + 1))[0]
                folded = np.histogram(np.abs(flat - DRAWS / 2), BINS // 2, (0, (DRAWS + 1) / 2))[0]
                print(
                    f"| {regime} | {groups} | {amortized.batch['group']} groups | {site} | {studies} "
                    f"| {stats.chisquare(counts).pvalue:.3f} "
                    f"| {stats.chisquare(folded).pvalue:.3f} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="training steps; the default of `pavi.amortize` if left out")
    parser.add_argument("--datasets", type=int, default=20)
    parser.add_argument("--studies", type=int, default=400, help="studies of the calibration")
    arguments = parser.parse_args()
    networks = fresh(arguments.steps, arguments.datasets)
    many_sizes({regime: network for (regime, groups), network in networks.items() if groups == 200}, arguments.datasets)
    growth(500)
    calibration(networks, arguments.studies)


if __name__ == "__main__":
    main()
