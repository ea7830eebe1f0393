"""What polishing has found so far, kept in a folder, so that it goes on where it was cut off.

The search is a sequence of looks at members, of which each follows from those before it. So what every look found is
written down, and a search that begins anew is told what it would find, until it comes to where it was cut off.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np

from pavi import storage
from pavi.errors import LoadError
from pavi.evidence import Look


class Journal:
    """The looks of one search, each in a file of its own.

    Args:
        folder: where they are; made if need be.
        identity: what searches must agree in to be the same.
    """

    def __init__(self, folder: str | os.PathLike, identity: str):
        self.folder, self.identity = Path(folder), identity
        self._number = 0

    @property
    def _path(self) -> Path:
        return self.folder / f"look-{self._number:04d}.npz"

    def next(self, theta: np.ndarray, count: int) -> tuple[Look, np.ndarray] | None:
        """What the next look found, if it is known: at so many members, with theta; and where members' latents were then."""
        if not self._path.exists():
            return None
        try:
            entry = storage.read(self._path)
            if entry["identity"] != self.identity or entry["count"] != count or not np.array_equal(entry["theta"], theta):
                return None
        except (LoadError, KeyError, TypeError) as error:
            warnings.warn(f"{str(self._path)!r} cannot be read ({error}): polishing goes on from before it.", stacklevel=2)
            return None
        self._number += 1
        return Look(*entry["look"]), entry["values"]

    def add(self, theta: np.ndarray, count: int, look: Look, values: np.ndarray) -> None:
        """Writes down what the next look found."""
        entry = {"identity": self.identity, "count": count, "theta": theta, "look": list(look), "values": values}
        storage.write(self._path, entry)
        self._number += 1
