"""Training: what is compiled, when it stops, and what it survives."""

import os
import signal
import subprocess
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import pavi
from pavi import compiling
from pavi.compiling import Purpose
from pavi.schedule import EARLY_RATE, Schedule

X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


class Counting:
    """A model that counts how often it is run."""

    def __init__(self):
        self.runs = 0

    def __call__(self):
        self.runs += 1
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("group", 6, dim=-2):
            theta = numpyro.sample("theta", dist.Normal(mu, 1))
            with numpyro.plate("point", 4, dim=-1):
                numpyro.sample("x", dist.Normal(theta, 1))


LINEAR = pavi.PAVI(flow=pavi.Affine(hidden=()))


def fit(model, **settings):
    return pavi.fit(model, {"x": X}, **{"progress_bar": False, "steps": 60, "family": LINEAR, **settings})


def test_a_second_fit_compiles_nothing_new():
    model = Counting()
    fit(model)
    traced = model.runs
    assert traced <= 8
    with jax.log_compiles(), warnings.catch_warnings():
        compiled = []
        logger = __import__("logging").getLogger("jax")
        handler = __import__("logging").Handler()
        handler.emit = lambda record: compiled.append(record.getMessage())
        logger.addHandler(handler)
        pavi.fit(model, {"x": 2 * X}, steps=900, rng_key=3, progress_bar=False, family=LINEAR)
        logger.removeHandler(handler)
    assert not [message for message in compiled if "Compiling" in message or "Finished XLA" in message]
    assert model.runs - traced <= 3, "only the template may be read again"


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="memory maps are counted on Linux alone")
def test_fits_of_many_models_do_not_pile_up_compiled_functions(monkeypatch):
    def maps():
        with open("/proc/self/maps") as found:
            return len(found.readlines())

    def counted():
        fit(Counting())
        return maps()

    before = [counted() for _ in range(2)]
    assert min(np.diff(before)) > 50, "what one model compiles is kept for its next fit"
    with open("/proc/sys/vm/max_map_count") as most:
        monkeypatch.setattr("pavi.compiling.MOST_MAPS", before[-1] / int(most.read()))
    after = [counted() for _ in range(2)]
    assert max(after) < before[-1] + 2 * max(np.diff(before))


def test_options_that_this_xla_does_not_know_are_left_out(monkeypatch):
    options = {"xla_backend_optimization_level": 1, "xla_of_another_version": True}
    monkeypatch.setitem(compiling._OPTIONS, jax.default_backend(), {Purpose.STEPS: options})
    assert compiling.compiler_options.__wrapped__(Purpose.STEPS) == {"xla_backend_optimization_level": 1}
    assert compiling.compiler_options.__wrapped__(Purpose.LONG) is None


def test_the_model_is_not_run_per_step():
    few, many = Counting(), Counting()
    fit(few, steps=10)
    fit(many, steps=2000)
    assert few.runs == many.runs


def test_the_same_key_gives_the_same_fit():
    model = Counting()
    a, b, c = fit(model, rng_key=1), fit(model, rng_key=jax.random.key(1)), fit(model, rng_key=2)
    assert np.array_equal(a.history["elbo"], b.history["elbo"])
    assert a.sample(5).identical(b.sample(5))
    assert not np.array_equal(a.history["elbo"], c.history["elbo"])


def test_history():
    result = fit(Counting(), steps=130)
    assert result.history["step"].tolist() == list(range(1, 131))
    assert (np.diff(result.history["seconds"]) > 0).all()
    assert result.history["elbo"][-30:].mean() > result.history["elbo"][:30].mean()
    assert result.stop is pavi.Stop.STEPS
    assert "130 steps" in repr(result)


def test_only_visited_rows_move():
    result = fit(Counting(), steps=1, batch={"group": 2})
    start = result.family.init(result.template, np.random.default_rng(0), result._observations.arrays, frozenset()).rows
    moved = np.abs(np.asarray(result._weights.rows[("group",)]) - start[("group",)]).sum(1) > 1e-6
    assert moved.sum() == 2


def test_steps_that_are_not_finite_are_skipped_and_counted():
    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("group", 24):
            numpyro.sample("x", dist.Normal(mu, 1))
        # Not a number where mu is drawn above 4, which happens in a few steps at first.
        numpyro.factor("trap", 0.0 * jnp.sqrt(4.0 - mu))

    x = np.full(24, 0.5, np.float32)
    result = pavi.fit(model, {"x": x}, steps=1500, progress_bar=False, rng_key=0, family=wide())
    assert 0 < result.skipped < 400
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result._weights))
    exact = 24 * 0.5 / (24 + 1 / 4)
    assert abs(float(result.sample(2000)["mu"].mean()) - exact) < 0.1


def wide():
    """A family that starts as wide as the prior."""
    import dataclasses

    @dataclasses.dataclass(frozen=True)
    class Wide(pavi.Affine):
        def build(self, rng, dim, cond_dim, counts=0):
            built = super().build(rng, dim, cond_dim, counts)
            bias = built.shown.readout.bias
            bias[dim : 2 * dim] = -3.0
            return built

    return pavi.PAVI(flow=Wide("diag", ()))


