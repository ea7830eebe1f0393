"""Fitting a study that has been read, and the posterior it gives, which can be saved and updated."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np
import xarray as xr
from jaxtyping import PRNGKeyArray

from pavi import storage
from pavi.cascade import Study
from pavi.compiling import finish_tracing
from pavi.data import Observations
from pavi.errors import ModelError, SettingError
from pavi.evidence import marginal_of
from pavi.families import Family, Joint, Normal, Polished, Reading, Units, Weights, outside
from pavi.identity import identity_of_study
from pavi.journal import Journal
from pavi.members import Members
from pavi.passes import centers_ahead
from pavi.planning import folder_of
from pavi.polishing import polish
from pavi.posterior import Posterior, seed_of
from pavi.reading import check_batch, check_counts, read_study
from pavi.schedule import Stop
from pavi.setting import Setting
from pavi.stepping import Inputs
from pavi.studying import Outcome, Refinement, train_study

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

    def __init__(self, outcome: Outcome):
        study, units, arguments, observations, trained, stop, history, batch, skipped = outcome
        reading = trained.family.settle(study, arguments, observations.everything, units, trained.weights)
        super().__init__(study, *reading, units, arguments, observations)
        self._trained, self._outcome = trained, outcome
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
        observations = self._observations.loaded(np.asarray)
        if observations.stored:
            raise SettingError(
                f"The data of {sorted(observations.stored)} lie outside of memory, so the fit cannot be saved with "
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
                "data": observations,
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
        if isinstance(family, Polished):
            weights = self._follow(family, study, arguments, observations, weights)
        if steps is None and not weights.rows:
            trained = Reading(family, weights)
            return Fit(self._outcome._replace(study=study, arguments=arguments, observations=observations, trained=trained))
        steps = max(len(self.history["step"]) // 10, 50) if steps is None else steps
        # There are few steps, so each sees more members.
        batch = {plate: min(UPDATE_BATCH * count, sizes[plate]) for plate, count in self.batch.items()}
        setting = Setting(family, batch, steps, 8, None, seed_of(rng_key), progress_bar, started)
        setting = setting._replace(rows_on_host=self._rows_on_host)
        refinement = Refinement(study, arguments, observations, setting, frozen=bool(weights.rows))
        return Fit(refinement.run(weights, self._units, steps, started))

    def _follow(
        self, family: Polished, study: Study, arguments: Any, observations: Observations, weights: Weights
    ) -> Weights:
        """Weights with posteriors of members for the study as it is now, given what is outside of plates as it was."""
        normal = family.normal(study.template, weights)
        mean = np.asarray(normal.mean)
        members = Members(study, family.marginal, arguments, observations, self._units, seed_of(0))
        members.look(mean, np.arange(members.count))
        found = members.posteriors(mean, np.zeros_like(mean))
        return family.add(family.strip(study.template, weights), normal._replace(members=found))

    def polish(
        self,
        steps: int | None = None,
        *,
        batch: Mapping[str, int] | None = None,
        num_particles: int = 2,
        num_draws: int = 128,
        inner_points: int = 1024,
        family: Family | None = None,
        rng_key: int | PRNGKeyArray = 0,
        progress_bar: bool = True,
    ) -> Fit:
        """A fit whose latents have the posterior that the evidence gives them, not a bound of it.

        For studies with many members: what flows cannot express of a member's posterior adds up over members, and biases
        spreads. Here members' latents are averaged out instead (see `pavi.polishing`). Latents outside of plates and those
        of the outermost plate then have normal posteriors; those further inside, if any, are trained on with these held.
        Members of the outermost plate must be independent given what is outside of plates.

        `pavi.fit(..., polish=True)` does the same at the end of a fit, and compiles what it needs while the fit trains.

        Args:
            steps: training steps of the latents inside the outermost plate, afterwards; by default as many as this fit took.
            batch: members per such step, by plate; by default as in this fit.
            num_particles: Monte Carlo samples per such step.
            num_draws: draws of each member's latents, a power of two. Their noise moves the result by a part of its standard
                deviation that does not fall with the number of members; polish twice with other keys to see which.
            inner_points: points of the prior over which latents further inside are averaged out, a power of two.
            family: of the latents inside the outermost plate, which then are trained anew, such as
                `pavi.PAVI(show_pull=True)`; by default they are trained on in that of this fit.
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
        how = Polish(steps, batch, num_particles, num_draws, inner_points, family)
        started = time.perf_counter()
        setting = Setting(self.family, self.batch, None, num_particles, None, seed_of(rng_key), progress_bar, started)
        try:
            return self._polisher(setting, how).run(self, started)
        finally:
            finish_tracing()

    def _polisher(self, setting: Setting, how: Polish) -> Polisher:
        """What polishes this fit, on one device."""
        setting = setting._replace(devices=None, rows_on_host=self._rows_on_host)
        return Polisher(self._study, self._arguments, self._observations, self._units, setting, how)

    @property
    def _rows_on_host(self) -> bool:
        return any(isinstance(rows, np.ndarray) for rows in self._trained.weights.rows.values())


