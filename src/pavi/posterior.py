"""Reading a posterior: draws, moments, predictions and the ELBO, for any slice, in bounded memory.

Everything is read in *tiles*: a block of members of each plate times a block of draws, of one fixed shape, so one
compiled function serves a study of any size. Draws depend on the key, the draw's number and the member's index alone,
so a slice equals the same slice of the whole. Plates that the wanted sites are not in are never visited.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, PRNGKeyArray

from pavi import rows as row_ops
from pavi import storage
from pavi.cascade import Study
from pavi.data import Observations, stored_at
from pavi.errors import SettingError
from pavi.families import Family, Units, Weights
from pavi.passes import CENTERED, Counts, block_moments, centers, draw, score
from pavi.sources import load
from pavi.template import Kind, Site, Template
from pavi.tiles import Tile, counts_here, one_ahead, tiles

Where = Mapping[str, Sequence[int] | np.ndarray | slice | int]


class Elbo(NamedTuple):
    """An ELBO in nats, and the standard error of its Monte Carlo estimate."""

    mean: float
    stderr: float


class Posterior:
    """An approximate posterior of a study. Draws come as `xarray`, labelled by plates and coordinates.

    Made by `pavi.fit` and `pavi.load`.
    """

    def __init__(
        self,
        study: Study,
        family: Family,
        weights: Weights,
        units: Units,
        arguments: Any,
        observations: Observations,
    ):
        self._study, self._family, self._weights, self._units = study, family, weights, units
        self._arguments, self._observations = arguments, observations

    @property
    def template(self) -> Template:
        """The sites and plates of the model."""
        return self._study.template

    @property
    def family(self) -> Family:
        """The variational family that was fitted."""
        return self._family

    @property
    def num_weights(self) -> int:
        """Trained numbers: shared weights plus rows."""
        return self._weights.count

    def sample(
        self,
        num_samples: int = 1000,
        *,
        sites: Sequence[str] | None = None,
        where: Where | None = None,
        rng_key: int | PRNGKeyArray = 0,
    ) -> xr.Dataset:
        """Draws from the posterior.

        Args:
            num_samples: how many draws.
            sites: latent and deterministic sites to read; all by default.
            where: members to read, by plate: indices, or a slice. A part equals the same part of the whole draw.
            rng_key: an int or a JAX key; the same key gives the same draws.

        Returns:
            A Dataset with dims ("chain", "draw", *plates, *event dims); `chain` has length 1.

        Example:
            >>> import numpy as np, numpyro, numpyro.distributions as dist, pavi
            >>> def model():
            ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
            ...     with numpyro.plate("item", 4):
            ...         numpyro.sample("x", dist.Normal(mu, 1))
            >>> fit = pavi.fit(model, {"x": np.array([1.0, 2.0, 2.0, 3.0])}, progress_bar=False)
            >>> draws = fit.sample(500)
            >>> draws["mu"].dims
            ('chain', 'draw')
            >>> bool(abs(draws["mu"].mean() - 2.0) < 0.2)
            True
        """
        wanted = self._wanted(sites)
        members = self._members(where)
        _check_count(num_samples)
        return self._draws(wanted, members, num_samples, rng_key, predict=False)

    def predict(self, num_samples: int = 1000, *, where: Where | None = None, rng_key: int | PRNGKeyArray = 0) -> xr.Dataset:
        """Draws of the observed sites given posterior draws of the latents: what new data would look like.

        Example:
            >>> import numpy as np, numpyro, numpyro.distributions as dist, pavi
            >>> def model():
            ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
            ...     with numpyro.plate("item", 4):
            ...         numpyro.sample("x", dist.Normal(mu, 1))
            >>> fit = pavi.fit(model, {"x": np.array([1.0, 2.0, 2.0, 3.0])}, progress_bar=False)
            >>> dict(fit.predict(100)["x"].sizes)
            {'chain': 1, 'draw': 100, 'item': 4}
        """
        wanted = self.template.observed
        members = self._members(where)
        _check_count(num_samples)
        return self._draws(wanted, members, num_samples, rng_key, predict=True)

    def moments(
        self,
        *,
        sites: Sequence[str] | None = None,
        where: Where | None = None,
        num_samples: int = 1000,
        rng_key: int | PRNGKeyArray = 0,
        store: str | os.PathLike | None = None,
    ) -> xr.Dataset:
        """Posterior mean and standard deviation, streamed: draws are summed up on the device, never kept.

        Args:
            sites: latent and deterministic sites to read; all by default.
            where: members to read, by plate, as in `sample`.
            num_samples: draws that are summed up.
            rng_key: an int or a JAX key.
            store: a path to write the moments to, as a Zarr store, for results larger than memory. What was there is
                replaced.

        Returns:
            A Dataset with leading dim "moment" = ["mean", "sd"], then plates and event dims; with `store`, opened lazily.

        Example:
            >>> import numpy as np, numpyro, numpyro.distributions as dist, pavi
            >>> def model():
            ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
            ...     with numpyro.plate("item", 4):
            ...         numpyro.sample("x", dist.Normal(mu, 1))
            >>> fit = pavi.fit(model, {"x": np.array([1.0, 2.0, 2.0, 3.0])}, progress_bar=False)
            >>> bool(abs(fit.moments().sel(moment="sd")["mu"] - 0.5) < 0.05)
            True
        """
        wanted = self._wanted(sites)
        members = self._members(where)
        _check_count(num_samples)
        lead = {"moment": np.array(["mean", "sd"])}
        shapes = {site.name: (2, *_sizes(site, members), *site.display_shape) for site in wanted}
        if store is not None:
            return self._stored_moments(store, wanted, members, shapes, num_samples, rng_key)
        arrays = {name: np.zeros(shape, jnp.result_type(float)) for name, shape in shapes.items()}
        for parts in one_ahead(self._moment_tiles(wanted, members, num_samples, rng_key)):
            for name, place, fetch in parts:
                arrays[name][place] = fetch()
        return self._dataset(wanted, members, arrays, tuple(lead)).assign_coords(lead)

    def _stored_moments(
        self,
        store: str | os.PathLike,
        wanted: Sequence[Site],
        members: dict[str, np.ndarray],
        shapes: dict[str, tuple[int, ...]],
        num_samples: int,
        rng_key: Any,
    ) -> xr.Dataset:
        """Moments written to a Zarr store tile by tile while the next tile is computed; the store, opened."""
        empty = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
        layout = self._dataset(wanted, members, empty, ("moment",)).assign_coords(moment=[0, 1])
        levels = tuple(dict.fromkeys(site.level for site in wanted))
        tile = next(tiles(self.template, levels, members, num_samples, observed=False))[0]
        chunks = {
            site.name: (2, *(len(tile.indices[plate]) for plate in site.level), *site.display_shape) for site in wanted
        }
        parts = itertools.chain.from_iterable(self._moment_tiles(wanted, members, num_samples, rng_key))
        return storage.write_zarr(store, layout, chunks, parts).assign_coords(moment=["mean", "sd"])

    def _moment_tiles(
        self, wanted: Sequence[Site], members: dict[str, np.ndarray], num_samples: int, rng_key: Any
    ) -> Iterator[list[tuple[str, tuple[slice, ...], Callable[[], np.ndarray]]]]:
        """Mean and sd of each wanted site, tile by tile: (its name, where, what waits for both and fetches them)."""
        names = tuple(site.name for site in wanted)
        levels = tuple(dict.fromkeys(site.level for site in wanted))
        running: dict[str, Array] = {}
        for tile, draws, ids in tiles(self.template, levels, members, num_samples, observed=False):
            if not running:
                shapes = {site.name: (len(tile.indices[p]) for p in site.level) for site in wanted}
                running = {site.name: jnp.zeros((2, *shapes[site.name], *site.member_shape)) for site in wanted}
            counts = Counts(*map(np.int32, (draws.start, draws.stop - draws.start, num_samples)))
            inputs = self._inputs(tile), tile.indices, ids, counts, running, seed_of(rng_key)
            running = block_moments(self._study, self._family, names, *inputs)
            if draws.stop == num_samples:
                here = [site for site in wanted if counts_here(site, tile)]
                places = [(slice(None), *(tile.slices[plate] for plate in site.level)) for site in here]
                yield [
                    (site.name, place, partial(_fetched, running[site.name], place, site.display_shape))
                    for site, place in zip(here, places, strict=True)
                ]

    def elbo(self, num_samples: int = 64, rng_key: int | PRNGKeyArray = 0) -> Elbo:
        """The ELBO of the full study, a lower bound on the log evidence, with its Monte Carlo standard error.

        Example:
            >>> import numpy as np, numpyro, numpyro.distributions as dist, pavi
            >>> def model():
            ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
            ...     with numpyro.plate("item", 4):
            ...         numpyro.sample("x", dist.Normal(mu, 1))
            >>> fit = pavi.fit(model, {"x": np.array([1.0, 2.0, 2.0, 3.0])}, progress_bar=False)
            >>> bool(abs(fit.elbo().mean - -7.06) < 0.02)
            True
        """
        _check_count(num_samples)
        members = self._members(None)
        levels = tuple(dict.fromkeys(s.level for s in self.template.sites if s.kind is not Kind.DETERMINISTIC))
        total = np.zeros(num_samples)
        for tile, draws, ids in tiles(self.template, levels, members, num_samples):
            terms = score(self._study, self._family, self._inputs(tile), tile.indices, tile.counts, ids, seed_of(rng_key))
            for name, values in terms.items():
                if counts_here(self.template.site(name), tile):
                    total[draws] += np.asarray(values, np.float64)[: draws.stop - draws.start]
        return Elbo(float(total.mean()), float(total.std(ddof=1) / np.sqrt(num_samples)) if num_samples > 1 else np.inf)

    def to_datatree(self, num_samples: int = 1000, *, predict: bool = False, rng_key: int | PRNGKeyArray = 0) -> xr.DataTree:
        """Draws and data as an `xarray.DataTree` in ArviZ's layout: /posterior, /observed_data, /posterior_predictive."""
        return xr.DataTree.from_dict(self._groups(num_samples, predict, rng_key))

    def to_inference_data(self, num_samples: int = 1000, *, predict: bool = False, rng_key: int | PRNGKeyArray = 0) -> Any:
        """Draws and data as an `arviz.InferenceData`, for `az.summary` and `az.plot_*`. Needs the `arviz` extra."""
        try:
            import arviz as az
        except ImportError as error:
            raise SettingError("to_inference_data needs ArviZ: install the `arviz` extra, or use to_datatree().") from error
        groups: dict[str, Any] = self._groups(num_samples, predict, rng_key)
        return az.InferenceData(**groups)

    def _groups(self, num_samples: int, predict: bool, rng_key: int | PRNGKeyArray) -> dict[str, xr.Dataset]:
        groups = {"posterior": self.sample(num_samples, rng_key=rng_key)}
        data = self._observations.everything
        arrays = {
            site.name: np.asarray(load(data[site.name])).reshape((*self.template.sizes(site.level), *site.display_shape))
            for site in self.template.observed
        }
        groups["observed_data"] = self._dataset(self.template.observed, self._members(None), arrays, ())
        if predict:
            groups["posterior_predictive"] = self.predict(num_samples, rng_key=rng_key)
        return groups

    def _inputs(self, tile: Tile) -> tuple[Any, ...]:
        stored = stored_at(self.template, self._observations.stored, tile.indices)
        every = self._weights.rows
        hosted = {
            level: row_ops.read(rows, tuple(tile.indices[plate] for plate in level))
            for level, rows in every.items()
            if isinstance(rows, np.ndarray)
        }
        weights = self._weights._replace(rows={level: rows for level, rows in every.items() if level not in hosted})
        return weights, self._units, self._arguments, self._observations.arrays, stored, hosted

    def _centers(self, names: tuple[str, ...], indices: Mapping[str, np.ndarray]) -> np.ndarray:
        """About where the posterior centers some latents of one level, in unconstrained space, side by side."""
        tile = Tile({plate: index.astype(np.int32) for plate, index in indices.items()}, {}, {}, {})
        found = centers(self._study, self._family, names, self._inputs(tile), tile.indices, np.arange(CENTERED), seed_of(0))
        return np.concatenate([np.asarray(found[name]) for name in names], -1)

    def _wanted(self, sites: Sequence[str] | None) -> tuple[Site, ...]:
        readable = {site.name: site for site in (*self.template.latents, *self.template.deterministics)}
        if sites is None:
            return tuple(readable.values())
        names = [sites] if isinstance(sites, str) else list(sites)
        unknown = [name for name in names if name not in readable]
        if unknown:
            raise SettingError(
                f"sites={unknown}: not a latent or deterministic site of the model. Known sites: {list(readable)}. "
                "Observed sites are read with `predict`; deterministic sites that sum over a plate have no value per member."
            )
        return tuple(readable[name] for name in names)

    def _members(self, where: Where | None) -> dict[str, np.ndarray]:
        where = dict(where or {})
        unknown = [name for name in where if name not in {plate.name for plate in self.template.plates}]
        if unknown:
            known = [plate.name for plate in self.template.plates]
            raise SettingError(f"where={unknown}: the model has no such plate. Its plates: {known}.")
        members = {}
        for plate in self.template.plates:
            chosen = where.get(plate.name, slice(None))
            if isinstance(chosen, slice):
                members[plate.name] = np.arange(plate.size)[chosen]
                continue
            index = np.atleast_1d(np.asarray(chosen))
            if index.size and (index.dtype.kind not in "iu" or index.min() < -plate.size or index.max() >= plate.size):
                raise SettingError(
                    f"where={{{plate.name!r}: ...}}: expected integers from 0 to {plate.size - 1}, "
                    f"found {index.tolist()[:8]}."
                )
            members[plate.name] = np.where(index < 0, index + plate.size, index).astype(np.int64)
        return members

    def _draws(
        self, wanted: Sequence[Site], members: dict[str, np.ndarray], num_samples: int, rng_key: Any, *, predict: bool
    ) -> xr.Dataset:
        shapes = {site.name: (1, num_samples, *_sizes(site, members), *site.display_shape) for site in wanted}
        arrays: dict[str, np.ndarray] = {}
        for site, place, draws, values in self._read(wanted, members, num_samples, rng_key, predict=predict):
            if site.name not in arrays:
                arrays[site.name] = np.empty(shapes[site.name], values.dtype)
            arrays[site.name][0][(draws, *place)] = values
        empty = {name: np.empty(shape) for name, shape in shapes.items() if name not in arrays}
        return self._dataset(wanted, members, arrays | empty, ("chain", "draw"))

    def _read(
        self, wanted: Sequence[Site], members: dict[str, np.ndarray], num_samples: int, rng_key: Any, *, predict: bool
    ) -> Iterator[tuple[Site, tuple[slice, ...], slice, np.ndarray]]:
        """Values of the wanted sites block by block: (site, where in its plates, which draws, values)."""
        names = tuple(site.name for site in wanted)
        levels = tuple(dict.fromkeys(site.level for site in wanted))
        for tile, draws, ids in tiles(self.template, levels, members, num_samples, observed=predict):
            found = draw(self._study, self._family, names, predict, self._inputs(tile), tile.indices, ids, seed_of(rng_key))
            for site in wanted:
                if counts_here(site, tile):
                    place = tuple(tile.slices[plate] for plate in site.level)
                    keep = tuple(slice(s.stop - s.start) for s in (draws, *place))
                    values = np.asarray(found[site.name])[keep]
                    yield site, place, draws, values.reshape(*values.shape[: 1 + len(place)], *site.display_shape)

    def _dataset(
        self, sites: Sequence[Site], members: dict[str, np.ndarray], arrays: dict[str, np.ndarray], lead: tuple[str, ...]
    ) -> xr.Dataset:
        variables, coords = {}, {}
        labels = self._observations.coords
        for site in sites:
            dims = self._observations.event_dims.get(site.name)
            if dims is None or len(dims) != len(site.display_shape):
                dims = tuple(f"{site.name}_dim_{k}" for k in range(len(site.display_shape)))
            variables[site.name] = ((*lead, *site.level, *dims), arrays[site.name])
            for plate in site.level:
                coords[plate] = labels[plate][members[plate]] if plate in labels else members[plate]
            for dim, size in zip(dims, site.display_shape, strict=True):
                coords[dim] = labels[dim] if len(labels.get(dim, ())) == size else np.arange(size)
        if "chain" in lead:
            coords["chain"] = np.arange(1)
            coords["draw"] = np.arange(next(iter(arrays.values())).shape[1])
        return xr.Dataset(variables, coords={dim: (dim, values) for dim, values in coords.items()})


def _check_count(num_samples: int) -> None:
    if num_samples < 1:
        raise SettingError(f"num_samples={num_samples}: expected at least 1.")


def _fetched(moments: Array, place: tuple[slice, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Moments on the host: those of the members that lie at a place, of a tile whose rest only fills it up."""
    _, *plates = place
    here = np.asarray(moments)[(slice(None), *(slice(each.stop - each.start) for each in plates))]
    return here.reshape(*here.shape[: len(place)], *shape)


def _sizes(site: Site, members: Mapping[str, np.ndarray]) -> tuple[int, ...]:
    return tuple(len(members[plate]) for plate in site.level)


def seed_of(rng_key: int | PRNGKeyArray) -> np.ndarray:
    """The data of a JAX key, on the host, from an int or a key of either kind."""
    if isinstance(rng_key, int | np.integer):
        rng_key = jax.random.key(int(rng_key))
    key = jnp.asarray(rng_key)
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return np.asarray(data)
