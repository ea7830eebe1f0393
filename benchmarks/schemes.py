"""Both encoding schemes on models that are not Gaussian, and what reduces the encoder's bias.

    python benchmarks/schemes.py            # tables of the hierarchical variance and Gaussian mixture models
    python benchmarks/schemes.py --bias     # what was tried against the bias of PAVI-E

Five data sets each, 5,000 steps with 5 or all groups per step. The ELBO is that of the full study.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import pavi
from pavi.branch import Branch
from pavi.experiments.problems import gaussian_mixture, gre, gre_evidence, hierarchical_variance, simulate
from pavi.families import Glimpse

MODELS: dict[str, tuple[Callable, int, int]] = {
    "hierarchical variance": (hierarchical_variance(), 15, 15),
    "Gaussian mixture": (gaussian_mixture(), 20, 10),
}
BIAS_MODELS = {
    "GRE, balanced": (gre(20, 5, 1.0, 2), 20, 5),
    "hierarchical variance": MODELS["hierarchical variance"],
}
SEEDS = 5


def encoder(**settings) -> pavi.PAVI:
    return pavi.PAVI(encodings=pavi.SetEncoder(**settings))


def compare(models: dict[str, tuple[Callable, int, int]]) -> None:
    schemes = {"PAVI-F": pavi.PAVI(), "PAVI-E": encoder()}
    print("| model | per step | scheme | ELBO of each data set | mean | noise of it | skipped steps | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (model, groups, points) in models.items():
        for batch in (5, groups):
            for scheme, family in schemes.items():
                elbos, skipped, seconds = [], 0, []
                for seed in tqdm(range(SEEDS), desc=f"{name}, {scheme}", leave=False):
                    x = simulate(model, seed)
                    started = time.perf_counter()
                    settings = {"batch": {"group": batch, "point": points}, "steps": 5000, "rng_key": seed}
                    fit = pavi.fit(model, {"x": x}, family=family, progress_bar=False, **settings)
                    seconds.append(time.perf_counter() - started)
                    elbos.append(fit.elbo(1000))
                    skipped += fit.skipped
                noise = np.sqrt(sum(elbo.stderr**2 for elbo in elbos)) / SEEDS
                each = ", ".join(f"{elbo.mean:.2f}" for elbo in elbos)
                print(
                    f"| {name} | {batch} of {groups} | {scheme} | {each} | {np.mean([elbo.mean for elbo in elbos]):.2f} "
                    f"| {noise:.2f} | {skipped} | {np.mean(seconds):.0f} |",
                    flush=True,
                )


@dataclasses.dataclass(frozen=True)
class DrawnCounts(pavi.PAVI):
    """The paper's scheme to the letter: the encoder sees the drawn members only, and not how many there are in all."""

    def encode(self, weights, units, glimpse):
        branch = glimpse.branch
        ones = {plate: jnp.ones_like(weight) for plate, weight in branch.weights.items()}
        return super().encode(weights, units, glimpse._replace(branch=dataclasses.replace(branch, weights=ones)))

    def __hash__(self) -> int:
        return super().__hash__()


@dataclasses.dataclass(frozen=True)
class MoreChildren(pavi.PAVI):
    """Encodes parents from `times` as many groups as are inferred, drawn anew in each step."""

    data: tuple = ()
    times: int = 3

    def encode(self, weights, units, glimpse):
        x = jnp.asarray(np.array(self.data[0], np.float32).reshape(self.data[1]))
        drawn = glimpse.branch.indices["group"]
        key = jax.random.fold_in(jax.random.key(1), (drawn * jnp.arange(1, 1 + len(drawn)) * 7919).sum())
        rank = jax.random.uniform(key, (len(x),)).at[drawn].set(-1.0 + jnp.arange(len(drawn)) * 1e-3)
        more = jnp.argsort(rank)[: min(len(x), self.times * len(drawn))]
        branch = glimpse.branch
        wide = Branch(
            {**branch.indices, "group": more},
            {**branch.weights, "group": jnp.full(len(more), len(x) / len(more))},
            {**branch.mask, "group": jnp.ones(len(more), bool)},
        )
        found, _ = super().encode(weights, units, Glimpse(glimpse.study, glimpse.arguments, wide, {"x": x[more]}))
        kept = {level: rows[: len(drawn)] if "group" in level else rows for level, rows in found.items()}
        return kept, weights.memory

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.data[1], self.times))


def ideas(x: np.ndarray) -> dict[str, pavi.PAVI]:
    """What was tried: each with the summaries of the drawn members only, but for the last."""
    plain = pavi.SetEncoder(memory=1.0)
    held = (tuple(x.ravel().tolist()), x.shape)
    return {
        "drawn members only (paper)": DrawnCounts(encodings=plain),
        "+ the number of all members": pavi.PAVI(encodings=plain),
        "+ parents encoded from 3 times as many": MoreChildren(encodings=plain, data=held),
        "+ moving summaries (default)": encoder(),
    }


def bias(models: dict[str, tuple[Callable, int, int]]) -> None:
    print("| model | groups per step | encoder | ELBO below PAVI-F on all groups, mean (nats) | each data set |")
    print("|---|---|---|---|---|")
    for name, (model, groups, points) in models.items():
        data = [simulate(model, seed) for seed in range(2)]
        best = []
        for seed, x in enumerate(data):
            exact = gre_evidence(x, 1.0) if name.startswith("GRE") else None
            best.append(
                pavi.fit(model, {"x": x}, progress_bar=False, rng_key=seed).elbo(1000).mean if exact is None else exact
            )
        for batch in (1, 2, 5):
            below: dict[str, list[float]] = {idea: [] for idea in ideas(data[0])}
            for seed, x in enumerate(tqdm(data, desc=f"{name}, {batch} per step", leave=False)):
                for idea, family in ideas(x).items():
                    settings = {"batch": {"group": batch, "point": points}, "steps": 3000, "rng_key": seed}
                    fit = pavi.fit(model, {"x": x}, family=family, progress_bar=False, **settings)
                    below[idea].append(best[seed] - fit.elbo(1000).mean)
            for idea, gaps in below.items():
                each = ", ".join(f"{gap:.2f}" for gap in gaps)
                print(f"| {name} | {batch} of {groups} | {idea} | {np.mean(gaps):.2f} | {each} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bias", action="store_true", help="compare ways to reduce the encoder's bias instead")
    parser.add_argument("--only", help="one of the models")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="The fit ended early")
    models = BIAS_MODELS if arguments.bias else MODELS
    models = {name: models[name] for name in models if arguments.only in (None, name)}
    bias(models) if arguments.bias else compare(models)


if __name__ == "__main__":
    main()
