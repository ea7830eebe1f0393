"""Ways to bring a model and its data, and how results come back."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from exact import assert_moments, gaussian, nuts

import pavi

LINEAR = pavi.PAVI(flow=pavi.Affine(hidden=()))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


def test_deterministic_sites_that_sum_over_a_plate_are_left_out():
    def model():
        with numpyro.plate("group", 5):
            theta = numpyro.sample("theta", dist.Normal(0, 1))
            numpyro.sample("x", dist.Normal(theta, 1))
        numpyro.deterministic("total", theta.sum())

    fit = pavi.fit(model, {"x": normal(5)}, progress_bar=False, steps=50, family=LINEAR)
    assert "total" not in fit.sample(2)
    with pytest.raises(pavi.SettingError, match="sum over a plate"):
        fit.sample(2, sites=["total"])


def test_the_model_stays_a_plain_numpyro_model_with_obs():
    def model(x=None):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("item", 6):
            numpyro.sample("x", dist.Normal(mu, 1), obs=x)

    x = normal(6)
    by_data = pavi.fit(model, {"x": x}, progress_bar=False, steps=300, family=LINEAR)
    by_both = pavi.fit(model, {"x": x}, model_args=(x,), progress_bar=False, steps=300, family=LINEAR)
    assert np.allclose(by_data.sample(50)["mu"], by_both.sample(50)["mu"], atol=1e-5)
    exact = nuts(model, {}, (x,))
    assert abs(float(by_data.sample(4000)["mu"].mean()) - exact.mean["mu"]) < 0.15 * exact.sd["mu"]


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, lambda x: x.tolist()])
def test_numpy_jax_and_lists_as_data(convert):
    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("item", 3):
            numpyro.sample("x", dist.Normal(mu, 1))

    fit = pavi.fit(model, {"x": convert(np.array([1.0, 2.0, 3.0], np.float32))}, progress_bar=False, steps=20, family=LINEAR)
    assert fit.elbo(8).mean < 0


def test_xarray_data_is_matched_by_name_and_coordinates_come_back():
    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("subject", 4, dim=-2):
            theta = numpyro.sample("theta", dist.Normal(mu, 1))
            with numpyro.plate("session", 3, dim=-1):
                numpyro.sample("x", dist.Normal(theta, 1))

    x = normal(4, 3)
    names = ["ann", "bob", "cyd", "dee"]
    dataset = xr.Dataset({"x": (("session", "subject"), x.T)}, coords={"subject": names, "session": [10, 20, 30]})
    fit = pavi.fit(model, dataset, progress_bar=False)
    exact = gaussian(model, {"x": x})
    assert_moments(fit, exact, exact.mean, mean_tolerance=0.1, sd_tolerance=0.1)
    assert list(fit.sample(2)["theta"].coords["subject"].values) == names
    part = fit.sample(2, where={"subject": [2, 0]})
    assert list(part["subject"].values) == ["cyd", "ann"]
    assert list(fit.predict(2)["session"].values) == [10, 20, 30]
    tree = fit.to_datatree(5, predict=True)
    assert set(tree.children) == {"posterior", "observed_data", "posterior_predictive"}
    assert np.allclose(tree["observed_data"]["x"].transpose("subject", "session"), x)


def supports_model():
    """Latents on every support; the likelihood ties each of them to data."""
    positive = numpyro.sample("positive", dist.Gamma(3.0, 2.0))
    interval = numpyro.sample("interval", dist.Uniform(-1.0, 2.0))
    bounded = numpyro.sample("bounded", dist.Uniform(interval, 3.0))
    simplex = numpyro.sample("simplex", dist.Dirichlet(jnp.array([2.0, 3.0, 1.5])))
    ordered = numpyro.sample(
        "ordered", dist.TransformedDistribution(dist.Normal(jnp.zeros(3), 1).to_event(1), dist.transforms.OrderedTransform())
    )
    cholesky = numpyro.sample("cholesky", dist.LKJCholesky(2, 2.0))
    numpyro.sample("y1", dist.Normal(jnp.log(positive), 0.5))
    numpyro.sample("y2", dist.Normal(interval + bounded, 0.5))
    numpyro.sample("y3", dist.Normal(simplex, 0.2).to_event(1))
    numpyro.sample("y4", dist.Normal(ordered, 0.7).to_event(1))
    numpyro.sample("y5", dist.Normal(cholesky[1, 0], 0.3))


def test_supports():
    data = {
        "y1": np.float32(0.8),
        "y2": np.float32(1.5),
        "y3": np.array([0.2, 0.6, 0.2], np.float32),
        "y4": np.array([-1.0, 0.2, 1.5], np.float32),
        "y5": np.float32(0.5),
    }
    fit = pavi.fit(
        supports_model, data, family=pavi.PAVI(flow=pavi.Affine("tril", hidden=())), steps=2000, progress_bar=False
    )
    exact = nuts(supports_model, data)
    draws = fit.sample(4000)
    assert (draws["positive"] > 0).all()
    assert ((draws["interval"] > -1) & (draws["interval"] < 2)).all()
    assert (draws["bounded"] > draws["interval"]).all()
    assert np.allclose(draws["simplex"].sum("simplex_dim_0"), 1, atol=1e-5)
    assert (np.diff(draws["ordered"], axis=-1) > 0).all()
    assert np.allclose((draws["cholesky"] ** 2).sum("cholesky_dim_1"), 1, atol=1e-5)
    sites = ["positive", "interval", "bounded", "simplex", "ordered"]
    assert_moments(fit, exact, sites, mean_tolerance=0.15, sd_tolerance=0.15)
    correlation = draws["cholesky"].values[0, :, 1, 0]
    assert abs(correlation.mean() - exact.mean["cholesky"][1, 0]) < 0.15 * exact.sd["cholesky"][1, 0]
    assert abs(correlation.std() / exact.sd["cholesky"][1, 0] - 1) < 0.15
