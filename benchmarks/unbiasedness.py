"""The reduced ELBO is unbiased (paper, `sec:no_bias`): its mean over every branching against the full ELBO.

    python benchmarks/unbiasedness.py

A small nested and a small crossed model; the same noise in every branching. Relative errors of value and gradient.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import pavi
from pavi import data as observed_data
from pavi import rows as row_ops
from pavi.branch import Branch
from pavi.cascade import cascade
from pavi.elbo import reduced_elbo
from pavi.families import Glimpse, Units, Weights
from pavi.inner import Inner
from pavi.reading import read_study


def nested() -> None:
    mu = numpyro.sample("mu", dist.Normal(jnp.zeros(2), 2).to_event(1))
    with numpyro.plate("group", 4, dim=-2):
        theta = numpyro.sample("theta", dist.Normal(mu, 1).to_event(1))
        with numpyro.plate("point", 3, dim=-1):
            numpyro.sample("x", dist.Normal(theta, 0.5).to_event(1))


def crossed() -> None:
    rows = numpyro.plate("row", 4, dim=-2)
    columns = numpyro.plate("column", 3, dim=-1)
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with rows:
        a = numpyro.sample("a", dist.Normal(0, tau))
    with columns:
        b = numpyro.sample("b", dist.Gamma(2.0, 1.0))
    with rows, columns:
        c = numpyro.sample("c", dist.Normal(a * b, 1))
        numpyro.sample("x", dist.StudentT(5.0, c, 0.5))


RNG = np.random.default_rng(0)
CASES = {
    "nested": (nested, {"x": RNG.normal(size=(4, 3, 2)).astype(np.float32)}, {"group": 2, "point": 2}),
    "crossed": (crossed, {"x": RNG.normal(size=(4, 3)).astype(np.float32)}, {"row": 2, "column": 1}),
}


def compare(
    model, data: dict, batch: dict[str, int], family=None, inner: Inner | None = None
) -> tuple[int, float, float, float]:
    """(branchings, full ELBO, relative error of the mean ELBO, relative error of the mean gradient).

    With `inner`, of the bound that averages over points of that level instead.
    """
    family = pavi.PAVI() if family is None else family
    study, arguments, observations = read_study(model, data, (), None)
    template = study.template
    weights = family.init(template, np.random.default_rng(1), observations.arrays, frozenset())
    rng = np.random.default_rng(2)  # away from the start, where many gradients are zero
    shared = jnp.asarray(weights.shared + 0.1 * rng.normal(size=weights.shared.shape), jnp.float32)
    rows = {k: jnp.asarray(v + 0.3 * rng.normal(size=v.shape), jnp.float32) for k, v in weights.rows.items()}
    ones = {site.name: jnp.ones(site.size) for site in template.latents}
    units = Units({name: 0 * one for name, one in ones.items()}, ones)
    sizes = {plate.name: plate.size for plate in template.plates}
    key = jax.random.key(5)

    def elbo(shared, rows, branch: Branch):
        gathered = {level: row_ops.gather(array, branch.at(level)) for level, array in rows.items()}
        sliced = observed_data.at_branch(template, observations.arrays, branch, frozenset())
        sampler = family.sampler(template, units, shared)
        glimpse = Glimpse(study, arguments, branch, sliced)
        encodings, _ = family.encode(Weights(shared, gathered, {}), units, glimpse)
        found = cascade(study, arguments, sampler, encodings, branch, sliced, key, inner=inner)
        return reduced_elbo(template, branch, found, inner=inner)

    def branch_of(members: dict[str, tuple[int, ...]]) -> Branch:
        return Branch(
            {p: jnp.array(m) for p, m in members.items()},
            {p: jnp.full(len(m), sizes[p] / len(m)) for p, m in members.items()},
            {p: jnp.ones(len(m), bool) for p, m in members.items()},
        )

    value_and_grad = jax.jit(jax.value_and_grad(elbo, (0, 1)))

    def evaluate(members: dict[str, tuple[int, ...]]) -> tuple[float, np.ndarray]:
        value, grad = value_and_grad(shared, rows, branch_of(members))
        return float(value), np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(grad)])

    full, full_grad = evaluate({plate: tuple(range(size)) for plate, size in sizes.items()})
    subsets = [itertools.combinations(range(sizes[p]), batch[p]) for p in sizes]
    found = [evaluate(dict(zip(sizes, chosen, strict=True))) for chosen in itertools.product(*subsets)]
    value_error = abs(np.mean([value for value, _ in found]) - full) / abs(full)
    grad_error = np.abs(np.mean([grad for _, grad in found], axis=0) - full_grad).max() / np.abs(full_grad).max()
    return len(found), full, float(value_error), float(grad_error)


def main() -> None:
    print("| model | branchings | full ELBO | relative error of the mean ELBO | of the mean gradient |")
    print("|---|---|---|---|---|")
    for name, case in CASES.items():
        count, full, value_error, grad_error = compare(*case)
        print(f"| {name} | {count} | {full:.4f} | {value_error:.1e} | {grad_error:.1e} |")


if __name__ == "__main__":
    main()
