"""Updating a fit: a tenth more groups, at most a tenth of the steps.

    python benchmarks/update.py

Gaussian random effects, D=2, 200 groups, then 220. `fit.update` keeps the shared weights and searches the new encodings
only; with `pavi.SetEncoder` nothing is searched.
"""

from __future__ import annotations

import time

import numpy as np

import pavi
from gre import DIM
from pavi.experiments.problems import REGIMES, gre, gre_evidence, simulate_gre

BEFORE, AFTER = 200, 220


def main() -> None:
    print("| regime | scheme | from scratch: gap per latent | steps | seconds | update: gap per latent | steps | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for regime, (points, sigma_x) in REGIMES.items():
        for name, family in {"PAVI-F": pavi.PAVI(), "PAVI-E": pavi.PAVI(encodings=pavi.SetEncoder())}.items():
            x = simulate_gre(AFTER, points, sigma_x, DIM, seed=0)
            evidence = gre_evidence(x, sigma_x)
            settings = {"family": family, "progress_bar": False}
            before = pavi.fit(gre(BEFORE, points, sigma_x, DIM), {"x": x[:BEFORE]}, **settings)
            after = gre(AFTER, points, sigma_x, DIM)
            fits, seconds = [], []
            for run in (
                lambda x=x, after=after, settings=settings: pavi.fit(after, {"x": x}, **settings),
                lambda x=x, before=before: before.update({"x": x}, progress_bar=False),
            ):
                started = time.perf_counter()
                fits.append(run())
                seconds.append(time.perf_counter() - started)
            gaps = [(evidence - fit.elbo(1000).mean) / (DIM * (AFTER + 1)) for fit in fits]
            searched = 0 if np.array_equal(fits[1].history["elbo"], before.history["elbo"]) else len(fits[1].history["step"])
            print(
                f"| {regime} | {name} | {gaps[0]:.5f} | {len(fits[0].history['step']):,} | {seconds[0]:.1f} "
                f"| {gaps[1]:.5f} | {searched:,} | {seconds[1]:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
