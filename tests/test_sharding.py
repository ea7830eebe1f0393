"""Several devices: the same gradients with a fixed branching, the same posterior within noise, also on two processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sharded_study import X, model

import pavi
from pavi.sharding import split_along

STUDY = Path(__file__).parent / "sharded_study.py"


def start(devices, batch, steps, *more, local_devices=None):
    count = devices if local_devices is None else local_devices
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(STUDY), str(devices), str(batch), str(steps), *map(str, more)]
    return subprocess.Popen(command, env={**os.environ, **flags}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-3000:]
    found = [line for line in out.splitlines() if line.startswith("{")]  # the runtime prints as well
    return json.loads(found[-1]) if found else None


def on_one_device(batch, steps):
    """The same study in this process."""
    family = pavi.PAVI(flow=pavi.Affine())
    return pavi.fit(model, {"x": X}, family=family, batch={"group": batch, "point": 6}, steps=steps, progress_bar=False)


@pytest.fixture(scope="module")
def one():
    """One device, all members in every step."""
    return on_one_device(16, 40)


def test_with_all_members_in_a_step_eight_devices_do_what_one_does(one):
    """Every step's gradient is that of one device, so the ELBOs stay together."""
    eight = result(start(8, 16, 40))
    np.testing.assert_allclose(eight["elbos"][0], one.history["elbo"][0], rtol=1e-5)
    np.testing.assert_allclose(eight["elbos"], one.history["elbo"], rtol=2e-3)
    np.testing.assert_allclose(eight["theta"], one.moments(num_samples=200)["theta"], atol=0.01)


def test_with_some_members_in_a_step_the_posterior_is_the_same_within_noise():
    eight, one = result(start(8, 8, 1200)), on_one_device(8, 1200)
    assert eight["skipped"] == 0
    assert abs(eight["elbo"] - one.elbo(256).mean) < 0.1
    np.testing.assert_allclose(eight["mu"][0], one.moments(num_samples=200)["mu"].values[0], atol=0.1)


def test_two_processes_do_what_one_does(one):
    with socket.socket() as found:
        found.bind(("localhost", 0))
        address = f"localhost:{found.getsockname()[1]}"
    both = [start(4, 16, 40, address, 2, number, local_devices=2) for number in range(2)]
    first, second = (result(process) for process in both)
    assert second is None
    np.testing.assert_allclose(first["elbos"], one.history["elbo"], rtol=2e-3)
    np.testing.assert_allclose(first["theta"], one.moments(num_samples=200)["theta"], atol=0.01)


def test_devices_that_are_not_there_are_refused():
    template = pavi.read_template(model, ["x"])
    assert split_along(template, 1) == ("group", 1)
    with pytest.raises(pavi.SettingError, match="expected a number up to"):
        split_along(template, 4096)
    with pytest.raises(pavi.SettingError, match="no plate 'subject'"):
        split_along(template, {"subject": 1})
