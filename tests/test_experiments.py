"""The experiments: rows are written once, times follow the plateau rule, exact answers are exact, pages come from CSVs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from exact import gaussian
from typer.testing import CliRunner

import pavi
from pavi import experiments
from pavi.cli import app
from pavi.experiments import comparing, curves, report
from pavi.experiments.measuring import plateau
from pavi.experiments.methods import Method
from pavi.experiments.problems import gre, gre_posterior, simulate_gre
from pavi.experiments.records import Table, read
from pavi.experiments.sanity import distances


def test_rows_are_kept_and_found_again(tmp_path):
    table = Table(tmp_path / "some.csv")
    table.add([{"method": "CF", "elbo": 1.5}])
    table.add([{"method": "PAVI-F", "elbo": 2.5, "labels_right": 0.5}])  # a column that the first row does not have
    again = Table(tmp_path / "some.csv")
    assert again.has(method="CF")
    assert not again.has(method="UIVI")
    assert again.rows[0]["elbo"] == 1.5
    assert again.rows[1] == table.rows[1]


def test_the_plateau_is_where_an_elbo_nearly_stops_rising():
    seconds = np.arange(1.0, 1001.0)
    elbos = -1000 * np.exp(-seconds / 50)
    # 0.01 nats for each of 100 latents are left after 50 log(1000) seconds, later by half the window it is smoothed over.
    assert plateau(elbos, seconds, 100) == pytest.approx(50 * np.log(1000), rel=0.05)


def test_exact_draws_have_the_moments_of_the_exact_posterior():
    x = simulate_gre(4, 3, 0.7, 2, seed=0)
    exact = gaussian(gre(4, 3, 0.7, 2), {"x": x})
    mu, theta = gre_posterior(x, 0.7, 20_000)
    np.testing.assert_allclose(mu.mean(0), exact.mean["mu"], atol=0.02)
    np.testing.assert_allclose(mu.std(0), exact.sd["mu"], rtol=0.03)
    np.testing.assert_allclose(theta.mean(0), exact.mean["theta"].reshape(4, 2), atol=0.02)
    np.testing.assert_allclose(theta.std(0), exact.sd["theta"].reshape(4, 2), rtol=0.03)


def test_wasserstein_distances_are_those_of_shifted_draws():
    draws = {"mu": np.random.default_rng(0).normal(size=(50, 2)), "theta": np.zeros((50, 3, 2))}
    moved = {"mu": draws["mu"] + [3.0, 4.0], "theta": draws["theta"]}
    found = distances(draws, moved)
    assert found == {"wasserstein": 5.0, "wasserstein_mu": 5.0, "wasserstein_theta": 0.0}


def test_a_comparison_runs_what_is_missing_and_notes_what_cannot_be(tmp_path, monkeypatch):
    chosen = {
        "mean field": Method(pavi.baselines.MeanField(), steps=30),
        "amortized": Method(pavi.baselines.CascadingFlows(1, sample_amortized=True), steps=5, amortized=True),
        "too small": Method(pavi.baselines.UIVI(), steps=5, largest=1),
    }
    monkeypatch.setitem(comparing.PROBLEMS, "scaling", lambda: [comparing.scaling(2)])
    monkeypatch.setitem(comparing.CHOSEN, "scaling", lambda: chosen)
    monkeypatch.setattr(comparing, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(1))
    table = Table(tmp_path / "scaling.csv")
    comparing.compare("scaling", table, 1, 1, progress=False, processes=2)
    assert {row["method"] for row in table.rows} == {"mean field", "amortized"}
    assert all(row["elbo"] < row["exact"] and row["seconds"] > 0 for row in table.rows)
    before = (tmp_path / "scaling.csv").read_text()
    comparing.compare("scaling", Table(tmp_path / "scaling.csv"), 1, 1, progress=False)
    assert (tmp_path / "scaling.csv").read_text() == before
    refused = Table(tmp_path / "refused.csv")
    monkeypatch.setitem(comparing.CHOSEN, "neuroimaging", lambda: {"ADAVI": Method(pavi.baselines.ADAVI(), steps=5)})
    comparing.compare("neuroimaging", refused, 1, 1, progress=False)
    assert "pyramidal" in refused.rows[0]["note"]


def test_fits_side_by_side_are_those_one_by_one():
    """Data sets and seeds as an axis of the step: the same posteriors, each near its own exact evidence."""
    problem, family = comparing.scaling(20), pavi.PAVI(pavi.FreeEncodings(8), pavi.Affine(hidden=()))
    pairs = [(0, 0), (1, 0), (1, 1)]
    found = list(comparing.runs(problem, Method(family, steps=1000, reduced=True), pairs, together=True))
    assert [pair for pair, _, _ in found] == pairs
    for (number, _), posterior, row in found:
        assert row["together"] == 3
        assert abs(row["exact"] - row["elbo"]) < 0.3
        exact = gre_posterior(problem.draw(number), comparing.GRE_SIGMA, 2000)[0]
        np.testing.assert_allclose(posterior.moments(sites=["mu"])["mu"].values[0], exact.mean(0), atol=0.1)
    assert found[1][2]["elbo"] != found[2][2]["elbo"]


def test_curves_end_closer_to_the_evidence(tmp_path):
    figure = curves.Figure(3, {"PAVI-F": curves.Curve(pavi.PAVI(), 2, 200)})
    table = Table(tmp_path / "curve.csv")
    curves.trace(figure, table, 1, progress=False)
    gaps = [row["exact"] - row["elbo"] for row in table.rows]
    assert gaps[-1] < 0.2 * gaps[0]


def test_the_page_is_made_of_csvs_alone(tmp_path):
    folder, page = tmp_path / "results", tmp_path / "docs" / "results.md"
    row = {"variant": "20 groups", "method": "PAVI-F", "dataset": 0, "seed": 0, "note": "", "elbo": 99.0, "stderr": 0.1}
    row |= {"weights": 3532, "steps": 100, "seconds": 3.0, "plateau_seconds": 2.0, "exact": 99.42}
    Table(folder / "scaling.csv").add([row])
    Table(folder / "neuroimaging.csv").add([row | {"variant": "neuroimaging", "labels_right": 0.9}])
    result = CliRunner().invoke(app, ["reproduce", "report", "--out", str(folder), "--page", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "| 20 | PAVI-F | 99.00 | 0.01000 | 3,532 | 2.0 | 0.071 | 4,202 | 72 |" in text
    assert "| PAVI-F | 99.0 (± 0.0) | 0.0 | 2.0 | 0.900 | -82,000 (± 1,000) | 0 | 1,600 |" in text
    assert (page.parent / "images" / "results" / "scaling.svg").exists()


def test_an_unknown_experiment_is_refused():
    result = CliRunner().invoke(app, ["reproduce", "figure-9"])
    assert result.exit_code != 0
    assert "figure-9" in result.output


@pytest.mark.parametrize(("folder", "page"), [("results", "results.md"), ("results/full", "results_full.md")])
def test_committed_results_make_the_committed_page(tmp_path, folder, page):
    """Pages of results are what the command writes from the CSVs, to the letter."""
    root = Path(__file__).parent.parent
    report.write(root / folder, tmp_path / page)
    assert (tmp_path / page).read_text() == (root / "docs" / page).read_text()
    assert {path.stem for path in (root / folder).glob("*.csv")} <= set(experiments.NAMES)
    assert all(row["device"] for path in (root / folder).glob("*.csv") for row in read(path))
