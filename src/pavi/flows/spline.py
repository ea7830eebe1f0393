"""The spline flow: an autoregressive rational-quadratic spline, then a triangular affine block."""

from __future__ import annotations

import dataclasses

import equinox as eqx
import flowjax.bijections as bij
import numpy as np
from flowjax.utils import get_ravelled_pytree_constructor
from jaxtyping import Array

from pavi.errors import SettingError
from pavi.flows.affine import LARGEST_TRIANGLE, ConditionalAffine
from pavi.flows.base import LARGEST_JACOBIAN, Conditional, Flow, Path
from pavi.flows.maf import Autoregressive
from pavi.flows.networks import Columns


@dataclasses.dataclass(frozen=True)
class Spline(Flow):
    """A monotone rational-quadratic spline per dimension, then a triangular affine block: skewed or many-peaked shapes.

    Args:
        hidden: widths of the masked network's hidden layers.
        knots: pieces of the spline.
        interval: the spline bends inside (-interval, interval), in units of the prior's spread, and is straight outside.
        path_gradients: as in `pavi.MAF`.

    Example:
        >>> import pavi
        >>> family = pavi.PAVI(flow={"theta": pavi.Spline(knots=12), ...: pavi.MAF()})
    """

    hidden: tuple[int, ...] = (32, 32)
    knots: int = 8
    interval: float = 4.0
    path_gradients: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        if not self.hidden or self.knots < 2 or self.interval <= 0:
            raise SettingError(f"{self}: expected a hidden layer, at least 2 knots and a positive interval.")

    def build(self, rng: np.random.Generator, dim: int, cond_dim: int, counts: int = 0) -> bij.AbstractBijection:
        num_parameters = 3 * self.knots + 4  # widths, heights and slopes
        columns = Columns(cond_dim - counts, counts)
        layer = Autoregressive(rng, self._spline, num_parameters, dim, columns, self.hidden)
        affine = ConditionalAffine(rng, dim, columns, (), triangular=dim <= LARGEST_TRIANGLE, counts=counts)
        return Conditional(columns, counts, bij.Chain([layer, affine]))

    def _spline(self, parameters: Array) -> bij.AbstractBijection:
        """A spline from unconstrained parameters; all zero is the identity."""
        build, _ = get_ravelled_pytree_constructor(
            bij.RationalQuadraticSpline(knots=self.knots, interval=self.interval), eqx.is_inexact_array
        )
        return build(parameters)

    def path(self, dim: int) -> Path:
        return Path.TRIANGULAR if self.path_gradients and dim <= LARGEST_JACOBIAN else Path.NONE
