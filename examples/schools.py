"""A study in one page: test scores of pupils in schools, from model to posterior.

    python examples/schools.py

Simulates 300 schools with 20 pupils each, fits the hierarchical model with default settings, prints the posterior of the
population and how well the schools were recovered, and saves pictures.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

import pavi


def simulate(schools: int, pupils: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    effect = rng.normal(50, 5, size=schools)
    return effect, effect[:, None] + rng.normal(0, 10, size=(schools, pupils))


def model(schools: int, pupils: int) -> None:
    mean = numpyro.sample("mean", dist.Normal(50, 20))
    spread = numpyro.sample("spread", dist.HalfNormal(10))
    noise = numpyro.sample("noise", dist.HalfNormal(20))
    with numpyro.plate("school", schools, dim=-2):
        effect = numpyro.sample("effect", dist.Normal(mean, spread))
        with numpyro.plate("pupil", pupils, dim=-1):
            numpyro.sample("score", dist.Normal(effect, noise))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schools", type=int, default=300)
    parser.add_argument("--pupils", type=int, default=20)
    parser.add_argument("--steps", type=int, default=None, help="training steps; by default until the ELBO settles")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where pictures and the fit go")
    arguments = parser.parse_args()
    sizes = (arguments.schools, arguments.pupils)
    truth, score = simulate(*sizes)

    fit = pavi.fit(model, {"score": score}, model_args=sizes, steps=arguments.steps)
    print(f"\n{fit.template}\n\n{fit}\n")

    moments = fit.moments()
    print(f"{'site':8} {'truth':>8} {'mean':>8} {'sd':>8}")
    for site, value in {"mean": 50, "spread": 5, "noise": 10}.items():
        mean, sd = moments[site].values
        print(f"{site:8} {value:8.2f} {mean:8.2f} {sd:8.2f}")
    mean, sd = moments["effect"].values
    covered = np.mean(np.abs(truth - mean) < 1.96 * sd)
    print(f"\n{100 * covered:.0f}% of the schools' true means lie in their 95% intervals.")

    arguments.out.mkdir(exist_ok=True)
    fit.save(arguments.out / "schools.pavi")
    figure, (left, middle) = plt.subplots(1, 2, figsize=(11, 4))
    pavi.plots.history(fit, left)
    raw = score.mean(1)
    order = np.argsort(raw)
    middle.errorbar(
        raw[order], mean[order], 1.96 * sd[order], fmt=".", color="tab:green", alpha=0.4, markersize=3, linewidth=0.7
    )
    middle.plot(raw[order], raw[order], color="gray", linestyle="--", label="no pooling")
    middle.axhline(float(moments["mean"][0]), color="black", linewidth=0.8, label="population mean")
    middle.set(xlabel="mean score of the school's pupils", ylabel="posterior of the school", title="95% intervals")
    middle.legend()
    figure.tight_layout()
    figure.savefig(arguments.out / "schools.png", dpi=120)
    ax = pavi.plots.plate_diagram(fit.template)
    ax.figure.savefig(arguments.out / "schools_model.png", dpi=120, bbox_inches="tight")
    print(f"Pictures and the fit are in {arguments.out}/: schools.png, schools_model.png, schools.pavi")


if __name__ == "__main__":
    main()
