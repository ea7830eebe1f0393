"""`inner_points`: bounds that average the innermost latents out over points of their prior, and what they mend."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import log_expit, logsumexp

import pavi
from pavi.branch import fixed_branch
from pavi.cascade import cascade
from pavi.elbo import reduced_elbo
from pavi.inner import Inner
from pavi.mixing import averaged, averages
from pavi.models import SharedLabel

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from unbiasedness import CASES, compare

AFFINE, LINEAR = pavi.PAVI(flow=pavi.Affine()), pavi.PAVI(flow=pavi.Affine(hidden=()))
COINS = Inner(("group",), 1024)


def coins(groups=400, center=0.0):
    """Group logits of unknown spread, one coin each. Around zero heads are as likely as tails whatever the spread, so coins
    tell nothing of it, and its posterior is its prior."""
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("group", groups):
        theta = numpyro.sample("theta", dist.Normal(center, tau))
        numpyro.sample("x", dist.Bernoulli(logits=theta))


def nested(noise=1.0):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("group", 4, dim=-2):
        theta = numpyro.sample("theta", dist.Normal(mu, 1))
        with numpyro.plate("point", 3, dim=-1):
            numpyro.sample("x", dist.Normal(theta, noise))


def flat():
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("point", 3):
        numpyro.sample("x", dist.Normal(mu, 1))


def without_quantiles():
    with numpyro.plate("point", 3):
        z = numpyro.sample("z", dist.Dirichlet(jnp.ones(3)))
        numpyro.sample("x", dist.Normal(z[..., 0], 1))


def tossed(groups):
    return {"x": np.random.default_rng(0).integers(0, 2, size=groups)}


def test_the_averaged_bound_is_unbiased_over_branchings():
    _, _, value_error, grad_error = compare(*CASES["crossed"], LINEAR, Inner(("row", "column"), 4))
    assert value_error < 1e-5
    assert grad_error < 1e-5


@pytest.fixture(scope="module")
def fit():
    return pavi.fit(coins, tossed(6), model_args=(6, 0.7), family=AFFINE, steps=500, progress_bar=False)


def run(fit, inner=None, key=jax.random.key(3), **settings):
    sampler = AFFINE.sampler(fit.template, fit._units, fit._trained.weights.shared)
    branch, rows, data = fixed_branch({"group": jnp.arange(6)}), fit._trained.weights.rows, fit._observations.arrays
    found = cascade(fit._study, fit._arguments, sampler, rows, branch, data, key, inner=inner, **settings)
    return found, reduced_elbo(fit.template, branch, found, inner=inner)


def test_the_averaged_bound_of_a_member_is_its_evidence(fit, monkeypatch):
    found, bound = run(fit, COINS)
    points, chances = np.polynomial.hermite_e.hermegauss(200)
    x = np.asarray(fit._observations.arrays["x"])
    logits = (2 * x[:, None] - 1) * (0.7 + float(found.values["tau"]) * points)
    exact = logsumexp(log_expit(logits), b=chances / chances.sum(), axis=1).sum()
    outer = float(found.log_p["tau"] - found.log_q["tau"])
    assert found.log_p["x"].shape == (6,)  # averaged as a whole
    assert bound - outer == pytest.approx(exact, abs=1e-3)
    monkeypatch.setattr(Inner, "mixing", lambda self, template: None)
    found, bound = run(fit, COINS)
    assert found.log_p["x"].shape == (6, 1024)
    assert bound - outer == pytest.approx(exact, abs=1e-3)


def test_the_averaged_bound_is_above_the_elbo(fit):
    """On average over draws, by what flows cannot express of the members."""

    def gap(key):
        return run(fit, COINS, key)[1] - run(fit, None, key)[1]

    gaps = jax.jit(jax.vmap(gap))(jax.random.split(jax.random.key(0), 1000))
    assert gaps.mean() > 3 * gaps.std() / np.sqrt(1000)


@pytest.mark.parametrize(
    "make",
    [
        lambda logits: dist.Bernoulli(logits=logits[0]),
        lambda logits: dist.Bernoulli(probs=jax.nn.sigmoid(logits[0])).expand([1, 1]),
        lambda logits: dist.Categorical(logits=logits),
        lambda logits: dist.Categorical(probs=jax.nn.softmax(logits)),
        lambda logits: SharedLabel(logits, jnp.arange(6.0).reshape(3, 2), jnp.array([1.0, 2.0, 0.5]), 2),
    ],
)
def test_the_mean_of_densities_is_the_density_of_the_mean(make):
    logits = 2 * jax.random.normal(jax.random.key(0), (50, 3))
    value = make(logits[0]).sample(jax.random.key(1))
    assert averages(make(logits[0]))
    each = jax.vmap(lambda one: make(one).log_prob(value))(logits)
    mixed = jax.vmap(
        lambda one: averaged(make(one), lambda array: jax.lax.pmean(array, "points")).log_prob(value),
        axis_name="points",
    )(logits)
    np.testing.assert_allclose(np.ravel(mixed), np.log(np.exp(each).mean()), rtol=2e-5)


def test_only_simple_densities_are_averaged_as_a_whole():
    assert not averages(dist.Normal(0, 1))
    assert not averages(dist.Bernoulli(logits=jnp.zeros(2)))

    def spread_by_member():
        with numpyro.plate("point", 3):
            z = numpyro.sample("z", dist.Normal(0, 1))
            scales = jnp.exp(jnp.stack([z, z], -1))
            numpyro.sample("x", SharedLabel(jnp.stack([z, -z], -1), jnp.array([[0.0], [1.0]]), scales, 1))

    fit = pavi.fit(spread_by_member, {"x": np.ones((3, 1, 1))}, family=LINEAR, steps=1, progress_bar=False)
    branch, inner = fixed_branch({"point": jnp.arange(3)}), Inner(("point",), 8)
    sampler = LINEAR.sampler(fit.template, fit._units, fit._trained.weights.shared)
    rows, data = fit._trained.weights.rows, fit._observations.arrays
    found = cascade(fit._study, fit._arguments, sampler, rows, branch, data, jax.random.key(0), inner=inner)
    # Its scales differ between points, so that the mean of its chances is not all there is to it.
    assert found.log_p["x"].shape == (3, 8)


def test_a_site_that_does_not_depend_on_the_points_stays_as_it_is():
    def graded(groups=5):
        tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("group", groups):
            theta = numpyro.sample("theta", dist.Normal(0.0, tau))
            numpyro.sample("x", dist.Bernoulli(logits=theta))
            numpyro.sample("y", dist.Normal(0.0, tau))

    data = {"x": np.array([0, 1, 1, 0, 1]), "y": np.zeros(5)}
    fit = pavi.fit(graded, data, family=LINEAR, inner_points=4, steps=2, progress_bar=False)
    assert np.isfinite(fit.history["elbo"]).all()


def test_inner_points_mend_a_spread_that_the_elbo_biases():
    settings = {"family": AFFINE, "num_particles": 2, "batch": {"group": 400}, "steps": 2500, "progress_bar": False}
    plain, averaged = (pavi.fit(coins, tossed(400), inner_points=points, **settings) for points in (0, 64))
    before, after = (np.log(each.sample(2000, sites=["tau"])["tau"].values) for each in (plain, averaged))
    assert before.std() < 0.7  # its prior's, and so its posterior's, is 1
    assert abs(after.std() - 1) < 0.15
    assert abs(after.mean()) < 0.15


def test_where_points_miss_the_data_the_elbo_is_followed():
    x = {"x": np.random.default_rng(0).normal(size=(4, 1)) + 1e-2 * np.random.default_rng(1).normal(size=(4, 3))}
    settings = {"model_args": (1e-2,), "family": LINEAR, "steps": 1500, "progress_bar": False}
    plain, averaged = (pavi.fit(nested, x, inner_points=points, **settings) for points in (0, 8))
    assert averaged.elbo(500).mean == pytest.approx(plain.elbo(500).mean, abs=0.1)


def test_half_of_the_global_draws_are_mirrored(fit):
    def log_tau(sign):
        return float(run(fit, sign=sign)[0].unconstrained["tau"][0])

    assert log_tau(1.0) + log_tau(-1.0) == pytest.approx(2 * log_tau(0.0), abs=1e-5)
    assert abs(log_tau(1.0) - log_tau(-1.0)) > 1e-2


def test_refusals():
    points = {"x": np.zeros((4, 3))}

    def fit(model, data, points, family=LINEAR, **settings):
        return pavi.fit(model, data, family=family, inner_points=points, steps=1, progress_bar=False, **settings)

    with pytest.raises(pavi.SettingError, match="power of two"):
        fit(nested, points, 3)
    with pytest.raises(pavi.SettingError, match=r"'point'.*whole"):
        fit(nested, points, 4, batch={"point": 2})
    with pytest.raises(pavi.SettingError, match="outside of it depends on"):
        fit(flat, {"x": np.zeros(3)}, 4)
    with pytest.raises(pavi.SettingError, match="CascadingFlows"):
        fit(nested, points, 4, pavi.baselines.CascadingFlows(2))
    with pytest.raises(pavi.SettingError, match=r"Dirichlet.*quantile"):
        fit(without_quantiles, {"x": np.zeros(3)}, 4)
    assert len(fit(nested, points, 4).history["elbo"]) == 1
