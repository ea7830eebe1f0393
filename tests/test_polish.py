"""`fit.polish`: evidences of members against quadrature, posteriors of what is outside of plates against exact ones."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import expit, logsumexp

import pavi
from pavi import checkpoint
from pavi.evidence import Look, marginal_of
from pavi.families import Normal
from pavi.fitting import Polish
from pavi.identity import Identity
from pavi.journal import Journal
from pavi.members import Members

AFFINE = pavi.PAVI(flow=pavi.Affine(hidden=()))
GROUPS, PUPILS = 1000, 20
ONE_STEP = {"steps": 1, "progress_bar": False}
NODES, CHANCES = np.polynomial.hermite_e.hermegauss(60)
LOG_CHANCES = np.log(CHANCES / CHANCES.sum())


def quiz(groups=GROUPS, pupils=PUPILS):
    """Pupils of a group pass or fail a test: a logit per group, one per pupil around it, both of unknown spread."""
    between = numpyro.sample("between", dist.LogNormal(0.0, 0.5))
    within = numpyro.sample("within", dist.LogNormal(0.0, 0.5))
    with numpyro.plate("group", groups, dim=-2):
        mean = numpyro.sample("mean", dist.Normal(0.5, between))
        with numpyro.plate("pupil", pupils, dim=-1):
            logit = numpyro.sample("logit", dist.Normal(mean, within))
            numpyro.sample("x", dist.Bernoulli(logits=logit))


def passed(between=1.2, within=2.0, seed=0):
    rng = np.random.default_rng(seed)
    mean = 0.5 + between * rng.normal(size=(GROUPS, 1))
    return rng.binomial(1, expit(mean + within * rng.normal(size=(GROUPS, PUPILS))))


def log_evidences(theta, x):
    """Log evidence of each group at logarithms of both spreads, by quadrature."""
    mean = 0.5 + np.exp(theta[0]) * NODES
    chance = expit(mean[:, None] + np.exp(theta[1]) * NODES) @ np.exp(LOG_CHANCES)
    heads = x.sum(1)[:, None]
    return logsumexp(LOG_CHANCES + heads * np.log(chance) + (PUPILS - heads) * np.log1p(-chance), axis=1)


def exact(x):
    """Mean and covariance of the logarithms of both spreads, on a grid."""
    axis = np.linspace(-0.6, 1.4, 61)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    log_p = np.array([log_evidences(theta, x).sum() for theta in grid]) - 0.5 * (grid**2).sum(1) / 0.25
    weights = np.exp(log_p - logsumexp(log_p))
    mean = weights @ grid
    return mean, (grid - mean).T @ ((grid - mean) * weights[:, None])


@pytest.fixture(scope="module")
def x():
    return passed()


@pytest.fixture(scope="module")
def fit(x):
    batch = {"group": 50, "pupil": PUPILS}
    return pavi.fit(quiz, {"x": x}, family=AFFINE, batch=batch, num_particles=2, steps=1000, progress_bar=False)


@pytest.fixture(scope="module")
def polished(fit):
    return fit.polish(2000, inner_points=256, progress_bar=False)


def test_evidences_and_scores_of_members(fit, x):
    marginal = marginal_of(fit.template, 1024, 1024)
    members = Members(fit._study, marginal, fit._arguments, fit._observations, fit._units, np.zeros(2, np.uint32))
    theta, some = np.array([0.2, -0.3]), np.arange(0, GROUPS, 25)
    look = members.look(theta, some)
    assert look.evidence == pytest.approx(log_evidences(theta, x[some]).sum(), abs=0.03)
    steps = 1e-3 * np.eye(2)
    slopes = np.array([log_evidences(theta + step, x[some]) - log_evidences(theta - step, x[some]) for step in steps]) / 2e-3
    np.testing.assert_allclose(look.score, slopes.sum(1), atol=0.05)
    np.testing.assert_allclose(look.squares, slopes @ slopes.T, rtol=0.02, atol=0.05)
    assert look.counting / len(some) > 0.9
    # A second look starts where the first one left the members.
    again = members.look(theta, some)
    np.testing.assert_allclose(again.score, look.score, atol=0.01)


class Cut(Exception):
    pass


def cut_off_after(monkeypatch, where, name, times):
    """Makes a method fail right after it was called so often; the method itself."""
    method, count = getattr(where, name), []

    def failing(self, *args):
        method(self, *args)
        count.append(1)
        if len(count) == times:
            raise Cut

    monkeypatch.setattr(where, name, failing)
    return method


def test_polishing_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    small = passed()[:60, :8]
    how = {"steps": 100, "num_draws": 16, "inner_points": 64}
    settings = {"family": AFFINE, "steps": 100, "polish": how, "progress_bar": False, "model_args": (60, 8)}
    whole = pavi.fit(quiz, {"x": small}, **settings)
    monkeypatch.setattr(checkpoint, "INTERVAL", 0.0)
    for where, name, times in [(Journal, "add", 4), (checkpoint.Keeper, "write", 2)]:
        method = cut_off_after(monkeypatch, where, name, times)
        with pytest.raises(Cut):
            pavi.fit(quiz, {"x": small}, checkpoint=tmp_path, **settings)
        monkeypatch.setattr(where, name, method)
    monkeypatch.setattr(Members, "__init__", None)  # what the search came to is known: nobody is looked at again
    kept = [path.name for path in (tmp_path / "polishing" / "search").iterdir()]
    resumed = pavi.fit(quiz, {"x": small}, checkpoint=tmp_path, **settings)
    assert kept == ["outcome.npz"]
    np.testing.assert_array_equal(resumed.history["elbo"], whole.history["elbo"])
    assert resumed.sample(20).identical(whole.sample(20))
    for changed in ({"num_draws": 32}, {"steps": 200}):
        with pytest.raises(pavi.LoadError, match=r"polishing.*another fit"):
            pavi.fit(quiz, {"x": small}, checkpoint=tmp_path, **settings | {"polish": how | changed})


def test_a_look_that_cannot_be_read_is_taken_again(tmp_path):
    this, other = (Identity({"data": name}, {}) for name in ("this", "other"))
    journal, look = Journal(tmp_path, this), Look(np.array(1.0), np.ones(2), np.eye(2), np.array(0.5))
    for theta in (np.zeros(2), np.ones(2)):
        journal.add(theta, look, np.full((3, 1), 7.0))
    again = Journal(tmp_path, this)
    found, values = again.next(np.zeros(2), 3)
    np.testing.assert_array_equal(found.squares, np.eye(2))
    np.testing.assert_array_equal(values, np.full((3, 1), 7.0))
    assert again.next(np.full(2, 2.0), 3) is None
    assert again.next(np.ones(2), 4) is None
    with pytest.raises(pavi.LoadError, match=r"another fit. Its data"):
        Journal(tmp_path, other).next(np.zeros(2), 3)
    (tmp_path / "look-0001.npz").write_bytes(b"half")
    with pytest.warns(UserWarning, match="goes on from before"):
        assert again.next(np.ones(2), 3) is None
    assert not again.ended
    normal = Normal(np.zeros(2), np.eye(2), np.ones((3, 4)))
    again.end(normal)
    assert [path.name for path in tmp_path.iterdir()] == ["outcome.npz"]
    for one, same in zip(normal, Journal(tmp_path, this).outcome(), strict=True):
        np.testing.assert_array_equal(one, same)


def test_an_interrupted_search_leaves_the_fit_before_it(x, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Members, "look", interrupted)
    with pytest.warns(UserWarning, match="interrupted"):
        fit = pavi.fit(quiz, {"x": x}, family=AFFINE, steps=20, polish=True, progress_bar=False)
    assert fit.stop is pavi.Stop.INTERRUPTED
    assert fit.family == AFFINE


def test_the_posterior_outside_of_plates_is_the_exact_one(fit, polished, x):
    mean, covariance = exact(x)
    deviations = np.sqrt(np.diag(covariance))
    draws = polished.sample(4000, sites=["between", "within"])
    found = np.log(np.stack([draws[name].values[0] for name in ("between", "within")]))
    assert (np.abs(found.mean(1) - mean) < 0.35 * deviations).all()
    np.testing.assert_allclose(found.std(1), deviations, rtol=0.2)
    assert np.corrcoef(found)[0, 1] == pytest.approx(covariance[0, 1] / deviations.prod(), abs=0.15)
    # What training alone gives is far too narrow, and off.
    plain = np.log(fit.sample(1000, sites=["within"])["within"].values)
    assert plain.std() < 0.6 * deviations[1]
    assert abs(plain.mean() - mean[1]) > deviations[1]


def test_members_follow(polished, x):
    """Posteriors of the groups' logits are those given the spreads found: coverage of the exact conditional moments."""
    moments = polished.moments(sites=["mean"], num_samples=400)["mean"].values
    theta = np.log([polished.moments(sites=[name], num_samples=400)[name].values[0] for name in ("between", "within")])
    mean = 0.5 + np.exp(theta[0]) * NODES
    chance = expit(mean[:, None] + np.exp(theta[1]) * NODES) @ np.exp(LOG_CHANCES)
    heads = x.sum(1)[:, None]
    weights = LOG_CHANCES + heads * np.log(chance) + (PUPILS - heads) * np.log1p(-chance)
    weights = np.exp(weights - logsumexp(weights, axis=1, keepdims=True))
    center = weights @ mean
    spread = np.sqrt(weights @ mean**2 - center**2)
    assert np.abs((moments[0] - center) / spread).mean() < 0.25
    assert np.median(moments[1] / spread) == pytest.approx(1.0, abs=0.15)


