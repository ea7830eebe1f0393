"""The families PAVI is compared with, each on a model where its optimum is known."""

from __future__ import annotations

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from exact import gaussian

import pavi
from pavi.baselines import ASVI, MeanField

X = np.random.default_rng(1).normal(1.0, 1.5, size=(8, 2)).astype(np.float32)
DATA = {"x": X}


def model():
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    with numpyro.plate("group", 8, dim=-2):
        theta = numpyro.sample("theta", dist.Normal(mu, 1))
        with numpyro.plate("point", 2, dim=-1):
            numpyro.sample("x", dist.Normal(theta, 1))


def precision() -> np.ndarray:
    """Of mu, then of each group's theta."""
    matrix = np.diag([1 / 9 + 8.0, *[1.0 + 2.0] * 8])
    matrix[0, 1:] = matrix[1:, 0] = -1.0
    return matrix


@pytest.mark.parametrize("amortized", [False, True])
def test_mean_field_has_exact_means_and_conditional_spreads(amortized):
    fit = pavi.fit(model, DATA, family=MeanField(amortized), steps=3000, progress_bar=False)
    exact, matrix = gaussian(model, DATA), precision()
    gap = 0.5 * (np.log(np.diag(matrix)).sum() - np.linalg.slogdet(matrix)[1])
    assert fit.elbo(2000).mean == pytest.approx(exact.evidence - gap, abs=0.03)
    draws = fit.sample(4000)
    assert float(draws["mu"].mean()) == pytest.approx(float(exact.mean["mu"]), abs=0.1 * float(exact.sd["mu"]))
    assert float(draws["mu"].std()) == pytest.approx(matrix[0, 0] ** -0.5, rel=0.05)
    np.testing.assert_allclose(draws["theta"].std("draw").values.ravel(), matrix[1, 1] ** -0.5, rtol=0.06)


@pytest.mark.parametrize("amortized", [False, True])
def test_asvi_is_exact_in_a_normal_hierarchy(amortized):
    fit = pavi.fit(model, DATA, family=ASVI(amortized), steps=3000, progress_bar=False)
    exact = gaussian(model, DATA)
    assert fit.elbo(500).mean == pytest.approx(exact.evidence, abs=0.02)
    draws = fit.sample(4000)
    np.testing.assert_allclose(draws["theta"].std("draw").values.ravel(), np.ravel(exact.sd["theta"]), rtol=0.06)


def test_amortized_forms_have_weights_that_hardly_grow():
    def larger(size):
        with numpyro.plate("group", size):
            theta = numpyro.sample("theta", dist.Normal(0, 1))
            numpyro.sample("x", dist.Normal(theta, 1))

    for family in (MeanField(True), ASVI(True)):
        counts = [
            family.shapes(pavi.read_template(larger, ["x"], model_args=(size,)), frozenset()).shared.size
            for size in (10, 1000)
        ]
        assert counts[0] == counts[1] > 0


def test_asvi_updates_positive_parameters():
    def counts():
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
        with numpyro.plate("item", 10):
            numpyro.sample("y", dist.Poisson(rate))

    y = np.array([3, 4, 2, 5, 3, 4, 6, 2, 3, 4])
    fit = pavi.fit(counts, {"y": y}, family=ASVI(), steps=4000, progress_bar=False)
    draws = fit.sample(4000)["rate"]
    # The posterior is Gamma(2 + sum(y), 1 + 10), which is in the family.
    assert float(draws.mean()) == pytest.approx(38 / 11, rel=0.03)
    assert float(draws.std()) == pytest.approx(38**0.5 / 11, rel=0.1)


def test_asvi_says_what_it_cannot_update():
    def simplex():
        share = numpyro.sample("share", dist.Dirichlet(np.ones(3)))
        with numpyro.plate("item", 4):
            numpyro.sample("y", dist.Normal(share[0], 1))

    with pytest.raises(pavi.PaviError, match="'share', a Dirichlet"):
        pavi.fit(simplex, {"y": np.zeros(4)}, family=ASVI(), progress_bar=False)
