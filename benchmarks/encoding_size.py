"""Encodings as summary statistics (paper, figure 2 right).

    python benchmarks/encoding_size.py

Gaussian random effects, D=8, 20 groups, 2 per step. A group's posterior has 8 numbers of its own (its mean), so the ELBO
should rise with the encoding size and plateau at 8. Results go to out/encoding_size.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from tqdm import tqdm

import pavi
from figures import save_axes
from pavi.experiments.problems import gre, gre_evidence, simulate_gre

DIM, GROUPS, BATCH, POINTS, SIGMA_X = 8, 20, 2, 10, 0.3
SIZES = (2, 4, 6, 8, 12, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    model = gre(GROUPS, POINTS, SIGMA_X, DIM)
    gaps: dict[int, list[float]] = {size: [] for size in SIZES}
    histories = {}
    for size in tqdm(SIZES, desc="encoding sizes"):
        for seed in range(arguments.seeds):
            x = simulate_gre(GROUPS, POINTS, SIGMA_X, DIM, seed=seed)
            fit = pavi.fit(
                model,
                {"x": x},
                family=pavi.PAVI(encodings=pavi.FreeEncodings(size)),
                batch={"group": BATCH},
                steps=arguments.steps,
                progress_bar=False,
                rng_key=seed,
            )
            evidence = gre_evidence(x, SIGMA_X)
            gaps[size].append(evidence - fit.elbo(500).mean)
            histories.setdefault(size, evidence - fit.history["elbo"])
    print(f"| encoding size | gap to log p(X), mean of {arguments.seeds} data sets (nats) | each |")
    print("|---|---|---|")
    for size in SIZES:
        print(f"| {size} | {np.mean(gaps[size]):.3f} | {', '.join(f'{gap:.3f}' for gap in gaps[size])} |")
    plot(gaps, histories, arguments.out / "encoding_size.png")


def plot(gaps: dict, histories: dict, path: Path) -> None:
    with save_axes(path, 2) as (left, right):
        for size, gap in histories.items():
            window = 200
            smooth = np.array([np.median(gap[a : a + window]) for a in range(0, len(gap), window)])
            left.semilogy(np.arange(len(smooth)) * window, np.maximum(smooth, 1e-2), label=f"{size}")
        left.set(xlabel="step", ylabel="log p(X) - reduced ELBO (nats)", title="training")
        left.legend(title="encoding size")
        right.semilogy(list(gaps), [np.mean(gap) for gap in gaps.values()], "o-", color="tab:green")
        right.axvline(DIM, color="gray", linestyle="--")
        right.set(xlabel="encoding size", ylabel="log p(X) - ELBO (nats)", title=f"after training; D={DIM}")


if __name__ == "__main__":
    main()
