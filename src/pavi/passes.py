"""Compiled passes over a tile of members: draws, their moments and centers, and their scores."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pavi import data as observed_data
from pavi import rows as row_ops
from pavi.branch import Branch
from pavi.cascade import Pass, Study, cascade
from pavi.compiling import Purpose, in_background, quick_jit
from pavi.encodings import SetEncoder
from pavi.families import PAVI, Family, Joint, Units
from pavi.flows import without_paths

# Draws whose mean stands for where a posterior is centered.
CENTERED = 16


def draw_values(
    study: Study,
    family: Family,
    names: tuple[str, ...],
    predict: bool,
    inputs: tuple,
    indices: dict,
    ids: Array,
    seed: Array,
) -> dict[str, Array]:
    counts = {plate: jnp.ones(len(index), bool) for plate, index in indices.items()}

    def one(draw: Array) -> dict[str, Array]:
        found, _ = _pass(study, family, inputs, indices, counts, draw, seed, predict)
        return {name: found.values[name] for name in names}

    return jax.vmap(one)(ids)


draw = quick_jit(static_argnums=(0, 1, 2, 3))(draw_values)


class Counts(NamedTuple):
    """How many draws came before a block, how many of the block count, and how many there will be."""

    before: Any
    here: Any
    total: Any


@quick_jit(static_argnums=(0, 1, 2), purpose=Purpose.READING)
def block_moments(
    study: Study,
    family: Family,
    names: tuple[str, ...],
    inputs: tuple,
    indices: dict,
    ids: Array,
    counts: Counts,
    running: dict[str, Array],
    seed: Array,
) -> dict[str, Array]:
    """Mean and sum of squared deviations of the draws so far, side by side; after the last draw, mean and sd.

    Args:
        running: the same of the draws before this block; not looked at before the first one.
    """
    draws = draw_values(study, family, names, False, inputs, indices, ids, seed)
    before, here, total = (jnp.asarray(count, jnp.result_type(float)) for count in counts)
    done = counts.before + counts.here == counts.total

    def moved_on(values: Array, running: Array) -> Array:
        values = values.astype(jnp.promote_types(values.dtype, here.dtype))  # sums need more digits than draws
        used = (jnp.arange(len(ids)) < counts.here).reshape(-1, *(1,) * (values.ndim - 1))
        mean = jnp.where(used, values, 0.0).sum(0) / here
        deviations = jnp.where(used, (values - mean) ** 2, 0.0).sum(0)
        # Chan's update of a running mean and sum of squared deviations.
        share, delta = here / (before + here), mean - running[0]
        mean = jnp.where(before > 0, running[0] + delta * share, mean)
        deviations = jnp.where(before > 0, running[1] + deviations + delta**2 * (before * share), deviations)
        return jnp.stack([mean, jnp.where(done, jnp.sqrt(deviations / jnp.maximum(total - 1, 1)), deviations)])

    return {name: moved_on(values, running[name]) for name, values in draws.items()}


@quick_jit(static_argnums=(0, 1, 2))
def centers(
    study: Study, family: Family, names: tuple[str, ...], inputs: tuple, indices: dict, ids: Array, seed: Array
) -> dict[str, Array]:
    """Means of some draws in unconstrained space."""
    counts = {plate: jnp.ones(len(index), bool) for plate, index in indices.items()}

    def one(draw: Array) -> dict[str, Array]:
        found, _ = _pass(study, family, inputs, indices, counts, draw, seed, False)
        return {name: found.unconstrained[name] for name in names}

    return {name: values.mean(0) for name, values in jax.vmap(one)(ids).items()}


def centers_ahead(
    study: Study, family: Family, names: tuple[str, ...], arguments: Any, arrays: Any, units: Units, seed: np.ndarray
) -> Future | None:
    """Compiles `centers` of latents outside of plates in the background, for a family that is read as it was trained."""
    if not isinstance(family, PAVI) or isinstance(family.encodings, SetEncoder) or family.show_pull:
        return None
    indices = {plate.name: np.zeros(1, np.int32) for plate in study.template.plates}
    inputs: tuple = (family.shapes(study.template, frozenset()), units, arguments, arrays, {}, {})
    return in_background(centers, study, family, names, inputs, indices, np.arange(CENTERED), seed)


@quick_jit(static_argnums=(0, 1))
def score(
    study: Study, family: Family, inputs: tuple, indices: dict, counts: dict, ids: Array, seed: Array
) -> dict[str, Float[Array, " draws"]]:
    """log p - log q of each site, summed over a tile's members, for each draw."""

    def one(draw: Array) -> dict[str, Array]:
        found, branch = _pass(study, family, inputs, indices, counts, draw, seed, False)
        return {
            name: branch.weigh(study.template.site(name).level, log_p - found.log_q.get(name, 0.0))
            for name, log_p in found.log_p.items()
        }

    return jax.vmap(one)(ids)


def _pass(
    study: Study, family: Family, inputs: tuple, indices: dict, counts: dict, number: Array, seed: Array, predict: bool
) -> tuple[Pass, Branch]:
    weights, units, arguments, arrays, stored, hosted = inputs
    template = study.template
    branch = Branch(indices, {plate: jnp.ones(len(index)) for plate, index in indices.items()}, counts)
    sliced = {**observed_data.at_branch(template, arrays, branch, frozenset()), **stored}
    sampler = family.sampler(template, units, weights.shared)
    key = jax.random.fold_in(jax.random.wrap_key_data(seed), number)
    rows = weights.rows
    if isinstance(family, Joint):
        rows = family.together(template, units, weights.shared, rows, key, training=False)
    encodings = {level: row_ops.gather(array, branch.at(level)) for level, array in rows.items()} | hosted
    with without_paths():
        return cascade(study, arguments, sampler, encodings, branch, sliced, key, predict=predict), branch
