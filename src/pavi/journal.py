"""What polishing has found so far, kept in a folder, so that it goes on where it was cut off.

The search is a sequence of looks at members, of which each follows from those before it. So what every look found is
written down, and a search that begins anew is told what it would find, until it comes to where it was cut off. What a search
came to takes the place of its looks.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pavi import storage
from pavi.errors import LoadError
from pavi.evidence import Look
from pavi.families import Normal
from pavi.identity import Identity


class Journal:
    """The looks of one search, each in a file of its own, and what it came to.

    Args:
        folder: where they are; made if need be.
        identity: what searches must agree in to be the same.
    """

    def __init__(self, folder: Path, identity: Identity):
        self.folder, self.identity = folder, identity
        self._number = 0

    @property
    def _path(self) -> Path:
        return self.folder / f"look-{self._number:04d}.npz"

    @property
    def _outcome(self) -> Path:
        return self.folder / "outcome.npz"

    @property
    def ended(self) -> bool:
        """Whether there is an outcome."""
        return self._outcome.exists()

    def next(self, theta: np.ndarray, count: int) -> tuple[Look, np.ndarray] | None:
        """What the next look found, if it is known: at so many members, with theta; and where their latents were then."""
        entry = self._read(self._path)
        # Where rounding has led the search elsewhere, it looks for itself.
        if entry is None or len(entry["values"]) != count or not np.array_equal(entry["theta"], theta):
            return None
        self._number += 1
        return Look(*entry["look"]), entry["values"]

    def add(self, theta: np.ndarray, look: Look, values: np.ndarray) -> None:
        """Writes down what the next look found, and where the latents of the members looked at were then."""
        self._write(self._path, {"theta": theta, "look": list(look), "values": values})
        self._number += 1

    def outcome(self) -> Normal | None:
        """What the search came to, if it has."""
        entry = self._read(self._outcome)
        return None if entry is None else Normal(entry["mean"], entry["factor"], entry["members"])

    def end(self, found: Normal) -> None:
        """Writes down what the search came to, in place of its looks."""
        self._write(self._outcome, found._asdict())
        for path in self.folder.glob("look-*"):
            path.unlink()

    def _write(self, path: Path, entry: Mapping[str, Any]) -> None:
        storage.write(path, {"identity": self.identity._asdict(), **entry})

    def _read(self, path: Path) -> dict[str, Any] | None:
        if not path.exists():
            return None
        try:
            entry = storage.read(path)
        except LoadError as error:
            warnings.warn(f"{error} Polishing goes on from before it.", stacklevel=2)
            return None
        self.identity.check(entry["identity"], self.folder.parent)
        return entry
