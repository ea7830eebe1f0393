"""The model of functional networks: densities against enumeration and quadrature, and a fit that finds the networks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import zarr
from numpyro.handlers import seed, trace
from scipy import stats
from scipy.special import logsumexp

import pavi
from pavi.branch import fixed_branch
from pavi.cascade import cascade, draw_prior
from pavi.models import SharedLabel, parcellation, simulate_cohort
from pavi.reading import read_study


def test_summed_labels_equal_enumeration():
    rng = np.random.default_rng(0)
    logits, locs = rng.normal(size=(5, 3)), rng.normal(size=(3, 4))
    scales, x = np.array([0.5, 1.0, 2.0]), rng.normal(size=(5, 2, 4))
    shared = SharedLabel(jnp.asarray(logits), jnp.asarray(locs), jnp.asarray(scales), 2)
    joint = np.stack(
        [
            jax.nn.log_softmax(logits)[:, label]
            + np.asarray(dist.Normal(locs[label], scales[label]).log_prob(x)).sum((1, 2))
            for label in range(3)
        ],
        -1,
    )
    np.testing.assert_allclose(shared.log_joint(jnp.asarray(x)), joint, rtol=1e-5)
    np.testing.assert_allclose(shared.log_prob(jnp.asarray(x)), jax.nn.logsumexp(joint, -1), rtol=1e-5)


def test_shared_label_keeps_the_digits_of_narrow_networks():
    """Fingerprints a hundred times farther from zero than vectors from them: float32 against float64."""
    rng = np.random.default_rng(0)
    locs, scales = 6 * rng.standard_normal((3, 64)), np.array([0.05, 0.1, 1.0])
    x = (locs[0] + scales[0] * rng.standard_normal((500, 2, 64))).astype(np.float32)
    f32 = SharedLabel(jnp.zeros(3), jnp.asarray(locs, jnp.float32), jnp.asarray(scales, jnp.float32), 2).log_prob(
        jnp.asarray(x)
    )
    locs, scales = locs.astype(np.float32).astype(float), scales.astype(np.float32).astype(float)
    exact = stats.norm.logpdf(x.astype(float)[:, :, None], locs, scales[:, None]).sum((1, 3)) - np.log(3)
    np.testing.assert_allclose(f32, logsumexp(exact, axis=1), atol=1e-3)


def test_draws_share_their_label():
    shared = SharedLabel(jnp.zeros(2), jnp.array([[-9.0], [9.0]]), jnp.ones(2), 3)
    draws = np.asarray(shared.sample(jax.random.key(0), (400,)))
    signs = np.sign(draws[..., 0])
    assert (signs == signs[:, :1]).all()
    assert 0.4 < (signs[:, 0] > 0).mean() < 0.6


def draw(model):
    with seed(rng_seed=3), trace() as found:
        model()
    return {name: np.asarray(site["value"]) for name, site in found.items() if site["type"] == "sample"}


def test_the_relaxed_form_fits():
    model = pavi.models.parcellation(4, 3, 10, 5, 3, labels="relaxed")
    truth = draw(model)
    assert truth["x"].shape == (4, 3, 10, 5)
    fit = pavi.fit(model, {"x": truth["x"]}, family=pavi.PAVI(flow=pavi.Affine()), steps=300, starts=1, progress_bar=False)
    assert fit.skipped < 5  # far below its location, the density of a Gumbel overflows
    assert np.isfinite(fit.elbo(16).mean)
    assert fit.history["elbo"][-50:].mean() > fit.history["elbo"][:50].mean()


def test_a_cohort_is_drawn_from_the_model():
    cohort = simulate_cohort(40, 3, 25, 6, 3, seed=1, dtype=np.float32)
    x, label = np.asarray(cohort.x), np.asarray(cohort.labels)
    assert x.shape == (40, 25, 3, 6)
    noise = (x - np.asarray(cohort.mu)[label][:, :, None]) / np.asarray(cohort.kappa)[label][..., None, None]
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    probs = np.asarray(jax.nn.softmax(cohort.population_logits))
    assert np.take_along_axis(np.broadcast_to(probs, (40, 25, 3)), label[..., None].astype(int), -1).mean() > 0.6


def test_a_cohort_can_be_written_elsewhere_and_fitted_there(tmp_path):
    store = zarr.create_array(tmp_path / "x", shape=(4, 10, 2, 5), chunks=(1, 5, 2, 5), dtype="float32")
    written = simulate_cohort(4, 2, 10, 5, 3, dtype=np.float32, store=store)
    kept = simulate_cohort(4, 2, 10, 5, 3, dtype=np.float32)
    np.testing.assert_allclose(written.x[:], kept.x, rtol=1e-5)
    np.testing.assert_array_equal(written.labels, kept.labels)
    settings = {
        "family": pavi.PAVI(flow=pavi.Affine(hidden=())),
        "batch": {"subject": 2, "vertex": 5},
        "runs": {},
        "starts": 1,
    }
    model = pavi.models.parcellation(4, 2, 10, 5, 3)
    fits = [pavi.fit(model, {"x": x}, steps=20, progress_bar=False, **settings) for x in (store, np.asarray(written.x[:]))]
    np.testing.assert_allclose(*(fit.history["elbo"] for fit in fits), rtol=1e-4)


def test_networks_and_labels_are_found():
    cohort = simulate_cohort(12, 2, 60, 16, 4, fingerprint_scale=1.0, spread=0.3, seed=2)
    model = pavi.models.parcellation(12, 2, 60, 16, 4)
    fit = pavi.fit(model, {"x": cohort.x}, family=pavi.PAVI(flow=pavi.Affine()), steps=600, progress_bar=False)
    moments = fit.moments(sites=["mu", "label_probs"], num_samples=100)
    correlation = np.corrcoef(moments["mu"].values[0], cohort.mu)[:4, 4:]
    assert correlation.max(0).min() > 0.98
    found = correlation.argmax(1)[moments["label_probs"].values[0].argmax(-1)]
    assert (found == np.asarray(cohort.labels)).mean() > 0.95


def test_bad_settings():
    with pytest.raises(pavi.SettingError, match="relaxed"):
        pavi.models.parcellation(labels="argmax")


def test_half_precision_data_are_computed_with_in_full():
    """Sums of squares in bfloat16 would be off by more than labels differ in."""
    half = simulate_cohort(6, 2, 8, 16, 3, seed=0, dtype=jnp.bfloat16).x
    study, arguments, _ = read_study(parcellation(6, 2, 8, 16, 3), {"x": half}, (), None)
    branch = fixed_branch({"subject": jnp.arange(6), "vertex": jnp.arange(8)})

    @jax.jit
    def likelihoods(x):
        return cascade(study, arguments, draw_prior, {}, branch, {"x": x}, jax.random.key(0)).log_p["x"]

    np.testing.assert_allclose(likelihoods(half), likelihoods(half.astype(jnp.float32)), rtol=1e-6)