class Polish(NamedTuple):
    """How to polish: what `Fit.polish` was told."""

    steps: int | None = None
    batch: Mapping[str, int] | None = None
    num_particles: int = 2
    num_draws: int = 128
    inner_points: int = 1024
    family: Family | None = None

    @classmethod
    def of(cls, told: bool | Mapping[str, Any]) -> Polish | None:
        """What `fit` was told of polishing."""
        settings = dict(told) if isinstance(told, Mapping) else {}
        unknown = sorted(set(settings) - set(cls._fields))
        if unknown:
            raise SettingError(f"polish={unknown}: unknown settings. `Fit.polish` has {list(cls._fields)}.")
        return cls(**settings) if told or isinstance(told, Mapping) else None


class Polisher:
    """Polishes fits of one study. What this needs is compiled in the background from the moment it is made.

    Args:
        setting: of the fit to be polished.
    """

    def __init__(
        self, study: Study, arguments: Any, observations: Observations, units: Units, setting: Setting, how: Polish
    ) -> None:
        template, base = study.template, setting.family if how.family is None else how.family
        base = base.base if isinstance(base, Polished) else base
        marginal = marginal_of(template, how.num_draws, how.inner_points)
        if isinstance(base, Joint):
            raise SettingError(
                f"{type(base).__name__} draws members together with what is outside of plates, so a fit with it cannot be "
                "polished. Use pavi.PAVI()."
            )
        check_counts(how.steps or None, how.num_particles, None)
        batch = check_batch(template, setting.batch if how.batch is None else how.batch, base)
        self.how, self.family, self.progress_bar = how, Polished(base, marginal), setting.progress_bar
        self._seed, self._journal, own_folder = setting.seed, None, setting.polishing
        if own_folder is not None and setting.identity is not None:
            self._journal = Journal(own_folder / "search", setting.identity.and_also(polishing=str(marginal)))
            setting = setting._replace(checkpoint=own_folder / "training")
        if setting.folder is not None:  # rows of the fit before stay as they are
            setting = setting._replace(folder=folder_of(os.path.join(setting.folder, "polishing")))
        self._members = partial(Members, study, marginal, arguments, observations, units, setting.seed, self._journal)
        self._begun: Members | None = None
        self._centering: Future | None = None
        if self._journal is None or not self._journal.ended:
            self._begun = self._members()
            if not observations.stored and not setting.rows_on_host:
                known = study, setting.family, tuple(outside(template)), arguments, observations.arrays, units
                self._centering = centers_ahead(*known, seed_of(0))
        self.refinement: Refinement | None = None
        if marginal.inner is not None and how.steps != 0:
            setting = setting._replace(
                family=self.family, batch=batch, steps=how.steps, num_particles=how.num_particles, inner_points=0
            )
            self.refinement = Refinement(study, arguments, observations, setting)
            self.refinement.compile(units)
            self.family.settle_ahead(study, arguments, observations.everything, units, frozenset())

    def run(self, fit: Fit, started: float) -> Fit:
        """A polished fit. `started` is when its own seconds begin."""
        units, steps = fit._units, len(fit.history["step"]) if self.how.steps is None else self.how.steps
        if self.refinement is not None:
            self.refinement.check(steps)
        normal = None if self._journal is None else self._journal.outcome()
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(self._first_weights, fit)
            if normal is None:
                normal = self._search(fit)
        if normal is None:
            return fit
        weights = self.family.add(first.result(), normal)
        if self.refinement is None:
            return Fit(fit._outcome._replace(trained=Reading(self.family, weights)))
        outcome = self.refinement.run(weights, units, steps, started)
        history = {
            name: np.concatenate([fit.history[name], fit.history[name][-1] * (name != "elbo") + new])
            for name, new in outcome.history.items()
        }
        return Fit(outcome._replace(history=history))

    def _search(self, fit: Fit) -> Normal | None:
        """What polishing finds, if members' posteriors allow it."""
        members = self._members() if self._begun is None else self._begun
        if self._centering is not None:
            self._centering.exception()  # waits; what went wrong will again
        one_each = {plate.name: np.zeros(1, np.int64) for plate in fit.template.plates}
        center = fit._centers(tuple(outside(fit.template)), one_each)
        normal, settled = polish(members, center, fit._units, self.progress_bar)
        if normal is not None and settled and self._journal is not None:
            self._journal.end(normal)
        return normal

    def _first_weights(self, fit: Fit) -> Weights:
        """Weights of the latents further inside to train on from: those of a fit, if they are of the same family."""
        family, weights = fit.family, fit._trained.weights
        if isinstance(family, Polished):
            weights = family.strip(fit.template, weights)
            family = family.base
        if family == self.family.base:
            return weights
        rng = np.random.default_rng(self._seed)
        return self.family.base.init(fit.template, rng, fit._observations.everything, frozenset())


