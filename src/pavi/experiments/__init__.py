"""Every table and figure of the paper, run again by one command: `pavi reproduce NAME`."""

from __future__ import annotations

from pathlib import Path

from pavi.experiments import comparing, curves, sanity
from pavi.experiments.records import Table

# Data sets and seeds, as in the paper and by default: one laptop has 90 minutes for everything.
FULL, USUAL = (20, 5), (2, 1)
# More where starts matter, and where a run may fail and a median is told.
USUAL_OF = {"convergence": (3, 1), "neuroimaging": (4, 2)}
SANITY_DATASETS = 4


def run(name: str, folder: Path, datasets: int, seeds: int, progress: bool = True, processes: int = 1) -> None:
    """Runs one experiment, or what is missing of it, and writes `folder/name.csv`; tables by several processes if asked."""
    path = folder / f"{name}.csv"
    if name in curves.FIGURES:
        curves.trace(curves.FIGURES[name](), Table(path), datasets, progress)
    elif name == "sanity":
        sanity.check(Table(path), folder / "draws", min(datasets, SANITY_DATASETS), progress)
    else:
        comparing.compare(name, Table(path), datasets, seeds, progress, processes)


NAMES = (*curves.FIGURES, *comparing.PROBLEMS, "sanity")
