"""`fit.tighten`: bounds that average over draws of the innermost latents, and what they mend."""

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
from pavi.families import Units
from pavi.reading import read_study

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from unbiasedness import CASES, compare

AFFINE = pavi.PAVI(flow=pavi.Affine())


def coins(groups=1000):
    """Group logits of unknown spread, one coin each: heads are as likely as tails whatever the spread, so coins tell nothing
    of it, and its posterior is its prior."""
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("group", groups):
        theta = numpyro.sample("theta", dist.Normal(0.0, tau))
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
    _, _, value_error, grad_error = compare(*CASES["crossed"], pavi.PAVI(flow=pavi.Affine()), Inner(("row", "column"), 4))
    assert value_error < 1e-5
    assert grad_error < 1e-5


def test_the_tight_bound_of_a_member_is_its_evidence():
    study, arguments, observations = read_study(lambda: coins(6), tossed(6), (), None)
    template = study.template
    weights = AFFINE.init(template, np.random.default_rng(0), observations.arrays, frozenset())
    rng = np.random.default_rng(1)
    shared = jnp.asarray(weights.shared + 0.1 * rng.normal(size=weights.shared.shape), jnp.float32)
    ones = {site.name: jnp.ones(site.size) for site in template.latents}
    sampler = AFFINE.sampler(template, Units({name: 0 * one for name, one in ones.items()}, ones), shared)
    branch, inner = (
        fixed_branch(
            {"group": jnp.arange(6)},
        ),
        Inner(("group",), 20_000),
    )
    found = cascade(
        study,
        arguments,
        sampler,
        jax.tree.map(jnp.asarray, weights.rows),
        branch,
        observations.arrays,
        jax.random.key(0),
        inner=inner,
    )
    bound = bounds(template, branch, found, inner)
    tau = float(found.values["tau"])
    points, log_weights = np.polynomial.hermite_e.hermegauss(200)
    signs = 2 * np.asarray(observations.arrays["x"]) - 1
    each = logsumexp(log_expit(signs[:, None] * tau * points) + np.log(log_weights / log_weights.sum()), axis=1)
    outer = float(found.log_p["tau"] - found.log_q["tau"])
    assert float(bound.tight) - outer == pytest.approx(each.sum(), abs=0.1)
    assert float(bound.elbo) < float(bound.tight) - 1


def test_tightening_mends_a_spread_that_the_elbo_biases():
    fit = pavi.fit(coins, tossed(1000), family=AFFINE, progress_bar=False, steps=2000)
    tight = fit.tighten(64, steps=4000, progress_bar=False)
    before, after = (np.log(each.sample(2000, sites=["tau"])["tau"].values) for each in (fit, tight))
    assert before.std() < 0.6  # its prior's, and so its posterior's, is 1
    assert after.std() > 0.75
    assert abs(after.mean()) < 0.35 < abs(before.mean())


def test_refusals():
    fit = pavi.fit(nested, {"x": np.zeros((4, 3))}, family=AFFINE, batch={"point": 2}, steps=10, progress_bar=False)
    with pytest.raises(pavi.SettingError, match="even number"):
        fit.tighten(3)
    with pytest.raises(pavi.SettingError, match=r"'point'.*whole"):
        fit.tighten(4)
    with pytest.raises(pavi.SettingError, match="outside of it depends on"):
        pavi.fit(flat, {"x": np.zeros(3)}, family=AFFINE, steps=10, progress_bar=False).tighten(4)
    whole = pavi.fit(nested, {"x": np.zeros((4, 3))}, family=pavi.baselines.CascadingFlows(4), steps=10, progress_bar=False)
    with pytest.raises(pavi.SettingError, match="CascadingFlows"):
        whole.tighten(4)
    assert len(fit.tighten(4, steps=10, batch={"point": 3}, progress_bar=False).history["elbo"]) == 10