def test_a_polished_fit_is_a_fit(polished, x, tmp_path):
    polished.save(tmp_path / "fit.pavi")
    again = pavi.load(tmp_path / "fit.pavi", quiz)
    some = {"where": {"group": [3, 7], "pupil": [0]}, "rng_key": 5}
    assert again.sample(10, **some).identical(polished.sample(10, **some))
    whole = polished.sample(10, rng_key=5).isel(group=[3, 7], pupil=[0])
    np.testing.assert_allclose(whole["logit"], polished.sample(10, **some)["logit"], rtol=1e-5, atol=1e-6)
    assert len(polished.history["step"]) == 3000
    assert (np.diff(polished.history["step"]) == 1).all()
    assert np.isfinite(polished.elbo(20).mean)
    assert polished.update({"x": x}, steps=5, progress_bar=False).sample(3)["mean"].sizes["group"] == GROUPS


def test_polishing_again_and_stored_data_change_nothing(fit, polished, x, tmp_path):
    settings = {"inner_points": 256, "progress_bar": False}
    again = polished.polish(0, **settings)
    stored = np.memmap(tmp_path / "x.npy", mode="w+", dtype=np.int32, shape=x.shape)
    stored[:] = x
    kept = {"family": AFFINE, "batch": fit.batch, "num_particles": 2, "steps": 200, "progress_bar": False}
    apart = pavi.fit(quiz, {"x": stored}, **kept).polish(0, **settings)
    # Groups are described at the place that was kept, not at one that was only tried.
    groups, before = (each.moments(sites=["mean"], num_samples=400)["mean"].values for each in (again, polished))
    assert np.abs((groups[0] - before[0]) / before[1]).mean() < 0.15
    want = polished.moments(sites=["between", "within"], num_samples=2000)
    for other in (again, apart):
        found = other.moments(sites=["between", "within"], num_samples=2000)
        for name in ("between", "within"):
            assert abs(found[name][0] - want[name][0]) < 0.4 * want[name][1]


