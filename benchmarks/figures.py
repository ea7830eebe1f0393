"""Figures of benchmarks: axes to draw on, saved at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def save_axes(path: Path, count: int = 1) -> Iterator[Any]:
    """Axes side by side; writes them to a PNG and says where."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, count, figsize=(5 * count, 4), squeeze=False)
    yield axes[0]
    path.parent.mkdir(exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"\nCurves: {path}")
