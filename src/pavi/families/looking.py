"""Showing data to an encoder: a branch of it in training, all of it, tile by tile, at the end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pavi import rows
from pavi.branch import choose_batch, fixed_branch
from pavi.cascade import Study, cascade, draw_prior
from pavi.compiling import quick_jit
from pavi.encodings import SetEncoder, View
from pavi.encodings.set_encoder import Known, contractions
from pavi.families.base import Glimpse, Units
from pavi.template import Level

# Numbers held on the device while one tile is encoded.
TILE_BUDGET = 2**24


def show(encoder: SetEncoder, glimpse: Glimpse) -> View:
    """What an encoder sees of a branch."""
    study, arguments, branch, data = glimpse
    seen: Mapping[str, Array] = {}
    if any(site.masked for site in study.template.observed):
        # Masks are the model's own; a draw from the prior serves to run it, and is compiled away.
        seen = cascade(study, arguments, draw_prior, {}, branch, data, jax.random.key(0)).seen
    covariates = {name: rows.gather(arguments[1][name], branch.at(level)) for name, level in encoder.covariates.items()}
    return View(branch, data, seen, covariates)


def encode_study(
    encoder: SetEncoder, study: Study, arguments: Any, data: Mapping[str, Array], units: Units, weights: Array
) -> dict[Level, Array]:
    """Encodings of every member of the study, per level, in tiles of bounded size."""
    template = study.template
    found: dict[str, dict[Level, Known]] = {}
    for number, site in enumerate(template.observed):
        inputs = (weights, units, arguments, {site.name: data[site.name]})
        known: dict[Level, Known] = {}
        if site.level in template.levels:
            run = _Tiled(encoder, study, number, None, inputs)
            known[site.level] = run.over(site.level, {site.level: _numbers(encoder, site.member_shape)}, None)
        for k, step in enumerate(contractions(template, site)):
            run = _Tiled(encoder, study, number, k, inputs)
            each = template.plate(step.plate).size * _numbers(encoder, site.member_shape)
            known[step.target] = run.over(step.target, {step.target: each}, known.get(step.source))
        found[site.name] = {
            level: Known(*map(jnp.asarray, each)) for level, each in known.items() if level in template.levels
        }
    return _joined(encoder, study, found)


@quick_jit(static_argnums=(0, 1))
def _joined(encoder: SetEncoder, study: Study, found: dict[str, dict[Level, Known]]) -> dict[Level, Array]:
    return encoder.encodings(study.template, found)


def _numbers(encoder: SetEncoder, member_shape: tuple[int, ...]) -> int:
    """About how many numbers the networks hold for one member."""
    return 8 * encoder.width + 4 * int(np.prod(member_shape, dtype=int))


class _Tiled:
    """Runs one part of an encoder over a level, tile by tile."""

    def __init__(self, encoder: SetEncoder, study: Study, number: int, step: int | None, inputs: tuple):
        self.encoder, self.study, self.number, self.step, self.inputs = encoder, study, number, step, inputs

    def over(self, level: Level, work: dict[Level, int], known: Known | None) -> Known:
        template = self.study.template
        sizes = {plate: template.plate(plate).size for plate in level}
        caps = choose_batch(sizes, work, TILE_BUDGET) if sizes else {}
        whole: list[np.ndarray] | None = None
        for place, indices in self._tiles(sizes, caps):
            if self.step is not None:
                plate = contractions(template, template.observed[self.number])[self.step].plate
                indices[plate] = np.arange(template.plate(plate).size, dtype=np.int32)
            part = None if known is None else self._at(known, indices)
            tile = _encode_tile(self.encoder, self.study, self.number, self.step, self.inputs, indices, part)
            parts = [np.asarray(part) for part in tile]
            if whole is None:
                whole = [np.empty((*sizes.values(), *part.shape[len(level) :]), part.dtype) for part in parts]
            keep = tuple(slice(s.stop - s.start) for s in place)
            for target, piece in zip(whole, parts, strict=True):
                target[place] = piece[keep]
        assert whole is not None
        return Known(*whole)  # type: ignore[arg-type]

    def _at(self, known: Known, indices: dict[str, np.ndarray]) -> Known:
        template = self.study.template
        assert self.step is not None
        source = contractions(template, template.observed[self.number])[self.step].source
        place = np.ix_(*(indices[plate] for plate in source))
        return Known(*(array[place] for array in known))

    def _tiles(
        self, sizes: dict[str, int], caps: dict[str, int]
    ) -> Iterator[tuple[tuple[slice, ...], dict[str, np.ndarray]]]:
        blocks = [[slice(a, min(a + caps[p], size)) for a in range(0, size, caps[p])] for p, size in sizes.items()]
        for place in itertools.product(*blocks):
            indices = {plate.name: np.zeros(1, np.int32) for plate in self.study.template.plates}
            for (plate, size), part in zip(sizes.items(), place, strict=True):
                indices[plate] = np.minimum(np.arange(part.start, part.start + caps[plate]), size - 1).astype(np.int32)
            yield place, indices


@quick_jit(static_argnums=(0, 1, 2, 3))
def _encode_tile(
    encoder: SetEncoder, study: Study, number: int, step: int | None, inputs: tuple, indices: dict, known: Known | None
) -> Known:
    """The elements of one observed site at some members, or one contraction towards some members."""
    weights, units, arguments, data = inputs
    template = study.template
    site, network = encoder.networks(template, weights)[number]
    branch = fixed_branch({plate: jnp.asarray(index) for plate, index in indices.items()})
    if known is None:
        sliced = {
            other.name: rows.gather(data[site.name], branch.at(site.level))
            if other.name == site.name
            else jnp.zeros((*(len(indices[plate]) for plate in other.level), *other.member_shape))
            for other in template.observed
        }
        known = encoder.elements(network, site, units.standardize, show(encoder, Glimpse(study, arguments, branch, sliced)))
    if step is None:
        return known
    contraction = contractions(template, site)[step]
    return encoder.contract(network.contracts[step], contraction, known, branch.weights[contraction.plate], None)[0]
