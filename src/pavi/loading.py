"""`load`: whatever was saved, back."""

from __future__ import annotations

import os
from collections.abc import Callable

from pavi import storage
from pavi.amortize import Amortized, load_amortized
from pavi.fitting import Fit, load_fit


def load(path: str | os.PathLike, model: Callable) -> Fit | Amortized:
    """Loads what `fit.save` or `amortized.save` wrote. `model` must be the model it was made with.

    Example: see `Fit.save`.
    """
    saved = storage.read(path)
    if isinstance(saved, dict) and saved.get("kind") == "amortized":
        return load_amortized(path, saved, model)
    return load_fit(path, saved, model)
