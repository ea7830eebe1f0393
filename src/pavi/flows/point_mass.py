"""The paper's MAP regressor: a single value instead of a distribution."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from flowjax.bijections import AbstractBijection
from jaxtyping import Array

from pavi.flows.base import Conditional, Flow
from pavi.flows.networks import Columns, Readout


class Regressor(AbstractBijection):
    """Sends every base draw to one value regressed from the condition. Not invertible: it has no density."""

    shape: tuple[int, ...]
    cond_shape: tuple[int, ...] | None
    readout: Readout

    def transform_and_log_det(self, x: Array, condition: Array | None = None) -> tuple[Array, Array]:
        assert condition is not None
        return self.readout(condition), jnp.zeros(())

    def inverse_and_log_det(self, y: Array, condition: Array | None = None) -> tuple[Array, Array]:
        raise TypeError("A point mass has no inverse.")


@dataclasses.dataclass(frozen=True)
class PointMass(Flow):
    """One best value (maximum a posteriori, in the site's own space) regressed from the encoding.

    Cheap, for sites whose uncertainty does not matter. It counts as zero in log q, so an ELBO with point masses in it
    is no bound on the evidence.

    Args:
        hidden: widths of the regressor's hidden layers, beside its linear part.

    Example:
        >>> import pavi
        >>> family = pavi.PAVI(flow={"sigma": pavi.PointMass(), ...: pavi.MAF()})
    """

    hidden: tuple[int, ...] = (32, 32)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))

    def build(self, rng: np.random.Generator, dim: int, cond_dim: int, counts: int = 0) -> AbstractBijection:
        columns = Columns(cond_dim - counts, counts)
        weight = rng.normal(size=(columns.size, dim)) / np.sqrt(max(columns.size, 1))
        readout = Readout(rng, columns, weight, np.zeros(dim), self.hidden)
        return Conditional(columns, counts, Regressor((dim,), None, readout))
