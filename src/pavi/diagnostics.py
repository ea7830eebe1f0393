"""Checks a user can run on their own model before trusting a scheme with a large study."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray
from tqdm.auto import tqdm

from pavi.branch import fixed_branch
from pavi.cascade import Study, cascade, draw_prior
from pavi.data import Observations
from pavi.encodings import FreeEncodings
from pavi.errors import SettingError
from pavi.families import PAVI, Family
from pavi.fitting import fit_study
from pavi.posterior import seed_of
from pavi.reading import check_batch, split_arguments, usual_batch, with_encoder
from pavi.setting import Setting
from pavi.tracing import read_template

# Most members per plate of the small instance, and the share of them that a step sees at least.
SMALL = 20
SHARE = 0.25


@dataclasses.dataclass(frozen=True)
class BiasCheck:
    """What `pavi.bias_check` found. ELBOs are of the full small instance, one per repetition.

    Attributes:
        free: ELBOs with free encodings, whose training is unbiased.
        encoder: ELBOs with the encoder.
        sizes: plate sizes of the instance.
        batch: members per step.
        num_latents: latent numbers of the instance.
    """

    free: np.ndarray
    encoder: np.ndarray
    sizes: Mapping[str, int]
    batch: Mapping[str, int]
    num_latents: int

    @property
    def difference(self) -> float:
        """How many nats the encoder's ELBO lies below that of free encodings."""
        return float(self.free.mean() - self.encoder.mean())

    @property
    def noise(self) -> float:
        """Standard error of the difference, from its spread over repetitions: both schemes are fitted to the same data."""
        return float((self.free - self.encoder).std(ddof=1) / np.sqrt(len(self.free)))

    @property
    def in_noise(self) -> float:
        """The difference in units of its noise."""
        return self.difference / max(self.noise, 1e-12)

    def __str__(self) -> str:
        instance = ", ".join(f"{self.batch[plate]} of {size} {plate}" for plate, size in self.sizes.items())
        worse = self.in_noise > 2 and self.difference > 0.01 * self.num_latents
        verdict = (
            "the encoder loses accuracy on this model: prefer pavi.FreeEncodings(), a larger batch or a larger encoder"
            if worse
            else "no bias that matters was found"
        )
        return (
            f"Bias check ({self.num_latents} latents; per step {instance}; {len(self.free)} repetitions)\n"
            f"  ELBO, free encodings  {self.free.mean():12.3f}\n"
            f"  ELBO, encoder         {self.encoder.mean():12.3f}\n"
            f"  difference            {self.difference:12.3f} nats = {self.difference / self.num_latents:.4f} per latent "
            f"= {self.in_noise:.1f} x noise\n"
            f"  {verdict}"
        )


def bias_check(
    model: Callable,
    observed: Sequence[str],
    *,
    model_args: tuple = (),
    model_kwargs: Mapping[str, Any] | None = None,
    family: PAVI | None = None,
    batch: Mapping[str, int] | None = None,
    steps: int | None = None,
    repetitions: int = 3,
    rng_key: int | PRNGKeyArray = 0,
    progress_bar: bool = True,
) -> BiasCheck:
    """Fits a small simulated instance of a model with free encodings and with an encoder, and compares their ELBOs.

    Training an encoder on branchings is biased in principle: it sees summaries of a few children, and is used with
    summaries of all. This tells whether that matters for a model. The instance has the model's first 20 members of each
    plate at most, with data drawn from the prior.

    Args:
        model: a NumPyro model.
        observed: the sites that would be given as data.
        model_args: passed to the model.
        model_kwargs: passed to the model.
        family: the family with the encoder; by default `pavi.PAVI(encodings=pavi.SetEncoder())`. Free encodings are put
            in its place for the comparison.
        batch: members per step of the instance; by default the share that a fit of the full study would see, at
            least a quarter.
        steps: training steps of each fit; by default until the ELBO has settled.
        repetitions: simulated instances, each fitted once with each scheme; at least 2.
        rng_key: an int or a JAX key.
        progress_bar: show progress over the fits.

    Example:
        >>> import numpyro, numpyro.distributions as dist, pavi
        >>> def model():
        ...     mu = numpyro.sample("mu", dist.Normal(0, 1))
        ...     with numpyro.plate("group", 1000):
        ...         theta = numpyro.sample("theta", dist.Normal(mu, 1))
        ...         numpyro.sample("x", dist.Normal(theta, 1))
        >>> family = pavi.PAVI(encodings=pavi.SetEncoder(), flow=pavi.Affine())
        >>> check = pavi.bias_check(model, ["x"], family=family, repetitions=2, steps=1000, progress_bar=False)
        >>> check.sizes, bool(abs(check.difference) < 0.5)
        ({'group': 20}, True)
    """
    family = with_encoder(family, "bias_check")
    if repetitions < 2:
        raise SettingError(f"bias_check(repetitions={repetitions}): expected at least 2, to know the noise.")
    full = read_template(model, list(observed), model_args=model_args, model_kwargs=model_kwargs)
    sizes = {plate.name: min(plate.size, SMALL) for plate in full.plates}
    small = full.resized(sizes)
    usual = usual_batch(full)
    chosen = {
        plate.name: min(sizes[plate.name], math.ceil(sizes[plate.name] * max(SHARE, usual[plate.name] / plate.size)))
        for plate in full.plates
    } | dict(batch or {})
    check_batch(small, chosen, family)
    static, arguments = split_arguments(tuple(model_args), dict(model_kwargs or {}))
    study = Study(model, small, static)
    families: dict[str, Family] = {"free": dataclasses.replace(family, encodings=FreeEncodings()), "encoder": family}
    key = jax.random.wrap_key_data(jnp.asarray(seed_of(rng_key)))
    elbos: dict[str, list[float]] = {name: [] for name in families}
    jobs = [(number, name) for number in range(repetitions) for name in families]
    for number, name in tqdm(jobs, disable=not progress_bar, desc="fits"):
        seed = seed_of(jax.random.fold_in(key, number))
        observations = _draw_study(study, arguments, seed)
        setting = Setting(families[name], chosen, steps, 8, None, seed, False, time.perf_counter())
        elbos[name].append(fit_study(study, arguments, observations, setting).elbo(256).mean)
    return BiasCheck(np.array(elbos["free"]), np.array(elbos["encoder"]), sizes, chosen, small.num_latents)


def _draw_study(study: Study, arguments: Any, seed: np.ndarray) -> Observations:
    """Data of the study's first members, drawn from the prior."""
    branch = fixed_branch({plate.name: jnp.arange(plate.size) for plate in study.template.plates})
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(seed)), 1)
    found = cascade(study, arguments, draw_prior, {}, branch, {}, key, predict=True)
    return Observations({site.name: found.values[site.name] for site in study.template.observed}, {}, {})
