"""`load`: whatever was saved, back."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pavi import storage
from pavi.amortize import Amortized, load_amortized
from pavi.cascade import Study
from pavi.data import Observations
from pavi.errors import LoadError
from pavi.families import Reading, Units
from pavi.fitting import Fit
from pavi.reading import read_saved_template, split_arguments
from pavi.schedule import Stop
from pavi.studying import Outcome


def load(path: str | os.PathLike, model: Callable) -> Fit | Amortized:
    """Loads what `fit.save` or `amortized.save` wrote. `model` must be the model it was made with.

    Example: see `Fit.save`.
    """
    saved = storage.read(path)
    if isinstance(saved, dict) and saved.get("kind") == "amortized":
        return load_amortized(path, saved, model)
    return _load_fit(path, saved, model)


def _load_fit(path: str | os.PathLike, saved: Any, model: Callable) -> Fit:
    """The fit of a saved file's content."""
    try:
        observations = saved["data"]
        args, kwargs = saved["model_args"], saved["model_kwargs"]
        expected = saved["template"]
    except (KeyError, TypeError) as error:
        raise LoadError(f"{str(path)!r} is a saved file, but not of a fit (it lacks {error}).") from error
    template = read_saved_template(path, model, list(observations.arrays), args, kwargs, expected)
    arrays = {name: jnp.asarray(array) for name, array in observations.arrays.items()}
    static, arguments = split_arguments(args, kwargs)
    study, units = Study(model, template, static), Units(*saved["units"])
    trained = Reading(saved["family"], jax.tree.map(jnp.asarray, saved["weights"]))
    observations = Observations(arrays, observations.coords, observations.event_dims)
    stop, history, batch, skipped = Stop[saved["stop"]], saved["history"], saved["batch"], saved["skipped"]
    return Fit(Outcome(study, units, arguments, observations, trained, stop, history, batch, skipped))
