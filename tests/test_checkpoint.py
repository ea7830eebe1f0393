"""Checkpoints: a fit that was cut off goes on to the very same result; bad folders are refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import pavi
from pavi import checkpoint, studying
from pavi.schedule import Stop

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
FAMILY = pavi.PAVI(flow=pavi.Affine(hidden=()))


def model():
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    with numpyro.plate("group", 12, dim=-2):
        theta = numpyro.sample("theta", dist.Normal(mu, 1))
        with numpyro.plate("point", 4, dim=-1):
            numpyro.sample("x", dist.Normal(theta, 1))


def fit(folder=None, x=X, **settings):
    settings = {"family": FAMILY, "batch": {"group": 5}, "steps": 300, "progress_bar": False} | settings
    return pavi.fit(model, {"x": x}, checkpoint=folder, **settings)


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(checkpoint, "INTERVAL", 0.0)


def assert_same(a, b):
    np.testing.assert_array_equal(a.history["elbo"], b.history["elbo"])
    assert a.sample(20).identical(b.sample(20))
    assert a.stop is b.stop


class Cut(Exception):
    pass


def cut_off_after(monkeypatch, writes):
    """Makes training fail right after so many checkpoints."""
    write, count = checkpoint.Keeper.write, []

    def failing(self, *args):
        write(self, *args)
        count.append(1)
        if len(count) == writes:
            raise Cut

    monkeypatch.setattr(checkpoint.Keeper, "write", failing)
    return write


def test_a_cut_off_fit_goes_on_to_the_same_result(tmp_path, often, monkeypatch):
    write = cut_off_after(monkeypatch, 3)
    with pytest.raises(Cut):
        fit(tmp_path)
    monkeypatch.setattr(checkpoint.Keeper, "write", write)
    resumed = fit(tmp_path)
    assert_same(resumed, fit())
    assert (np.diff(resumed.history["seconds"]) > 0).all()
    assert_same(fit(tmp_path), resumed)  # finished: read, not trained


def test_a_killed_process_loses_nothing_written(tmp_path):
    script = (
        "import sys; sys.path.insert(0, sys.argv[2]); import test_checkpoint as t; from pavi import checkpoint; "
        "checkpoint.INTERVAL = 0.0; t.fit(sys.argv[1], steps=2000)"
    )
    here = str(Path(__file__).parent)
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path), here])
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and sum(p.name.isdigit() for p in tmp_path.iterdir()) < 2:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    steps = sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit())
    assert steps, "nothing was written"
    assert steps[-1] < 2000, "it was killed too late"
    assert_same(fit(tmp_path, steps=2000), fit(steps=2000))


def test_a_corrupt_checkpoint_gives_way_to_the_one_before(tmp_path, often, monkeypatch):
    write = cut_off_after(monkeypatch, 4)
    with pytest.raises(Cut):
        fit(tmp_path)
    monkeypatch.setattr(checkpoint.Keeper, "write", write)
    steps = sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit())
    assert len(steps) == checkpoint.KEPT
    shutil.rmtree(tmp_path / str(steps[-1]) / "state")
    with pytest.warns(UserWarning, match=f"Checkpoint {steps[-1]}"):
        resumed = fit(tmp_path)
    assert_same(resumed, fit())


def test_bad_folders_are_refused(tmp_path, often):
    fit(tmp_path / "a", steps=50)
    with pytest.raises(pavi.LoadError, match=r"another fit. Its batch"):
        fit(tmp_path / "a", steps=50, batch={"group": 6})
    with pytest.raises(pavi.LoadError, match=r"another fit. Its data"):
        fit(tmp_path / "a", steps=50, x=X + 1)
    with pytest.raises(pavi.LoadError, match=r"another fit. Its starting values"):
        fit(tmp_path / "a", steps=50, init={"mu": 1.0})
    with pytest.raises(pavi.LoadError, match=r"another fit. Its optimizer"):
        fit(tmp_path / "a", steps=50, optimizer=optax.adam(1e-3))
    fit(tmp_path / "b", steps=50, optimizer=optax.adam(1e-3))
    fit(tmp_path / "b", steps=50, optimizer=optax.adam(1e-3))
    with pytest.raises(pavi.LoadError, match=r"another fit. Its optimizer"):
        fit(tmp_path / "b", steps=50, optimizer=optax.adam(1e-2))
    for step in (tmp_path / "a").iterdir():
        if step.name.isdigit():
            shutil.rmtree(step / "state")
    with pytest.warns(UserWarning, match="cannot be read"), pytest.raises(pavi.LoadError, match="Delete the folder"):
        fit(tmp_path / "a", steps=50)
    (tmp_path / "file").write_text("x")
    with pytest.raises(pavi.SettingError, match="is a file"):
        fit(tmp_path / "file")


def test_a_folder_of_another_study_is_refused(tmp_path, often):
    """Other priors, arguments, or data at places that are not looked at one by one."""
    many = np.random.default_rng(0).normal(size=(5000, 4)).astype(np.float32)

    def wide(spread, age):
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        with numpyro.plate("group", 5000, dim=-2):
            mean = mu + numpyro.subsample(age[:, None], event_dim=0)
            theta = numpyro.sample("theta", dist.Normal(mean, spread))
            with numpyro.plate("point", 4, dim=-1):
                numpyro.sample("x", dist.Normal(theta, 1))

    def fit(x=many, **settings):
        settings = {"family": FAMILY, "batch": {"group": 50}, "steps": 20, "progress_bar": False} | settings
        return pavi.fit(wide, {"x": x}, checkpoint=tmp_path, **settings)

    age = np.linspace(-1, 1, 5000, dtype=np.float32)
    kept = {"model_args": (1.0,), "model_kwargs": {"age": age}}
    first = fit(**kept)
    for placement in ("host", None):  # nor does it matter where the data lie, and in which precision they come
        assert_same(fit(many.astype(np.float64), placement=placement, **kept), first)
    with pytest.raises(pavi.LoadError, match=r"another fit. Its model: .* 'theta' is usually"):
        fit(**kept | {"model_args": (1.01,)})
    with pytest.raises(pavi.LoadError, match=r"another fit. Its arguments"):
        fit(**kept | {"model_kwargs": {"age": np.where(np.arange(5000) == 4321, 0, age)}})
    other = many.copy()
    other[4321, 2] = 0
    with pytest.raises(pavi.LoadError, match=r"another fit. Its data as a whole"):
        fit(other, **kept)


def test_a_slower_attempt_replaces_the_checkpoints_of_the_one_before(tmp_path, often, monkeypatch):
    train, paces = studying.train, []

    def failing(problem, inputs, state, schedule, *more):
        paces.append(schedule.pace)
        trained = train(problem, inputs, state, schedule, *more)
        return trained._replace(stop=Stop.NON_FINITE) if schedule.pace == 1.0 else trained

    monkeypatch.setattr(studying, "train", failing)
    slower = fit(tmp_path)
    assert paces == [1.0, 0.5]
    assert_same(fit(tmp_path), slower)
    assert paces == [1.0, 0.5]


def test_starts_are_not_tried_again(tmp_path, often, monkeypatch):
    write = cut_off_after(monkeypatch, 2)
    with pytest.raises(Cut):
        fit(tmp_path, starts=3)
    monkeypatch.setattr(checkpoint.Keeper, "write", write)
    whole = fit(starts=3)
    monkeypatch.setattr("pavi.studying.best_start", None)
    assert_same(fit(tmp_path, starts=3), whole)
