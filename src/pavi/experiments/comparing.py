"""Tables of methods: each trained on several data sets with several seeds (paper, `tab:scaling`, `tab:GM`, ...)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment
from tqdm.auto import tqdm

from pavi.errors import PaviError
from pavi.experiments import methods
from pavi.experiments.measuring import evaluated, fitted, forget_compiled, trained
from pavi.experiments.methods import Method
from pavi.experiments.problems import (
    REGIMES,
    gaussian_mixture,
    gre,
    gre_evidence,
    hierarchical_variance,
    simulate,
    simulate_gre,
)
from pavi.experiments.records import Row, Table
from pavi.experiments.together import fitted_together
from pavi.models import parcellation, simulate_cohort
from pavi.posterior import Posterior

# Points per group and the noise of a point, which the paper leaves open; and its feature size.
GRE_POINTS, GRE_SIGMA = REGIMES["informative"]
GRE_DIM = 2
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
    side_by_side: bool = False
    """Whether its fits may be trained side by side: those that need several starts may not."""


class Job(NamedTuple):
    """What one process does in one go: a method and its (data set, seed) pairs."""

    experiment: str
    problem: int
    method: str
    pairs: tuple[tuple[int, int], ...]
    together: bool


def compare(name: str, table: Table, datasets: int, seeds: int, progress: bool, processes: int = 1) -> None:
    """Fills the table of an experiment with every method that its problems are not too large for.

    On accelerators all data sets and seeds of a method are trained side by side. With several `processes`, methods are too.
    """
    problems = enumerate(PROBLEMS[name]())
    jobs = [job for number, problem in problems for job in _jobs(name, number, problem, table, datasets, seeds)]
    with tqdm(total=len(jobs), desc=name, disable=not progress, dynamic_ncols=True) as bar:
        if processes == 1:
            for _, same in itertools.groupby(jobs, key=lambda job: (job.problem, job.method)):
                forget_compiled()
                for job in same:
                    for row in work(job):
                        table.add([row])
                    bar.update()
            return
        # Long jobs first; the same compiled code for another seed later.
        jobs.sort(key=lambda job: (not CHOSEN[name]()[job.method].amortized, job.pairs[0][1]))
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            for future in as_completed([pool.submit(_work_elsewhere, job) for job in jobs]):
                table.add(future.result())
                bar.update()


def _jobs(name: str, number: int, problem: Problem, table: Table, datasets: int, seeds: int) -> Iterator[Job]:
    """What is still to do. An amortized method takes all data sets of a seed at once; so do others where they fit."""
    together = jax.default_backend() != "cpu" and problem.side_by_side
    for method, settings in CHOSEN[name]().items():
        if problem.size > settings.largest:
            continue
        key = {"variant": problem.variant, "method": method}
        missing = [
            (dataset, seed)
            for seed in range(seeds)
            for dataset in range(datasets)
            if not table.has(**key, seed=seed, dataset=dataset)
        ]
        if settings.amortized:
            for seed in sorted({seed for _, seed in missing}):
                yield Job(name, number, method, tuple(pair for pair in missing if pair[1] == seed), False)
        elif together and missing:
            yield Job(name, number, method, tuple(missing), True)
        else:
            yield from (Job(name, number, method, (pair,), False) for pair in missing)


def work(job: Job) -> Iterator[Row]:
    """Does a job; the rows it gives."""
    problem, method = _built(PROBLEMS[job.experiment])[job.problem], CHOSEN[job.experiment]()[job.method]
    key = {"variant": problem.variant, "method": job.method}
    try:
        for (number, seed), posterior, row in runs(problem, method, job.pairs, job.together):
            judged = {} if problem.judge is None else problem.judge(posterior, number)
            yield {**key, "dataset": number, "seed": seed, "note": "", **row, **judged}
    except PaviError as error:
        empty = {"elbo": "", "stderr": "", "weights": "", "steps": "", "seconds": "", "plateau_seconds": "", "exact": ""}
        note = str(error).split(". ")[0]
        yield from ({**key, "dataset": number, "seed": seed, "note": note, **empty} for number, seed in job.pairs)


@functools.cache
def _built(problems: Callable[[], list[Problem]]) -> list[Problem]:
    """The problems of an experiment, built once: compiled code is found again for the same model only."""
    return problems()


def _work_elsewhere(job: Job) -> list[Row]:
    rows = list(work(job))
    forget_compiled()
    return rows


def runs(
    problem: Problem, method: Method, pairs: Sequence[tuple[int, int]], together: bool = False
) -> Iterator[tuple[tuple[int, int], Posterior, Row]]:
    """A method's posterior for each data set and seed, and what was measured; an amortized one is trained once per seed."""
    batch = dict(problem.batch) if method.reduced else None
    drawn = {number: problem.draw(number) for number, _ in pairs}
    settings: dict[str, Any] = {"steps": method.steps, "batch": batch}
    if method.amortized:
        found = _amortized(problem, method, pairs, drawn, batch)
    elif together:
        data = [({problem.observed: drawn[number]}, seed) for number, seed in pairs]
        found = fitted_together(problem.model, data, method.family, **settings)
    else:
        found = (
            fitted(problem.model, {problem.observed: drawn[number]}, method.family, seed, starts=method.starts, **settings)
            for number, seed in pairs
        )
    for pair, (row, posterior) in zip(pairs, found, strict=True):
        row["exact"] = "" if problem.exact is None else round(problem.exact(drawn[pair[0]]), 4)
        yield pair, posterior, row


def _amortized(
    problem: Problem, method: Method, pairs: Sequence[tuple[int, int]], drawn: Mapping[int, np.ndarray], batch: Any
) -> Iterator[tuple[Row, Posterior]]:
    known: dict[int, tuple[Row, Any]] = {}
    for number, seed in pairs:
        if seed not in known:
            known[seed] = trained(
                problem.model, problem.observed, method.family, seed, steps=method.steps, batch=batch, num_datasets=None
            )
        training, amortized = known[seed]
        posterior = amortized.infer({problem.observed: drawn[number]})
        yield {**evaluated(posterior), **training}, posterior


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
        side_by_side=True,
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


PROBLEMS: dict[str, Callable[[], list[Problem]]] = {
    "scaling": lambda: [scaling(groups) for groups in GRE_GROUPS],
    "mixture": lambda: [mixture()],
    "variance": lambda: [variance()],
    "neuroimaging": lambda: [neuroimaging()],
}
CHOSEN = {
    "scaling": methods.scaling,
    "mixture": methods.mixture,
    "variance": methods.variance,
    "neuroimaging": methods.neuroimaging,
}
