"""The networks of flows: perceptrons, and what they read of a flow's condition.

**Parts.** The condition is what a flow is told of one member: its encoding, and the values it is given. Little of it is the
member's own in every draw: a value from outside of a plate is that of all members, an encoding is that of all draws. So the
condition comes in parts, one per level, and all that a flow's networks read of it is one product of each part with a matrix
(`Entry`), whose results are added up. `vmap` computes once what has no axis: the product with a part is made once for all
members and draws that share it, and its gradients are summed over these before they are multiplied.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def as_weight(array: np.ndarray) -> np.ndarray:
    return array.astype(jnp.result_type(float))


class Linear(eqx.Module):
    """x @ weight + bias, with a fixed 0-1 mask on the weight where one is given."""

    weight: Float[Array | np.ndarray, "in out"]
    bias: Float[Array | np.ndarray, " out"]
    mask: np.ndarray | None = None

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        weight = self.weight if self.mask is None else jnp.where(self.mask, self.weight, 0.0)
        return x @ weight + self.bias


class Perceptron(eqx.Module):
    """Linear layers with rectifiers between them; the last one starts at zero, so the output does, unless `open`."""

    layers: tuple[Linear, ...]

    def __init__(
        self, rng: np.random.Generator, sizes: Sequence[int], masks: Sequence[np.ndarray] | None = None, open: bool = False
    ):
        layers = []
        for k, (n, m) in enumerate(itertools.pairwise(sizes)):
            mask = None if masks is None else masks[k]
            fan_in = max(n, 1) if mask is None else np.maximum(mask.sum(0), 1)
            last = k == len(sizes) - 2 and not open
            weight = np.zeros((n, m)) if last else rng.normal(size=(n, m)) * np.sqrt(2 / fan_in)
            layers.append(Linear(as_weight(weight), as_weight(np.zeros(m)), mask))
        self.layers = tuple(layers)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


class Entry(eqx.Module):
    """Readings of a condition: the sum of its parts, each times its rows of a matrix. Parts left out at the end are zero.

    A gain, fixed per reading, sets how fast it learns to depend on the condition, against how fast its bias moves.
    """

    weights: tuple[Float[Array | np.ndarray, "in _"], ...]
    """A matrix for each network that reads."""
    gains: tuple[tuple[float, ...], ...] = eqx.field(static=True)

    def __call__(self, parts: Sequence[Float[Array, " _"]]) -> Float[Array, " out"]:
        return jnp.concatenate(
            [_product(parts, w * np.array(g, w.dtype)) for w, g in zip(self.weights, self.gains, strict=True)]
        )


def _product(parts: Sequence[Float[Array, " _"]], weight: Float[Array | np.ndarray, "in out"]) -> Float[Array, " out"]:
    product, row = jnp.zeros(weight.shape[1], weight.dtype), 0
    for part in parts:
        if len(part):
            product = product + part @ weight[row : row + len(part)]
        row += len(part)
    return product


class Columns:
    """Collects what the networks of a flow will read of its condition, one network after the other.

    Args:
        size: numbers of the condition.
        first: where readings begin in the vector that networks are shown.
    """

    def __init__(self, size: int, first: int = 0):
        self.size = size
        self._end = first
        self._weights: list[np.ndarray] = []
        self._gains: list[np.ndarray] = []

    def add(self, weight: np.ndarray, gain: Sequence[float] | float = 1.0) -> int:
        """Columns of the matrix, and their gains. Returns where their readings begin."""
        start, width = self._end, weight.shape[1]
        self._weights.append(weight)
        self._gains.append(np.broadcast_to(gain, width))
        self._end += width
        return start

    def entry(self) -> Entry:
        return Entry(tuple(map(as_weight, self._weights)), tuple(tuple(g.tolist()) for g in self._gains))


class Readout(eqx.Module):
    """A vector made of readings: some of them as they are, plus a perceptron of others.

    So it is a linear map of the condition plus a perceptron of it: the linear part alone makes Gaussian posteriors exact,
    the perceptron adds what is not linear.
    """

    bias: Float[Array | np.ndarray, " out"]
    inner_bias: Float[Array | np.ndarray, " inner"] | None
    perceptron: Perceptron | None
    start: int = eqx.field(static=True)

    def __init__(
        self,
        rng: np.random.Generator,
        columns: Columns,
        weight: np.ndarray,
        bias: np.ndarray,
        hidden: Sequence[int],
        gain: Sequence[float] | float = 1.0,
    ):
        self.start, self.bias, self.inner_bias, self.perceptron = columns.add(weight, gain), as_weight(bias), None, None
        if hidden:
            columns.add(rng.normal(size=(columns.size, hidden[0])) * np.sqrt(2 / max(columns.size, 1)))
            self.inner_bias = as_weight(np.zeros(hidden[0]))
            self.perceptron = Perceptron(rng, [*hidden, len(bias)])

    def __call__(self, readings: Float[Array, " _"]) -> Float[Array, " out"]:
        inner = 0 if self.inner_bias is None else len(self.inner_bias)
        rest = len(readings) - self.start - len(self.bias) - inner
        _, out, hidden, _ = jax.lax.split(readings, (self.start, len(self.bias), inner, rest))
        out = out + self.bias
        if self.perceptron is None or self.inner_bias is None:
            return out
        return out + self.perceptron(jax.nn.relu(hidden + self.inner_bias))


class Conditioner(eqx.Module):
    """A linear map of a condition plus a perceptron of it."""

    entry: Entry
    readout: Readout

    def __init__(self, rng: np.random.Generator, weight: np.ndarray, bias: np.ndarray, hidden: Sequence[int]):
        columns = Columns(weight.shape[0])
        self.readout = Readout(rng, columns, weight, bias, hidden)
        self.entry = columns.entry()

    def __call__(self, condition: Float[Array, " in"]) -> Float[Array, " out"]:
        return self.readout(self.entry([condition]))