def _matched(old: Observations, new: Observations, plate: str, old_size: int, size: int) -> np.ndarray:
    """For each member of a plate now, which member it was before, or -1."""
    if plate in old.coords and plate in new.coords:
        before = {label: k for k, label in enumerate(old.coords[plate].tolist())}
        return np.array([before.get(label, -1) for label in new.coords[plate].tolist()])
    index = np.arange(size)
    return np.where(index < old_size, index, -1)


def fit_study(study: Study, arguments: Any, observations: Observations, setting: Setting, how: Polish | None = None) -> Fit:
    """A fit of a study that has been read, polished if told how: what that needs is compiled while the fit trains."""
    polishers: list[Polisher] = []
    if how is not None:
        marginal_of(study.template, how.num_draws, how.inner_points)  # what cannot be is refused before anything is trained

    def prepared(inputs: Inputs) -> None:
        # When several devices have trained, rows and data lie elsewhere.
        if how is not None and setting.devices is None:
            polishers.append(Polisher(study, arguments, observations, inputs.units, setting, how))

    if setting.checkpoint is not None:
        setting = setting._replace(identity=identity_of_study(study, arguments, observations, setting.seed))
    try:
        fit = Fit(train_study(study, arguments, observations, setting, prepared))
        if how is None or fit.stop is Stop.INTERRUPTED:
            return fit
        try:
            polisher = polishers[0] if polishers else fit._polisher(setting, how)
            return polisher.run(fit, time.perf_counter())
        except KeyboardInterrupt:
            then = "`fit.polish()` polishes it" if setting.checkpoint is None else "the same call goes on where it was"
            warnings.warn(f"Polishing was interrupted: this is the fit before it; {then}.", stacklevel=3)
            fit.stop = Stop.INTERRUPTED
            return fit
    finally:
        finish_tracing()
