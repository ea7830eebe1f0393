"""Where fits start: components of mixtures at clusters of the data, given values, and the choice among starts."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints
from sklearn.mixture import GaussianMixture

import pavi
from pavi.experiments.stepwise import start
from pavi.posterior import seed_of
from pavi.reading import read_study
from pavi.schedule import Schedule
from pavi.sources import Stored
from pavi.starting import _clusters, components, other_start, usual_starts
from pavi.train import best_start, chunk_runner

CENTERS = np.array([[-4.0, 0.0], [0.0, 3.0], [4.0, -2.0]])


def mixed(logits, locs, scales):
    """A mixture of normal vectors, for every NumPyro: 0.21 refuses them in `MixtureSameFamily`."""
    each = [dist.Normal(locs[..., k, :], scales[..., k, :]).to_event(1) for k in range(locs.shape[-2])]
    return dist.MixtureGeneral(dist.Categorical(logits=logits), each, support=constraints.real_vector)


def mixture():
    centers = numpyro.sample("centers", dist.Normal(jnp.zeros((3, 2)), 4.0).to_event(2))
    with numpyro.plate("group", 8, dim=-2):
        means = numpyro.sample("means", dist.Normal(centers, 0.5).to_event(2))
        with numpyro.plate("point", 15, dim=-1):
            numpyro.sample("x", mixed(jnp.zeros(3), means, jnp.full((3, 1), 0.3)))


def overlapping():
    centers = numpyro.sample("centers", dist.Normal(jnp.zeros((5, 8)), 1.0).to_event(2))
    with numpyro.plate("point", 10):
        numpyro.sample("x", dist.Normal(centers.mean(0), 1.0).to_event(1))


def simulate(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    means = CENTERS + 0.5 * rng.normal(size=(8, 3, 2))
    label = rng.integers(0, 3, size=(8, 15))
    drawn = np.take_along_axis(means, label[..., None], 1) + 0.3 * rng.normal(size=(8, 15, 2))
    return drawn.astype(np.float32)


def farthest(centers: np.ndarray) -> float:
    """The distance from a true center to the nearest one found, for the worst of them."""
    return np.linalg.norm(CENTERS[:, None] - centers, axis=-1).min(1).max()


@pytest.mark.parametrize("seed", range(2))
def test_a_mixture_finds_all_its_components(seed):
    fit = pavi.fit(mixture, {"x": simulate(seed)}, steps=600, rng_key=seed, progress_bar=False)
    assert farthest(fit.moments(sites=["centers"])["centers"].values[0]) < 0.6


def test_the_best_start_goes_on_with_its_members_rows():
    data, family = {"x": simulate(0)}, pavi.PAVI(flow=pavi.Affine(hidden=()))
    problem, inputs, state, observations = start(mixture, data, family, {"group": 8, "point": 15}, particles=1)
    first = {level: np.array(rows) for level, rows in state.weights.rows.items()}
    schedule = Schedule(problem.template, dict(problem.batch), 10, decays=True, load=1.0)
    _, best = best_start(problem, inputs, state, observations, seed_of(0), 2, schedule, {}, False, chunk_runner(True))
    assert int(best.step) == 0
    for level in (("group",), ()):
        assert np.abs(np.asarray(best.weights.rows[level]) - first[level]).max() > 0.1


@pytest.mark.parametrize("seed", [1, 3, 5])
def test_clusters_that_overlap_are_followed_to_the_top(seed):
    """About as near the likeliest centers as these are to the true ones: the last stretch takes many small rounds."""
    template = pavi.read_template(overlapping, {"x": np.zeros((10, 8), np.float32)})
    rng, truth, spreads = np.random.default_rng(0), np.eye(5, 8), np.array([1.2, 0.9, 0.9, 0.7, 0.6])
    label = rng.integers(0, 5, 30_000)
    points = truth[label] + spreads[label, None] * rng.normal(size=(len(label), 8))
    likeliest = GaussianMixture(5, covariance_type="spherical", means_init=truth, tol=1e-9, max_iter=5000).fit(points).means_
    found = _clusters(template.site("centers"), points, seed)[0].value.reshape(5, 8)
    missed = np.linalg.norm(likeliest[:, None] - found, axis=-1).min(1).max()
    assert missed < 1.5 * np.linalg.norm(likeliest - truth, axis=-1).max()


@pytest.mark.parametrize("points", [1, 2])
def test_fewer_data_than_components_are_no_obstacle(points):
    def model():
        centers = numpyro.sample("centers", dist.Normal(jnp.zeros((5, 2)), 4.0).to_event(2))
        with numpyro.plate("group", 2, dim=-2), numpyro.plate("point", points, dim=-1):
            numpyro.sample("x", dist.Normal(centers.mean(0), 1.0).to_event(1))

    x = np.random.default_rng(0).normal(size=(2, points, 2)).astype(np.float32)
    study, arguments, _ = read_study(model, {"x": x}, (), None)
    assert all(not other_start(study, arguments, {"x": x}, {}, number) for number in (1, 2, 3))


@pytest.mark.parametrize("stored", [False, True])
def test_spreads_of_clusters_start_the_latent_they_belong_to(stored):
    """Of two positive latents with a number for each component, only one is the spread of what is observed."""
    scales = np.array([0.2, 0.5, 1.0])

    def model():
        centers = numpyro.sample("centers", dist.Normal(jnp.zeros((3, 2)), 4.0).to_event(2))
        rates = numpyro.sample("rates", dist.Gamma(2.0, 1.0).expand([3]).to_event(1))
        spreads = numpyro.sample("spreads", dist.LogNormal(0.0, 1.0).expand([3]).to_event(1))
        with numpyro.plate("point", 600):
            shares = numpyro.sample("shares", dist.Normal(jnp.zeros(3), rates).to_event(1))
            numpyro.sample("x", mixed(shares, centers, spreads[:, None]))

    rng = np.random.default_rng(0)
    label = rng.integers(0, 3, 600)
    x = (CENTERS[label] + scales[label][:, None] * rng.normal(size=(600, 2))).astype(np.float32)
    study, arguments, _ = read_study(model, {"x": x}, (), None)
    start = other_start(study, arguments, {"x": Stored(x) if stored else x}, {}, 1)
    assert set(start) == {"centers", "spreads"}
    found = start["centers"].value.reshape(3, 2)
    nearest = np.linalg.norm(CENTERS[:, None] - found, axis=-1).argmin(1)
    np.testing.assert_allclose(np.exp(start["spreads"].value)[nearest], scales, rtol=0.15)


def test_a_start_is_where_it_was_asked_for():
    x = simulate(0)
    fit = pavi.fit(mixture, {"x": x}, init={"centers": CENTERS}, starts=1, steps=1, progress_bar=False)
    moments = fit.moments(num_samples=300)
    np.testing.assert_allclose(moments["centers"].values[0], CENTERS, atol=1.0)
    # Latents below start where the prior puts them, given their parents.
    np.testing.assert_allclose(moments["means"].values[0].mean(0), CENTERS, atol=1.0)


def test_positive_sites_start_in_their_own_space():
    def model():
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 2.0))
        with numpyro.plate("item", 5):
            numpyro.sample("x", dist.Normal(0.0, scale))

    fit = pavi.fit(model, {"x": np.ones(5)}, init={"scale": 7.0}, steps=1, progress_bar=False)
    assert 4 < float(fit.sample(200)["scale"].median()) < 11
    with pytest.raises(pavi.SettingError, match="support"):
        pavi.fit(model, {"x": np.ones(5)}, init={"scale": -7.0}, steps=1, progress_bar=False)


def test_which_models_look_like_mixtures():
    template = pavi.read_template(mixture, ["x"])
    assert components(template) == {"centers": "x"}
    assert usual_starts(template) > 1

    def plain():
        mu = numpyro.sample("mu", dist.Normal(jnp.zeros(2), 1).to_event(1))
        spread = numpyro.sample("spread", dist.LogNormal(jnp.zeros((3, 2)), 1).to_event(2))
        with numpyro.plate("item", 5):
            numpyro.sample("x", dist.Normal(mu, spread.mean()).to_event(1))

    assert usual_starts(pavi.read_template(plain, ["x"])) == 1


def test_bad_starts_are_refused():
    x = simulate(0)
    with pytest.raises(pavi.SettingError, match=r"'center'.*'centers', 'means'"):
        pavi.fit(mixture, {"x": x}, init={"center": CENTERS}, progress_bar=False)
    with pytest.raises(pavi.SettingError, match=r"\(2, 3\).*\(3, 2\)"):
        pavi.fit(mixture, {"x": x}, init={"centers": CENTERS.T}, progress_bar=False)
    with pytest.raises(pavi.SettingError, match="starts=0"):
        pavi.fit(mixture, {"x": x}, starts=0, progress_bar=False)


def test_the_best_of_several_prior_draws():
    """A posterior with two peaks, one far higher: some start finds it."""

    def model():
        place = numpyro.sample("place", dist.Normal(0.0, 5.0))
        with numpyro.plate("item", 20):
            numpyro.sample("x", dist.Normal(jnp.where(place > 3.0, 2.0, 0.1 * place), 0.3))

    fit = pavi.fit(model, {"x": np.full(20, 2.0)}, starts=8, steps=300, progress_bar=False)
    assert float(fit.sample(200)["place"].median()) > 3.0
