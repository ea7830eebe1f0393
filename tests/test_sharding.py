"""Several devices: the same gradients with a fixed branching, the same posterior within noise, also on two processes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sharded_study import AGES, ANSWER, X, aged, alone, family, model

import pavi
from pavi.cascade import Hashable, Study
from pavi.identity import Identity
from pavi.inner import Inner
from pavi.mesh import SHARD, Shards
from pavi.setting import Setting, identity_of, problem_of
from pavi.sharding import split_along, split_problem
from pavi.stepping import Problem, _in_study, default_optimizers, drawn_at

STUDY = Path(__file__).parent / "sharded_study.py"


class Fitter:
    """A process with some devices that fits one study after the other."""

    def __init__(self, devices, *process):
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
        self.said = []
        self.process = subprocess.Popen(
            [sys.executable, str(STUDY), *map(str, process)],
            env={**os.environ, **flags},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ask(self, *told):
        self.process.stdin.write(shlex.join(map(str, told)) + "\n")
        self.process.stdin.flush()

    def answer(self):
        late = threading.Timer(240, self.process.kill)
        late.start()
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                late.cancel()
                return json.loads(line.removeprefix(ANSWER))
            self.said.append(line)
        raise AssertionError("It ended:\n" + "".join(self.said)[-3000:])

    def fit(self, *told):
        self.ask(*told)
        return self.answer()

    def end(self):
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def several():
    """One process with eight devices."""
    fitter = Fitter(8)
    yield fitter
    fitter.end()


@pytest.fixture(scope="module")
def processes():
    """Two processes with two devices each: what both answer."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        address = f"localhost:{found.getsockname()[1]}"
    pair = [Fitter(2, address, 2, number) for number in range(2)]

    def fit(*told):
        for each in pair:
            each.ask(*told)
        return [each.answer() for each in pair]

    yield fit
    for each in pair:
        each.process.stdin.close()
    for each in pair:
        each.end()


def on_one_device(batch, steps, groups=16):
    """The same study in this process."""
    settings = {"family": family(), "batch": {"group": batch, "point": 6}, "progress_bar": False}
    return pavi.fit(model, {"x": X[:groups]}, model_args=(groups,), steps=steps, **settings)


@pytest.fixture(scope="module")
def one():
    """One device, all members in every step."""
    return on_one_device(16, 40)


def test_with_all_members_in_a_step_eight_devices_do_what_one_does(one, several):
    """Every step's gradient is that of one device, so the ELBOs stay together."""
    eight = several.fit(8, 16, 40)
    np.testing.assert_allclose(eight["elbos"][0], one.history["elbo"][0], rtol=1e-5)
    np.testing.assert_allclose(eight["elbos"], one.history["elbo"], rtol=2e-3)
    np.testing.assert_allclose(eight["theta"], one.moments(num_samples=200)["theta"], atol=0.01)


def test_with_some_members_in_a_step_the_posterior_is_the_same_within_noise(several):
    eight, one = several.fit(8, 8, 1200, "--elbo"), on_one_device(8, 1200)
    assert eight["skipped"] == 0
    assert abs(eight["elbo"] - one.elbo(256).mean) < 0.1
    np.testing.assert_allclose(eight["mu"][0], one.moments(num_samples=200)["mu"].values[0], atol=0.1)


def test_devices_of_one_process_alone_are_refused(processes):
    for answer in processes(2, 16, 40):
        assert "1 of the 2 processes would have none. Take all 4" in answer["error"]


def test_two_processes_do_what_one_does(one, processes):
    first, second = processes(4, 16, 40)
    assert first == second
    np.testing.assert_allclose(first["elbos"], one.history["elbo"], rtol=2e-3)
    np.testing.assert_allclose(first["theta"], one.moments(num_samples=200)["theta"], atol=0.01)


