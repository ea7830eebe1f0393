"""The central claim (paper, `sec:no_bias`): averaged over every branching, the reduced ELBO is the full ELBO."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import pavi
from pavi import data as observed_data
from pavi import rows as row_ops
from pavi.api import _study
from pavi.branch import draw_branch
from pavi.elbo import reduced_elbo
from pavi.families import Units

RNG = np.random.default_rng(0)


def nested():
    mu = numpyro.sample("mu", dist.Normal(jnp.zeros(2), 2).to_event(1))
    with numpyro.plate("group", 4, dim=-2):
        theta = numpyro.sample("theta", dist.Normal(mu, 1).to_event(1))
        with numpyro.plate("point", 3, dim=-1):
            numpyro.sample("x", dist.Normal(theta, 0.5).to_event(1))


def crossed():
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


CASES = {
    "nested": (nested, {"x": RNG.normal(size=(4, 3, 2)).astype(np.float32)}, {"group": 2, "point": 2}),
    "crossed": (crossed, {"x": RNG.normal(size=(4, 3)).astype(np.float32)}, {"row": 2, "column": 1}),
}


@pytest.mark.parametrize("family", [pavi.PAVI(), pavi.baselines.UnamortizedFlows(flow=pavi.MAF(hidden=(8,)))], ids=["PAVI", "SVI"])
@pytest.mark.parametrize("case", CASES)
def test_mean_over_all_branchings_is_the_full_elbo(case, family):
    model, data, batch = CASES[case]
    study, arguments, observations = _study(model, data, (), None)
    template = study.template
    weights = family.init(template, np.random.default_rng(1))
    shared = jnp.asarray(weights.shared + 0.1 * RNG.normal(size=weights.shared.shape), jnp.float32)
    rows = {k: jnp.asarray(v + 0.3 * RNG.normal(size=v.shape), jnp.float32) for k, v in weights.rows.items()}
    ones = {site.name: jnp.ones(site.size) for site in template.latents}
    units = Units({name: 0 * one for name, one in ones.items()}, ones)
    sizes = {plate.name: plate.size for plate in template.plates}
    key = jax.random.key(5)

    def elbo(shared, rows, indices, weight):
        branch = draw_branch(key, sizes, {p: len(i) for p, i in indices.items()})
        branch = type(branch)(indices, {p: jnp.full(len(i), weight[p]) for p, i in indices.items()}, branch.mask)
        gathered = {level: row_ops.gather(array, branch.at(level)) for level, array in rows.items()}
        sliced = observed_data.at_branch(template, observations.arrays, branch, frozenset())
        sampler = family.sampler(template, units, shared)
        return reduced_elbo(study, arguments, sampler, gathered, branch, sliced, key)

    value_and_grad = jax.jit(jax.value_and_grad(elbo, (0, 1)))
    whole = {plate: jnp.arange(size) for plate, size in sizes.items()}
    full, full_grad = value_and_grad(shared, rows, whole, dict.fromkeys(sizes, 1.0))
    subsets = [itertools.combinations(range(sizes[p]), batch[p]) for p in sizes]
    total, total_grad, count = 0.0, None, 0
    for chosen in itertools.product(*subsets):
        indices = {p: jnp.array(c) for p, c in zip(sizes, chosen, strict=True)}
        value, grad = value_and_grad(shared, rows, indices, {p: sizes[p] / batch[p] for p in sizes})
        grad = jax.tree.map(lambda g: np.asarray(g, np.float64), grad)
        total += float(value)
        total_grad = grad if total_grad is None else jax.tree.map(np.add, total_grad, grad)
        count += 1
    assert count > 10
    assert abs(total / count - float(full)) < 1e-5 * abs(float(full))
    for mean, exact in zip(jax.tree.leaves(total_grad), jax.tree.leaves(full_grad), strict=True):
        scale = np.abs(np.asarray(exact)).max() if exact.size else 0
        assert np.allclose(mean / count, exact, atol=2e-5 * scale + 1e-6)
