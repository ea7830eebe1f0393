"""Every kind of model users bring, held against an exact answer: with default settings, and with an encoder."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from exact import assert_moments, gaussian, nuts
from numpyro.infer.reparam import LocScaleReparam

import pavi

RNG = np.random.default_rng(7)


@pytest.fixture(autouse=True, params=["free", "encoder"])
def scheme(request, monkeypatch):
    """Models are fitted with both encoding schemes, on the same data whichever tests are run.

    Those whose encoder would take longest to compile, or changes nothing, are fitted with free encodings alone.
    The encoder goes with affine flows, which compile faster; the library's own flows are fitted with free encodings, or
    linear ones where it is the plates that are of interest.
    """
    global RNG
    RNG = np.random.default_rng(7)
    encoder = {"family": pavi.PAVI(encodings=pavi.SetEncoder(), flow=pavi.Affine()), "steps": 1000}
    settings = {"encoder": encoder, "linear": {"family": pavi.PAVI(flow=pavi.Affine("tril", hidden=()))}}
    if request.param in settings:
        monkeypatch.setattr(pavi, "fit", functools.partial(pavi.fit, **settings[request.param]))
    return request.param


def normal(*shape: int, loc: float = 0.0, scale: float = 1.0) -> np.ndarray:
    return (loc + scale * RNG.normal(size=shape)).astype(np.float32)


def check_gaussian(model, data, *, args=(), kwargs=None, tolerance=0.02, **settings):
    """Fits, and compares ELBO and moments with the closed form. `tolerance` is in nats per latent number."""
    fit = pavi.fit(model, data, model_args=args, model_kwargs=kwargs, progress_bar=False, **settings)
    exact = gaussian(model, {k: np.asarray(v) for k, v in data.items()}, args, kwargs)
    elbo = fit.elbo(256)
    gap = exact.evidence - elbo.mean
    assert -4 * elbo.stderr - 1e-2 < gap < tolerance * fit.template.num_latents + 4 * elbo.stderr, f"gap {gap:.4f} nats"
    assert_moments(fit, exact, exact.mean, mean_tolerance=0.15, sd_tolerance=0.12)
    return fit


def test_two_levels(scheme):
    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        with numpyro.plate("group", 12):
            numpyro.sample("x", dist.Normal(mu, 1))

    fit = check_gaussian(model, {"x": normal(12, loc=2.0)}, tolerance=0.002)
    assert fit.stop is (pavi.Stop.SETTLED if scheme == "free" else pavi.Stop.STEPS)


@pytest.mark.parametrize("scheme", ["free"], indirect=True)
def test_three_levels_with_explicit_dims():
    def model():
        mu = numpyro.sample("mu", dist.Normal(jnp.zeros(2), 2).to_event(1))
        with numpyro.plate("group", 8, dim=-2):
            theta = numpyro.sample("theta", dist.Normal(mu, 1).to_event(1))
            with numpyro.plate("point", 5, dim=-1):
                numpyro.sample("x", dist.Normal(theta, 0.5).to_event(1))

    fit = check_gaussian(model, {"x": normal(8, 5, 2)}, tolerance=0.002)
    assert fit.sample(5)["theta"].dims == ("chain", "draw", "group", "theta_dim_0")


@pytest.mark.parametrize("scheme", ["linear"], indirect=True)
def test_four_levels_without_dims():
    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("region", 3):
            region = numpyro.sample("region_mean", dist.Normal(mu, 1))
            with numpyro.plate("school", 4):
                school = numpyro.sample("school_mean", dist.Normal(region, 1))
                with numpyro.plate("pupil", 5):
                    numpyro.sample("x", dist.Normal(school, 1))

    # Members of one school share what they say of its region, which no forward cascade can carry across regions.
    fit = pavi.fit(model, {"x": normal(5, 4, 3)}, progress_bar=False)
    assert fit.template.site("x").level == ("region", "school", "pupil")
    assert fit.sample(3)["school_mean"].dims == ("chain", "draw", "region", "school")
    data = {"x": np.asarray(fit._observations.arrays["x"]).transpose(2, 1, 0)}
    exact = gaussian(model, data)
    exact = exact._replace(mean={k: v.T for k, v in exact.mean.items()}, sd={k: v.T for k, v in exact.sd.items()})
    gap = exact.evidence - fit.elbo(256).mean
    assert -0.05 < gap < 0.02 * fit.template.num_latents
    assert_moments(fit, exact, exact.mean, mean_tolerance=0.15, sd_tolerance=0.12)


@pytest.mark.parametrize("scheme", ["linear"], indirect=True)
def test_crossed_plates_with_a_latent_on_each_and_on_their_product():
    def model():
        rows = numpyro.plate("row", 6, dim=-2)
        columns = numpyro.plate("column", 5, dim=-1)
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with rows:
            a = numpyro.sample("a", dist.Normal(0, 1))
        with columns:
            b = numpyro.sample("b", dist.Normal(0, 1))
        with rows, columns:
            c = numpyro.sample("c", dist.Normal(mu + a + b, 0.5))
            numpyro.sample("x", dist.Normal(c, 1))

    x = normal(6, 5)
    fit = pavi.fit(model, {"x": x}, progress_bar=False)
    exact = gaussian(model, {"x": x})
    gap = exact.evidence - fit.elbo(256).mean
    # Rows and columns are dependent in the posterior across plates ("horizontal" dependence), which the family leaves out.
    assert -0.05 < gap < 0.05 * fit.template.num_latents
    means = fit.moments(num_samples=4000)
    for name in ("mu", "a", "b", "c"):
        off = np.abs(means[name].sel(moment="mean").values.ravel() - exact.mean[name].ravel()) / exact.sd[name].ravel()
        assert off.max() < 0.3
    assert fit.sample(2)["a"].dims == ("chain", "draw", "row")
    assert fit.sample(2)["c"].dims == ("chain", "draw", "row", "column")


@pytest.mark.parametrize("scheme", ["linear"], indirect=True)
def test_several_latents_per_level_and_observed_sites_at_different_levels():
    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        nu = numpyro.sample("nu", dist.Normal(0, 2))
        numpyro.sample("total", dist.Normal(mu + nu, 1))
        with numpyro.plate("group", 7, dim=-2):
            a = numpyro.sample("a", dist.Normal(mu, 1))
            b = numpyro.sample("b", dist.Normal(nu, 1))
            numpyro.sample("y", dist.Normal(a + b, 0.5))
            with numpyro.plate("point", 4, dim=-1):
                numpyro.sample("x", dist.Normal(a - b, 1))

    fit = check_gaussian(model, {"x": normal(7, 4), "y": normal(7, 1), "total": normal()}, tolerance=0.005)
    assert set(fit.template.site("b").given) == {"nu", "a"}


@pytest.mark.parametrize("scheme", ["free"], indirect=True)
def test_correlated_global_latents_and_covariates():
    """Intercept and slope have no common parent, but a common child; their posterior correlation must be there."""
    t = np.linspace(1.0, 3.0, 30).astype(np.float32)

    def model(t):
        intercept = numpyro.sample("intercept", dist.Normal(0, 5))
        slope = numpyro.sample("slope", dist.Normal(0, 5))
        with numpyro.plate("time", len(t)):
            t = numpyro.subsample(t, event_dim=0)
            numpyro.sample("x", dist.Normal(intercept + slope * t, 0.5))

    fit = check_gaussian(model, {"x": 1 + 2 * t + normal(30, scale=0.5)}, args=(t,), tolerance=0.005)
    draws = fit.sample(2000)
    correlation = np.corrcoef(draws["intercept"].values.ravel(), draws["slope"].values.ravel())[0, 1]
    assert correlation < -0.9


def test_covariates_through_the_plate_index():
    t = normal(20)

    def model(t):
        slope = numpyro.sample("slope", dist.Normal(0, 5))
        with numpyro.plate("time", len(t)) as index:
            numpyro.sample("x", dist.Normal(slope * t[index], 0.5))

    check_gaussian(model, {"x": 2 * t + normal(20, scale=0.5)}, kwargs={"t": t}, tolerance=0.005)


@pytest.mark.parametrize("scheme", ["linear"], indirect=True)
def test_batch_dimensions_that_are_no_plate():
    def model():
        mu = numpyro.sample("mu", dist.Normal(jnp.zeros(3), 2))
        with numpyro.plate("group", 5, dim=-2):
            theta = numpyro.sample("theta", dist.Normal(mu, 1))
            numpyro.sample("x", dist.Normal(theta, jnp.array([0.5, 1.0, 2.0])))

    fit = check_gaussian(model, {"x": normal(5, 3)}, tolerance=0.005)
    assert fit.template.site("theta").size == 3
    assert fit.sample(2)["theta"].dims == ("chain", "draw", "group", "theta_dim_0")


@pytest.mark.parametrize("scheme", ["free"], indirect=True)
def test_subsampled_plates_reach_the_exact_posterior():
    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("group", 30, dim=-2):
            theta = numpyro.sample("theta", dist.Normal(mu, 1))
            with numpyro.plate("point", 6, dim=-1):
                numpyro.sample("x", dist.Normal(theta, 0.7))

    check_gaussian(model, {"x": normal(30, 6)}, batch={"group": 6, "point": 6}, tolerance=0.005)
    check_gaussian(model, {"x": normal(30, 6)}, batch={"group": 10, "point": 3}, steps=24_000, tolerance=0.02)


def test_handlers_scale_mask_and_factor():
    keep = np.array([True, False, True, True, False, True])

    def model(keep):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        numpyro.factor("pull", -0.5 * (mu - 1.0) ** 2)
        with numpyro.plate("group", 6):
            counted = numpyro.handlers.mask(mask=numpyro.subsample(keep, event_dim=0))
            with numpyro.handlers.scale(scale=0.5), counted:
                numpyro.sample("x", dist.Normal(mu, 1))

    fit = check_gaussian(model, {"x": normal(6)}, args=(keep,), tolerance=0.005)
    assert "factor" in str(fit.template)


def test_masked_latents_count_in_neither_sum():
    keep = np.array([True, True, False, True])

    def model(keep):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("group", 4), numpyro.handlers.mask(mask=numpyro.subsample(keep, event_dim=0)):
            theta = numpyro.sample("theta", dist.Normal(mu, 1))
            numpyro.sample("x", dist.Normal(theta, 1))

    def only_kept():
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("group", 3):
            theta = numpyro.sample("theta", dist.Normal(mu, 1))
            numpyro.sample("x", dist.Normal(theta, 1))

    x = normal(4)
    fit = pavi.fit(model, {"x": x}, model_args=(keep,), progress_bar=False)
    exact = gaussian(only_kept, {"x": x[keep]})
    assert abs(fit.elbo(256).mean - exact.evidence) < 0.03


def test_obs_mask_imputes():
    seen = np.array([True, True, False, True, False])
    x = np.where(seen, normal(5, loc=1.0), 0.0).astype(np.float32)

    def model(seen, x=None):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("item", 5):
            numpyro.sample("x", dist.Normal(mu, 1), obs=x, obs_mask=numpyro.subsample(seen, event_dim=0))

    def only_seen():
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("item", int(seen.sum())):
            numpyro.sample("x", dist.Normal(mu, 1))

    fit = pavi.fit(model, {"x": x}, model_args=(seen,), progress_bar=False)
    exact = gaussian(only_seen, {"x": x[seen]})
    assert_moments(fit, exact, ["mu"], mean_tolerance=0.1, sd_tolerance=0.1)
    draws = fit.sample(4000)["x"][0]
    assert np.allclose(draws[:, seen], x[seen])
    predictive_sd = np.sqrt(1 + exact.sd["mu"] ** 2)
    assert np.allclose(draws[:, ~seen].std("draw"), predictive_sd, rtol=0.1)


@pytest.mark.parametrize("scheme", ["free"], indirect=True)
def test_reparam_and_deterministic():
    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("group", 5):
            with numpyro.handlers.reparam(config={"theta": LocScaleReparam(0)}):
                theta = numpyro.sample("theta", dist.Normal(mu, 0.5))
            numpyro.sample("x", dist.Normal(theta, 1))
        numpyro.deterministic("double", 2 * theta)

    def centered():
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("group", 5):
            theta = numpyro.sample("theta", dist.Normal(mu, 0.5))
            numpyro.sample("x", dist.Normal(theta, 1))

    x = normal(5)
    fit = pavi.fit(model, {"x": x}, progress_bar=False)
    exact = gaussian(centered, {"x": x})
    assert_moments(fit, exact, ["mu", "theta"], mean_tolerance=0.1, sd_tolerance=0.1)
    draws = fit.sample(10)
    assert np.allclose(draws["double"], 2 * draws["theta"])
    assert draws["double"].dims == ("chain", "draw", "group")
    assert fit.template.site("x").parents == ("mu", "theta_decentered")


def test_unknown_scales_match_nuts(scheme):
    """Eight schools: a funnel between the spread and the effects."""
    y = np.array([28.0, 8, -3, 7, -1, 1, 18, 12], np.float32)
    sigma = np.array([15.0, 10, 16, 11, 9, 11, 10, 18], np.float32)

    def model(sigma):
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("school", 8):
            with numpyro.handlers.reparam(config={"theta": LocScaleReparam(0)}):
                theta = numpyro.sample("theta", dist.Normal(mu, tau))
            numpyro.sample("y", dist.Normal(theta, numpyro.subsample(sigma, event_dim=0)))

    longer = {"steps": 1500} if scheme == "encoder" else {}
    fit = pavi.fit(model, {"y": y}, model_args=(sigma,), progress_bar=False, **longer)
    exact = nuts(model, {"y": y}, (sigma,), num_samples=8000)
    assert_moments(fit, exact, ["mu", "theta"], mean_tolerance=0.15, sd_tolerance=0.15)
    tau = fit.sample(4000)["tau"]
    assert abs(float(tau.mean()) - exact.mean["tau"]) < 0.2 * exact.sd["tau"]


@pytest.mark.parametrize("scheme", ["free"], indirect=True)
def test_counts_match_nuts():
    rng = np.random.default_rng(11)
    counts = rng.poisson(np.exp(rng.normal(1.0, 0.8, size=(20, 1))), size=(20, 8))

    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("site", 20, dim=-2):
            rate = numpyro.sample("log_rate", dist.Normal(mu, tau))
            with numpyro.plate("visit", 8, dim=-1):
                numpyro.sample("count", dist.Poisson(jnp.exp(rate)))

    fit = pavi.fit(model, {"count": counts}, progress_bar=False)
    exact = nuts(model, {"count": counts}, num_samples=8000)
    assert_moments(fit, exact, ["mu", "log_rate"], mean_tolerance=0.2, sd_tolerance=0.15)
    assert fit.predict(10)["count"].dtype.kind == "i"
