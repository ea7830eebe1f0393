"""Encodings computed from data: laws of the encoder, and fits that use it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from exact import gaussian

import pavi
from pavi.branch import draw_branch, fixed_branch
from pavi.encodings import attention
from pavi.encodings.set_encoder import contractions
from pavi.families import Glimpse, looking
from pavi.reading import read_study

GROUPS, POINTS = 6, 4
ENCODER = pavi.PAVI(encodings=pavi.SetEncoder(size=3, width=8, heads=2), flow=pavi.Affine())


def nested(num_groups: int = GROUPS, num_points: int = POINTS):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with numpyro.plate("group", num_groups, dim=-2):
        theta = numpyro.sample("theta", dist.Normal(mu, 1))
        with numpyro.plate("point", num_points, dim=-1):
            numpyro.sample("x", dist.Normal(theta, 1))


def data(seed: int = 0, groups: int = GROUPS, points: int = POINTS) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(groups, 1)) + rng.normal(size=(groups, points))).astype(np.float32)


def encode(x, family=ENCODER, model=nested, args=(), kwargs=None, seed=1):
    """Encodings of all members by one network, in one piece and in tiles: (whole, tiled)."""
    study, arguments, observations = read_study(model, {"x": x}, args, kwargs)
    weights = family.init(study.template, np.random.default_rng(seed), observations.arrays, frozenset())
    units = family.measure(study.template, {"x": np.linspace(-2, 2, 100, dtype=np.float32)}, arguments)
    branch = fixed_branch({plate.name: jnp.arange(plate.size) for plate in study.template.plates})
    glimpse = Glimpse(study, arguments, branch, observations.arrays)
    whole, _ = jax.jit(lambda shared: family.encode(weights._replace(shared=shared, memory={}), units, glimpse))(
        weights.shared
    )
    flat = jnp.asarray(weights.shared[family._layout(study.template).size :])
    tiled = looking.encode_study(family.encodings, study, arguments, observations.arrays, units, flat)
    return whole, tiled


def test_permuting_members_permutes_their_encodings_and_nothing_else():
    x = data()
    groups, points = np.random.default_rng(3).permutation(GROUPS), np.random.default_rng(4).permutation(POINTS)
    before, _ = encode(x)
    after, _ = encode(x[groups][:, points])
    np.testing.assert_allclose(after["group",], before["group",][groups], atol=1e-5)
    np.testing.assert_allclose(after[()], before[()], atol=1e-5)
    assert np.abs(np.asarray(before["group",])[0] - np.asarray(before["group",])[1]).max() > 1e-2


def test_encodings_of_the_study_do_not_depend_on_tiles(monkeypatch):
    x = data()
    whole, tiled = encode(x)
    monkeypatch.setattr(looking, "TILE_BUDGET", 600)
    _, small = encode(x, seed=1)
    for level, expected in whole.items():
        np.testing.assert_allclose(tiled[level], expected, atol=1e-5)
        np.testing.assert_allclose(small[level], expected, atol=1e-5)


def test_attention_does_not_depend_on_chunks_and_ignores_the_absent(monkeypatch):
    rng = np.random.default_rng(0)
    transformer = attention.SetTransformer(rng, 8, 2, 3)
    members = jnp.asarray(rng.normal(size=(11, 8)), jnp.float32)
    present = jnp.arange(11) < 7
    run = jax.jit(lambda *given: transformer(*given))
    whole = run(members, present)
    np.testing.assert_allclose(run(members[:7], jnp.ones(7, bool)), whole, atol=1e-5)
    np.testing.assert_allclose(run(members.at[7:].set(1e6), present), whole, atol=1e-5)
    assert np.isfinite(run(members, jnp.zeros(11, bool))).all()
    monkeypatch.setattr(attention, "CHUNK", 4)
    np.testing.assert_allclose(jax.jit(lambda *given: transformer(*given))(members, present), whole, atol=1e-5)


def test_missing_elements_do_not_count():
    def model(seen):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("group", GROUPS, dim=-2):
            theta = numpyro.sample("theta", dist.Normal(mu, 1))
            with numpyro.plate("point", POINTS, dim=-1):
                shown = numpyro.subsample(seen, event_dim=0)
                with numpyro.handlers.mask(mask=shown):
                    numpyro.sample("x", dist.Normal(theta, 1))

    seen = np.ones((GROUPS, POINTS), bool)
    seen[0, 1] = seen[2, 3] = False
    seen[5] = False
    x = data()
    kept, tiled = encode(x, model=model, args=(seen,))
    other, _ = encode(np.where(seen, x, 99.0).astype(np.float32), model=model, args=(seen,))
    for level, expected in kept.items():
        np.testing.assert_allclose(other[level], expected, atol=1e-5)
        np.testing.assert_allclose(tiled[level], expected, atol=1e-5)
        assert np.isfinite(expected).all()
    changed, _ = encode(np.where(seen, x, 99.0).astype(np.float32), model=model, args=(np.ones_like(seen),))
    assert np.abs(np.asarray(changed[()]) - np.asarray(kept[()])).max() > 0.1


def test_covariates_reach_the_encodings():
    def model(dose):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("group", GROUPS, dim=-2):
            given = numpyro.subsample(dose[:, None], event_dim=0)
            theta = numpyro.sample("theta", dist.Normal(slope * given, 1))
            with numpyro.plate("point", POINTS, dim=-1):
                numpyro.sample("x", dist.Normal(theta, 1))

    family = pavi.PAVI(encodings=pavi.SetEncoder(size=3, width=8, heads=2, covariates={"dose": "group"}))
    x, dose = data(), np.linspace(-1, 1, GROUPS).astype(np.float32)
    whole, tiled = encode(x, family, model, kwargs={"dose": dose})
    other, _ = encode(x, family, model, kwargs={"dose": dose[::-1].copy()})
    assert np.abs(np.asarray(other["group",]) - np.asarray(whole["group",])).max() > 0.1
    np.testing.assert_allclose(tiled["group",], whole["group",], atol=1e-5)
    for covariates, culprit in (
        ({"dose": "ward"}, "ward"),
        ({"dosis": "group"}, "dosis"),
        ({"dose": ("group", "point")}, "shape"),
    ):
        bad = pavi.PAVI(encodings=pavi.SetEncoder(covariates=covariates))
        with pytest.raises(pavi.SettingError, match=culprit):
            pavi.fit(model, {"x": x}, model_kwargs={"dose": dose}, family=bad, progress_bar=False)


def crossed():
    rows = numpyro.plate("row", 3, dim=-2)
    columns = numpyro.plate("column", 4, dim=-1)
    with rows:
        a = numpyro.sample("a", dist.Normal(0, 1))
    with columns:
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(b, 1))
    with rows, columns:
        numpyro.sample("x", dist.Normal(a + b, 1))


def test_contractions_reach_every_level_above_the_data():
    template = pavi.read_template(crossed, ["x", "y"])
    steps = contractions(template, template.site("x"))
    assert {step.target for step in steps} == {("row",), ("column",)}
    assert contractions(template, template.site("y")) == ()
    template = pavi.read_template(nested, ["x"])
    assert [step.target for step in contractions(template, template.site("x"))] == [("group",), ()]


def test_levels_without_data_get_free_encodings():
    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("group", 5):
            numpyro.sample("theta", dist.Normal(mu, 1))
        with numpyro.plate("other", 3):
            numpyro.sample("x", dist.Normal(mu, 1))

    x = data(0, 3, 1)[:, 0]
    fit = pavi.fit(model, {"x": x}, family=ENCODER, progress_bar=False)
    assert list(fit._trained.weights.rows) == [("group",)]
    exact = gaussian(model, {"x": x})
    assert exact.evidence - fit.elbo(256).mean < 0.02 * 6


def test_reduced_training_meets_the_full_posterior():
    """Three of twelve groups per step; moving summaries stand in for the rest."""
    x = data(2, 12, POINTS)
    fit = pavi.fit(nested, {"x": x}, model_args=(12,), family=ENCODER, batch={"group": 3}, progress_bar=False)
    exact = gaussian(nested, {"x": x}, (12,))
    gap = exact.evidence - fit.elbo(256).mean
    assert gap < 0.01 * 13
    assert fit.skipped == 0


def test_moving_summaries_find_the_moments_of_all_children():
    """Averaged over many steps that each draw a few children, what is known of the parent is what all children say."""
    family = pavi.PAVI(encodings=pavi.SetEncoder(size=3, width=8, heads=2, memory=0.01))
    x = data(2, 12, POINTS)
    study, arguments, observations = read_study(nested, {"x": x}, (12,), None)
    weights = family.init(study.template, np.random.default_rng(1), observations.arrays, frozenset({"point"}))
    weights = weights._replace(shared=jnp.asarray(weights.shared))
    units = family.measure(study.template, observations.arrays, arguments)
    everyone = {plate.name: jnp.arange(plate.size) for plate in study.template.plates}
    glimpse = Glimpse(study, arguments, fixed_branch(everyone), observations.arrays)
    expected, _ = jax.jit(lambda shared: family.encode(weights._replace(shared=shared, memory={}), units, glimpse))(
        weights.shared
    )

    @jax.jit
    def visit(memory, key):
        branch = draw_branch(key, {"group": 12, "point": POINTS}, {"group": 3, "point": POINTS})
        some = Glimpse(study, arguments, branch, {"x": observations.arrays["x"][branch.indices["group"]]})
        found, kept = family.encode(weights._replace(memory=memory), units, some)
        return kept, found[()]

    memory = weights.memory
    for key in jax.random.split(jax.random.key(0), 500):
        memory, found = visit(memory, key)
    moments = len(found) - 3
    np.testing.assert_allclose(found[:moments], expected[()][:moments], atol=0.15)
    spread = slice(5, 10)
    assert np.abs(np.asarray(found - expected[()])[spread]).max() < 0.15


def test_save_load_and_update(tmp_path):
    x = data(1, 12, POINTS)
    fit = pavi.fit(nested, {"x": x[:9]}, model_args=(9,), family=ENCODER, steps=1500, progress_bar=False)
    fit.save(tmp_path / "fit.pavi")
    again = pavi.load(tmp_path / "fit.pavi", nested)
    assert again.sample(5).identical(fit.sample(5))
    assert again.family == ENCODER
    larger = again.update({"x": x}, progress_bar=False)
    exact = gaussian(nested, {"x": x}, (12,))
    assert larger.sample(2)["theta"].sizes["group"] == 12
    # The encoder has seen 9 groups only: close, without any search.
    assert exact.evidence - larger.elbo(256).mean < 0.05 * 13
    searched = fit.update({"x": x}, steps=60, progress_bar=False)
    assert len(searched.history["step"]) == 60
    assert exact.evidence - searched.elbo(256).mean < 0.05 * 13


def test_update_searches_new_encodings_only():
    x = data(1, 12, POINTS)
    fit = pavi.fit(nested, {"x": x[:10]}, model_args=(10,), progress_bar=False)
    larger = fit.update({"x": x}, progress_bar=False)
    assert len(larger.history["step"]) <= len(fit.history["step"]) // 10
    np.testing.assert_array_equal(larger._trained.weights.shared, fit._trained.weights.shared)
    exact = gaussian(nested, {"x": x}, (12,))
    assert exact.evidence - larger.elbo(256).mean < 0.02 * 13
    with pytest.raises(pavi.PaviError):
        fit.update({"y": x}, progress_bar=False)


def test_bad_settings():
    for settings in ({"size": 0}, {"heads": 3, "width": 8}, {"memory": 0.0}, {"inducing": 0}):
        with pytest.raises(pavi.SettingError, match="expected"):
            pavi.SetEncoder(**settings)


def test_bias_check_reports_nats_and_noise():
    free, encoder = np.array([-10.0, -12.0, -11.0]), np.array([-13.0, -14.0, -15.0])
    check = pavi.BiasCheck(free, encoder, {"group": 20}, {"group": 5}, 21)
    assert np.isclose(check.difference, 3.0)  # though the data sets differ by as much
    assert np.isclose(check.noise, np.std(free - encoder, ddof=1) / np.sqrt(3))
    assert np.isclose(check.in_noise, check.difference / check.noise)
    assert "loses accuracy" in str(check)
    with pytest.raises(pavi.SettingError, match="at least 2"):
        pavi.bias_check(nested, ["x"], repetitions=1)
    with pytest.raises(pavi.SettingError, match="SetEncoder"):
        pavi.bias_check(nested, ["x"], family=pavi.PAVI())