def test_a_normal_hierarchy_without_an_inner_level():
    """The posterior of a spread of normal groups, whose evidences are known."""

    def model():
        tau = numpyro.sample("tau", dist.HalfNormal(2.0))
        with numpyro.plate("group", 500):
            theta = numpyro.sample("theta", dist.Normal(jnp.zeros(3), tau).to_event(1))
            numpyro.sample("x", dist.Normal(theta, 1.0).to_event(1))

    x = np.random.default_rng(1).normal(size=(500, 3)) * np.sqrt(1 + 0.7**2)
    fit = pavi.fit(model, {"x": x}, family=AFFINE, steps=200, progress_bar=False)
    log_tau = np.log(fit.polish(0, progress_bar=False).sample(4000, sites=["tau"])["tau"].values)
    grid = np.linspace(-1.5, 0.5, 2001)
    variance = 1 + np.exp(2 * grid)
    log_p = -0.5 * x.size * np.log(variance) - 0.5 * (x**2).sum() / variance - np.exp(2 * grid) / 8 + grid
    weights = np.exp(log_p - logsumexp(log_p))
    mean = weights @ grid
    sd = np.sqrt(weights @ (grid - mean) ** 2)
    assert abs(log_tau.mean() - mean) < 0.3 * sd
    assert log_tau.std() == pytest.approx(sd, rel=0.1)