def test_two_processes_read_data_and_gather_rows_piece_by_piece_and_go_on_from_a_checkpoint(several, processes, tmp_path):
    """17 groups in parts of 5, 4, 4 and 4, their data in a memory map, rows gathered two of each part at a time.

    They write checkpoints together, though only the first finds it time to, and end where the uninterrupted fit does.
    """
    told, kept = (4, 8, 100, "--groups", 17), tmp_path / "kept"
    apart = *told, "--stored", tmp_path / "x.npy", "--gathered", 70, "--checkpoint", kept, "--interval", 0
    whole, _ = processes(*apart)
    held = several.fit(*told)
    np.testing.assert_allclose(whole["elbos"], held["elbos"], rtol=1e-4)
    np.testing.assert_allclose(whole["theta"], held["theta"], rtol=1e-3, atol=1e-3)
    steps = sorted(int(folder.name) for folder in kept.iterdir() if folder.name.isdigit())
    assert len(steps) == 2
    assert steps[1] == 100
    shutil.rmtree(kept / str(steps[1]))
    again, _ = processes(*apart)
    assert again["elbos"] == whole["elbos"]
    assert again["theta"] == whole["theta"]


def test_a_plate_that_devices_do_not_divide_is_split_all_the_same(several):
    """17 groups on 8 devices, all in every step: the one device that has three and the seven that have two."""
    eight, one = several.fit(8, 17, 40, "--groups", 17), on_one_device(17, 40, 17)
    np.testing.assert_allclose(eight["elbos"][0], one.history["elbo"][0], rtol=1e-5)
    np.testing.assert_allclose(eight["elbos"], one.history["elbo"], rtol=2e-3)
    np.testing.assert_allclose(eight["theta"], one.moments(num_samples=200)["theta"], atol=0.01)


def test_the_shorter_parts_of_a_plate_have_no_covariates_beyond_the_last(several):
    eight = several.fit(8, 17, 40, "--groups", 17, "--aged")
    settings = {"family": family(), "batch": {"group": 17}, "steps": 40, "progress_bar": False}
    one = pavi.fit(partial(aged, 17), {"x": X}, model_args=(AGES,), **settings)
    assert eight["skipped"] == 0
    np.testing.assert_allclose(eight["elbos"], one.history["elbo"], rtol=2e-3)


def test_a_fit_goes_on_on_another_number_of_devices(several, tmp_path):
    """A batch that four devices round up to eight groups."""
    told = 6, 100, "--checkpoint", tmp_path, "--interval", 0
    whole = several.fit(2, *told)
    shutil.rmtree(tmp_path / "100")
    (step,) = (int(folder.name) for folder in tmp_path.iterdir() if folder.name.isdigit())
    again = several.fit(4, *told)
    assert again["elbos"][:step] == whole["elbos"][:step]
    assert again["skipped"] == 0


def test_what_fits_on_other_numbers_of_devices_must_agree_in():
    """Batches as they were asked for; and uneven parts, which hold members in other places: 10 groups on 3 and on 6."""

    def identity(parts, groups):
        template = pavi.read_template(model, ["x"], model_args=(groups,))
        batch = {"group": 6, "point": 6}
        setting = Setting(pavi.PAVI(), batch, 10, 8, None, np.zeros(2), False, 0.0, identity=Identity({}, {}))
        problem, _ = problem_of(Study(model, template, Hashable(())), setting, default_optimizers(1.0), True, 1.0)
        return identity_of(problem if parts is None else split_problem(problem, Shards("group", parts, groups)), setting)

    assert identity(2, 16).difference(identity(4, 16)) is None
    assert identity(4, 16).difference(identity(None, 16)) is None
    assert "Its rows" in identity(6, 10).difference(identity(3, 10))
    assert "Its rows" in identity(3, 10).difference(identity(None, 10))


def test_what_is_averaged_out_together_is_not_split():
    template = pavi.read_template(model, ["x"])
    theta = Inner(("group",), 64)
    assert theta.below(template) == {"point"}
    with pytest.raises(pavi.SettingError, match="cannot be split"):
        split_along(template, {"point": 1}, theta)
    assert split_along(template, 1, theta).plate == "group"


