"""The families PAVI is compared with, each on a model where its optimum is known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from exact import gaussian
from scipy.optimize import minimize

import pavi
from pavi.baselines import ADAVI, ASVI, UIVI, CascadingFlows, MeanField
from pavi.families import Units
from pavi.flows import Highway
from pavi.packing import skeleton_of

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


def pushed_gap() -> float:
    """The least KL divergence from normals that are the prior's draws stretched and shifted: mu + s e, a (mu + e) + b."""

    def divergence(logs: np.ndarray) -> float:
        s, a = np.exp(logs)
        root = np.diag([s, *[a] * 8])
        root[1:, 0] = a * s
        product = precision() @ root @ root.T
        return 0.5 * (np.trace(product) - 9 - np.linalg.slogdet(product)[1])

    return minimize(divergence, np.zeros(2)).fun


def test_cascading_flows_reach_the_optimum_of_pushed_priors():
    """A child leans on its parent as much as it is stretched; auxiliary variables do not help where r is mean field."""
    fit = pavi.fit(model, DATA, family=CascadingFlows(auxiliary=2), steps=3000, progress_bar=False)
    exact = gaussian(model, DATA)
    assert exact.evidence - fit.elbo(4000).mean == pytest.approx(pushed_gap(), abs=0.03)
    draws = fit.sample(20)
    part = fit.sample(20, where={"group": [5]})["theta"]
    np.testing.assert_allclose(part.values[..., 0], draws["theta"].values[..., 5], atol=1e-5)


def test_noise_of_children_reaches_their_parents():
    """With a gain on it, a child's noise moves its parent; the density of what was drawn counts it."""
    template = pavi.read_template(model, ["x"])
    family = CascadingFlows(auxiliary=2)
    flat = family.init(template, np.random.default_rng(0), {}, frozenset()).shared
    rows = dict(family._rows(template, jnp.asarray(flat), Units({}, {}), {}))
    rows[()] = rows[()].at[4:6].set(1.0)  # after the mean and scales of r: gains of the noise of theta
    found = family.together(template, Units({}, {}), jnp.zeros(0), rows, jax.random.key(0), training=True)
    theta, mu = found[("group",)]["theta"], found[()]["mu"]
    np.testing.assert_allclose(mu.shift, theta.noise.mean(0), rtol=1e-5)
    assert np.all(theta.shift == 0)


def test_highway_layers_invert_and_know_their_determinant():
    flow = Highway(4)
    rng = np.random.default_rng(0)
    skeleton = skeleton_of(flow)
    flow = skeleton.fill(jnp.asarray(rng.normal(size=skeleton.size), jnp.float32))
    x = jnp.asarray(rng.normal(size=4), jnp.float32)
    y, log_det = flow.transform_and_log_det(x, jnp.zeros(0))
    back, inverse_log_det = flow.inverse_and_log_det(y, jnp.zeros(0))
    np.testing.assert_allclose(back, x, atol=1e-4)
    jacobian = jax.jacfwd(lambda x: flow.transform_and_log_det(x, jnp.zeros(0))[0])(x)
    assert float(log_det) == pytest.approx(float(jnp.linalg.slogdet(jacobian)[1]), abs=1e-4)
    assert float(inverse_log_det) == pytest.approx(-float(log_det), abs=1e-4)


def test_implicit_inference_finds_a_correlated_posterior():
    """Two latents whose sum is measured: mean field would be far too narrow."""

    def pair():
        a = numpyro.sample("a", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("x", dist.Normal(a + b, 0.3))

    data = {"x": np.float32(1.0)}
    fit = pavi.fit(pair, data, family=UIVI(embedding=2), steps=3000, progress_bar=False)
    exact = gaussian(pair, data)
    elbo = fit.elbo(500)
    assert -4 * elbo.stderr < exact.evidence - elbo.mean < 0.1
    draws = fit.sample(4000)
    a, b = draws["a"].values.ravel(), draws["b"].values.ravel()
    assert a.mean() == pytest.approx(float(exact.mean["a"]), abs=0.1)
    assert a.std() == pytest.approx(float(exact.sd["a"]), rel=0.15)
    assert np.corrcoef(a, b)[0, 1] < -0.7


def test_adavi_reaches_the_optimum_of_mean_field():
    family = ADAVI(encodings=pavi.SetEncoder(width=16), flow=pavi.Affine())
    exact, matrix = gaussian(model, DATA), precision()
    gap = 0.5 * (np.log(np.diag(matrix)).sum() - np.linalg.slogdet(matrix)[1])
    fit = pavi.fit(model, DATA, family=family, steps=1500, progress_bar=False)
    assert exact.evidence - fit.elbo(1000).mean == pytest.approx(gap, abs=0.1)


def test_adavi_refuses_graphs_that_are_no_pyramid():
    def crossed():
        with numpyro.plate("row", 3, dim=-2):
            a = numpyro.sample("a", dist.Normal(0, 1))
        with numpyro.plate("column", 2, dim=-1):
            b = numpyro.sample("b", dist.Normal(0, 1))
            with numpyro.plate("row", 3, dim=-2):
                numpyro.sample("x", dist.Normal(a + b, 1))

    with pytest.raises(pavi.ModelError, match="pyramidal"):
        pavi.fit(crossed, {"x": np.zeros((3, 2), np.float32)}, family=ADAVI(), progress_bar=False)


def test_sample_amortized_cascading_flows_answer_for_new_data():
    family = CascadingFlows(auxiliary=2, sample_amortized=True)
    amortized = pavi.amortize(model, ["x"], family=family, steps=1500, progress_bar=False)
    for data in (DATA, {"x": X[::-1] - 1.0}):
        posterior, exact = amortized.infer(data), gaussian(model, data)
        assert exact.evidence - posterior.elbo(500).mean < 2.0
        assert float(posterior.sample(1000)["mu"].mean()) == pytest.approx(float(exact.mean["mu"]), abs=0.5)
    with pytest.raises(pavi.SettingError, match="a flow for each member"):
        amortized.infer({"x": X[:4]})


@pytest.mark.parametrize("family", [CascadingFlows(), UIVI(), ADAVI()])
def test_families_that_need_whole_plates_say_so(family):
    with pytest.raises(pavi.SettingError, match="needs all 8 members"):
        pavi.fit(model, DATA, family=family, batch={"group": 4}, progress_bar=False)
    with pytest.raises(pavi.SettingError, match="on one device"):
        pavi.fit(model, DATA, family=family, devices=1, progress_bar=False)
