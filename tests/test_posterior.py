"""Reading a posterior: slices, moments, predictions, files."""

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import pavi
from pavi import tiles


def model():
    rows = numpyro.plate("row", 5, dim=-2)
    columns = numpyro.plate("column", 4, dim=-1)
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with rows:
        a = numpyro.sample("a", dist.Dirichlet(jnp.ones(3)))
    with columns:
        b = numpyro.sample("b", dist.Gamma(2.0, 1.0))
    with rows, columns:
        c = numpyro.sample("c", dist.Normal(a[..., 0] * b, tau))
        numpyro.deterministic("d", c + b)
        numpyro.sample("x", dist.Normal(c, 0.5))


X = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def fit():
    return pavi.fit(model, {"x": X}, family=pavi.PAVI(flow=pavi.Affine()), progress_bar=False, steps=200)


def test_a_slice_equals_the_slice_of_the_whole(fit, monkeypatch):
    whole = fit.sample(70, rng_key=3)
    # Small tiles: many blocks of members and of draws, padded at the ends.
    monkeypatch.setattr(tiles, "CPU_TILE", 2000)
    monkeypatch.setattr(tiles, "LARGEST_DRAW_BLOCK", 32)
    tiled = fit.sample(70, rng_key=3)
    for name in whole:
        assert np.allclose(whole[name], tiled[name], atol=1e-5), name
    part = fit.sample(70, where={"row": [4, 1], "column": slice(1, None, 2)}, rng_key=jax.random.key(3))
    for name in part:
        expected = whole[name].isel({d: i for d, i in {"row": [4, 1], "column": [1, 3]}.items() if d in whole[name].dims})
        assert np.allclose(part[name], expected, atol=1e-5), name
    assert part["row"].values.tolist() == [4, 1]
    few = fit.sample(10, rng_key=3)
    assert np.allclose(few["c"], whole["c"][:, :10], atol=1e-5)


def test_elbo_does_not_depend_on_tiles(fit, monkeypatch):
    whole = fit.elbo(40, rng_key=1)
    monkeypatch.setattr(tiles, "CPU_TILE", 1000)
    monkeypatch.setattr(tiles, "LARGEST_DRAW_BLOCK", 16)
    tiled = fit.elbo(40, rng_key=1)
    assert np.allclose(whole, tiled, rtol=1e-5)
    assert whole.stderr > 0


def test_moments_are_those_of_the_draws(fit, monkeypatch):
    monkeypatch.setattr(tiles, "LARGEST_DRAW_BLOCK", 64)
    draws, moments = fit.sample(300), fit.moments(num_samples=300)
    assert moments["moment"].values.tolist() == ["mean", "sd"]
    for name in draws:
        assert np.allclose(moments[name].sel(moment="mean"), draws[name].mean(("chain", "draw")), atol=1e-5)
        assert np.allclose(moments[name].sel(moment="sd"), draws[name].std(("chain", "draw"), ddof=1), atol=1e-4)
    part = fit.moments(sites=["c"], where={"row": [2]}, num_samples=300)
    assert np.allclose(part["c"].squeeze("row"), moments["c"].sel(row=2), atol=1e-5)


def test_predictions_scatter_around_their_latents(fit):
    latents, predicted = fit.sample(2000, rng_key=7), fit.predict(2000, rng_key=7)
    residual = predicted["x"] - latents["c"]
    assert abs(float(residual.std()) - 0.5) < 0.02
    assert abs(float(residual.mean())) < 0.02
    part = fit.predict(2000, where={"column": [2]}, rng_key=7)
    assert np.allclose(part["x"].squeeze("column"), predicted["x"].sel(column=2), atol=1e-5)


def test_deterministic_sites_follow_their_latents(fit):
    draws = fit.sample(20)
    assert np.allclose(draws["d"], draws["c"] + draws["b"], atol=1e-5)
    assert draws["a"].dims == ("chain", "draw", "row", "a_dim_0")
    only = fit.sample(20, sites=["tau"])
    assert list(only) == ["tau"]
    assert np.allclose(only["tau"], draws["tau"])


def test_arviz_reads_it(fit):
    data = fit.to_inference_data(200, predict=True)
    summary = az.summary(data, var_names=["tau", "b"], kind="stats")
    assert len(summary) == 5
    assert data.posterior_predictive["x"].shape == (1, 200, 5, 4)
    assert np.allclose(data.observed_data["x"], X)


def test_save_and_load(fit, tmp_path):
    path = tmp_path / "fit.pavi"
    fit.save(path)
    again = pavi.load(path, model)
    assert again.sample(20).identical(fit.sample(20))
    assert again.elbo(8) == fit.elbo(8)
    assert again.stop is fit.stop
    assert np.array_equal(again.history["elbo"], fit.history["elbo"])
    assert again.family == fit.family
    assert list(tmp_path.iterdir()) == [path]


