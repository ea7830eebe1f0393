"""Posterior draws against exact ones, with Wasserstein distances (paper, `fig:sanity`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from pavi.experiments import methods
from pavi.experiments.comparing import GRE_SIGMA, runs, scaling
from pavi.experiments.measuring import forget_compiled
from pavi.experiments.problems import gre_posterior
from pavi.experiments.records import Table

GROUPS, DRAWN = 20, 400


def check(table: Table, draws: Path, datasets: int, progress: bool) -> None:
    """Fits every method to some data sets of 20 groups; writes distances to the table and draws to a folder."""
    problem = scaling(GROUPS)
    for number in range(datasets):
        if not table.has(method="exact", dataset=number):
            pair = [
                dict(zip(("mu", "theta"), gre_posterior(problem.draw(number), GRE_SIGMA, DRAWN, seed), strict=True))
                for seed in (1, 0)
            ]
            table.add([{"method": "exact", "dataset": number, **distances(*pair)}])
    for name, method in tqdm(methods.scaling().items(), desc="sanity", disable=not progress, dynamic_ncols=True):
        missing = [number for number in range(datasets) if not table.has(method=name, dataset=number)]
        if not missing:  # an amortized method would be trained for nothing
            continue
        forget_compiled()
        for (number, _), posterior, _ in runs(problem, method, [(number, 0) for number in missing]):
            x = problem.draw(number)
            found = posterior.sample(DRAWN, sites=["mu", "theta"])
            values = {name: found[name].values[0] for name in ("mu", "theta")}
            row = distances(values, dict(zip(("mu", "theta"), gre_posterior(x, GRE_SIGMA, DRAWN), strict=True)))
            draws.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(draws / f"{_plain(name)}-{number}.npz", **values)
            table.add([{"method": name, "dataset": number, **row}])


def distances(found: Mapping[str, np.ndarray], exact: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Wasserstein distances between draws of all latents together, of mu alone, and of the groups on average."""
    import ot

    def distance(a: np.ndarray, b: np.ndarray) -> float:
        weights = np.full(len(a), 1 / len(a))
        return float(np.sqrt(ot.emd2(weights, weights, ot.dist(a.astype(np.float64), b.astype(np.float64)))))

    def flat(draws: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.concatenate(
            [draws["mu"].reshape(len(draws["mu"]), -1), draws["theta"].reshape(len(draws["theta"]), -1)], -1
        )

    each = [distance(found["theta"][:, group], exact["theta"][:, group]) for group in range(found["theta"].shape[1])]
    return {
        "wasserstein": round(distance(flat(found), flat(exact)), 4),
        "wasserstein_mu": round(distance(found["mu"], exact["mu"]), 4),
        "wasserstein_theta": round(float(np.mean(each)), 4),
    }


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name).strip("-")
