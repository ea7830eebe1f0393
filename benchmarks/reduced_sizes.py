"""How many groups a step needs to see (paper, `fig:card_redu`), for both encoding schemes.

    python benchmarks/reduced_sizes.py

Gaussian random effects, D=2, 20 groups, 1 to 20 of them per step. Curves of the gap to the exact evidence go to
out/reduced_sizes_free.png and out/reduced_sizes_encoder.png.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from tqdm import tqdm

import pavi
from figures import save_axes
from gre import DIM, REGIMES
from pavi.experiments.problems import gre, gre_evidence, simulate_gre

GROUPS = 20
BATCHES = (1, 2, 4, 8, 16, 20)
SCHEMES = {
    "free": pavi.PAVI(),
    "encoder": pavi.PAVI(encodings=pavi.SetEncoder()),
    "encoder, drawn members only": pavi.PAVI(encodings=pavi.SetEncoder(memory=1.0)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    points, sigma_x = REGIMES["balanced"]
    model = gre(GROUPS, points, sigma_x, DIM)
    print(f"| scheme | groups per step | gap per latent after {arguments.steps} steps, mean | each data set |")
    print("|---|---|---|---|")
    curves: dict[str, dict[int, np.ndarray]] = {scheme: {} for scheme in SCHEMES}
    for scheme, family in SCHEMES.items():
        for batch in tqdm(BATCHES, desc=scheme, leave=False):
            gaps = []
            for seed in range(arguments.seeds):
                x = simulate_gre(GROUPS, points, sigma_x, DIM, seed)
                evidence = gre_evidence(x, sigma_x)
                settings = {"batch": {"group": batch}, "steps": arguments.steps, "rng_key": seed}
                fit = pavi.fit(model, {"x": x}, family=family, progress_bar=False, **settings)
                gaps.append((evidence - fit.elbo(1000).mean) / (DIM * (GROUPS + 1)))
                curves[scheme].setdefault(batch, evidence - fit.history["elbo"])
            each = ", ".join(f"{gap:.4f}" for gap in gaps)
            print(f"| {scheme} | {batch} | {np.mean(gaps):.4f} | {each} |", flush=True)
    for scheme, found in curves.items():
        with save_axes(arguments.out / f"reduced_sizes_{scheme.replace(', ', '_').replace(' ', '_')}.png") as (ax,):
            for batch, gap in found.items():
                window = 100
                smooth = [np.mean(gap[a : a + window]) for a in range(0, len(gap), window)]
                color = "black" if batch == GROUPS else None
                ax.semilogy(np.arange(len(smooth)) * window, np.maximum(smooth, 1e-2), color=color, label=f"{batch}")
            ax.set(xlabel="step", ylabel="log p(X) - reduced ELBO (nats)", title=f"{scheme}: groups per step, of {GROUPS}")
            ax.legend()


if __name__ == "__main__":
    main()
