"""The paper's default flow: a triangular affine block, then a masked autoregressive layer."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import equinox as eqx
import flowjax.bijections as bij
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pavi.errors import SettingError
from pavi.flows.affine import LARGEST_TRIANGLE, ConditionalAffine
from pavi.flows.base import LARGEST_JACOBIAN, Conditional, Flow, Path
from pavi.flows.networks import Columns, Linear, Perceptron, as_weight

OPEN = -3.0  # logit of a gate at the start: the layer comes in once it has something to add


class LogAffine(bij.AbstractBijection):
    """y = exp(log_scale) x + shift, for one number."""

    shape: tuple[int, ...]
    cond_shape: tuple[int, ...] | None
    parameters: Float[Array, " 2"]

    def __init__(self, parameters: Float[Array, " 2"]):
        self.shape, self.cond_shape, self.parameters = (), None, parameters

    def transform_and_log_det(self, x: Array, condition: Array | None = None) -> tuple[Array, Array]:
        shift, log_scale = self.parameters
        return jnp.exp(log_scale) * x + shift, log_scale

    def inverse_and_log_det(self, y: Array, condition: Array | None = None) -> tuple[Array, Array]:
        shift, log_scale = self.parameters
        return jnp.exp(-log_scale) * (y - shift), -log_scale


class Autoregressive(bij.AbstractBijection):
    """y_i = transformer(x_i; parameters from x_1..x_{i-1} and the condition), in one pass.

    FlowJAX's `MaskedAutoregressive`, with any hidden widths, starting weights drawn on the host (building FlowJAX's own
    costs seconds of compilation), and a gate: the parameters are multiplied by a sigmoid of the condition, so that the
    layer can step aside where the prior is narrow and any push would be too much. All-zero parameters are the identity.
    """

    shape: tuple[int, ...]
    cond_shape: tuple[int, ...] | None
    first: Linear
    network: Perceptron
    gate_bias: Float[Array | np.ndarray, " dim"]
    transformer: Callable[..., bij.AbstractBijection] = eqx.field(static=True)
    starts: tuple[int, int] = eqx.field(static=True)
    """Where the readings of the network's first layer and of the gate begin."""

    def __init__(
        self,
        rng: np.random.Generator,
        transformer: Callable[..., bij.AbstractBijection],
        num_parameters: int,
        dim: int,
        columns: Columns,
        hidden: tuple[int, ...],
    ):
        self.shape, self.cond_shape, self.transformer = (dim,), None, transformer
        # An input of rank r may reach outputs of rank above r; the condition has rank -1 and reaches all.
        ranks = [
            np.concatenate([np.arange(dim), np.full(columns.size, -1)]),
            *[np.arange(width) % dim - 1 for width in hidden],
            np.repeat(np.arange(dim), num_parameters),
        ]
        masks = [a[:, None] <= b for a, b in itertools.pairwise(ranks[:-1])]
        masks.append(ranks[-2][:, None] < ranks[-1])
        whole = Perceptron(rng, [len(rank) for rank in ranks], masks)
        weight, bias = whole.layers[0].weight, whole.layers[0].bias
        self.first = Linear(weight[:dim], bias, masks[0][:dim])
        self.network = eqx.tree_at(lambda network: network.layers, whole, whole.layers[1:])
        self.starts = columns.add(np.asarray(weight[dim:])), columns.add(np.zeros((columns.size, dim)))
        self.gate_bias = as_weight(np.full(dim, OPEN))

    def _parameters(self, x: Array, condition: Array | None) -> Array:
        assert condition is not None
        inner, gate = self.starts
        hidden = jax.nn.relu(self.first(x) + condition[inner : inner + len(self.first.bias)])
        parameters = self.network(hidden).reshape(self.shape[0], -1)
        return jax.nn.sigmoid(condition[gate : gate + len(self.gate_bias)] + self.gate_bias)[:, None] * parameters

    def transform_and_log_det(self, x: Array, condition: Array | None = None) -> tuple[Array, Array]:
        parameters = self._parameters(x, condition)
        y, log_dets = jax.vmap(lambda p, x: self.transformer(p).transform_and_log_det(x))(parameters, x)
        return y, log_dets.sum()

    def inverse_and_log_det(self, y: Array, condition: Array | None = None) -> tuple[Array, Array]:
        def refine(_: Array, x: Array) -> Array:  # each round fixes one more coordinate
            return jax.vmap(lambda p, y: self.transformer(p).inverse(y))(self._parameters(x, condition), y)

        x = jax.lax.fori_loop(0, self.shape[0], refine, y)
        return x, -self.transform_and_log_det(x, condition)[1]


@dataclasses.dataclass(frozen=True)
class MAF(Flow):
    """Triangular affine block, then a masked autoregressive layer in its one-pass direction; the default flow.

    Args:
        hidden: widths of the masked network's hidden layers.
        path_gradients: remove the noise that vanishes at an exact optimum from gradients (see `pavi.flows.base`), up to
            dimension 8. The cost grows with the dimension: leave it off for posteriors that no flow fits exactly.

    Example:
        >>> import pavi
        >>> family = pavi.PAVI(flow=pavi.MAF(hidden=(64, 64)))
    """

    hidden: tuple[int, ...] = (32, 32)
    path_gradients: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        if not self.hidden or min(self.hidden) < 1:
            raise SettingError(f"MAF(hidden={self.hidden}): expected at least one hidden width, each at least 1.")

    def build(self, rng: np.random.Generator, dim: int, cond_dim: int, counts: int = 0) -> bij.AbstractBijection:
        columns = Columns(cond_dim - counts, counts)
        affine = ConditionalAffine(rng, dim, columns, (), triangular=dim <= LARGEST_TRIANGLE, counts=counts)
        layer = Autoregressive(rng, LogAffine, 2, dim, columns, self.hidden)
        return Conditional(columns, counts, bij.Chain([affine, layer]))

    def path(self, dim: int) -> Path:
        return Path.TRIANGULAR if self.path_gradients and dim <= LARGEST_JACOBIAN else Path.NONE
