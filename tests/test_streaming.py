"""Data that stay where they are: memory maps, Zarr and lazy xarray give the very fit that data in memory give."""

from __future__ import annotations

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
import zarr

import pavi
from pavi import ahead

X = np.random.default_rng(0).normal(1.0, 1.5, size=(20, 6, 2)).astype(np.float32)


def model():
    mu = numpyro.sample("mu", dist.Normal(np.zeros(2), 3).to_event(1))
    with numpyro.plate("group", 20, dim=-2):
        theta = numpyro.sample("theta", dist.Normal(mu, 1).to_event(1))
        with numpyro.plate("point", 6, dim=-1):
            numpyro.sample("x", dist.Normal(theta, 1).to_event(1))


def fit(data, **settings):
    settings = {"batch": {"group": 7, "point": 4}, "steps": 250, "progress_bar": False} | settings
    return pavi.fit(model, data, **settings)


@pytest.fixture(scope="module")
def in_memory():
    return fit({"x": X})


def memmap(folder):
    np.save(folder / "x.npy", X)
    return {"x": np.load(folder / "x.npy", mmap_mode="r")}


def zarr_array(folder):
    array = zarr.create_array(folder / "x.zarr", shape=X.shape, chunks=(5, 6, 2), dtype="float32")
    array[:] = X
    return {"x": zarr.open_array(folder / "x.zarr", mode="r")}


def lazy(folder):
    xr.Dataset({"x": (("group", "point", "feature"), X)}).to_netcdf(folder / "x.nc", engine="h5netcdf")
    return xr.open_dataset(folder / "x.nc", engine="h5netcdf")


@pytest.mark.parametrize("source", [memmap, zarr_array, lazy])
def test_stored_data_give_the_same_fit(source, in_memory, tmp_path):
    stored = fit(source(tmp_path))
    np.testing.assert_array_equal(stored.history["elbo"], in_memory.history["elbo"])
    np.testing.assert_array_equal(stored.sample(20)["theta"], in_memory.sample(20)["theta"])
    if source is not memmap:
        return
    assert stored.elbo(32) == in_memory.elbo(32)
    np.testing.assert_array_equal(stored.predict(5)["x"], in_memory.predict(5)["x"])
    assert stored.to_datatree(5)["observed_data"]["x"].shape == X.shape


def test_the_length_of_blocks_does_not_matter(in_memory, tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "MOST_BYTES", 700)
    stored = fit(memmap(tmp_path))
    np.testing.assert_array_equal(stored.history["elbo"], in_memory.history["elbo"])


def test_several_starts_and_checkpoints_work_with_stored_data(tmp_path):
    kept = fit({"x": X}, starts=3)
    stored = fit(memmap(tmp_path), starts=3, checkpoint=tmp_path / "checkpoint")
    np.testing.assert_array_equal(stored.history["elbo"], kept.history["elbo"])


def test_what_stored_data_cannot_do_is_refused(tmp_path):
    data = memmap(tmp_path)
    with pytest.raises(pavi.SettingError, match="checkpoint=folder"):
        fit(data, steps=5).save(tmp_path / "fit.pavi")
    with pytest.raises(pavi.SettingError, match="SetEncoder reads all data on the device"):
        fit(data, family=pavi.PAVI(encodings=pavi.SetEncoder()))
    np.save(tmp_path / "t.npy", X.transpose(1, 0, 2))
    with pytest.raises(pavi.DataError, match="Store them that way"):
        fit({"x": np.load(tmp_path / "t.npy", mmap_mode="r")})
    bad = X.copy()
    bad[3, 2, 1] = np.nan
    np.save(tmp_path / "bad.npy", bad)
    with pytest.raises(pavi.DataError, match="NaN"):
        fit({"x": np.load(tmp_path / "bad.npy", mmap_mode="r")})
