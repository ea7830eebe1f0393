"""Encodings read off the data (PAVI-E): gap to the exact evidence, beside free encodings.

    python benchmarks/encoder.py

Gaussian random effects, D=2, 5 of 20 and 20 of 200 groups per step, everything else at its default.
"""

from __future__ import annotations

import time

import numpy as np
from tqdm import tqdm

import pavi
from gre import DIM
from pavi.experiments.problems import REGIMES, gre, gre_evidence, simulate_gre

CELLS = [(regime, groups, batch) for regime in ("informative", "balanced") for groups, batch in ((20, 5), (200, 20))]
FAMILIES = {"PAVI-F": pavi.PAVI(), "PAVI-E": pavi.PAVI(encodings=pavi.SetEncoder())}
SEEDS = 3


def main() -> None:
    print(
        "| regime | groups | per step | scheme | gap per latent, mean | each data set | weights | steps | seconds | skip |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for regime, groups, batch in tqdm(CELLS, desc="cells"):
        points, sigma_x = REGIMES[regime]
        model = gre(groups, points, sigma_x, DIM)
        for name, family in FAMILIES.items():
            gaps, seconds, fits = [], [], []
            for seed in range(SEEDS):
                x = simulate_gre(groups, points, sigma_x, DIM, seed=seed)
                started = time.perf_counter()
                fits.append(pavi.fit(model, {"x": x}, family=family, batch={"group": batch}, progress_bar=False))
                seconds.append(time.perf_counter() - started)
                gaps.append((gre_evidence(x, sigma_x) - fits[-1].elbo(1000).mean) / (DIM * (groups + 1)))
            each = ", ".join(f"{gap:.5f}" for gap in gaps)
            steps = np.mean([len(fit.history["step"]) for fit in fits])
            print(
                f"| {regime} | {groups} | {batch} | {name} | {np.mean(gaps):.5f} | {each} | {fits[0].num_weights:,} "
                f"| {steps:,.0f} | {seconds[0]:.1f}, then {np.mean(seconds[1:]):.1f} | {sum(fit.skipped for fit in fits)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
