"""Bad input: each mistake has an error that names the culprit and the way out."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from numpyro.contrib.control_flow import scan

import pavi


def simple():
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("group", 4):
        numpyro.sample("x", dist.Normal(mu, 1))


X = np.zeros(4, np.float32)


def fails(error, match, model=simple, data=None, **settings):
    with pytest.raises(error, match=match) as caught:
        pavi.fit(model, {"x": X} if data is None else data, progress_bar=False, **settings)
    assert isinstance(caught.value, pavi.PaviError)
    return str(caught.value)


def test_data_shape_against_plate_sizes():
    message = fails(pavi.DataError, r"shape \(5,\).*shape \(4,\)", data={"x": np.zeros(5)})
    assert "group (4)" in message


def test_unknown_site():
    message = fails(pavi.DataError, "names .*'y'", data={"x": X, "y": X})
    assert "'mu', 'x'" in message


def test_missing_site():
    def model(x):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("group", 4):
            numpyro.sample("x", dist.Normal(mu, 1), obs=x)
            numpyro.sample("y", dist.Normal(mu, 1))

    fails(pavi.DataError, "'x' is observed inside the model", model, {"y": X}, model_args=(X,))


def test_empty_data_and_data_of_the_wrong_kind():
    fails(pavi.DataError, "empty", data={})
    with pytest.raises(pavi.DataError, match="expected a mapping"):
        pavi.reading.read_study(simple, X, (), None)  # beartype stops `fit` itself in tests
    fails(pavi.DataError, "expected numbers", data={"x": np.array(["a", "b", "c", "d"])})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_in_data(bad):
    x = X.copy()
    x[[1, 3]] = bad
    fails(pavi.DataError, r"'x' has 2 value\(s\).*NaN or infinite, of 4", data={"x": x})
    fails(pavi.DataError, r"'x' has 2 value\(s\).*NaN or infinite, of 4", data={"x": jnp.asarray(x)})


def test_data_outside_the_support():
    def model():
        rate = numpyro.sample("rate", dist.Gamma(1.0, 1.0))
        with numpyro.plate("group", 4):
            numpyro.sample("x", dist.Poisson(rate))

    fails(pavi.DataError, r"'x' has 1 value\(s\) outside the support of Poisson", model, {"x": np.array([1, 2, -3, 0])})


def test_improper_prior():
    def model():
        mu = numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
        with numpyro.plate("group", 4):
            numpyro.sample("x", dist.Normal(mu, 1))

    fails(pavi.ModelError, "'mu' has an improper prior", model)


def test_discrete_latent_names_the_ways_out():
    def model():
        with numpyro.plate("group", 4):
            label = numpyro.sample("label", dist.Bernoulli(0.5))
            numpyro.sample("x", dist.Normal(label, 1))

    message = fails(pavi.ModelError, "'label' is discrete", model)
    for way in ("MixtureSameFamily", "Gumbel", "data"):
        assert way in message


def test_control_flow_around_sites():
    def with_scan():
        def body(carry, _):
            carry = numpyro.sample("z", dist.Normal(carry, 1))
            return carry, carry

        scan(body, 0.0, None, length=3)
        numpyro.sample("x", dist.Normal(0, 1))

    def with_lax():
        def body(carry, _):
            carry = numpyro.sample("z", dist.Normal(carry, 1), rng_key=jax.random.key(0))
            return carry, carry

        last, _ = jax.lax.scan(body, 0.0, None, length=3)
        numpyro.sample("x", dist.Normal(last, 1))

    fails(pavi.ModelError, "control_flow", with_scan, {"x": np.float32(0)})
    fails(pavi.ModelError, "control-flow", with_lax, {"x": np.float32(0)})


def test_trainable_parameters():
    def model():
        mu = numpyro.param("mu", 0.0)
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("x", dist.Normal(z, 1))

    fails(pavi.ModelError, "parameter 'mu'", model, {"x": np.float32(0)})


def test_batch_of_unknown_plate_or_too_large():
    fails(pavi.SettingError, "'groups'.*does not have", batch={"groups": 2})
    fails(pavi.SettingError, r"batch\['group'\] = 5", batch={"group": 5})
    fails(pavi.SettingError, r"batch\['group'\] = 0", batch={"group": 0})


def test_counts_that_make_no_sense():
    fails(pavi.SettingError, "steps=0", steps=0)
    fails(pavi.SettingError, "num_particles=0", num_particles=0)


def test_a_parent_in_a_plate_its_child_does_not_share():
    def model():
        with numpyro.plate("group", 4):
            theta = numpyro.sample("theta", dist.Normal(0, 1))
        numpyro.sample("x", dist.Normal(theta.mean(), 1))

    fails(pavi.ModelError, r"'x' .*depends on 'theta'.*\['group'\]", model, {"x": np.float32(0)})


def test_a_plate_index_used_outside_its_plate():
    t = jnp.arange(4.0)

    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("group", 4) as index:
            shift = t[index]
        numpyro.sample("x", dist.Normal(mu + shift.sum(), 1))

    fails(pavi.ModelError, "'x'.*member index.*group", model, {"x": np.float32(0)})


def test_full_size_arrays_inside_a_plate():
    t = jnp.arange(4.0)

    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("group", 4):
            numpyro.sample("x", dist.Normal(mu + t, 1))

    fails(pavi.ModelError, r"'x'.*numpyro\.subsample", model)


def test_no_latent():
    def model():
        with numpyro.plate("group", 4):
            numpyro.sample("x", dist.Normal(0, 1))

    fails(pavi.ModelError, "no latent site", model)


def test_a_model_that_fails():
    def model():
        raise RuntimeError("boom")

    fails(pavi.ModelError, "RuntimeError: boom", model)


def test_sites_with_one_name_and_plates_with_two_sizes():
    def twice():
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        mu = numpyro.sample("mu", dist.Normal(mu, 1))
        with numpyro.plate("group", 4):
            numpyro.sample("x", dist.Normal(mu, 1))

    def two_sizes():
        with numpyro.plate("group", 3):
            numpyro.sample("z", dist.Normal(0, 1))
        with numpyro.plate("group", 4):
            numpyro.sample("x", dist.Normal(0, 1))

    fails(pavi.ModelError, "named 'mu'", twice)
    fails(pavi.ModelError, "two sizes, 3 and 4", two_sizes)


def test_family_settings_for_sites_and_levels_that_do_not_exist():
    fails(pavi.SettingError, r"\['theta'\] is no latent site", family=pavi.PAVI(flow={"theta": pavi.MAF()}))
    fails(pavi.SettingError, "neither a level nor", family=pavi.PAVI(encodings=pavi.FreeEncodings({"subject": 4})))


def test_xarray_dims_and_labels():
    fails(pavi.DataError, r"lacks the plate\(s\) \['group'\]", data=xr.Dataset({"x": ("subject", X)}))
    fails(pavi.DataError, "sizes.*5", data=xr.Dataset({"x": ("group", np.zeros(5))}))


def test_reading_what_is_not_there():
    fit = pavi.fit(simple, {"x": X}, progress_bar=False, steps=5)
    with pytest.raises(pavi.SettingError, match=r"\['nu'\]: not a latent"):
        fit.sample(2, sites=["nu"])
    with pytest.raises(pavi.SettingError, match=r"\['subject'\]: the model has no such plate"):
        fit.sample(2, where={"subject": [0]})
    with pytest.raises(pavi.SettingError, match="from 0 to 3"):
        fit.sample(2, where={"group": [4]})
    with pytest.raises(pavi.SettingError, match="num_samples=0"):
        fit.sample(0)


def test_a_model_that_is_never_finite():
    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("group", 4):
            numpyro.sample("x", dist.Normal(mu, 1))
        numpyro.factor("broken", jnp.log(-jnp.exp(mu)))

    fails(pavi.TrainingError, "not finite, so nothing was learned", model)


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 28.34GiB"), "device"),
        (MemoryError("Unable to allocate 28.34GiB"), r"host \(Unable to allocate 28.34GiB\)"),
    ],
)
def test_memory_that_runs_out(error, where, monkeypatch):
    def full(*args):
        raise error

    monkeypatch.setattr("pavi.api.fit_study", full)
    message = fails(pavi.SettingError, f"Memory of the {where} ran out")
    assert "device in all" in message
    assert "placement=folder" in message


def test_other_errors_of_the_runtime_stay_as_they_are(monkeypatch):
    def broken(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr("pavi.api.fit_study", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        pavi.fit(simple, {"x": X}, progress_bar=False)


def test_the_plan_counts_data_that_are_reordered_on_the_device():
    def model():
        inner, outer = numpyro.plate("inner", 3, dim=-1), numpyro.plate("outer", 4, dim=-2)
        with inner:
            a = numpyro.sample("a", dist.Normal(0, 1))
        with outer, inner:
            numpyro.sample("x", dist.Normal(a, 1))

    x = np.zeros((4, 3), np.float32)
    plans = [pavi.plan(model, {"x": array}, memory=10**9) for array in (x, jnp.asarray(x))]
    assert plans[1].data_bytes - plans[0].data_bytes == x.nbytes
