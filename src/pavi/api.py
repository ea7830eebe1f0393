"""`fit`: from a model and its data to a posterior."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
import xarray as xr
from jaxtyping import PRNGKeyArray

from pavi.data import observe, usual_runs
from pavi.errors import SettingError
from pavi.families import PAVI, Family
from pavi.fitting import Fit, Polish, fit_study
from pavi.planning import Place, enough_memory, folder_of, make_plan, polished_family
from pavi.posterior import seed_of
from pavi.reading import check_batch, check_counts, check_points, check_runs, read_model
from pavi.setting import Setting
from pavi.sharding import split_along
from pavi.starting import unconstrain, usual_starts


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
    inner_points: int = 0,
    optimizer: optax.GradientTransformation | None = None,
    init: Mapping[str, Any] | None = None,
    starts: int | None = None,
    polish: bool | Mapping[str, Any] = False,
    rng_key: int | PRNGKeyArray = 0,
    progress_bar: bool = True,
    checkpoint: str | os.PathLike | None = None,
    devices: int | Mapping[str, int] | None = None,
    placement: str | os.PathLike | None = None,
    runs: Mapping[str, int] | None = None,
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
        inner_points: over how many points of their prior the innermost latents are averaged out for all other latents, a
            power of two, such as 256; none by default. What the innermost flows cannot express then does not bias the
            others. `history["elbo"]` is that bound, or the ELBO in a step where it is larger: points are of use where single
            members say little. An even `num_particles`, such as 2, mirrors half of the global draws, which tells what
            members make of them.
        optimizer: an `optax.GradientTransformation` with its own learning rate, for all weights.
        init: values around which the posterior of some latents starts, by site, each in the shape of one member.
        starts: how many starting points to try for some steps, before the best one is trained on. By default one, and four
            for a model with a latent made of several of what is observed (the components of a mixture): see
            `pavi.starting`.
        polish: whether to polish the fit at its end, or settings to do so with, as in `Fit.polish`: {"steps": 4000}.
        rng_key: an int or a JAX key; the same key gives the same fit.
        progress_bar: show ELBO and steps per second while training.
        checkpoint: a folder to keep the state of training in, written every minute and at the end. The same call again
            goes on from there, to the same result.
        devices: over how many devices to split the study along a plate, or `{plate: devices}`. By default one device. All
            of them train; one polishes what they come to.
        placement: where data and rows (encodings with their optimizer state) lie: "device"; "host", from where a step is
            given those of its members; or a folder, in which rows are memory maps. By default on the device as far as there
            is room: see `pavi.plan`. The result is the same up to rounding.
        runs: members of a plate to draw side by side, by plate, so that data stored in chunks are read in few pieces; by
            default what fits the chunks of stored data, and one for data in memory.

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
    study, arguments, supports = read_model(model, data, model_args, model_kwargs)
    template = study.template
    check_counts(steps, num_particles, starts)
    how = Polish.of(polish)
    if how is not None and checkpoint is not None and jax.process_count() > 1:
        raise SettingError(
            f"polish=..., checkpoint=...: this is one of {jax.process_count()} processes, each of which would write what it "
            "came to by polishing. Leave out one of the two; `fit.polish()` polishes a fit afterwards."
        )
    family = PAVI() if family is None else family
    inner = check_points(inner_points, template, family)
    batch = check_batch(template, batch, family)
    check_runs(template, runs)
    polished = polished_family(family, polish)
    starts = usual_starts(template) if starts is None else starts
    shards = None if devices is None else split_along(template, devices, inner)
    settings = num_particles, None, placement, inner, polished, starts, shards
    planned = make_plan(template, arguments, data, family, batch, *settings)
    with enough_memory(planned):
        # Several devices are given their parts of what is in host memory; no device ever holds all of it.
        on_host = planned.data_place is Place.HOST or devices is not None
        observations = observe(template, data, supports, on_host=on_host)
        runs = usual_runs(template, observations.stored, planned.batch) if runs is None else runs
        values = unconstrain(study, arguments, init or {}, {} if observations.stored else observations.arrays)
        setting = Setting(
            family,
            batch,
            steps,
            num_particles,
            optimizer,
            seed_of(rng_key),
            progress_bar,
            started,
            starts,
            values,
            checkpoint,
            devices,
            runs,
            planned.rows_place is Place.HOST,
            folder_of(placement),
            inner_points,
            planned.data_place is not Place.DEVICE,
        )
        return fit_study(study, arguments, observations, setting, how)
