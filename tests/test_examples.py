"""What users read runs: the README, the examples, the plots, the benchmarks' exact answers."""

import re
import runpy
import sys
from pathlib import Path

import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from exact import gaussian

import pavi

matplotlib.use("agg")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))


def test_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.print", lambda *args: None)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    scope: dict = {}
    exec(
        blocks[0].replace(
            '{"score": score}', '{"score": score}, family=pavi.PAVI(flow=pavi.Affine()), steps=300, progress_bar=False'
        ),
        scope,
    )
    exec(blocks[1].replace("1000", "20"), scope)
    smaller = "family=pavi.PAVI(pavi.SetEncoder(), pavi.Affine(hidden=())), steps=5, progress_bar=False"
    exec(blocks[2].replace('["score"])', f'["score"], {smaller})'), scope)
    assert pavi.load(tmp_path / "schools.pavi", scope["model"]).template == scope["fit"].template


def test_demo(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["schools.py", "--schools", "12", "--steps", "400", "--out", str(tmp_path / "out")])
    runpy.run_path(str(ROOT / "examples" / "schools.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "95% intervals" in shown
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"schools.png", "schools_model.png", "schools.pavi"}


def test_plots():
    def model():
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("row", 3, dim=-2):
            a = numpyro.sample("a", dist.Normal(mu, 1))
        with numpyro.plate("column", 2, dim=-1):
            b = numpyro.sample("b", dist.Normal(0, 1))
            with numpyro.plate("row", 3, dim=-2):
                numpyro.sample("x", dist.Normal(a + b, 1))

    fit = pavi.fit(model, {"x": np.zeros((3, 2), np.float32)}, steps=50, progress_bar=False)
    ax = pavi.plots.plate_diagram(fit.template)
    labels = {text.get_text() for text in ax.texts}
    assert {"mu", "a", "b", "x", "row: 3", "column: 2"} <= labels
    assert sum(type(patch).__name__ == "Circle" for patch in ax.patches) == 4
    history = pavi.plots.history(fit)
    assert len(history.lines[0].get_xdata()) == 50
    forest = pavi.plots.forest(fit, "a")
    assert len(forest.get_yticks()) == 3


def test_the_benchmarks_exact_evidence():
    from pavi.experiments.problems import gre, gre_evidence, simulate_gre

    x = simulate_gre(3, 4, 0.7, 2, seed=1)
    exact = gaussian(gre(3, 4, 0.7, 2), {"x": x})
    assert abs(exact.evidence - gre_evidence(x, 0.7)) < 1e-3
