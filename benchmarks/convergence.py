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
from figures import save_axes
from gre import REGIMES
from pavi.experiments.problems import gre, gre_evidence, simulate_gre
from pavi.experiments.stepwise import elbos

DIM, GROUPS, BATCH = 8, 100, 2
FRACTION = 0.01


def curve(family, points: int, sigma_x: float, seed: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps and gaps, until the gap is a fifth of what is looked for."""
    model = gre(GROUPS, points, sigma_x, DIM)
    x = simulate_gre(GROUPS, points, sigma_x, DIM, seed=seed)
    evidence = gre_evidence(x, sigma_x)
    at = np.unique(np.geomspace(1, longest, 120).astype(int))
    steps, gaps = [], []
    for taken, elbo in tqdm(
        elbos(model, {"x": x}, family, {"group": BATCH, "point": points}, at, seed), total=len(at), leave=False
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
    families = {"PAVI-F": pavi.PAVI(), "one flow per group": pavi.baselines.UnamortizedFlows()}
    print("| regime | method | gap at step 1 | steps to 1% of it (each seed) | median | ratio |")
    print("|---|---|---|---|---|---|")
    curves: dict = {}
    for regime, (points, sigma_x) in REGIMES.items():
        medians = {}
        for name, family in families.items():
            runs = [curve(family, points, sigma_x, seed, arguments.longest) for seed in range(arguments.seeds)]
            curves[regime, name] = runs
            steps = [reached(*run) for run in runs]
            medians[name] = float(np.median(steps))
            first = np.median([gaps[0] for _, gaps in runs])
            ratio = medians[name] / medians["PAVI-F"]
            listed = ", ".join(f"{s:,.0f}" for s in steps)
            print(f"| {regime} | {name} | {first:,.0f} | {listed} | {medians[name]:,.0f} | {ratio:.1f} |", flush=True)
    plot(curves, arguments.out / "convergence.png")


def plot(curves: dict, path: Path) -> None:
    colors = {"PAVI-F": "tab:green", "one flow per group": "tab:purple"}
    with save_axes(path, len(REGIMES)) as axes:
        for ax, regime in zip(axes, REGIMES, strict=True):
            for name, color in colors.items():
                for k, (steps, gaps) in enumerate(curves[regime, name]):
                    ax.loglog(steps, np.maximum(gaps, 1e-3), color=color, label=name if k == 0 else None)
            ax.axhline(FRACTION * curves[regime, "PAVI-F"][0][1][0], color="gray", linestyle="--")
            title = f"{regime}: D={DIM}, {GROUPS} groups, {BATCH} per step"
            ax.set(xlabel="step", ylabel="log p(X) - ELBO (nats)", title=title)
            ax.legend()


if __name__ == "__main__":
    main()
