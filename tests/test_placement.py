"""Rows and data in host memory or memory maps give the fit that the device gives; members drawn in runs."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import zarr

import pavi
from pavi import hosting, streaming, studying
from pavi.branch import draw_branch, fit_runs
from pavi.experiments.stepwise import start
from pavi.hosting import _places
from pavi.memory import in_all
from pavi.planning import Place

X = np.random.default_rng(0).normal(1.0, 1.5, size=(20, 6, 2)).astype(np.float32)
FAMILY = pavi.PAVI(flow=pavi.Affine(hidden=()))
SETTINGS = {"family": FAMILY, "batch": {"group": 7, "point": 4}, "steps": 120, "progress_bar": False}


def model():
    mu = numpyro.sample("mu", dist.Normal(np.zeros(2), 3).to_event(1))
    with numpyro.plate("group", 20, dim=-2):
        theta = numpyro.sample("theta", dist.Normal(mu, 1).to_event(1))
        with numpyro.plate("point", 6, dim=-1):
            each = numpyro.sample("each", dist.Normal(theta, 1).to_event(1))
            numpyro.sample("x", dist.Normal(each, 1).to_event(1))


def nested(groups=20):
    """One number outside of plates, which data tell little of."""
    tau = numpyro.sample("tau", dist.LogNormal(0, 0.5))
    with numpyro.plate("group", groups, dim=-2):
        theta = numpyro.sample("theta", dist.Normal(0, tau))
        with numpyro.plate("point", 6, dim=-1):
            each = numpyro.sample("each", dist.Normal(theta, 1))
            numpyro.sample("x", dist.Normal(each, 1))


@pytest.fixture(scope="module")
def on_device():
    return pavi.fit(model, {"x": X}, **SETTINGS)


def same(fit: pavi.Fit, other: pavi.Fit) -> None:
    """The same steps on the same members, compiled as two programs: equal up to rounding."""
    np.testing.assert_allclose(fit.history["elbo"], other.history["elbo"], rtol=1e-5)
    for name, draws in fit.sample(20).items():
        np.testing.assert_allclose(draws, other.sample(20)[name], rtol=1e-3, atol=1e-3)
    assert fit.elbo(16).mean == pytest.approx(other.elbo(16).mean, rel=1e-5)


def test_rows_and_data_in_host_memory_give_the_same_fit(on_device):
    hosted = pavi.fit(model, {"x": X}, placement="host", **SETTINGS)
    assert isinstance(hosted._weights.rows["group",], np.ndarray)
    assert hosted._observations.stored
    same(hosted, on_device)
    where = {"group": [3, 11]}
    moments, expected = (fit.moments(where=where, num_samples=50) for fit in (hosted, on_device))
    np.testing.assert_allclose(moments["theta"], expected["theta"], rtol=1e-3, atol=1e-3)


def test_members_are_found_where_the_steps_just_before_had_them():
    """Of 12 members four in each step, the last ones beyond the plate; steps of a block know those before them alone."""
    rng = np.random.default_rng(0)
    before, members = (np.stack([rng.permutation(12)[:4] for _ in range(3)]) for _ in range(2))
    for earlier in (None, before):
        found = _places(members, earlier, 10)
        for k, own in enumerate(members):
            known = [*(np.full((3, 4), -1) if earlier is None else earlier), *members[:k]]
            for number in range(6):
                there = known[number].tolist() if number < len(known) else []
                expected = [there.index(m) if m < 10 and m in there else -1 for m in own]
                assert found[k, number].tolist() == expected


def test_a_fit_to_data_in_host_memory_can_be_saved(tmp_path):
    hosted = pavi.fit(model, {"x": X}, placement="host", **SETTINGS | {"steps": 20})
    hosted.save(tmp_path / "fit.pavi")
    again = pavi.load(tmp_path / "fit.pavi", model)
    np.testing.assert_allclose(again.sample(20)["each"], hosted.sample(20)["each"], rtol=1e-4, atol=1e-4)


def test_rows_in_memory_maps_give_the_same_fit(on_device, tmp_path):
    mapped = pavi.fit(model, {"x": jnp.asarray(X)}, placement=tmp_path / "rows", **SETTINGS)
    assert isinstance(mapped._weights.rows["group", "point"], np.memmap)
    assert list((tmp_path / "rows").glob("*.npy"))
    same(mapped, on_device)


def test_a_second_fit_in_a_folder_leaves_the_first_one_alone(tmp_path):
    first = pavi.fit(model, {"x": X}, placement=tmp_path / "rows", **SETTINGS | {"steps": 20})
    draws = first.sample(5)
    pavi.fit(nested, {"x": X[..., 0]}, placement=tmp_path / "rows", **SETTINGS | {"steps": 20})
    np.testing.assert_array_equal(first.sample(5)["each"], draws["each"])


def test_steps_that_failed_write_nothing_any_more():
    """Else they would write into the rows of the fit that comes next."""
    problem, *_ = start(model, {"x": X}, FAMILY, SETTINGS["batch"], 1)
    held, running, late = np.zeros((20, 3)), threading.Event(), hosting.Hosting(problem, True)
    late._rows, made = {("group",): (held, ())}, {("group",): (np.ones((1, 2, 3)), ())}
    members = {"group": np.array([[0, 5]])}
    late._writer.submit(running.wait)
    late._writing.append(late._writer.submit(late._write, members, made, 1))
    late.abandon()
    running.set()
    late._writer.shutdown()
    assert not held.any()
    late._rows = {("group",): (held, ())}
    late._write(members, made, 1)
    assert held[[0, 5]].all(), "it is what was taken away that kept them from being written"


def test_a_read_that_fails_ends_the_fit(tmp_path, monkeypatch):
    def read(*args):
        monkeypatch.undo()
        raise OSError("the disk is gone")

    monkeypatch.setattr(streaming, "read_at", read)
    with pytest.raises(OSError, match="the disk is gone"):
        pavi.fit(model, {"x": X}, placement=tmp_path / "rows", **SETTINGS)


def test_settings_of_jax_for_one_thread_hold_for_what_is_read_ahead():
    settings = SETTINGS | {"steps": 40}
    with jax.threefry_partitionable(False):
        kept, hosted = (pavi.fit(model, {"x": X}, placement=placement, **settings) for placement in ("device", "host"))
    np.testing.assert_allclose(hosted.history["elbo"], kept.history["elbo"], rtol=1e-5)


def test_sites_may_have_the_names_of_what_a_step_is_given():
    def named():
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        with numpyro.plate("group", 20):
            theta = numpyro.sample("theta", dist.Normal(mu, 1))
            numpyro.sample("rate", dist.Normal(theta, 1))

    settings = SETTINGS | {"steps": 5, "batch": {"group": 7}}
    fit = pavi.fit(named, {"rate": X[:, 0, 0]}, placement="host", **settings)
    assert fit.skipped == 0


def test_random_keys_of_an_optimizer_are_refused_on_the_host():
    noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.adam(1e-2))
    with pytest.raises(pavi.SettingError, match="holds a random key per row"):
        pavi.fit(model, {"x": X}, placement="host", optimizer=noisy, **SETTINGS)


def test_cascading_flows_read_data_in_host_memory():
    settings = SETTINGS | {"family": pavi.baselines.CascadingFlows(), "batch": None, "steps": 5}
    hosted, kept = (pavi.fit(model, {"x": X}, placement=placement, **settings) for placement in ("host", "device"))
    np.testing.assert_allclose(hosted.sample(5)["theta"], kept.sample(5)["theta"], rtol=1e-3, atol=1e-3)


def test_hosted_rows_go_on_from_a_checkpoint_and_can_be_updated(on_device, tmp_path):
    settings = SETTINGS | {"checkpoint": tmp_path / "kept", "placement": tmp_path / "rows"}
    pavi.fit(model, {"x": X}, **settings)
    again = pavi.fit(model, {"x": X}, **settings)
    same(again, on_device)
    updated = again.update({"x": np.concatenate([X, X[:2]])}, steps=30, progress_bar=False)
    assert updated.sample(5)["theta"].sizes["group"] == 22
    assert isinstance(updated._weights.rows["group",], np.ndarray)


def test_starting_values_where_data_lie_in_two_places(tmp_path):
    def both():
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        with numpyro.plate("group", 20, dim=-1):
            theta = numpyro.sample("theta", dist.Normal(mu, 1))
            numpyro.sample("x", dist.Normal(theta, 1))
            numpyro.sample("y", dist.Normal(theta, 2))

    y = np.memmap(tmp_path / "y", np.float32, "w+", shape=(20,))
    y[:] = X[:, 1, 0]
    settings = {"init": {"mu": 1.0}, "family": FAMILY, "steps": 20, "progress_bar": False}
    apart = pavi.fit(both, {"x": jnp.asarray(X[:, 0, 0]), "y": y}, **settings)
    together = pavi.fit(both, {"x": X[:, 0, 0], "y": np.asarray(y)}, **settings)
    np.testing.assert_allclose(apart.history["elbo"], together.history["elbo"], rtol=1e-5)


def test_polishing_leaves_the_rows_of_the_fit_before_it(tmp_path, monkeypatch):
    """Memory maps of both lie in one folder; Ctrl-C at the end of polishing gives back the fit before it."""
    settings = SETTINGS | {"steps": 50}
    alone = pavi.fit(nested, {"x": X[..., 0]}, placement=tmp_path / "alone", **settings)
    report, calls = studying.report, []

    def interrupted(trained):
        calls.append(trained)
        if len(calls) == 2:  # the first one was that of the fit
            raise KeyboardInterrupt
        report(trained)

    monkeypatch.setattr(studying, "report", interrupted)
    with pytest.warns(UserWarning, match="the fit before it; `fit.polish"):
        before = pavi.fit(
            nested, {"x": X[..., 0]}, placement=tmp_path / "rows", polish={"num_draws": 8, "inner_points": 8}, **settings
        )
    assert len(calls) == 2
    assert before.sample(20).identical(alone.sample(20))


def test_a_fit_on_several_devices_is_polished_on_one():
    """Means of groups are normal with variance tau^2 + 2 / 6, so the posterior of log tau is known."""
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(100, 1)) + np.sqrt(2) * rng.normal(size=(100, 6))).astype(np.float32)
    settings = SETTINGS | {"steps": 60, "polish": {"num_draws": 32, "inner_points": 256}, "model_args": (100,)}
    fit = pavi.fit(nested, {"x": x}, devices=1, **settings)
    assert len(fit.history["step"]) == 120
    log_tau = np.linspace(-2, 2, 4001)
    variance = np.exp(2 * log_tau) + 2 / 6
    log_p = -0.5 * (log_tau / 0.5) ** 2 - 50 * np.log(variance) - 0.5 * (x.mean(1) ** 2).sum() / variance
    weights = np.exp(log_p - log_p.max()) / np.exp(log_p - log_p.max()).sum()
    mean = weights @ log_tau
    sd = np.sqrt(weights @ (log_tau - mean) ** 2)
    found = np.log(fit.sample(1000, sites=["tau"])["tau"].values)
    assert abs(found.mean() - mean) < 0.35 * sd
    assert found.std() == pytest.approx(sd, rel=0.2)


def test_the_plan_of_several_devices_is_that_of_each():
    """Parts of 5 groups of 20: a quarter of data and rows, and what all devices have."""
    ages = np.zeros((20, 1), np.float32)

    def aged(ages):
        with numpyro.plate("group", 20, dim=-2):
            theta = numpyro.sample("theta", dist.Normal(numpyro.subsample(ages, event_dim=0), 1))
            with numpyro.plate("point", 6, dim=-1):
                numpyro.sample("x", dist.Normal(theta, 1))

    settings = {"model_args": (ages,), "batch": {"group": 8, "point": 6}}
    one, four = (pavi.plan(aged, {"x": X[..., 0]}, devices=devices, **settings) for devices in (None, 4))
    x = X[..., 0].nbytes
    assert (one.data_bytes, four.data_bytes) == (x + ages.nbytes, x / 4 + ages.nbytes)
    assert four.rows_bytes == one.rows_bytes / 4
    assert four.state_bytes - four.rows_bytes == one.state_bytes - one.rows_bytes
    assert four.temporary_bytes == pytest.approx(one.temporary_bytes / 4)
    assert "each of 4 devices" in str(four)
    on_device = pavi.plan(aged, {"x": jnp.asarray(X[..., 0])}, devices=4, **settings)
    assert on_device.data_bytes == four.data_bytes + x
    with pytest.raises(pavi.SettingError, match="does not fit on the device"):
        pavi.plan(aged, {"x": X[..., 0]}, devices=4, memory=four.state_bytes, **settings)


def test_several_devices_refuse_hosted_rows():
    with pytest.raises(pavi.PaviError, match="placement='host': rows lie on the devices"):
        pavi.fit(model, {"x": jnp.asarray(X)}, placement="host", devices=1, **SETTINGS)


def test_a_placement_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(pavi.PaviError, match="a folder to keep rows in"):
        pavi.fit(model, {"x": X}, placement=tmp_path / "file", **SETTINGS)


def test_plan_moves_data_first_then_rows_then_refuses():
    large, data = functools.partial(nested, 2000), {"x": jax.ShapeDtypeStruct((2000, 6), np.float32)}
    settings = {"batch": {"group": 7, "point": 4}}
    whole = pavi.plan(large, data, **settings)
    assert (whole.data_place, whole.rows_place) == (Place.DEVICE, Place.DEVICE)
    assert whole.encoding_sizes == {(): 8, ("group",): 8, ("group", "point"): 8}
    some = pavi.plan(large, data, memory=whole.device_bytes - 1, **settings)
    assert (some.data_place, some.rows_place) == (Place.HOST, Place.DEVICE)
    assert some.device_bytes == whole.device_bytes - 2000 * 6 * 4 + some.ahead_bytes
    assert some.ahead_bytes == 2 * 64 * 7 * 4 * 4  # 64 steps of 7 x 4 members are less than half of the data; twice
    little = pavi.plan(large, data, memory=some.device_bytes - 1, **settings)
    assert (little.data_place, little.rows_place) == (Place.HOST, Place.HOST)
    with pytest.raises(pavi.PaviError, match="does not fit on the device"):
        pavi.plan(large, data, memory=little.device_bytes - 1, **settings)
    with pytest.raises(pavi.PaviError, match="does not fit on the device"):
        pavi.plan(large, data, memory=whole.device_bytes - 1, placement="device", **settings)
    with pytest.raises(pavi.PaviError, match="does not fit"):
        pavi.plan(model, {"x": jnp.asarray(X)}, memory=some.ahead_bytes, placement="device", **settings)


def test_what_is_read_ahead_is_what_the_plan_counts(monkeypatch):
    """Data of two blocks of steps; of rows two as they were read, and four times what steps made of them."""
    settings = SETTINGS | {"steps": 40, "starts": 1}
    planned = pavi.plan(model, {"x": X}, batch=SETTINGS["batch"], placement="host", family=FAMILY, starts=1)
    held = set()

    def run(problem, inputs, state, rates, count, stored, fetched, before):
        state, elbos, made = compiled(problem, inputs, state, rates, count, stored, fetched, before)
        held.add(2 * in_all(stored) + 2 * in_all(fetched) + in_all(before, made) + 2 * in_all(made))
        return state, elbos, made

    compiled = hosting._runner(True)
    monkeypatch.setattr(hosting, "_runner", lambda quick: run)
    pavi.fit(model, {"x": X}, placement="host", **settings)
    assert held == {planned.ahead_bytes}


def test_runs_are_neighbours_and_count_each_member_alike():
    sizes, batch = {"a": 11, "b": 5}, {"a": 4, "b": 3}
    batch, runs = fit_runs(sizes, batch, {"a": 4, "b": 5})
    assert (batch, runs) == ({"a": 4, "b": 5}, {"a": 4})
    values = jnp.arange(55.0).reshape(11, 5) ** 2

    def estimate(key):
        branch = draw_branch(key, sizes, batch, runs)
        part = values.at[jnp.ix_(*branch.at(("a", "b")))].get(mode="clip")
        return branch.weigh(("a", "b"), part), branch.indices["a"][0]

    estimates, firsts = jax.vmap(estimate)(jax.random.split(jax.random.key(2), 3000))
    # There are three runs, each drawn alone: the average over them is the sum, exactly.
    each = [float(estimates[np.flatnonzero(firsts == first)[0]]) for first in (0, 4, 8)]
    assert np.mean(each) == pytest.approx(float(values.sum()))
    assert all(abs(int((firsts == first).sum()) - 1000) < 120 for first in (0, 4, 8))


def test_chunked_data_are_read_in_runs(tmp_path):
    array = zarr.create_array(tmp_path / "x.zarr", shape=(40, 6, 2), chunks=(4, 6, 2), dtype="float32")
    array[:] = np.concatenate([X, X])

    def larger():
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        with numpyro.plate("group", 40, dim=-2):
            theta = numpyro.sample("theta", dist.Normal(mu, 1).expand([2]).to_event(1))
            with numpyro.plate("point", 6, dim=-1):
                numpyro.sample("x", dist.Normal(theta, 1).to_event(1))

    settings = {"family": FAMILY, "batch": {"group": 18, "point": 4}, "steps": 60, "progress_bar": False}
    stored = pavi.fit(larger, {"x": zarr.open_array(tmp_path / "x.zarr", mode="r")}, **settings)
    assert stored.batch["group"] == 18
    in_memory = pavi.fit(larger, {"x": array[:]}, runs={"group": 2}, **settings)
    same(stored, in_memory)


def test_a_run_beyond_the_last_member_is_harmless():
    settings = SETTINGS | {"batch": {"group": 9, "point": 4}, "runs": {"group": 3}}
    fit = pavi.fit(model, {"x": X}, **settings)
    same(pavi.fit(model, {"x": X}, placement="host", **settings), fit)
    assert fit.skipped == 0
    assert fit.history["elbo"][-20:].mean() > fit.history["elbo"][:20].mean()


def test_a_run_beyond_the_last_member_has_the_covariates_of_that():
    """Beyond the last covariate NumPyro has NaN, which would spoil the gradients of all members of the step."""
    ages = np.linspace(0.0, 1.0, 11, dtype=np.float32)

    def aged(ages):
        slope = numpyro.sample("slope", dist.Normal(0, 3))
        with numpyro.plate("person", 11):
            theta = numpyro.sample("theta", dist.Normal(slope * numpyro.subsample(ages, event_dim=0), 1))
            numpyro.sample("y", dist.Normal(theta, 1))

    settings = SETTINGS | {"batch": {"person": 4}, "runs": {"person": 2}, "steps": 400}
    fit = pavi.fit(aged, {"y": 20 * ages}, model_args=(ages,), **settings)
    assert fit.skipped == 0
    # The last person is drawn like all others: its posterior lies between its own value and the slope's.
    assert 13 < float(fit.moments(num_samples=200)["theta"][0, -1]) < 20


def test_runs_are_checked():
    with pytest.raises(pavi.PaviError, match="does not have"):
        pavi.fit(model, {"x": X}, runs={"person": 3}, **SETTINGS)
    with pytest.raises(pavi.PaviError, match="expected from 1"):
        pavi.fit(model, {"x": X}, runs={"group": 0}, **SETTINGS)


def test_the_plan_counts_the_rows_that_starts_begin_from():
    cohort, data = pavi.models.parcellation(), {"x": jax.ShapeDtypeStruct((1000, 59_412, 2, 64), np.float16)}
    settings = {"batch": {"subject": 125, "vertex": 512}, "num_particles": 1, "memory": 10**12}
    once, usual = (pavi.plan(cohort, data, starts=starts, **settings) for starts in (1, None))
    rows = 4 * sum(size * np.prod(cohort_sizes(level)) for level, size in usual.encoding_sizes.items())
    assert usual.temporary_bytes == rows > once.temporary_bytes
    hosted = pavi.plan(cohort, data, placement="host", **settings)
    assert hosted.temporary_bytes == once.temporary_bytes


def cohort_sizes(level):
    return [{"subject": 1000, "vertex": 59_412}[plate] for plate in level]
