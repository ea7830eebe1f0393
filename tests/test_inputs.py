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


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)


def test_deterministic_sites_that_sum_over_a_plate_are_left_out():
    def model():
        with numpyro.plate("group", 5):
            theta = numpyro.sample("theta", dist.Normal(0, 1))
            numpyro.sample("x", dist.Normal(theta, 1))
        numpyro.deterministic("total", theta.sum())

    fit = pavi.fit(model, {"x": normal(5)}, progress_bar=False, steps=50)
    assert "total" not in fit.sample(2)
    with pytest.raises(pavi.SettingError, match="sum over a plate"):
        fit.sample(2, sites=["total"])


def test_the_model_stays_a_plain_numpyro_model_with_obs():
    def model(x=None):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("item", 6):
            numpyro.sample("x", dist.Normal(mu, 1), obs=x)

    x = normal(6)
    by_data = pavi.fit(model, {"x": x}, progress_bar=False, steps=300)
    by_both = pavi.fit(model, {"x": x}, model_args=(x,), progress_bar=False, steps=300)
    assert np.allclose(by_data.sample(50)["mu"], by_both.sample(50)["mu"], atol=1e-5)
    exact = nuts(model, {}, (x,))
    assert abs(float(by_data.sample(4000)["mu"].mean()) - exact.mean["mu"]) < 0.15 * exact.sd["mu"]


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, lambda x: x.tolist()])
def test_numpy_jax_and_lists_as_data(convert):
    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("item", 3):
            numpyro.sample("x", dist.Normal(mu, 1))

    fit = pavi.fit(model, {"x": convert(np.array([1.0, 2.0, 3.0], np.float32))}, progress_bar=False, steps=20)
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
