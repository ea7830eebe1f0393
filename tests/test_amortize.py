"""Sample amortization: train on simulated studies, infer for any data."""

from __future__ import annotations

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from exact import gaussian

import pavi


def model(num_groups=8, num_points=4):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with numpyro.plate("group", num_groups, dim=-2):
        theta = numpyro.sample("theta", dist.Normal(mu, 1))
        with numpyro.plate("point", num_points, dim=-1):
            numpyro.sample("x", dist.Normal(theta, 1))


def simulate(seed: int, groups: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    theta = 2 * rng.normal() + rng.normal(size=(groups, 1))
    return (theta + rng.normal(size=(groups, 4))).astype(np.float32)


FAMILY = pavi.PAVI(encodings=pavi.SetEncoder(size=4, width=16, heads=2), flow=pavi.Affine("tril"))


@pytest.fixture(scope="module")
def amortized():
    return pavi.amortize(model, ["x"], family=FAMILY, steps=1500, progress_bar=False)


def gap(posterior, x) -> float:
    """Nats per latent below the exact evidence."""
    exact = gaussian(model, {"x": x}, (len(x),))
    return (exact.evidence - posterior.elbo(256).mean) / posterior.template.num_latents


def test_one_network_for_studies_of_other_sizes(amortized):
    for groups, bar in ((2, 0.05), (8, 0.05), (40, 0.05)):
        gaps = [
            gap(amortized.infer({"x": x}, model_args=(groups,)), x) for x in (simulate(seed, groups) for seed in range(3))
        ]
        assert np.mean(gaps) < bar, groups


def test_plates_take_their_size_from_the_data(amortized):
    assert amortized.infer({"x": simulate(0, 5)}).sample(2)["theta"].sizes["group"] == 5


def test_refinement_starts_from_the_amortized_answer(amortized):
    x = simulate(5, 12)
    start = gap(amortized.infer({"x": x}), x)
    for free in (True, False):
        refined = amortized.infer({"x": x}, refine_steps=300, free=free, progress_bar=False)
        assert gap(refined, x) < max(start, 0.0) + 0.005
        assert len(refined.history["step"]) == 300


def test_save_and_load(amortized, tmp_path):
    amortized.save(tmp_path / "net.pavi")
    again = pavi.load(tmp_path / "net.pavi", model)
    x = simulate(1, 6)
    assert again.infer({"x": x}).sample(5).identical(amortized.infer({"x": x}).sample(5))
    assert again.num_weights == amortized.num_weights
    assert "Amortized" in repr(again)

    def other(num_groups=8):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        with numpyro.plate("group", num_groups):
            numpyro.sample("x", dist.Normal(mu, 1))

    with pytest.raises(pavi.LoadError, match="another model"):
        pavi.load(tmp_path / "net.pavi", other)


def test_the_forward_kl_covers_the_posterior():
    trained = pavi.amortize(
        model, ["x"], family=FAMILY, steps=1500, objective="forward", num_datasets=None, progress_bar=False
    )
    gaps = [gap(trained.infer({"x": x}), x) for x in (simulate(seed, 8) for seed in range(5))]
    assert np.mean(gaps) < 0.1


def test_weights_do_not_depend_on_the_study():
    templates = [pavi.read_template(model, ["x"], model_args=(groups,)) for groups in (20, 2000)]
    small, large = (FAMILY.shapes(template, frozenset()) for template in templates)
    assert small.shared.shape == large.shared.shape
    assert not large.rows


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": pavi.PAVI()}, "SetEncoder"),
        ({"objective": "sideways"}, "reverse"),
        ({"num_datasets": 0}, "at least 1"),
        ({"batch": {"ward": 3}}, "ward"),
        ({"batch": {"group": 9}}, "from 1 to"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(pavi.SettingError, match=message):
        pavi.amortize(model, ["x"], progress_bar=False, steps=1, **settings)


def test_data_of_another_model(amortized):
    with pytest.raises(pavi.PaviError):
        amortized.infer({"y": simulate(0, 5)})