def test_load_keeps_arguments_coordinates_and_family(tmp_path):
    def with_arguments(t, *, power):
        slope = numpyro.sample("slope", dist.Normal(0, 5))
        with numpyro.plate("time", 3):
            numpyro.sample("x", dist.Normal(slope * numpyro.subsample(t, event_dim=0) ** power, 0.5))

    family = pavi.PAVI(
        encodings=pavi.FreeEncodings({"slope": 4, ...: 2}), flow={"slope": pavi.Affine("diag", ()), ...: pavi.MAF()}
    )
    fit = pavi.fit(
        with_arguments,
        {"x": np.ones(3, np.float32)},
        model_args=(np.array([1.0, 2.0, 3.0], np.float32),),
        model_kwargs={"power": 2},
        family=family,
        steps=5,
        progress_bar=False,
    )
    fit.save(tmp_path / "fit.pavi")
    again = pavi.load(tmp_path / "fit.pavi", with_arguments)
    assert again.family == family
    assert again.predict(5).identical(fit.predict(5))


def test_load_against_another_model(fit, tmp_path):
    def other():
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("row", 5, dim=-2), numpyro.plate("column", 4, dim=-1):
            numpyro.sample("x", dist.Normal(mu, 1))

    fit.save(tmp_path / "fit.pavi")
    with pytest.raises(pavi.LoadError, match="another model"):
        pavi.load(tmp_path / "fit.pavi", other)


def test_load_of_another_format(fit, tmp_path, monkeypatch):
    """What an earlier version wrote has its weights in another order."""
    with monkeypatch.context() as patched:
        patched.setattr("pavi.storage.FORMAT", 1)
        fit.save(tmp_path / "fit.pavi")
    with pytest.raises(pavi.LoadError, match="has format 1, this version"):
        pavi.load(tmp_path / "fit.pavi", model)


def test_load_of_nothing_and_of_broken_files(fit, tmp_path):
    with pytest.raises(pavi.LoadError, match="no saved fit"):
        pavi.load(tmp_path / "none.pavi", model)
    path = tmp_path / "fit.pavi"
    fit.save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(pavi.LoadError, match="not a whole saved fit"):
        pavi.load(path, model)
    path.write_bytes(b"something else")
    with pytest.raises(pavi.LoadError, match="not a whole saved fit"):
        pavi.load(path, model)
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(pavi.LoadError, match="not a whole saved fit"):
        pavi.load(tmp_path / "other.npz", model)


def test_numbers_in_half_precision_no_members_and_a_single_datum():
    def small():
        mu = numpyro.sample("mu", dist.Normal(300, 5))
        numpyro.sample("alone", dist.Normal(mu, 1))
        with numpyro.plate("item", 3):
            theta = numpyro.sample("theta", dist.Normal(mu, 1))
            numpyro.deterministic("half", theta.astype(jnp.float16))
            numpyro.sample("x", dist.Normal(theta, 1))

    data = {"alone": np.float32(300), "x": np.array([299, 300, 301], np.float32)}
    fit = pavi.fit(small, data, family=pavi.PAVI(flow=pavi.Affine(hidden=())), steps=5, progress_bar=False)
    # The sum of so many draws is beyond the largest number of half precision.
    draws, moments = fit.sample(300)["half"].astype(np.float32), fit.moments(num_samples=300)["half"]
    np.testing.assert_allclose(moments.sel(moment="mean"), draws.mean(("chain", "draw")), rtol=1e-5)
    np.testing.assert_allclose(moments.sel(moment="sd"), draws.std(("chain", "draw"), ddof=1), rtol=1e-4)
    for read in (fit.sample, fit.moments):
        none = read(num_samples=10, sites=["mu", "theta"], where={"item": []})
        assert none.sizes["item"] == 0
        np.testing.assert_array_equal(none["mu"], read(num_samples=10, sites=["mu"])["mu"])
    assert fit.to_datatree(3)["observed_data"]["alone"].shape == ()


def test_moments_can_be_written_to_zarr(fit, tmp_path, monkeypatch):
    kept = fit.moments(num_samples=300)
    monkeypatch.setattr(tiles, "CPU_TILE", 2**12)  # many tiles
    stored = fit.moments(num_samples=300, store=tmp_path / "moments.zarr")
    assert set(stored.data_vars) == set(kept.data_vars)
    for name in kept.data_vars:
        assert stored[name].dims == kept[name].dims
        np.testing.assert_allclose(stored[name].values, kept[name].values, rtol=1e-4, atol=1e-5)
    for name in kept.coords:
        np.testing.assert_array_equal(stored[name].values, kept[name].values)