def test_polishing_at_the_end_of_a_fit(fit, x):
    """`fit(polish=...)` is `fit().polish(...)`; latents further inside may be of another family, the others stay."""
    shown = pavi.PAVI(flow=pavi.Affine(), show_pull=True)
    how = {"steps": 300, "inner_points": 256, "family": shown, "num_draws": 32}
    kept = {"family": AFFINE, "batch": fit.batch, "num_particles": 2, "steps": 200, "progress_bar": False}
    once = pavi.fit(quiz, {"x": x}, polish=how, **kept)
    before = pavi.fit(quiz, {"x": x}, **kept)
    twice = before.polish(**how, progress_bar=False)
    for each in ("between", "within", "mean", "logit"):
        some = {"sites": [each], "where": {"group": [3, 7], "pupil": [0, 5]}}
        np.testing.assert_allclose(once.sample(5, **some)[each], twice.sample(5, **some)[each], rtol=1e-4, atol=1e-4)
    normal = before.polish(0, inner_points=256, num_draws=32, progress_bar=False)
    # Training the pupils moves neither what is outside of plates nor the groups.
    for found, want in zip(_normal(once), _normal(normal), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    assert once.elbo(200).mean > normal.elbo(200).mean


def _normal(fit):
    return fit.family.normal(fit.template, fit._trained.weights)


def test_tops_are_found_past_inflections():
    """A member far out in the tail of its likelihood, where the posterior is not concave and Newton steps lead astray."""

    def model():
        tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("group", 60):
            theta = numpyro.sample("theta", dist.Normal(0.0, 10 * tau))
            numpyro.sample("x", dist.StudentT(3.0, theta, 0.3))

    x = np.linspace(-12.0, 12.0, 60)
    fit = pavi.fit(model, {"x": x}, family=AFFINE, **ONE_STEP)
    marginal = marginal_of(fit.template, 128, 0)
    members = Members(fit._study, marginal, fit._arguments, fit._observations, fit._units, np.zeros(2, np.uint32))
    members.values[...] = 0.0
    members.look(np.zeros(1), np.arange(60))
    grid = np.linspace(-15, 15, 30001)
    log_p = -0.5 * grid**2 / 100 - 2 * np.log1p(((x[:, None] - grid) / 0.3) ** 2 / 3)
    np.testing.assert_allclose(members.values[:, 0], grid[log_p.argmax(1)], atol=0.01)


def test_evidences_of_posteriors_that_are_cut_off():
    """Posteriors cut off on four sides, right beside where they are highest: half of the prior is left on each."""

    def model():
        tau = numpyro.sample("tau", dist.LogNormal(0.0, 0.1))
        with numpyro.plate("group", 40):
            theta = numpyro.sample("theta", dist.Normal(jnp.zeros(4), 3 * tau).to_event(1))
            numpyro.sample("x", dist.Bernoulli(logits=50 * theta).to_event(1))

    fit = pavi.fit(model, {"x": np.ones((40, 4), int)}, family=AFFINE, **ONE_STEP)
    marginal = marginal_of(fit.template, 256, 0)
    members = Members(fit._study, marginal, fit._arguments, fit._observations, fit._units, np.zeros(2, np.uint32))
    for log_tau in (-0.5, 0.0, 0.5):
        look = members.look(np.array([log_tau]), np.arange(40))
        assert look.evidence / 40 == pytest.approx(4 * np.log(0.5), abs=0.005)
        assert look.score[0] / 40 == pytest.approx(0.0, abs=0.02)
        assert look.counting / 40 > 0.8
    mean, sd = np.sqrt(2 / np.pi), np.sqrt(1 - 2 / np.pi)
    members.look(np.zeros(1), np.arange(40))
    normals = np.asarray(members.posteriors(np.zeros(1), np.zeros(1)))
    factor = normals[:, 4:20].reshape(40, 4, 4)
    np.testing.assert_allclose(normals[:, :4].mean(0) / 3, mean, atol=0.1)
    np.testing.assert_allclose(np.sqrt((factor**2).sum(-1)).mean(0) / 3, sd, rtol=0.1)


def test_members_too_far_from_normal_are_left_alone():
    """Posteriors on a ring: polishing says so, and changes nothing."""

    def model():
        tau = numpyro.sample("tau", dist.LogNormal(0.0, 0.1))
        with numpyro.plate("group", 40):
            theta = numpyro.sample("theta", dist.Normal(jnp.zeros(2), tau).to_event(1))
            numpyro.sample("x", dist.Normal((theta**2).sum(-1), 0.02))

    fit = pavi.fit(model, {"x": np.ones(40)}, family=AFFINE, **ONE_STEP)
    with pytest.warns(UserWarning, match="the fit stays as it was"):
        assert fit.polish(progress_bar=False) is fit


def crossed():
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
    rows, columns = numpyro.plate("row", 20, dim=-2), numpyro.plate("column", 20, dim=-1)
    with rows:
        a = numpyro.sample("a", dist.Normal(0, tau))
    with columns:
        b = numpyro.sample("b", dist.Normal(0, tau))
    with rows, columns:
        numpyro.sample("x", dist.Normal(a + b, 1))


def few():
    mu = numpyro.sample("mu", dist.Normal(jnp.zeros(3), 1).to_event(1))
    with numpyro.plate("group", 8):
        theta = numpyro.sample("theta", dist.Normal(mu, 1).to_event(1))
        numpyro.sample("x", dist.Normal(theta, 1).to_event(1))


def flat():
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("item", 30):
        numpyro.sample("x", dist.Normal(mu, 1))


def test_both_ways_to_polish_have_the_same_defaults():
    parameters = inspect.signature(pavi.Fit.polish).parameters
    assert {name: parameters[name].default for name in Polish._fields} == Polish._field_defaults


def test_refusals(fit):
    def refuse(model, shape, match):
        short = pavi.fit(model, {"x": np.zeros(shape)}, family=pavi.PAVI(flow=pavi.Affine(hidden=())), **ONE_STEP)
        with pytest.raises(pavi.SettingError, match=match):
            short.polish(progress_bar=False)

    refuse(crossed, (20, 20), "not independent")
    refuse(few, (8, 3), "8 members for 3 numbers")
    refuse(flat, (30,), "expected a single plate")
    together = pavi.fit(
        quiz, {"x": np.zeros((8, 2))}, model_args=(8, 2), family=pavi.baselines.CascadingFlows(2), **ONE_STEP
    )
    with pytest.raises(pavi.SettingError, match="CascadingFlows draws members together"):
        together.polish()
    with pytest.raises(pavi.SettingError, match="num_draws=3"):
        fit.polish(num_draws=3)
    with pytest.raises(pavi.SettingError, match="inner_points=5"):
        fit.polish(inner_points=5)
    with pytest.raises(pavi.SettingError, match="num_particles=0"):
        fit.polish(num_particles=0)
    with pytest.raises(pavi.SettingError, match=r"polish=\['draws'\]: unknown settings"):
        pavi.fit(few, {"x": np.zeros((8, 3))}, polish={"draws": 8}, **ONE_STEP)
    with pytest.raises(pavi.SettingError, match="8 members for 3 numbers"):
        pavi.fit(few, {"x": np.zeros((8, 3))}, polish=True, **ONE_STEP)


def test_the_plan_counts_what_polishing_needs():
    """Posteriors of groups, twice, and rows that are kept."""
    groups, family = 1_000_000, pavi.PAVI(encodings=pavi.FreeEncodings(size=8), flow=pavi.Affine())
    data = {"x": jax.ShapeDtypeStruct((groups, PUPILS), jnp.int32)}
    settings = {"model_args": (groups,), "family": family, "batch": {"group": 50}, "num_particles": 1, "memory": 10**12}
    plain, polished = (pavi.plan(quiz, data, polish=polish, **settings) for polish in (False, True))
    rows, normals = 4 * 8 * groups * (1 + PUPILS), 4 * 4 * groups
    assert polished.temporary_bytes == pytest.approx(2 * rows + 2 * normals, rel=0.01)
    assert polished.device_bytes - plain.device_bytes == polished.temporary_bytes - plain.temporary_bytes > 0
