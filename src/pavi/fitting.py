"""Fitting a study that has been read, and the posterior it gives, which can be saved and updated."""

from __future__ import annotations

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
from pavi.cascade import Study
from pavi.checkpoint import Keeper, Progress
from pavi.data import Observations
from pavi.errors import ModelError, SettingError
from pavi.evidence import marginal_of
from pavi.families import Family, Joint, Polished, Reading, Units, Weights, outside
from pavi.polishing import Members, polish
from pavi.posterior import Posterior, seed_of
from pavi.reading import check_batch, check_counts, read_study
from pavi.schedule import Schedule, Stop
from pavi.setting import Setting, identity_of, problem_of, runner_of
from pavi.sharding import gathered
from pavi.stepping import Inputs, Problem, State, default_optimizers, place
from pavi.streaming import runner
from pavi.train import Trained, best_start, history_of, informed, prepare, report, started_units, train

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
        """`parts` are those of a posterior, but for its family and weights, which follow from what was `trained`."""
        study, units, arguments, observations = parts
        reading = trained.family.settle(study, arguments, observations.everything, units, trained.weights)
        super().__init__(study, *reading, units, arguments, observations)
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
        if self._observations.stored:
            raise SettingError(
                f"The data of {sorted(self._observations.stored)} lie outside of memory, so the fit cannot be saved with "
                "them. Fit with `checkpoint=folder`: the same call brings the fit back."
            )
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
        weights = family.extend(self._trained.weights, kept, study.template, observations.everything)
        searched = steps is not None or bool(weights.rows)
        if not searched:
            trained = Reading(family, weights)
            return Fit(
                study,
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
        hosted = any(isinstance(rows, np.ndarray) for rows in self._trained.weights.rows.values())
        setting = Setting(family, batch, steps, 8, None, seed_of(rng_key), progress_bar, started, rows_on_host=hosted)
        return refine(study, arguments, observations, weights, self._units, setting, frozen=bool(weights.rows))

    def polish(
        self,
        steps: int | None = None,
        *,
        batch: Mapping[str, int] | None = None,
        num_particles: int = 2,
        num_draws: int = 128,
        inner_points: int = 1024,
        rng_key: int | PRNGKeyArray = 0,
        progress_bar: bool = True,
    ) -> Fit:
        """A fit whose latents outside of plates have the posterior that the evidence gives them, not a bound of it.

        For studies with many members: what flows cannot express of a member's posterior adds up over members, and biases
        spreads. Here members' latents are averaged out instead (see `pavi.polishing`), and then trained on with the latents
        outside drawn from the posterior found. Members of the outermost plate must be independent given these.

        Args:
            steps: training steps of the latents inside plates, afterwards; by default as many as this fit took.
            batch: members per such step, by plate; by default as in this fit.
            num_particles: Monte Carlo samples per such step.
            num_draws: draws of each member's latents, a power of two. Their noise moves the result by a part of its standard
                deviation that does not fall with the number of members; polish twice with other keys to see which.
            inner_points: points of the prior over which latents further inside are averaged out, a power of two.
            rng_key: an int or a JAX key.
            progress_bar: show progress.

        Example:
            >>> import numpy as np, numpyro, numpyro.distributions as dist, pavi
            >>> def model():
            ...     tau = numpyro.sample("tau", dist.LogNormal(0.0, 1.0))
            ...     with numpyro.plate("group", 200):
            ...         theta = numpyro.sample("theta", dist.Normal(0.0, tau))
            ...         numpyro.sample("x", dist.Normal(theta, 1))
            >>> x = np.random.default_rng(0).normal(size=200) * np.sqrt(1 + 0.8**2)
            >>> fit = pavi.fit(model, {"x": x}, steps=200, progress_bar=False)
            >>> tau = fit.polish(progress_bar=False).moments(sites=["tau"])["tau"]
            >>> bool(abs(tau[0] - 0.8) < 3 * tau[1])
            True
        """
        started, template = time.perf_counter(), self.template
        marginal = marginal_of(template, num_draws, inner_points)
        base, weights = self._trained
        if isinstance(base, Polished):
            base, weights = base.base, Polished.strip(template, weights)
        if isinstance(base, Joint):
            raise SettingError(
                f"{type(base).__name__} draws members together with what is outside of plates, so a fit with it cannot be "
                "polished. Use pavi.PAVI()."
            )
        steps = len(self.history["step"]) if steps is None else steps
        check_counts(steps or None, num_particles, None)
        batch = check_batch(template, self.batch if batch is None else batch, base)
        first = {plate.name: np.zeros(1, np.int64) for plate in template.plates}
        spreads = self._units.prior_spread or self._units.spread
        center = self._centers(tuple(outside(template)), first)
        spread = np.concatenate([np.ravel(spreads[name]) for name in outside(template)])
        own = tuple(site.name for site in marginal.latents(template))

        def start(index: np.ndarray) -> np.ndarray:
            return self._centers(own, {**first, marginal.plate: index})

        members = Members(self._study, marginal, self._arguments, self._observations, seed_of(rng_key))
        normal = polish(members, center, spread, start, progress_bar)
        family = Polished(base)
        if not steps:
            trained = Reading(family, Polished.add(weights, normal._replace(center=center)))
            parts = self._study, self._units, self._arguments, self._observations
            return Fit(*parts, trained=trained, stop=self.stop, history=self.history, batch=self.batch, skipped=self.skipped)
        hosted = any(isinstance(rows, np.ndarray) for rows in weights.rows.values())
        setting = Setting(family, batch, steps, num_particles, None, seed_of(rng_key), progress_bar, started)
        setting = setting._replace(rows_on_host=hosted, inner_points=0 if marginal.inner is None else inner_points)
        weights = Polished.add(weights, normal)
        fit = refine(self._study, self._arguments, self._observations, weights, self._units, setting)
        fit.history = {
            name: np.concatenate([self.history[name], self.history[name][-1] * (name != "elbo") + new])
            for name, new in fit.history.items()
        }
        return fit


def _matched(old: Observations, new: Observations, plate: str, old_size: int, size: int) -> np.ndarray:
    """For each member of a plate now, which member it was before, or -1."""
    if plate in old.coords and plate in new.coords:
        before = {label: k for k, label in enumerate(old.coords[plate].tolist())}
        return np.array([before.get(label, -1) for label in new.coords[plate].tolist()])
    index = np.arange(size)
    return np.where(index < old_size, index, -1)


def fit_study(study: Study, arguments: Any, observations: Observations, setting: Setting) -> Fit:
    """Trains from scratch on a study that has been read; again and slower where too many steps were not finite."""
    family, optimizer = setting.family, setting.optimizer
    optimizers = default_optimizers(family.row_rate) if optimizer is None else (optimizer, optimizer)
    for pace in PACES:
        problem, schedule = problem_of(study, setting, optimizers, pace == PACES[0], pace)
        inputs, state = prepare(problem, arguments, observations, setting.seed, schedule.short)
        run = runner_of(problem, observations, schedule)
        keeper = (
            None if setting.checkpoint is None else Keeper(setting.checkpoint, identity_of(problem, setting, observations))
        )
        progress = None if keeper is None else keeper.read(inputs, state, schedule)
        if progress is not None and progress.stop is not None and progress.stop is not Stop.INTERRUPTED:
            trained = Trained(progress.state, history_of(progress.elbos, progress.seconds), progress.stop)
            return _finish(problem, progress.inputs, observations, trained)
        if progress is not None:
            inputs, state = progress.inputs, progress.state
        else:
            inputs = inputs._replace(units=started_units(problem, inputs, inputs.data, setting.seed, setting.values))
            if setting.starts > 1:
                inputs, state = best_start(
                    problem,
                    inputs,
                    state,
                    observations,
                    setting.seed,
                    setting.starts,
                    schedule,
                    setting.values,
                    setting.progress_bar,
                    run,
                )
                schedule.early = False  # that was in the trial
            else:
                state = informed(problem, inputs, state, observations)
        trained = _train(problem, inputs, state, schedule, setting, keeper, progress, run)
        if trained.stop is not Stop.NON_FINITE:
            break
    report(trained)
    return _finish(problem, inputs, observations, trained)


def _train(
    problem: Problem,
    inputs: Inputs,
    state: State,
    schedule: Schedule,
    setting: Setting,
    keeper: Keeper | None,
    progress: Progress | None,
    run: Callable[..., tuple[State, Any]],
) -> Trained:
    """Trains, from where a checkpoint stands if there is one, writing checkpoints if there is a keeper."""
    before = None if progress is None else (progress.elbos, progress.seconds)
    started = setting.started if progress is None else time.perf_counter() - progress.seconds[-1]

    def write(state: State, elbos: list[np.ndarray], seconds: list[np.ndarray], stop: Stop | None) -> None:
        if keeper is not None and stop is not Stop.NON_FINITE:
            keeper.write(inputs, state, elbos, seconds, schedule, stop)

    return train(problem, inputs, state, schedule, started, setting.progress_bar, before, write, run)


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
    problem, schedule = problem_of(study, setting, optimizers, early=False, pace=1.0)
    paces = np.ones(weights.shared.shape, weights.shared.dtype)
    row_paces = dict.fromkeys(weights.rows, np.float32(1.0))
    inputs = Inputs(arguments, observations.arrays, units, paces, row_paces)
    rng = np.random.default_rng(setting.seed)
    memory: Mapping[Any, Any] = {}
    if setting.family.shapes(study.template, problem.whole).memory:
        memory = setting.family.init(study.template, rng, observations.everything, problem.whole).memory
    copied = jax.tree.map(np.array if problem.hosted else jnp.array, weights._replace(memory=memory))
    state = place(problem, copied, setting.seed)
    run = runner(problem, observations.stored, schedule.short)
    trained = train(problem, inputs, state, schedule, setting.started, setting.progress_bar, run=run)
    report(trained)
    return _finish(problem, inputs, observations, trained)


def _finish(problem: Problem, inputs: Inputs, observations: Observations, trained: Trained) -> Fit:
    state = trained.state if problem.shards is None else gathered(trained.state)
    reading = Reading(problem.family, state.weights)
    return Fit(
        problem.study,
        inputs.units,
        inputs.arguments,
        observations,
        trained=reading,
        stop=trained.stop,
        history=trained.history,
        batch=dict(problem.batch),
        skipped=int(state.skipped),
    )
