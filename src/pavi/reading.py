"""Reading what a caller hands over: model and data into a study, settings checked, members per step chosen."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pavi.branch import choose_batch
from pavi.cascade import Hashable, Study
from pavi.compiling import spare_maps
from pavi.data import Observations, observe, sizes_of
from pavi.encodings import SetEncoder
from pavi.errors import DataError, LoadError, PaviError, SettingError
from pavi.families import PAVI, Family, Joint
from pavi.inner import Inner, inner_of
from pavi.template import Kind, Level, Template
from pavi.tracing import is_array, read_template, trace

# Numbers a step touches by default: on a CPU enough to keep the cores busy, on an accelerator many more.
CPU_BUDGET = 2**15
ACCELERATOR_BUDGET = 2**20
# A number of a latent costs about this many times what a number of data does: its flow has layers.
FLOW_COST = 24


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


def read_model(
    model: Callable, data: Any, model_args: tuple, model_kwargs: Mapping[str, Any] | None, resize: bool = False
) -> tuple[Study, Any, Mapping[str, Any]]:
    """The study of a model: (study, the arrays among the model's arguments, supports of the observed sites).

    With `resize`, plates take their sizes from the data where the model states others.
    """
    if not isinstance(data, Mapping):
        raise DataError(f"`data` is a {type(data).__name__}; expected a mapping from observed site to array, or a Dataset.")
    if not data:
        raise DataError("`data` is empty: name at least one observed site and its values.")
    spare_maps()
    names = [str(name) for name in data]
    template, supports = trace(model, names, tuple(model_args), model_kwargs)
    static, arguments = split_arguments(tuple(model_args), dict(model_kwargs or {}))
    if resize and not jax.tree.leaves(arguments):
        template = template.resized(sizes_of(template, data))
    return Study(model, template, static), arguments, supports


def read_study(
    model: Callable, data: Any, model_args: tuple, model_kwargs: Mapping[str, Any] | None, resize: bool = False
) -> tuple[Study, Any, Observations]:
    """The study of a model and its data, on the device but for data that are stored elsewhere."""
    study, arguments, supports = read_model(model, data, model_args, model_kwargs, resize)
    return study, arguments, observe(study.template, data, supports)


def split_arguments(args: tuple, kwargs: dict) -> tuple[Hashable, Any]:
    """Arguments that are not arrays, which the compiled step depends on, and those that are."""
    arrays, static = eqx.partition((args, kwargs), is_array)
    return Hashable(static), jax.tree.map(jnp.asarray, arrays)


def check_counts(steps: int | None, num_particles: int, starts: int | None) -> None:
    if steps is not None and steps < 1:
        raise SettingError(f"steps={steps}: expected at least 1, or None to train until the ELBO has settled.")
    if num_particles < 1:
        raise SettingError(f"num_particles={num_particles}: expected at least 1.")
    if starts is not None and starts < 1:
        raise SettingError(f"starts={starts}: expected at least 1, or None to leave it to the model.")


def check_points(inner_points: int, template: Template, family: Family) -> Inner | None:
    """The level that is averaged out over points, if any. Refuses what cannot be."""
    inner = inner_of(template, inner_points)
    if inner is not None and isinstance(family, Joint):
        name = type(family).__name__
        raise SettingError(
            f"inner_points={inner_points}: {name} draws members together, so none can be left out. Use pavi.PAVI()."
        )
    return inner


def check_batch(template: Template, batch: Mapping[str, int] | None, family: Family) -> dict[str, int]:
    """Members per step by plate as asked for, or all of them for a family that needs all. Refuses what cannot be."""
    sizes = {plate.name: plate.size for plate in template.plates}
    for plate, count in (batch or {}).items():
        if plate not in sizes:
            raise SettingError(f"batch names the plate {plate!r}, which the model does not have. Its plates: {list(sizes)}.")
        if not 1 <= count <= sizes[plate]:
            raise SettingError(f"batch[{plate!r}] = {count}: expected from 1 to the plate's size, {sizes[plate]}.")
        if family.whole_plates and count < sizes[plate]:
            raise SettingError(
                f"batch[{plate!r}] = {count}: {type(family).__name__} needs all {sizes[plate]} members of the plate in "
                "every step. Leave out `batch`, or use pavi.PAVI()."
            )
    return sizes if family.whole_plates else dict(batch or {})


def check_runs(template: Template, runs: Mapping[str, int] | None) -> None:
    """Refuses runs of members that the plates do not have."""
    sizes = {plate.name: plate.size for plate in template.plates}
    for plate, run in (runs or {}).items():
        if plate not in sizes:
            raise SettingError(f"runs names the plate {plate!r}, which the model does not have. Its plates: {list(sizes)}.")
        if not 1 <= run <= sizes[plate]:
            raise SettingError(f"runs[{plate!r}] = {run}: expected from 1 to the plate's size, {sizes[plate]}.")


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
    return members_per_step(template, None, 8)[0]


def members_per_step(
    template: Template, batch: Mapping[str, int] | None, num_particles: int, inner: Inner | None = None
) -> tuple[dict[str, int], float]:
    """Members per step for every plate: those asked for, and for the rest what a step can afford; what share that is."""
    batch = dict(batch or {})
    sizes = {plate.name: plate.size for plate in template.plates}
    free = {plate: size for plate, size in sizes.items() if plate not in batch}
    work = _work(template, batch, inner)
    budget = (CPU_BUDGET if jax.default_backend() == "cpu" else ACCELERATOR_BUDGET) // num_particles
    chosen = {plate: batch.get(plate, 1) for plate in sizes} | (choose_batch(free, work, budget) if free else {})
    return chosen, sum(_work(template, chosen, inner).values()) / budget


def _work(template: Template, batch: Mapping[str, int], inner: Inner | None) -> dict[Level, int]:
    """Numbers a step touches, given members of some plates: per level of the remaining ones, for one member of it."""
    costs = [
        (site.level, int(np.prod(site.member_shape, dtype=int)) + FLOW_COST * site.size)
        for site in template.sites
        if site.kind is not Kind.DETERMINISTIC
    ]
    if inner is not None:
        costs += inner.work(template).items()
    work: dict[Level, int] = {}
    for whole, numbers in costs:
        level = tuple(plate for plate in whole if plate not in batch)
        work[level] = work.get(level, 0) + numbers * math.prod(batch[plate] for plate in whole if plate in batch)
    return work
