"""The command line: `pavi reproduce NAME`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pavi import experiments
from pavi.experiments import report

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Plate-amortized variational inference."
)


@app.callback()
def main() -> None:
    """Plate-amortized variational inference."""


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(experiments.NAMES)}; all; or report, the page alone.")],
    full: Annotated[bool, typer.Option("--full", help="20 data sets and 5 seeds, as in the paper.")] = False,
    datasets: Annotated[int | None, typer.Option(help="Data sets per method.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds per data set.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the CSVs. What is there already is not run again.")] = Path("results"),
    page: Annotated[Path, typer.Option(help="Page to write, with figures beside it.")] = Path("docs/results.md"),
    processes: Annotated[int, typer.Option(help="Methods of a table that are run at the same time.")] = 1,
    progress_bar: Annotated[bool, typer.Option(help="Show progress.")] = True,
) -> None:
    """Runs an experiment of the paper again, or what is missing of it, and writes its table and figure."""
    if name not in (*experiments.NAMES, "all", "report"):
        raise typer.BadParameter(
            f"{name!r} is no experiment. Expected one of {', '.join(experiments.NAMES)}, all or report."
        )
    if processes > 1:  # they share a device
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    chosen = {"all": experiments.NAMES, "report": ()}.get(name, (name,))
    for each in chosen:
        usual = experiments.FULL if full else experiments.USUAL_OF.get(each, experiments.USUAL)
        experiments.run(
            each,
            out,
            usual[0] if datasets is None else datasets,
            usual[1] if seeds is None else seeds,
            progress_bar,
            processes,
        )
        report.write(out, page)
    report.write(out, page)
    typer.echo(f"{page}: {len(list(out.glob('*.csv')))} experiments, from {out}")
