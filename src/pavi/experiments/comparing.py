"""Tables of methods: each trained on several data sets with several seeds (paper, `tab:scaling`, `tab:GM`, ...)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment
from tqdm.auto import tqdm

from pavi.errors import PaviError
from pavi.experiments import methods
from pavi.experiments.measuring import evaluated, fitted, trained
from pavi.experiments.methods import Method
from pavi.experiments.problems import gaussian_mixture, gre, gre_evidence, hierarchical_variance, simulate, simulate_gre
from pavi.experiments.records import Row, Table
from pavi.models import parcellation, simulate_cohort
from pavi.posterior import Posterior

# Points per group and the noise of a point, which the paper leaves open; and its feature size.
GRE_POINTS, GRE_SIGMA, GRE_DIM = 10, 0.3, 2
# Groups, and how many of them a step takes.
GRE_GROUPS = {2: 1, 20: 5, 200: 20, 2_000: 20, 20_000: 20}
SMALL_CORTEX = {"num_subjects": 5, "num_sessions": 6, "num_vertices": 12, "num_features": 4, "num_networks": 7}


class Problem(NamedTuple):
    """A model with a way to draw data of it."""

    variant: str
    model: Callable
    observed: str
    batch: Mapping[str, int]
    draw: Callable[[int], np.ndarray]
    exact: Callable[[np.ndarray], float] | None = None
    judge: Callable[[Posterior, int], Row] | None = None
    """What else is looked at in a posterior, given the number of the data set."""
    size: int = 0
    """Groups, where it grows."""


def compare(problem: Problem, chosen: Mapping[str, Method], table: Table, datasets: int, seeds: int, progress: bool) -> None:
    """Fills a table with every method that the problem is not too large for."""
    jobs = list(_jobs(problem, chosen, table, datasets, seeds))
    for name, method, seed, missing in tqdm(jobs, desc=problem.variant, disable=not progress, dynamic_ncols=True):
        key = {"variant": problem.variant, "method": name}
        try:
            for number, posterior, row in runs(problem, method, seed, missing):
                judged = {} if problem.judge is None else problem.judge(posterior, number)
                table.add([{**key, "dataset": number, "seed": seed, "note": "", **row, **judged}])
        except PaviError as error:
            empty = {"elbo": "", "stderr": "", "weights": "", "steps": "", "seconds": "", "plateau_seconds": "", "exact": ""}
            note = str(error).split(". ")[0]
            table.add([{**key, "dataset": number, "seed": seed, "note": note, **empty} for number in missing])


def _jobs(
    problem: Problem, chosen: Mapping[str, Method], table: Table, datasets: int, seeds: int
) -> Iterator[tuple[str, Method, int, list[int]]]:
    """What is still to do: (name, method, seed, data sets). An amortized method takes all data sets of a seed at once."""
    for name, method in chosen.items():
        if problem.size > method.largest:
            continue
        for seed in range(seeds):
            key = {"variant": problem.variant, "method": name, "seed": seed}
            missing = [number for number in range(datasets) if not table.has(**key, dataset=number)]
            if method.amortized and missing:
                yield name, method, seed, missing
            elif not method.amortized:
                yield from ((name, method, seed, [number]) for number in missing)


def runs(problem: Problem, method: Method, seed: int, numbers: list[int]) -> Iterator[tuple[int, Posterior, Row]]:
    """A method's posterior of each data set, and what was measured; an amortized one is trained once for all of them."""
    batch = dict(problem.batch) if method.reduced else None
    training: Row = {}
    amortized = None
    if method.amortized:
        training, amortized = trained(
            problem.model, problem.observed, method.family, seed, steps=method.steps, batch=batch, num_datasets=None
        )
    for number in numbers:
        x = problem.draw(number)
        data = {problem.observed: x}
        if amortized is not None:
            posterior = amortized.infer(data)
            row = {**evaluated(posterior), **training}
        else:
            row, posterior = fitted(problem.model, data, method.family, seed, steps=method.steps, batch=batch)
        row["exact"] = "" if problem.exact is None else round(problem.exact(x), 4)
        yield number, posterior, row


def scaling(groups: int) -> Problem:
    """Gaussian random effects with some groups (`tab:scaling`)."""
    return Problem(
        f"{groups} groups",
        gre(groups, GRE_POINTS, GRE_SIGMA, GRE_DIM),
        "x",
        {"group": GRE_GROUPS[groups], "point": GRE_POINTS},
        lambda number: simulate_gre(groups, GRE_POINTS, GRE_SIGMA, GRE_DIM, 1000 + number),
        lambda x: gre_evidence(x, GRE_SIGMA),
        size=groups,
    )


def mixture() -> Problem:
    """A Gaussian mixture with random effects (`tab:GM`)."""
    model = gaussian_mixture()
    return Problem("mixture", model, "x", {"group": 5, "point": 10}, lambda number: simulate(model, 1000 + number))


def variance() -> Problem:
    """Parents as variances of their children (`tab:HV`)."""
    model = hierarchical_variance()
    return Problem("variance", model, "x", {"group": 3, "point": 3}, lambda number: simulate(model, 1000 + number))


def neuroimaging() -> Problem:
    """The neuroimaging model in small, labels relaxed (`tab:HCPL`); S, T, N, D, L = 5, 6, 12, 4, 7."""
    model = parcellation(labels="relaxed", **SMALL_CORTEX)

    def cohort(number: int) -> Any:
        return simulate_cohort(**SMALL_CORTEX, seed=1000 + number, dtype=jnp.float32)

    def judge(posterior: Posterior, number: int) -> Row:
        probs = posterior.moments(sites=["label_probs"], num_samples=200)["label_probs"].values[0]
        found, truth = probs.argmax(-1).ravel(), np.asarray(cohort(number).labels).ravel()
        counts = np.zeros((7, 7))
        np.add.at(counts, (found, truth), 1)
        matched = counts[linear_sum_assignment(-counts)].sum()
        return {"labels_right": round(float(matched / len(truth)), 4)}

    return Problem(
        "neuroimaging",
        model,
        "x",
        {"subject": 3, "session": 3, "vertex": 3},
        lambda number: np.asarray(cohort(number).x.transpose(0, 2, 1, 3)),
        judge=judge,
    )


CHOSEN = {
    "scaling": methods.scaling,
    "mixture": methods.mixture,
    "variance": methods.variance,
    "neuroimaging": methods.neuroimaging,
}
