"""Sample amortization (PAVI-E(sa), paper `sec:sup_sa`): train once on simulated studies, then infer without training.

Studies are simulated from the model's prior at a reduced number of members per plate, of random sizes up to that number,
so that the encoder learns what the size of a set means. A fixed set of studies is a fixed set of random keys: nothing is
stored. Training is either by the reverse KL (the ELBO averaged over studies, as in the paper) or by the forward KL
(neural posterior estimation: the log-density of the simulated latents).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pavi import storage
from pavi.branch import Branch, distinct
from pavi.cascade import Study, cascade, draw_prior
from pavi.compiling import quick_jit
from pavi.elbo import reduced_elbo
from pavi.errors import LoadError, ModelError, SettingError
from pavi.families import PAVI, CascadingFlows, Glimpse, Joint, Units, Weights
from pavi.fitting import Fit
from pavi.posterior import Posterior, seed_of
from pavi.reading import check_batch, read_saved_template, read_study, split_arguments, with_encoder
from pavi.schedule import Schedule, Stop
from pavi.setting import Setting
from pavi.stepping import Inputs, State, default_optimizers, first_state
from pavi.studying import Refinement
from pavi.template import Template
from pavi.tracing import read_template
from pavi.train import report, train
from pavi.units import prior_units

# Members per plate of a simulated study, where the caller does not say.
USUAL_BATCH = 20
STUDIES_PER_STEP = 16
USUAL_STEPS = 4_000
MEASURED_STUDIES = 256


@dataclasses.dataclass(frozen=True)
class Simulations:
    """What a compiled step of amortized training depends on besides arrays. `study` has the reduced plate sizes."""

    study: Study
    sizes: tuple[tuple[str, int], ...]
    family: PAVI | CascadingFlows
    objective: str
    num_datasets: int | None
    num_particles: int
    optimizer: optax.GradientTransformation

    def step(self, inputs: Inputs, state: State, rate: Float[Array, ""]) -> tuple[State, Float[Array, ""]]:
        """One step on a few simulated studies; returns the objective per latent number, averaged over them."""
        key = jax.random.fold_in(state.key, state.step)
        which, noise = jax.random.split(key)
        first = state.step * STUDIES_PER_STEP
        ids = first + jnp.arange(STUDIES_PER_STEP)
        if self.num_datasets is not None:
            ids = jax.random.randint(which, (STUDIES_PER_STEP,), 0, self.num_datasets)

        def loss(shared: Array) -> Float[Array, ""]:
            keys = jax.random.split(noise, STUDIES_PER_STEP)
            values = jax.vmap(lambda k, key: self.value(inputs, shared, simulation_key(state.key, k), key))(ids, keys)
            return -values.mean()

        value, grad = jax.value_and_grad(loss)(state.weights.shared)
        finite = jnp.isfinite(value) & jnp.isfinite(grad * grad).all()  # Adam keeps squares
        updates, optimizer = self.optimizer.update(grad, state.optimizer, state.weights.shared)
        kept = functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
        shared = kept(state.weights.shared + rate * updates, state.weights.shared)
        weights = state.weights._replace(shared=shared)
        new = State(weights, kept(optimizer, state.optimizer), {}, state.key, state.step + 1, state.skipped + ~finite)
        return new, -value

    def value(self, inputs: Inputs, shared: Array, key: PRNGKeyArray, noise: PRNGKeyArray) -> Float[Array, ""]:
        """The objective of one simulated study, per latent number."""
        template = self.study.template
        varied = not self.family.whole_plates
        branch, latents, data = simulate(self.study, dict(self.sizes), inputs.arguments, key, varied)
        weights = Weights(shared, {}, {})
        encodings, _ = self.family.encode(weights, inputs.units, Glimpse(self.study, inputs.arguments, branch, data))
        count = sum(site.size * branch.weigh(site.level, jnp.ones(template.sizes(site.level))) for site in template.latents)
        if self.objective == "forward" and isinstance(self.family, PAVI):
            sampler = self.family.scorer(template, inputs.units, shared)
            truths = {
                level: (rows, {site.name: latents[site.name] for site in template.latents if site.level == level})
                for level, rows in encodings.items()
            }
            found = cascade(self.study, inputs.arguments, sampler, truths, branch, data, noise)
            scores = jnp.stack([branch.weigh(site.level, found.log_q[site.name]) for site in template.latents])
            return scores.sum() / count
        sampler = self.family.sampler(template, inputs.units, shared)

        def particle(key: PRNGKeyArray) -> Float[Array, ""]:
            shown = encodings
            if isinstance(self.family, Joint):
                shown = self.family.together(template, inputs.units, shared, encodings, key, training=True)
            found = cascade(self.study, inputs.arguments, sampler, shown, branch, data, key)
            return reduced_elbo(template, branch, found) / count

        return jax.vmap(particle)(jax.random.split(noise, self.num_particles)).mean()


def simulation_key(key: PRNGKeyArray, number: Int[Array, ""]) -> PRNGKeyArray:
    """The key of one simulated study, apart from the keys of training."""
    return jax.random.fold_in(jax.random.fold_in(key, 2**31), number)


def simulate(
    study: Study, sizes: Mapping[str, int], arguments: Any, key: PRNGKeyArray, varied: bool
) -> tuple[Branch, dict[str, Array], dict[str, Array]]:
    """Draws a study, of random size if `varied`, from the prior: its branch, unconstrained latents and data.

    Args:
        study: its template's plate sizes are the largest to draw.
        sizes: the model's own plate sizes, of which members are taken.
    """
    branch_key, size_key, key = jax.random.split(key, 3)
    indices, mask = {}, {}
    for k, plate in enumerate(study.template.plates):
        indices[plate.name] = distinct(jax.random.fold_in(branch_key, k), sizes[plate.name], plate.size)
        size = _random_size(jax.random.fold_in(size_key, k), plate.size) if varied else plate.size
        mask[plate.name] = jnp.arange(plate.size) < size
    branch = Branch(indices, {plate: jnp.ones(len(index)) for plate, index in indices.items()}, mask)
    found = cascade(study, arguments, draw_prior, {}, branch, {}, key, predict=True)
    return branch, found.unconstrained, {site.name: found.values[site.name] for site in study.template.observed}


def _random_size(key: PRNGKeyArray, most: int) -> Int[Array, ""]:
    """Half the time the most, else from 1 to the most, evenly in its logarithm."""
    whole, size = jax.random.uniform(key, (2,))
    drawn = jnp.floor(jnp.exp(size * jnp.log(most + 1.0))).astype(jnp.int32)
    return jnp.where(whole < 0.5, most, jnp.clip(drawn, 1, most))


class Amortized:
    """A posterior for any data of a model, trained on simulated studies. Made by `pavi.amortize` and `pavi.load`.

    Attributes:
        history: "step", "elbo" (the objective per latent number) and "seconds", one entry per step.
        batch: members per plate of the studies it was trained on.
    """

    def __init__(
        self,
        study: Study,
        arguments: Any,
        family: PAVI | CascadingFlows,
        shared: Array,
        units: Units,
        history: Mapping[str, np.ndarray],
        batch: Mapping[str, int],
        stop: Stop,
    ):
        self._study, self._arguments, self._family, self._shared, self._units = study, arguments, family, shared, units
        self.history, self.batch, self.stop = dict(history), dict(batch), stop

    @property
    def _template(self) -> Template:
        return self._study.template

    @property
    def num_weights(self) -> int:
        """Trained numbers."""
        return int(self._shared.size)

    def __repr__(self) -> str:
        return (
            f"Amortized posterior of {[site.name for site in self._template.latents]} given "
            f"{[site.name for site in self._template.observed]}, {self.num_weights:,} weights, trained on studies of up to "
            f"{self.batch} members in {self.history['seconds'][-1]:.1f} s"
        )

    def infer(
        self,
        data: Mapping[str, Any] | xr.Dataset,
        *,
        model_args: tuple = (),
        model_kwargs: Mapping[str, Any] | None = None,
        refine_steps: int | None = None,
        free: bool = True,
        rng_key: int | PRNGKeyArray = 0,
        progress_bar: bool = True,
    ) -> Posterior:
        """The posterior given data of any number of members, without optimization.

        Args:
            data: as in `pavi.fit`.
            model_args: the model's arguments for this study.
            model_kwargs: the model's keyword arguments for this study.
            refine_steps: train this many steps more on the data, starting from the amortized answer.
            free: in refinement, train one encoding per member (PAVI-F); otherwise the encoder (PAVI-E).
            rng_key: for refinement.
            progress_bar: for refinement.

        Example: see `pavi.amortize`.
        """
        study, arguments, observations = read_study(self._study.model, data, model_args, model_kwargs, resize=True)
        if str(study.template.resized(self._sizes)) != str(self._template):
            raise ModelError(
                f"With these arguments the model is\n{study.template}\nbut the posterior was amortized for\n{self._template}"
            )
        family = self._family
        if isinstance(family, CascadingFlows) and {plate.name: plate.size for plate in study.template.plates} != self._sizes:
            raise SettingError(
                f"CascadingFlows has a flow for each member: expected plates of {self._sizes}, as it was trained with. "
                "Amortize again for these data, or use pavi.PAVI(encodings=pavi.SetEncoder()), which takes any size."
            )
        rows = family.encodings.init(study.template, observations.arrays) if isinstance(family, PAVI) else {}
        weights = Weights(self._shared, rows, {})
        reading = family.settle(study, arguments, observations.arrays, self._units, weights)
        if refine_steps is None:
            return Posterior(study, *reading, self._units, arguments, observations)
        if isinstance(family, CascadingFlows):
            raise SettingError("infer(refine_steps=...): expected a family with encodings. Use pavi.fit for CascadingFlows.")
        chosen, start = reading if free else (family, weights)
        setting = Setting(chosen, None, refine_steps, 8, None, seed_of(rng_key), progress_bar, time.perf_counter())
        refinement = Refinement(study, arguments, observations, setting)
        return Fit(refinement.run(start, self._units, setting.steps, setting.started))

    @property
    def _sizes(self) -> dict[str, int]:
        return {plate.name: plate.size for plate in self._template.plates}

    def save(self, path: str | os.PathLike) -> None:
        """Saves the trained networks to one file; `pavi.load(path, model)` brings them back."""
        model_args, model_kwargs = eqx.combine(self._arguments, self._study.static.value)
        storage.write(
            path,
            {
                "kind": "amortized",
                "template": str(self._template),
                "observed": [site.name for site in self._template.observed],
                "model_args": model_args,
                "model_kwargs": model_kwargs,
                "family": self._family,
                "shared": self._shared,
                "units": self._units,
                "history": self.history,
                "batch": self.batch,
                "stop": self.stop.name,
            },
        )


def amortize(
    model: Callable,
    observed: Sequence[str],
    *,
    model_args: tuple = (),
    model_kwargs: Mapping[str, Any] | None = None,
    family: PAVI | CascadingFlows | None = None,
    batch: Mapping[str, int] | None = None,
    steps: int | None = None,
    num_datasets: int | None = 20_000,
    objective: str = "reverse",
    num_particles: int = 2,
    rng_key: int | PRNGKeyArray = 0,
    progress_bar: bool = True,
) -> Amortized:
    """Trains a posterior for any data of a model, on studies simulated from its prior.

    Args:
        model: a NumPyro model.
        observed: the sites that will be given as data.
        model_args: passed to the model. Plate sizes need not be those of the data to come.
        model_kwargs: passed to the model.
        family: `pavi.PAVI(encodings=pavi.SetEncoder(...), ...)`; by default with default settings. Of the baselines, `ADAVI`
            and `CascadingFlows(sample_amortized=True)`, which are trained on studies of full size.
        batch: most members per plate of a simulated study; by default at most 20.
        steps: training steps; 4,000 by default.
        num_datasets: size of the fixed set of studies; None for fresh ones in every step.
        objective: "reverse" for the ELBO, "forward" for neural posterior estimation.
        num_particles: draws per study and step, with the ELBO.
        rng_key: an int or a JAX key.
        progress_bar: show progress.

    Example:
        >>> import numpy as np, numpyro, numpyro.distributions as dist, pavi
        >>> def model(n):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
        ...     with numpyro.plate("item", n):
        ...         numpyro.sample("x", dist.Normal(mu, 1))
        >>> amortized = pavi.amortize(model, ["x"], model_args=(10,), steps=2000, progress_bar=False)
        >>> posterior = amortized.infer({"x": np.full(50, 3.0)}, model_args=(50,))
        >>> bool(abs(posterior.sample(500)["mu"].mean() - 3.0) < 0.2)
        True
    """
    started = time.perf_counter()
    if not isinstance(family, CascadingFlows) or not family.sample_amortized:
        family = with_encoder(family, "amortize")
    elif objective == "forward":
        raise SettingError("amortize(objective='forward'): CascadingFlows has no density of given values. Use 'reverse'.")
    if objective not in ("reverse", "forward"):
        raise SettingError(f"amortize(objective={objective!r}): expected 'reverse' or 'forward'.")
    if num_datasets is not None and num_datasets < 1:
        raise SettingError(f"amortize(num_datasets={num_datasets}): expected at least 1, or None for fresh studies.")
    full = read_template(model, list(observed), model_args=model_args, model_kwargs=model_kwargs)
    batch = check_batch(full, batch, family)
    sizes = {plate.name: plate.size for plate in full.plates}
    chosen = {plate: min(size, USUAL_BATCH) for plate, size in sizes.items()} | batch
    template = full.resized(chosen)
    static, arguments = split_arguments(tuple(model_args), dict(model_kwargs or {}))
    whole, study = Study(model, full, static), Study(model, template, static)
    seed = seed_of(rng_key)
    optimizer, _ = default_optimizers(1.0)
    problem = Simulations(study, tuple(sizes.items()), family, objective, num_datasets, num_particles, optimizer)
    weights = family.init(template, np.random.default_rng(seed), {}, frozenset(sizes))
    state = first_state(optimizer, optimizer, weights._replace(rows={}), seed)
    units = prior_units(whole, arguments, {}, seed) | family.measure(
        template, _measured(study, tuple(sizes.items()), arguments, seed, not family.whole_plates), arguments
    )
    # The forward KL starts steep: values far off the first guess. High rates would throw it away.
    early = objective == "reverse"
    schedule = Schedule(template, chosen, USUAL_STEPS if steps is None else steps, decays=True, load=1.0, early=early)
    trained = train(problem, Inputs(arguments, {}, units), state, schedule, started, progress_bar)
    report(trained)
    shared = trained.state.weights.shared
    return Amortized(whole, arguments, family, shared, units, trained.history, chosen, trained.stop)


@quick_jit(static_argnums=(0, 1, 4))
def _measured(
    study: Study, sizes: tuple[tuple[str, int], ...], arguments: Any, seed: Array, varied: bool
) -> dict[str, Array]:
    """Data of some simulated studies, to read their scale off."""
    keys = jax.random.split(jax.random.wrap_key_data(seed), MEASURED_STUDIES)
    return jax.vmap(lambda key: simulate(study, dict(sizes), arguments, key, varied)[2])(keys)


def load_amortized(path: str | os.PathLike, saved: dict, model: Callable) -> Amortized:
    """The amortized posterior of a saved file's content."""
    try:
        args, kwargs, observed, expected = (saved[name] for name in ("model_args", "model_kwargs", "observed", "template"))
        parts = (saved["family"], jnp.asarray(saved["shared"]), Units(*saved["units"]), saved["history"], saved["batch"])
        stop = Stop[saved["stop"]]
    except (KeyError, TypeError) as error:
        raise LoadError(f"{str(path)!r} is not a whole amortized posterior (it lacks {error}).") from error
    template = read_saved_template(path, model, observed, args, kwargs, expected)
    static, arguments = split_arguments(args, kwargs)
    return Amortized(Study(model, template, static), arguments, *parts, stop)
