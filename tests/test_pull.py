"""`show_pull`: members' flows are shown where the prior lies and which way the data pull."""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr

import pavi
from pavi.branch import fixed_branch
from pavi.families import Glimpse, Units
from pavi.reading import read_study

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from unbiasedness import CASES, compare

PULLED = pavi.PAVI(encodings=pavi.FreeEncodings(2), flow=pavi.Affine(hidden=()), show_pull=True)
GROUPS = 40


def normal(groups=GROUPS):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("group", groups):
        theta = numpyro.sample("theta", dist.Normal(mu, 0.5))
        numpyro.sample("x", dist.Normal(theta, 2.0))


def weighed(w, groups=2000):
    """The data say nothing of a group but for its weight, which the model knows."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("group", groups):
        theta = numpyro.sample("theta", dist.Normal(mu, 1))
        numpyro.sample("x", dist.Normal(numpyro.subsample(w, 0) * theta, 0.5))


def shared(groups=3):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("group", groups, dim=-2):
        theta = numpyro.sample("theta", dist.Normal(mu, 1))
        with numpyro.plate("point", 2, dim=-1):
            numpyro.sample("x", dist.Normal(theta, 1))


def visits(w):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("group", 6, dim=-2):
        theta = numpyro.sample("theta", dist.Normal(mu, 1))
        with numpyro.plate("visit", 5, dim=-1):
            z = numpyro.sample("z", dist.Normal(theta, 1))
            numpyro.sample("x", dist.Normal(numpyro.subsample(w, 0) * z, 0.5))


@pytest.fixture(scope="module")
def fit():
    x = np.random.default_rng(0).normal(1.0, 2.0, GROUPS)
    return pavi.fit(normal, {"x": x}, family=PULLED, batch={"group": 10}, steps=200, progress_bar=False)


def test_the_pull_is_the_gradient_of_the_likelihood(fit):
    data, units, weights = fit._observations.arrays, fit._units, fit._trained.weights
    branch = fixed_branch({"group": jnp.arange(GROUPS)})
    found, _ = PULLED.encode(weights, units, Glimpse(fit._study, fit._arguments, branch, data))
    prior, pull = found[("group",)][:, 2:].T
    center, spread = float(units.center["theta"][0]), float(units.spread["theta"][0])
    mu = float(prior[0]) * spread + center
    np.testing.assert_allclose(prior, prior[0], rtol=1e-5)
    np.testing.assert_allclose(np.sinh(pull) / spread, (data["x"] - mu) / 4, atol=1e-4)


def test_a_settled_fit_needs_no_data(fit):
    data, weights = fit._observations.arrays, fit._trained.weights
    some = jnp.array([3, 17])
    rows = {level: array[some] if level else array for level, array in weights.rows.items()}
    glimpse = Glimpse(fit._study, fit._arguments, fixed_branch({"group": some}), {"x": data["x"][some]})
    found, _ = PULLED.encode(weights._replace(rows=rows), fit._units, glimpse)
    np.testing.assert_allclose(fit._weights.rows[("group",)][some], found[("group",)], rtol=1e-5, atol=1e-6)
    where = {"group": [3, 17]}
    part = fit.sample(5, sites=["theta"], where=where)["theta"]
    # Rounding depends on how many members are drawn at once.
    xr.testing.assert_allclose(part, fit.sample(5, sites=["theta"])["theta"].isel(where), rtol=1e-5)


def test_encodings_of_outer_levels_start_from_means_of_pulls():
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(6, 5)).astype(np.float32), rng.normal(size=(6, 5)).astype(np.float32)
    study, arguments, observations = read_study(visits, {"x": x}, (w,), None)
    data, template = observations.everything, study.template
    units = Units(*({site.name: np.full(site.size, value, np.float32) for site in template.latents} for value in (0.3, 2.0)))
    rows = PULLED.init(template, rng, data, frozenset()).rows
    found = PULLED.inform(study, arguments, data, units, rows)
    pull = np.arcsinh(2.0 * w * (x - 0.3 * w) / 0.25)  # where z starts: at its prior's center, that of theta
    means = pull.mean(1)
    np.testing.assert_allclose(found[("group",)][:, 0], (means - means.mean()) / means.std(), atol=1e-4)
    np.testing.assert_allclose(found[("group", "visit")][..., 0], (pull - pull.mean()) / pull.std(), atol=1e-4)


def test_the_gradient_is_unbiased_over_branchings():
    _, _, value_error, grad_error = compare(*CASES["crossed"], PULLED)
    assert value_error < 1e-5
    assert grad_error < 1e-5


def test_members_are_known_before_they_are_visited():
    rng = np.random.default_rng(0)
    w = rng.normal(size=2000)
    x = w * rng.normal(size=2000) + 0.5 * rng.normal(size=2000)
    settings = {"batch": {"group": 100}, "steps": 200, "num_particles": 4, "progress_bar": False}  # ten visits each
    plain, shown = (
        pavi.fit(weighed, {"x": x}, model_args=(w,), family=pavi.PAVI(flow=pavi.Affine(), show_pull=pull), **settings)
        for pull in (False, True)
    )
    assert shown.elbo(64).mean > plain.elbo(64).mean + 100


def test_stored_data_and_rows_on_the_host_give_the_same(fit, tmp_path):
    np.save(tmp_path / "x.npy", np.asarray(fit._observations.arrays["x"]))
    settings = {"family": PULLED, "batch": {"group": 10}, "steps": 200, "progress_bar": False, "placement": "host"}
    other = pavi.fit(normal, {"x": np.load(tmp_path / "x.npy", mmap_mode="r")}, **settings)
    for level, rows in fit._weights.rows.items():
        np.testing.assert_allclose(other._weights.rows[level], rows, rtol=1e-4, atol=1e-5)


def test_refusals():
    with pytest.raises(pavi.SettingError, match="SetEncoder sees the data itself"):
        pavi.PAVI(pavi.SetEncoder(), show_pull=True)
    with pytest.raises(pavi.SettingError, match="all plates of what depends on it"):
        pavi.fit(shared, {"x": np.zeros((3, 2))}, family=PULLED, steps=1, progress_bar=False)
