"""The public functions that tie the parts together: `fit` and `load`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr
from jaxtyping import PRNGKeyArray

from pavi import storage
from pavi.branch import choose_batch
from pavi.cascade import Hashable, Study
from pavi.data import Observations, observe
from pavi.errors import DataError, LoadError, SettingError
from pavi.families import PAVI, Family, Reading, Units
from pavi.posterior import Posterior, seed_of
from pavi.template import Kind, Level, Template
from pavi.tracing import is_array, read_template, trace
from pavi.train import Inputs, Problem, Schedule, Stop, Trained, default_optimizers, prepare, train

# Numbers a step touches by default: on a CPU enough to keep the cores busy, on an accelerator many more.
CPU_BUDGET = 2**15
ACCELERATOR_BUDGET = 2**20
# A number of a latent costs about this many times what a number of data does: its flow has layers.
FLOW_COST = 24


class Fit(Posterior):
    """A fitted posterior, with how the fitting went.

    Attributes:
        stop: why training ended, a `Stop`; `str(fit.stop.value)` is a sentence.
        history: "step", "elbo" and "seconds" (since the start of `fit`), one entry per step.
        batch: members per step that each plate was trained with.
        skipped: steps whose gradient was not finite.
    """

    def __init__(
        self,
        *parts: Any,
        trained: Reading,
        stop: Stop,
        history: Mapping[str, np.ndarray],
        batch: Mapping[str, int],
        skipped: int = 0,
    ):
        super().__init__(*parts)
        self._trained = trained
        self.stop, self.history, self.batch, self.skipped = stop, dict(history), dict(batch), skipped

    @property
    def family(self) -> Family:
        """The variational family that was fitted."""
        return self._trained.family

    @property
    def num_weights(self) -> int:
        """Trained numbers: shared weights plus rows."""
        return self._trained.weights.count

    def __repr__(self) -> str:
        final = self.history["elbo"][-100:]
        return (
            f"Fit of {self.template.num_latents:,} latents with {self.num_weights:,} weights: "
            f"{len(self.history['step']):,} steps in {self.history['seconds'][-1]:.1f} s, "
            f"ELBO about {np.nanmean(final):.2f}; {self.stop.value}"
        )

    def save(self, path: str | os.PathLike) -> None:
        """Saves the fit to one file, with its data; `pavi.load(path, model)` brings it back.

        Example:
            >>> import numpy as np, numpyro, numpyro.distributions as dist, pavi, tempfile
            >>> def model():
            ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
            ...     with numpyro.plate("item", 4):
            ...         numpyro.sample("x", dist.Normal(mu, 1))
            >>> fit = pavi.fit(model, {"x": np.array([1.0, 2.0, 2.0, 3.0])}, progress_bar=False)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     fit.save(f"{folder}/fit.pavi")
            ...     again = pavi.load(f"{folder}/fit.pavi", model)
            >>> again.sample(10).identical(fit.sample(10))
            True
        """
        model_args, model_kwargs = eqx.combine(self._arguments, self._study.static.value)
        storage.write(
            path,
            {
                "template": str(self.template),
                "family": self._trained.family,
                "weights": self._trained.weights,
                "units": self._units,
                "data": self._observations,
                "model_args": model_args,
                "model_kwargs": model_kwargs,
                "stop": self.stop.name,
                "history": self.history,
                "batch": self.batch,
                "skipped": self.skipped,
            },
        )


def fit(
    model: Callable,
    data: Mapping[str, Any] | xr.Dataset,
    *,
    model_args: tuple = (),
    model_kwargs: Mapping[str, Any] | None = None,
    family: Family | None = None,
    batch: Mapping[str, int] | None = None,
    steps: int | None = None,
    num_particles: int = 8,
    optimizer: optax.GradientTransformation | None = None,
    rng_key: int | PRNGKeyArray = 0,
    progress_bar: bool = True,
) -> Fit:
    """Fits the posterior of a NumPyro model with plates, given data.

    Args:
        model: a plain NumPyro model; the sites named in `data` are its observed sites.
        data: arrays by site, each with the full shape its site would have; or an `xarray.Dataset` whose dims are
            named after the plates.
        model_args: passed to the model. Covariates are sliced inside plates with `numpyro.subsample`.
        model_kwargs: passed to the model.
        family: the variational family; `pavi.PAVI()` by default.
        batch: members per step, by plate; chosen by size for the plates not named.
        steps: how many training steps; by default until the ELBO has settled.
        num_particles: Monte Carlo samples per step.
        optimizer: an `optax.GradientTransformation` with its own learning rate, for all weights.
        rng_key: an int or a JAX key; the same key gives the same fit.
        progress_bar: show ELBO and steps per second while training.

    Returns:
        The fitted posterior. Ctrl-C ends training early and returns the fit so far.

    Example:
        >>> import numpy as np, numpyro, numpyro.distributions as dist, pavi
        >>> def model():
        ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
        ...     with numpyro.plate("group", 3):
        ...         theta = numpyro.sample("theta", dist.Normal(mu, 1))
        ...         numpyro.sample("x", dist.Normal(theta, 1))
        >>> fit = pavi.fit(model, {"x": np.array([1.0, 2.0, 3.0])}, progress_bar=False)
        >>> fit.stop
        <Stop.SETTLED: 'the ELBO settled: no gain beyond its own noise; the learning rate was then decayed to zero'>
    """
    started = time.perf_counter()
    family = PAVI() if family is None else family
    study, arguments, observations = read_study(model, data, model_args, model_kwargs)
    template = study.template
    _check_counts(steps, num_particles)
    chosen, load = _batch(template, batch, num_particles)
    optimizers = default_optimizers(family.row_rate) if optimizer is None else (optimizer, optimizer)
    problem = Problem(study, family, tuple(chosen.items()), num_particles, *optimizers)
    seed = seed_of(rng_key)
    schedule = Schedule(template, chosen, steps, decays=optimizer is None, load=load)
    inputs, state = prepare(problem, arguments, observations.arrays, seed, schedule.short)
    trained = train(problem, inputs, state, schedule, started, progress_bar)
    return finish(problem, inputs, observations, trained)


def finish(problem: Problem, inputs: Inputs, observations: Observations, trained: Trained) -> Fit:
    """The fit that training has led to."""
    reading = Reading(problem.family, trained.state.weights)
    return Fit(
        problem.study,
        *reading.family.settle(problem.study, inputs.arguments, inputs.data, inputs.units, reading.weights),
        inputs.units,
        inputs.arguments,
        observations,
        trained=reading,
        stop=trained.stop,
        history=trained.history,
        batch=dict(problem.batch),
        skipped=int(trained.state.skipped),
    )


def load(path: str | os.PathLike, model: Callable) -> Fit:
    """Loads a fit that `Fit.save` wrote. `model` must be the model it was fitted with.

    Example: see `Fit.save`.
    """
    saved = storage.read(path)
    try:
        observations = saved["data"]
        args, kwargs = saved["model_args"], saved["model_kwargs"]
        expected = saved["template"]
    except (KeyError, TypeError) as error:
        raise LoadError(f"{str(path)!r} is a saved file, but not of a fit (it lacks {error}).") from error
    template = read_template(model, list(observations.arrays), model_args=args, model_kwargs=kwargs)
    if str(template) != expected:
        raise LoadError(
            f"The fit at {str(path)!r} is of another model. It was fitted with\n{expected}\n"
            f"and the model given is\n{template}"
        )
    arrays = {name: jnp.asarray(array) for name, array in observations.arrays.items()}
    static, arguments = _split_arguments(args, kwargs)
    study, units = Study(model, template, static), Units(*saved["units"])
    trained = Reading(saved["family"], jax.tree.map(jnp.asarray, saved["weights"]))
    return Fit(
        study,
        *trained.family.settle(study, arguments, arrays, units, trained.weights),
        units,
        arguments,
        Observations(arrays, observations.coords, observations.event_dims),
        trained=trained,
        stop=Stop[saved["stop"]],
        history=saved["history"],
        batch=saved["batch"],
        skipped=saved["skipped"],
    )


def read_study(
    model: Callable, data: Any, model_args: tuple, model_kwargs: Mapping[str, Any] | None
) -> tuple[Study, Any, Observations]:
    """The study of a model and its data: (study, the arrays among the model's arguments, the checked data)."""
    if not isinstance(data, Mapping):
        raise DataError(f"`data` is a {type(data).__name__}; expected a mapping from observed site to array, or a Dataset.")
    if not data:
        raise DataError("`data` is empty: name at least one observed site and its values.")
    names = [str(name) for name in data]
    template, supports = trace(model, names, tuple(model_args), model_kwargs)
    observations = observe(template, data, supports)
    static, arguments = _split_arguments(tuple(model_args), dict(model_kwargs or {}))
    return Study(model, template, static), arguments, observations


def _split_arguments(args: tuple, kwargs: dict) -> tuple[Hashable, Any]:
    """Arguments that are not arrays, which the compiled step depends on, and those that are."""
    arrays, static = eqx.partition((args, kwargs), is_array)
    return Hashable(static), jax.tree.map(jnp.asarray, arrays)


def _check_counts(steps: int | None, num_particles: int) -> None:
    if steps is not None and steps < 1:
        raise SettingError(f"steps={steps}: expected at least 1, or None to train until the ELBO has settled.")
    if num_particles < 1:
        raise SettingError(f"num_particles={num_particles}: expected at least 1.")


def _batch(template: Template, batch: Mapping[str, int] | None, num_particles: int) -> tuple[dict[str, int], float]:
    """Members per step for every plate: those asked for, and for the rest what a step can afford; what share that is."""
    batch = dict(batch or {})
    sizes = {plate.name: plate.size for plate in template.plates}
    for plate, count in batch.items():
        if plate not in sizes:
            raise SettingError(f"batch names the plate {plate!r}, which the model does not have. Its plates: {list(sizes)}.")
        if not 1 <= count <= sizes[plate]:
            raise SettingError(f"batch[{plate!r}] = {count}: expected from 1 to the plate's size, {sizes[plate]}.")
    free = {plate: size for plate, size in sizes.items() if plate not in batch}
    work = _work(template, batch)
    budget = (CPU_BUDGET if jax.default_backend() == "cpu" else ACCELERATOR_BUDGET) // num_particles
    chosen = {plate: batch.get(plate, 1) for plate in sizes} | (choose_batch(free, work, budget) if free else {})
    return chosen, sum(_work(template, chosen).values()) / budget


def _work(template: Template, batch: Mapping[str, int]) -> dict[Level, int]:
    """Numbers a step touches, given members of some plates: per level of the remaining ones, for one member of it."""
    work: dict[Level, int] = {}
    for site in template.sites:
        if site.kind is not Kind.DETERMINISTIC:
            numbers = int(np.prod(site.member_shape, dtype=int)) + FLOW_COST * site.size
            numbers *= math.prod(batch[plate] for plate in site.level if plate in batch)
            level = tuple(plate for plate in site.level if plate not in batch)
            work[level] = work.get(level, 0) + numbers
    return work