@pytest.mark.parametrize("height", [1e12, 1e25])
def test_gradients_out_of_all_proportion_do_not_freeze_the_fit(height):
    """Adam would take a thousand steps to forget their squares; those that overflow it would never forget."""

    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("group", 4):
            numpyro.sample("x", dist.Normal(mu, 1))
        numpyro.factor("cliff", -height * jnp.maximum(mu - 3.4, 0.0))  # more than three sd off: reached early on

    family = pavi.PAVI(flow=pavi.Affine())
    result = pavi.fit(model, {"x": np.full(4, 1.9, np.float32)}, steps=600, progress_bar=False, family=family)
    assert (result.history["elbo"] < -0.01 * height).any()
    mean, sd = result.moments()["mu"].values
    assert abs(mean - 7.6 / 4.25) < 0.05
    assert abs(sd * 4.25**0.5 - 1) < 0.05


def test_a_fit_that_keeps_failing_stops_with_a_reason():
    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("group", 4):
            numpyro.sample("x", dist.Normal(mu, 1))
        # The data pull mu up to where the factor is not a number.
        numpyro.factor("trap", 0.0 * jnp.sqrt(1.0 - mu))

    with pytest.warns(UserWarning, match="not finite"):
        result = pavi.fit(model, {"x": np.full(4, 9.0, np.float32)}, progress_bar=False)
    assert result.stop is pavi.Stop.NON_FINITE
    assert np.isfinite(result.sample(5)["mu"]).all()


def test_ctrl_c_returns_the_fit_so_far():
    # A job started in the background ignores interrupts until told otherwise.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    model = Counting()
    fit(model, steps=10)
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    result = fit(model, steps=10_000_000)
    assert result.stop is pavi.Stop.INTERRUPTED
    assert 0 < len(result.history["step"]) < 10_000_000
    assert np.isfinite(result.elbo(8).mean)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, previous)


def test_an_optimizer_of_the_callers_own():
    result = fit(Counting(), optimizer=optax.adam(1e-2), steps=400)
    assert result.history["elbo"][-50:].mean() > result.history["elbo"][:20].mean()
    settled = fit(Counting(), optimizer=optax.adam(1e-2), steps=None)
    assert settled.stop is pavi.Stop.SETTLED


def test_stopping_waits_for_a_slow_rise_and_not_for_noise():
    template = pavi.read_template(Counting(), ["x"])
    rng = np.random.default_rng(0)

    def stops(trend):
        schedule = Schedule(template, {"group": 6, "point": 4}, None, decays=True, load=1.0)
        elbos, taken = [], 0
        while schedule.decay is None and taken < 4000:
            count = len(schedule.rates(taken))
            elbos.append(trend * np.arange(taken, taken + count) + rng.normal(size=count))
            taken += count
            schedule.update(elbos)
        return taken

    assert stops(0.0) < 1500
    assert stops(0.01) >= 4000


def test_the_rate_decays_to_zero():
    template = pavi.read_template(Counting(), ["x"])
    schedule = Schedule(template, {"group": 6, "point": 4}, 1000, decays=True, load=1.0)
    rates = []
    while len(rates) < 1000:
        rates += schedule.rates(len(rates)).tolist()
    assert rates[0] == EARLY_RATE
    assert rates[-1] < 1e-4
    assert (np.diff(rates) <= 0).all()


def test_progress_bar_shows_elbo_and_speed(capsys):
    fit(Counting(), progress_bar=True, steps=120)
    shown = capsys.readouterr().err
    assert "ELBO" in shown
    assert "step/s" in shown


def test_encoding_sizes_per_level_and_site():
    encodings = pavi.FreeEncodings({"theta": 3, ("group",): 5, ...: 2})
    result = fit(Counting(), family=pavi.PAVI(encodings=encodings), steps=5)
    assert result._weights.rows[("group",)].shape == (6, 3)
    assert result._weights.rows[()].shape == (2,)


def test_the_papers_form_without_parents():
    result = fit(Counting(), family=pavi.PAVI(condition_on_parents=False), steps=1500)
    with_parents = fit(Counting(), steps=1500)
    assert result.elbo(256).mean < with_parents.elbo(256).mean


def test_double_precision():
    """In a process of its own, since precision is set for all of JAX."""
    script = """
import jax, numpy as np, numpyro, numpyro.distributions as dist
jax.config.update("jax_enable_x64", True)
import pavi
def model():
    mu = numpyro.sample("mu", dist.Normal(0., 5.))
    with numpyro.plate("item", 4):
        numpyro.sample("x", dist.Normal(mu, 1.))
fit = pavi.fit(model, {"x": np.array([1., 2., 2., 3.])}, progress_bar=False)
assert fit.sample(5)["mu"].dtype == np.float64, fit.sample(5)["mu"].dtype
assert abs(fit.elbo(256).mean - -7.06252) < 1e-4, fit.elbo(256)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=300)
