"""`fit`, and the posterior it gives, which can be saved and updated."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
from pavi.data import Observations, observe, sizes_of
from pavi.encodings import SetEncoder
from pavi.errors import DataError, LoadError, ModelError, PaviError, SettingError
from pavi.families import PAVI, Family, Reading, Units, Weights
from pavi.posterior import Posterior, seed_of
from pavi.template import Kind, Level, Template
from pavi.tracing import is_array, read_template, trace
from pavi.train import Inputs, Problem, Schedule, Stop, Trained, default_optimizers, first_state, prepare, report, train

# Numbers a step touches by default: on a CPU enough to keep the cores busy, on an accelerator many more.
CPU_BUDGET = 2**15
ACCELERATOR_BUDGET = 2**20
# A number of a latent costs about this many times what a number of data does: its flow has layers.
FLOW_COST = 24
# Fractions of the learning rate that are tried, one after the other, while steps fail.
PACES = (1.0, 0.5, 0.125)
# An update sees this many times the members per step that the fit saw.
UPDATE_BATCH = 4


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

    def update(
        self,
        data: Mapping[str, Any] | xr.Dataset,
        *,
        model_args: tuple | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        steps: int | None = None,
        rng_key: int | PRNGKeyArray = 0,
        progress_bar: bool = True,
    ) -> Fit:
        """A fit to new data, or to data with new members of a plate, that starts from this one.

        The shared weights are kept and only encodings are searched. Members keep theirs: they are matched by their
        coordinates where both data have some, else by position. With `pavi.SetEncoder` nothing is searched unless
        `steps` is given, for which the networks are trained on.

        Args:
            data: all data of the study as it is now, as in `pavi.fit`.
            model_args: the model's arguments now; by default those of this fit, with plate sizes read off the data.
            model_kwargs: the model's keyword arguments now, likewise.
            steps: training steps; by default a tenth of what this fit took.
            rng_key: an int or a JAX key.
            progress_bar: show progress.

        Example:
            >>> import numpy as np, numpyro, numpyro.distributions as dist, pavi
            >>> def model():
            ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
            ...     with numpyro.plate("group", 30):
            ...         theta = numpyro.sample("theta", dist.Normal(mu, 1))
            ...         numpyro.sample("x", dist.Normal(theta, 1))
            >>> x = np.random.default_rng(0).normal(2.0, 1.4, size=33)
            >>> fit = pavi.fit(model, {"x": x[:30]}, progress_bar=False)
            >>> fit.update({"x": x}, progress_bar=False).sample(10)["theta"].sizes["group"]
            33
        """
        started = time.perf_counter()
        before = eqx.combine(self._arguments, self._study.static.value)
        args = before[0] if model_args is None else model_args
        kwargs = before[1] if model_kwargs is None else model_kwargs
        resize = model_args is None and model_kwargs is None
        study, arguments, observations = read_study(self._study.model, data, args, kwargs, resize)
        sizes = {plate.name: plate.size for plate in study.template.plates}
        if str(self.template.resized(sizes)) != str(study.template):
            raise ModelError(f"The new data belong to another model:\n{study.template}\nThis fit is of\n{self.template}")
        family = self.family
        kept = {
            name: _matched(self._observations, observations, name, self.template.plate(name).size, size)
            for name, size in sizes.items()
        }
        weights = family.extend(self._trained.weights, kept, study.template, observations.arrays)
        searched = steps is not None or bool(weights.rows)
        if not searched:
            trained = Reading(family, weights)
            return Fit(
                study,
                *family.settle(study, arguments, observations.arrays, self._units, weights),
                self._units,
                arguments,
                observations,
                trained=trained,
                stop=self.stop,
                history=self.history,
                batch=self.batch,
                skipped=self.skipped,
            )
        steps = max(len(self.history["step"]) // 10, 50) if steps is None else steps
        # There are few steps, so each sees more members.
        batch = {plate: min(UPDATE_BATCH * count, sizes[plate]) for plate, count in self.batch.items()}
        setting = Setting(family, batch, steps, 8, None, seed_of(rng_key), progress_bar, started)
        return refine(study, arguments, observations, weights, self._units, setting, frozen=bool(weights.rows))


def _matched(old: Observations, new: Observations, plate: str, old_size: int, size: int) -> np.ndarray:
    """For each member of a plate now, which member it was before, or -1."""
    if plate in old.coords and plate in new.coords:
        before = {label: k for k, label in enumerate(old.coords[plate].tolist())}
        return np.array([before.get(label, -1) for label in new.coords[plate].tolist()])
    index = np.arange(size)
    return np.where(index < old_size, index, -1)


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
    study, arguments, observations = read_study(model, data, model_args, model_kwargs)
    _check_counts(steps, num_particles)
    check_batch(study.template, batch)
    family = PAVI() if family is None else family
    setting = Setting(family, batch, steps, num_particles, optimizer, seed_of(rng_key), progress_bar, started)
    return fit_study(study, arguments, observations, setting)


class Setting(NamedTuple):
    """How to train: what `fit` was told."""

    family: Family
    batch: Mapping[str, int] | None
    steps: int | None
    num_particles: int
    optimizer: optax.GradientTransformation | None
    seed: np.ndarray
    progress_bar: bool
    started: float


def fit_study(study: Study, arguments: Any, observations: Observations, setting: Setting) -> Fit:
    """Trains from scratch on a study that has been read; again and slower where too many steps were not finite."""
    family, optimizer = setting.family, setting.optimizer
    optimizers = default_optimizers(family.row_rate) if optimizer is None else (optimizer, optimizer)
    for pace in PACES:
        problem, schedule = _problem(study, setting, optimizers, pace == PACES[0], pace)
        inputs, state = prepare(problem, arguments, observations.arrays, setting.seed, schedule.short)
        trained = train(problem, inputs, state, schedule, setting.started, setting.progress_bar)
        if trained.stop is not Stop.NON_FINITE:
            break
    report(trained)
    return _finish(problem, inputs, observations, trained)


def refine(
    study: Study,
    arguments: Any,
    observations: Observations,
    weights: Weights,
    units: Units,
    setting: Setting,
    frozen: bool = False,
) -> Fit:
    """Trains on from given weights; with `frozen`, only the rows."""
    optimizer, row_optimizer = default_optimizers(setting.family.row_rate)
    optimizers = (optax.set_to_zero() if frozen else optimizer, row_optimizer)
    problem, schedule = _problem(study, setting, optimizers, early=False, pace=1.0)
    inputs = Inputs(arguments, observations.arrays, units)
    rng = np.random.default_rng(setting.seed)
    memory = setting.family.init(study.template, rng, observations.arrays, problem.whole).memory
    state = first_state(*optimizers, weights._replace(memory=memory), setting.seed)
    trained = train(problem, inputs, state, schedule, setting.started, setting.progress_bar)
    report(trained)
    return _finish(problem, inputs, observations, trained)


def _problem(study: Study, setting: Setting, optimizers: tuple, early: bool, pace: float) -> tuple[Problem, Schedule]:
    chosen, load = _batch(study.template, setting.batch, setting.num_particles)
    problem = Problem(study, setting.family, tuple(chosen.items()), setting.num_particles, *optimizers)
    decays = setting.optimizer is None
    return problem, Schedule(study.template, chosen, setting.steps, decays=decays, load=load, early=early, pace=pace)


def _finish(problem: Problem, inputs: Inputs, observations: Observations, trained: Trained) -> Fit:
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


def load_fit(path: str | os.PathLike, saved: Any, model: Callable) -> Fit:
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


def read_saved_template(
    path: str | os.PathLike, model: Callable, observed: list[str], args: tuple, kwargs: dict, expected: str
) -> Template:
    """The template of the model given for a saved file; it must be the one that was saved."""
    try:
        template = read_template(model, observed, model_args=args, model_kwargs=kwargs)
    except (TypeError, PaviError) as error:
        raise LoadError(
            f"What {str(path)!r} holds is of another model, with\n{expected}\nThe model given does not run as that one did: "
            f"{error}"
        ) from error
    if str(template) != expected:
        raise LoadError(
            f"What {str(path)!r} holds is of another model. It was fitted with\n{expected}\n"
            f"and the model given is\n{template}"
        )
    return template


def read_study(
    model: Callable, data: Any, model_args: tuple, model_kwargs: Mapping[str, Any] | None, resize: bool = False
) -> tuple[Study, Any, Observations]:
    """The study of a model and its data: (study, the arrays among the model's arguments, the checked data).

    With `resize`, plates take their sizes from the data where the model states others.
    """
    if not isinstance(data, Mapping):
        raise DataError(f"`data` is a {type(data).__name__}; expected a mapping from observed site to array, or a Dataset.")
    if not data:
        raise DataError("`data` is empty: name at least one observed site and its values.")
    names = [str(name) for name in data]
    template, supports = trace(model, names, tuple(model_args), model_kwargs)
    static, arguments = split_arguments(tuple(model_args), dict(model_kwargs or {}))
    if resize and not jax.tree.leaves(arguments):
        template = template.resized(sizes_of(template, data))
    return Study(model, template, static), arguments, observe(template, data, supports)


def split_arguments(args: tuple, kwargs: dict) -> tuple[Hashable, Any]:
    """Arguments that are not arrays, which the compiled step depends on, and those that are."""
    arrays, static = eqx.partition((args, kwargs), is_array)
    return Hashable(static), jax.tree.map(jnp.asarray, arrays)


def _check_counts(steps: int | None, num_particles: int) -> None:
    if steps is not None and steps < 1:
        raise SettingError(f"steps={steps}: expected at least 1, or None to train until the ELBO has settled.")
    if num_particles < 1:
        raise SettingError(f"num_particles={num_particles}: expected at least 1.")


def check_batch(template: Template, batch: Mapping[str, int] | None) -> None:
    """Refuses members per step that the plates do not have."""
    sizes = {plate.name: plate.size for plate in template.plates}
    for plate, count in (batch or {}).items():
        if plate not in sizes:
            raise SettingError(f"batch names the plate {plate!r}, which the model does not have. Its plates: {list(sizes)}.")
        if not 1 <= count <= sizes[plate]:
            raise SettingError(f"batch[{plate!r}] = {count}: expected from 1 to the plate's size, {sizes[plate]}.")


def with_encoder(family: Family | None, caller: str) -> PAVI:
    """A family whose encodings are computed from data: the one given, checked, or the default one."""
    family = PAVI(encodings=SetEncoder()) if family is None else family
    if not isinstance(family, PAVI) or not isinstance(family.encodings, SetEncoder):
        raise SettingError(
            f"{caller}(family={family!r}): expected pavi.PAVI(encodings=pavi.SetEncoder(...)), whose encodings are computed "
            "from data."
        )
    return family


def usual_batch(template: Template) -> dict[str, int]:
    """Members per step that a fit takes of each plate when it is not told."""
    return _batch(template, None, 8)[0]


def _batch(template: Template, batch: Mapping[str, int] | None, num_particles: int) -> tuple[dict[str, int], float]:
    """Members per step for every plate: those asked for, and for the rest what a step can afford; what share that is."""
    batch = dict(batch or {})
    sizes = {plate.name: plate.size for plate in template.plates}
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
