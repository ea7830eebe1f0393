"""The affine flow: location and scale regressed from the condition."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flowjax.bijections import AbstractBijection
from jaxtyping import Array, Float

from pavi.errors import SettingError
from pavi.flows.base import Conditional, Flow, Path, solve_lower
from pavi.flows.networks import Columns, Readout, as_weight

# The posterior starts this much narrower than the prior, so that early draws stay near each other.
INITIAL_SCALE = 0.1
# The rest learns to depend on the condition this much more slowly than the offset does: it usually depends on it little,
# and every weight adds jitter.
GAIN = 0.25
# How fast the dependence on counts of data is learned, and the count at which the posterior starts at its initial scale.
COUNT_GAIN = 0.1
USUAL_COUNT = 8.0
# A triangular scale has about dim^2 / 2 entries to regress; above this dimension the default is diagonal.
LARGEST_TRIANGLE = 32


class ConditionalAffine(AbstractBijection):
    """z = center + gate * offset + scale * T (u - center), with T unit lower triangular, all regressed from the condition.

    The gate, between 0 and 1, is how much the data say: scale = sqrt(1 - gate) * exp(gate * stretch). With a gate of zero
    the prior passes through untouched, whatever its parents; with a gate of one it is forgotten. In a normal model with
    unknown spread tau the exact posterior has this form with a gate that is a sigmoid of log tau, so it is in the family
    from tau = 0 (all members alike) to tau = infinity (all on their own), which a plain shift and scale is not.
    """

    shape: tuple[int, ...]
    cond_shape: tuple[int, ...] | None
    readout: Readout
    slopes_on_counts: Float[Array | np.ndarray, "count dim"] | None
    triangular: bool = eqx.field(static=True)

    def __init__(
        self,
        rng: np.random.Generator,
        dim: int,
        columns: Columns,
        hidden: tuple[int, ...],
        triangular: bool,
        counts: int = 0,
    ):
        self.shape, self.cond_shape = (dim,), None  # readings, of which other blocks may have some
        self.slopes_on_counts = as_weight(np.zeros((counts, dim))) if counts else None
        self.triangular = triangular and dim > 1
        size = 4 * dim + (dim * (dim - 1) // 2 if self.triangular else 0)
        # The condition moves the offset from the start.
        weight = np.zeros((columns.size, size))
        weight[:, :dim] = rng.normal(size=(columns.size, dim)) * np.sqrt(8) / max(columns.size, 8)
        bias = np.zeros(size)
        bias[dim : 2 * dim] = np.log(1 / INITIAL_SCALE**2 - 1)
        self.readout = Readout(rng, columns, weight, bias, hidden, (1.0,) * dim + (GAIN,) * (size - dim))

    def _parameters(self, condition: Array) -> tuple[Array, Array, Array, Array | None]:
        """Center, gated offset, log scale, and the part of T below the diagonal."""
        dim = self.shape[0]
        out = self.readout(condition)
        offset, logit, stretch, center = out[:dim], out[dim : 2 * dim], out[2 * dim : 3 * dim], out[3 * dim : 4 * dim]
        if self.slopes_on_counts is not None:
            # With n data, posteriors narrow by the square root of n: the logit rises with log n, give or take.
            logs = condition[: len(self.slopes_on_counts)]
            logit = logit + logs[-1] - np.log(USUAL_COUNT) + COUNT_GAIN * logs @ self.slopes_on_counts
        gate = jax.nn.sigmoid(logit)
        log_scale = 0.5 * jax.nn.log_sigmoid(-logit) + gate * stretch
        slopes = None
        if self.triangular:
            slopes = jnp.zeros((dim, dim)).at[np.tril_indices(dim, -1)].set(out[4 * dim :])
        return center, gate * offset, log_scale, slopes

    def transform_and_log_det(self, x: Array, condition: Array | None = None) -> tuple[Array, Array]:
        assert condition is not None
        center, shift, log_scale, slopes = self._parameters(condition)
        mixed = x - center
        if slopes is not None:
            mixed = mixed + slopes @ mixed
        return center + shift + jnp.exp(log_scale) * mixed, log_scale.sum()

    def inverse_and_log_det(self, y: Array, condition: Array | None = None) -> tuple[Array, Array]:
        assert condition is not None
        center, shift, log_scale, slopes = self._parameters(condition)
        mixed = (y - center - shift) * jnp.exp(-log_scale)
        if slopes is not None:
            mixed = solve_lower(jnp.eye(len(y)) + slopes, mixed)
        return center + mixed, -log_scale.sum()


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

    scale: str = "diag"
    hidden: tuple[int, ...] = (32, 32)

    def __post_init__(self) -> None:
        if self.scale not in ("diag", "tril"):
            raise SettingError(f"Affine(scale={self.scale!r}): expected 'diag' or 'tril'.")
        object.__setattr__(self, "hidden", tuple(self.hidden))

    def build(self, rng: np.random.Generator, dim: int, cond_dim: int, counts: int = 0) -> AbstractBijection:
        columns = Columns(cond_dim - counts, counts)
        return Conditional(columns, counts, ConditionalAffine(rng, dim, columns, self.hidden, self.scale == "tril", counts))

    def path(self, dim: int) -> Path:
        return Path.INVERSE if self.scale == "diag" or dim <= LARGEST_TRIANGLE else Path.NONE
