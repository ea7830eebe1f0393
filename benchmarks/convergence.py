"""Plate amortization and convergence speed (paper, figure 2 left).

    python benchmarks/convergence.py

Gaussian random effects, D=8, 100 groups, 2 per step. Steps until the gap to the exact evidence has fallen to 1% of its
value at the first step: PAVI-F against one flow per group, with everything else the same (flows, learning rate of flow
weights, branchings, particles). Curves go to out/convergence.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from tqdm import tqdm

import pavi
from models import gre, gre_evidence, simulate_gre
from running import elbos

DIM, GROUPS, BATCH, POINTS, SIGMA_X = 8, 100, 2, 10, 0.3
FRACTION = 0.01


def curve(family, seed: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps and gaps, until the gap is a fifth of what is looked for."""
    model = gre(GROUPS, POINTS, SIGMA_X, DIM)
    x = simulate_gre(GROUPS, POINTS, SIGMA_X, DIM, seed=seed)
    evidence = gre_evidence(x, SIGMA_X)
    at = np.unique(np.geomspace(1, longest, 60).astype(int))
    steps, gaps = [], []
    for taken, elbo in tqdm(
        elbos(model, {"x": x}, family, {"group": BATCH, "point": POINTS}, at, seed), total=len(at), leave=False
    ):
        steps.append(taken)
        gaps.append(evidence - elbo)
        if gaps[-1] < 0.2 * FRACTION * gaps[0]:
            break
    return np.array(steps), np.array(gaps)


def reached(steps: np.ndarray, gaps: np.ndarray) -> float:
    below = np.flatnonzero(gaps <= FRACTION * gaps[0])
    return float(steps[below[0]]) if len(below) else np.inf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=200_000)
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    families = {
        "PAVI-F": pavi.PAVI(encodings=pavi.FreeEncodings(128)),
        "one flow per group": pavi.baselines.UnamortizedFlows(),
    }
    curves = {
        name: [curve(family, seed, arguments.longest) for seed in range(arguments.seeds)]
        for name, family in families.items()
    }
    print("| method | gap at step 1 | steps to 1% of it (each seed) | median |")
    print("|---|---|---|---|")
    medians = {}
    for name, runs in curves.items():
        steps = [reached(*run) for run in runs]
        medians[name] = float(np.median(steps))
        first = np.median([gaps[0] for _, gaps in runs])
        print(f"| {name} | {first:,.0f} | {', '.join(f'{s:,.0f}' for s in steps)} | {medians[name]:,.0f} |")
    print(f"\nPAVI-F takes {medians['one flow per group'] / medians['PAVI-F']:.0f} times fewer steps.")
    plot(curves, arguments.out / "convergence.png")


def plot(curves: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(6, 4))
    for (name, runs), color in zip(curves.items(), ["tab:green", "tab:purple"], strict=True):
        for k, (steps, gaps) in enumerate(runs):
            ax.loglog(steps, np.maximum(gaps, 1e-3), color=color, label=name if k == 0 else None)
    ax.axhline(FRACTION * np.median([gaps[0] for runs in curves.values() for _, gaps in runs]), color="gray", linestyle="--")
    ax.set(xlabel="step", ylabel="log p(X) - ELBO (nats)", title=f"D={DIM}, {GROUPS} groups, {BATCH} per step")
    ax.legend()
    path.parent.mkdir(exist_ok=True)
    plt.tight_layout()
    plt.savefig(path, dpi=150)
    print(f"Curves: {path}")


if __name__ == "__main__":
    main()
