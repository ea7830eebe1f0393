"""The affine flow: location and scale regressed from the condition."""

from __future__ import annotations

import dataclasses
from typing import Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from flowjax.bijections import AbstractBijection
from jaxtyping import Array

from pavi.errors import SettingError
from pavi.flows.base import Conditioner, Flow, Path, solve_lower

# The posterior starts this much narrower than the prior, so that early draws stay near each other.
INITIAL_SCALE = 0.1
# A triangular scale has about dim^2 / 2 entries to regress; above this dimension the default is diagonal.
LARGEST_TRIANGLE = 32


class ConditionalAffine(AbstractBijection):
    """z = shift + diag(scale) T u, with T unit lower triangular (the identity where `triangular` is false)."""

    shape: tuple[int, ...]
    cond_shape: tuple[int, ...]
    conditioner: Conditioner
    triangular: bool = eqx.field(static=True)

    def __init__(self, rng: np.random.Generator, dim: int, cond_dim: int, hidden: tuple[int, ...], triangular: bool):
        self.shape, self.cond_shape = (dim,), (cond_dim,)
        self.triangular = triangular and dim > 1
        below = dim * (dim - 1) // 2 if self.triangular else 0
        # The condition moves the location from the start; scales and slopes learn to depend on it.
        weight = np.zeros((cond_dim, 2 * dim + below))
        weight[:, :dim] = rng.normal(size=(cond_dim, dim)) / np.sqrt(max(cond_dim, 1))
        bias = np.zeros(2 * dim + below)
        bias[dim : 2 * dim] = np.log(INITIAL_SCALE)
        self.conditioner = Conditioner(rng, weight, bias, hidden)

    def _parameters(self, condition: Array) -> tuple[Array, Array, Array | None]:
        dim = self.shape[0]
        out = self.conditioner(condition)
        slopes = None
        if self.triangular:
            slopes = jnp.zeros((dim, dim)).at[np.tril_indices(dim, -1)].set(out[2 * dim :])
        return out[:dim], out[dim : 2 * dim], slopes

    def transform_and_log_det(self, x: Array, condition: Array | None = None) -> tuple[Array, Array]:
        assert condition is not None
        shift, log_scale, slopes = self._parameters(condition)
        mixed = x if slopes is None else x + slopes @ x
        return shift + jnp.exp(log_scale) * mixed, log_scale.sum()

    def inverse_and_log_det(self, y: Array, condition: Array | None = None) -> tuple[Array, Array]:
        assert condition is not None
        shift, log_scale, slopes = self._parameters(condition)
        mixed = (y - shift) * jnp.exp(-log_scale)
        return mixed if slopes is None else solve_lower(jnp.eye(len(y)) + slopes, mixed), -log_scale.sum()


@dataclasses.dataclass(frozen=True)
class Affine(Flow):
    """Location and scale regressed from the encoding and the given values.

    Exact wherever the posterior of a site is the prior stretched and shifted, as in linear Gaussian models.

    Args:
        scale: "diag" for one scale per dimension, "tril" for a lower-triangular scale matrix.
        hidden: widths of the regressor's hidden layers, beside its linear part; `()` for the linear part alone.

    Example:
        >>> import pavi
        >>> family = pavi.PAVI(flow=pavi.Affine(scale="tril", hidden=(32,)))
    """

    scale: Literal["diag", "tril"] = "diag"
    hidden: tuple[int, ...] = (32, 32)

    def __post_init__(self) -> None:
        if self.scale not in ("diag", "tril"):
            raise SettingError(f"Affine(scale={self.scale!r}): expected 'diag' or 'tril'.")
        object.__setattr__(self, "hidden", tuple(self.hidden))

    def build(self, rng: np.random.Generator, dim: int, cond_dim: int) -> AbstractBijection:
        return ConditionalAffine(rng, dim, cond_dim, self.hidden, self.scale == "tril")

    def path(self, dim: int) -> Path:
        return Path.INVERSE if self.scale == "diag" or dim <= LARGEST_TRIANGLE else Path.NONE
