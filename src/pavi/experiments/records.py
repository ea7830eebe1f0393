"""Tables that an experiment fills row by row: a CSV on disk, so that a run that was cut off goes on where it stopped."""

from __future__ import annotations

import csv
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpyro

Row = dict[str, Any]


class Table:
    """Rows of one experiment, in a CSV at `path`, each written as soon as it is known."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[Row] = read(path) if path.exists() else []

    def has(self, **key: Any) -> bool:
        """Whether there is a row with these values, compared as text."""
        return any(all(str(row[name]) == str(value) for name, value in key.items()) for row in self.rows)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds rows, with what they were measured on, and replaces the file in one go."""
        self.rows += [{name: _parsed(str(value)) for name, value in {**row, **machine()}.items()} for row in rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        with unfinished.open("w", newline="") as file:
            names = dict.fromkeys(name for row in self.rows for name in row)
            writer = csv.DictWriter(file, fieldnames=list(names), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        unfinished.replace(self.path)


def read(path: Path) -> list[Row]:
    """The rows of a CSV, with numbers as numbers."""
    with path.open(newline="") as file:
        return [{name: _parsed(value) for name, value in row.items()} for row in csv.DictReader(file)]


def machine() -> Row:
    """Hardware and versions."""
    kind = jax.devices()[0].device_kind
    device = f"{platform.machine()} CPU" if jax.default_backend() == "cpu" else kind
    return {"device": device, "jax": jax.__version__, "numpyro": numpyro.__version__}


def _parsed(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