def test_devices_draw_no_more_than_their_part_of_a_batch():
    template = pavi.read_template(model, ["x"], model_args=(512,))
    study, members = Study(model, template, Hashable(())), (("group", 128), ("point", 6))
    problem = Problem(study, pavi.PAVI(), members, 1, *default_optimizers(1.0), runs=(("group", 64),))
    split = split_problem(problem, Shards("group", 8, 512))
    assert dict(split.batch)["group"] == 128
    assert split.runs == (("group", 16),)


def test_rows_that_begin_with_pulls_are_laid_out(several):
    eight = several.fit(8, 17, 40, "--groups", 17, "--pull")
    settings = {"family": family(pull=True), "batch": {"group": 17}, "steps": 40}
    one = pavi.fit(alone, {"x": X}, model_args=(17,), progress_bar=False, **settings)
    np.testing.assert_allclose(eight["elbos"], one.history["elbo"], rtol=2e-3)
    np.testing.assert_allclose(eight["theta"], one.moments(num_samples=200)["theta"], atol=0.01)


def test_stored_data_are_read_for_each_device(several, tmp_path):
    """The same members in the same steps, whether each device holds its part of the data or is given what it draws."""
    in_map = "--stored", tmp_path / "x.npy"
    held, streamed = (several.fit(4, 8, 60, "--groups", 17, "--runs", 2, *stored) for stored in ((), in_map))
    np.testing.assert_allclose(streamed["elbos"], held["elbos"], rtol=1e-5)
    np.testing.assert_allclose(streamed["theta"], held["theta"], rtol=1e-3, atol=1e-3)


def test_parts_hold_every_member_once():
    shards = Shards("group", 8, 17)
    assert shards.counts.tolist() == [3, 2, 2, 2, 2, 2, 2, 2]
    assert len(shards.members) == 8 * 3
    np.testing.assert_array_equal(shards.members[shards.places], np.arange(17))
    np.testing.assert_array_equal(shards.members.reshape(8, 3)[:, 0], shards.firsts)


@pytest.mark.parametrize(("batch", "runs"), [(4, {}), (12, {}), (17, {}), (8, {"group": 2})])
def test_members_of_uneven_parts_count_alike(batch, runs):
    """Weights times how often each of 17 members is drawn on 4 devices, which have 5, 4, 4 and 4 of them: one each."""
    template = pavi.read_template(model, ["x"], model_args=(17,))
    study = Study(model, template, Hashable(()))
    members = ("group", batch), ("point", 6)
    problem = Problem(study, pavi.PAVI(), members, 1, *default_optimizers(1.0), runs=tuple(runs.items()))
    split = split_problem(problem, Shards("group", 4, 17))

    def weights(key):
        def on_one(_):
            branch = _in_study(split, drawn_at(split, key, jnp.int32(0))[0])
            counts = jnp.where(branch.mask["group"], branch.weights["group"], 0.0)
            return jnp.zeros(17).at[branch.indices["group"]].add(counts, mode="drop")

        return jax.vmap(on_one, axis_name=SHARD)(jnp.arange(4)).sum(0)

    found = jax.jit(jax.vmap(weights))(jax.random.split(jax.random.key(0), 4000))
    error = found.std(0) / np.sqrt(len(found))
    assert (np.abs(found.mean(0) - 1) <= 4 * error + 1e-6).all()


def test_devices_that_are_not_there_are_refused():
    template = pavi.read_template(model, ["x"])
    assert split_along(template, 1) == Shards("group", 1, 16)
    with pytest.raises(pavi.SettingError, match="expected a number up to"):
        split_along(template, 4096)
    with pytest.raises(pavi.SettingError, match="no plate 'subject'"):
        split_along(template, {"subject": 1})
