"""`inner_points`: bounds that average over draws of the innermost latents, and what they mend."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import log_expit, logsumexp

import pavi
from pavi.branch import fixed_branch
from pavi.cascade import Inner, cascade
from pavi.elbo import bounds

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from unbiasedness import CASES, compare

AFFINE, LINEAR = pavi.PAVI(flow=pavi.Affine()), pavi.PAVI(flow=pavi.Affine(hidden=()))


def coins(groups=400, center=0.0):
    """Group logits of unknown spread, one coin each. Around zero heads are as likely as tails whatever the spread, so coins
    tell nothing of it, and its posterior is its prior."""
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("group", groups):
        theta = numpyro.sample("theta", dist.Normal(center, tau))
        numpyro.sample("x", dist.Bernoulli(logits=theta))


def nested():
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("group", 4, dim=-2):
        theta = numpyro.sample("theta", dist.Normal(mu, 1))
        with numpyro.plate("point", 3, dim=-1):
            numpyro.sample("x", dist.Normal(theta, 1))


def flat():
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("point", 3):
        numpyro.sample("x", dist.Normal(mu, 1))


def tossed(groups):
    return {"x": np.random.default_rng(0).integers(0, 2, size=groups)}


def test_the_tight_bound_is_unbiased_over_branchings():
    _, _, value_error, grad_error = compare(*CASES["crossed"], LINEAR, Inner(("row", "column"), 4))
    assert value_error < 1e-5
    assert grad_error < 1e-5


@pytest.fixture(scope="module")
def fit():
    return pavi.fit(coins, tossed(6), model_args=(6, 0.7), family=AFFINE, steps=500, progress_bar=False)


def test_the_tight_bound_of_a_member_is_its_evidence(fit):
    template, weights = fit.template, fit._trained.weights
    sampler = AFFINE.sampler(template, fit._units, weights.shared)
    branch, inner = fixed_branch({"group": jnp.arange(6)}), Inner(("group",), 20_000)
    data = fit._observations.arrays
    found = cascade(fit._study, fit._arguments, sampler, weights.rows, branch, data, jax.random.key(0), inner=inner)
    bound = bounds(template, branch, found, inner)
    points, chances = np.polynomial.hermite_e.hermegauss(200)
    logits = (2 * np.asarray(data["x"])[:, None] - 1) * (0.7 + float(found.values["tau"]) * points)
    each = logsumexp(log_expit(logits), b=chances / chances.sum(), axis=1)
    outer = float(found.log_p["tau"] - found.log_q["tau"])
    assert float(bound.tight) - outer == pytest.approx(each.sum(), abs=0.02)
    assert float(bound.elbo) < float(bound.tight) - 0.02


def test_inner_points_mend_a_spread_that_the_elbo_biases():
    settings = {"family": AFFINE, "num_particles": 2, "batch": {"group": 400}, "steps": 2500, "progress_bar": False}
    plain, tight = (pavi.fit(coins, tossed(400), inner_points=draws, **settings) for draws in (1, 16))
    before, after = (np.log(each.sample(2000, sites=["tau"])["tau"].values) for each in (plain, tight))
    assert before.std() < 0.7  # its prior's, and so its posterior's, is 1
    assert after.std() > before.std() + 0.1
    assert abs(after.mean()) < abs(before.mean()) - 0.2


def test_half_of_the_global_draws_are_mirrored(fit):
    sampler = AFFINE.sampler(fit.template, fit._units, fit._trained.weights.shared)
    branch, rows, data = fixed_branch({"group": jnp.arange(6)}), fit._trained.weights.rows, fit._observations.arrays

    def log_tau(sign):
        found = cascade(fit._study, fit._arguments, sampler, rows, branch, data, jax.random.key(3), sign=sign)
        return float(found.unconstrained["tau"][0])

    assert log_tau(1.0) + log_tau(-1.0) == pytest.approx(2 * log_tau(0.0), abs=1e-5)
    assert abs(log_tau(1.0) - log_tau(-1.0)) > 1e-2


def test_refusals():
    points = {"x": np.zeros((4, 3))}

    def fit(model, data, draws, family=LINEAR, **settings):
        return pavi.fit(model, data, family=family, inner_points=draws, steps=1, progress_bar=False, **settings)

    with pytest.raises(pavi.SettingError, match="even number"):
        fit(nested, points, 3)
    with pytest.raises(pavi.SettingError, match=r"'point'.*whole"):
        fit(nested, points, 4, batch={"point": 2})
    with pytest.raises(pavi.SettingError, match="outside of it depends on"):
        fit(flat, {"x": np.zeros(3)}, 4)
    with pytest.raises(pavi.SettingError, match="CascadingFlows"):
        fit(nested, points, 4, pavi.baselines.CascadingFlows(2))
    assert len(fit(nested, points, 4).history["elbo"]) == 1
