"""What a flow is, and how a draw is pushed through one.

A *flow* is described by a small frozen record (`Flow`) and built into a FlowJAX bijection for a site of some
dimension, conditional on a vector: the member's encoding followed by the values the site is given. Sampling is the
bijection's `transform` direction, one pass for every flow here; the log-density comes with the sample.

**Path gradients.** The ELBO's gradient has a part that goes through the sampled value and a part that goes through
the density's own weights. The second has mean zero but not variance zero ("sticking the landing", Roeder et al.
2017). So the density is evaluated with its weights held constant, at the sampled value. That needs the inverse of
the flow; where it has no cheap one (a masked autoregressive layer), the gradient of its density is had from the
triangular Jacobian at the known base point instead. At the optimum of an exact family the gradient then has no noise.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flowjax.bijections import AbstractBijection
from jaxtyping import Array, Float

# Above this dimension the Jacobian of an autoregressive flow costs more than the noise it removes.
LARGEST_JACOBIAN = 8


_WITHOUT_PATHS = ContextVar("without_paths", default=False)


@contextmanager
def without_paths() -> Iterator[None]:
    """Within, densities are traced without path gradients: where no gradient will be asked for, or the full one is."""
    token = _WITHOUT_PATHS.set(True)
    try:
        yield
    finally:
        _WITHOUT_PATHS.reset(token)


class Path(Enum):
    """How a flow's density can be evaluated at a sample with its weights held constant."""

    INVERSE = "by the flow's closed-form inverse"
    TRIANGULAR = "by solving with its triangular Jacobian"
    NONE = "not cheaply: the gradient goes through the weights too"


@dataclasses.dataclass(frozen=True)
class Flow:
    """A recipe for a site's flow. Subclass it, frozen, to bring your own."""

    @abstractmethod
    def build(self, rng: np.random.Generator, dim: int, cond_dim: int, counts: int = 0) -> AbstractBijection:
        """The bijection of a `dim`-vector given a `cond_dim`-vector.

        The first `counts` numbers of the condition are logarithms of how many data there are. They tell how narrow a
        posterior is, not where it lies, and studies may be larger than any seen in training: so let them reach scales only.
        Starting weights are best drawn with `rng`, on the host, where nothing has to compile.
        """

    def path(self, dim: int) -> Path:
        """Which path-gradient estimator this flow allows at dimension `dim`."""
        del dim
        return Path.NONE


def push(
    bijection: AbstractBijection,
    path: Path,
    base: Float[Array, " dim"],
    encoding: Float[Array, " encoding"],
    conditions: tuple[Float[Array, " given"], Float[Array, " given"]],
    log_prior: Callable[[Float[Array, " dim"]], Float[Array, ""]],
) -> tuple[Float[Array, " dim"], Float[Array, ""]]:
    """Pushes one draw of the prior through a flow: the value and its log q, both in unconstrained space (`eq:q_full`).

    `conditions` are the given values, twice: once as they depend on the draws and the weights, once on the draws alone.
    """
    moving, given = conditions
    value, log_det = bijection.transform_and_log_det(base, jnp.concatenate([encoding, moving]))
    if path is Path.NONE or _WITHOUT_PATHS.get():
        return value, log_prior(base) - log_det
    frozen = jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf) if eqx.is_inexact_array(leaf) else leaf, bijection)
    encoding = jax.lax.stop_gradient(encoding)
    if path is Path.INVERSE:
        # Gradients come from the inverse, values from the draw: a narrow posterior's inverse loses its digits to rounding.
        base_of_value, inverse_log_det = frozen.inverse_and_log_det(value, jnp.concatenate([encoding, given]))
        return value, log_prior(_at(base, base_of_value)) + _at(-log_det, inverse_log_det)
    point, given_point, log_det = jax.lax.stop_gradient((base, given, log_det))
    by_value, by_given = _density_gradient(frozen, point, encoding, given_point, log_prior)
    log_q = log_prior(point) - log_det
    log_q += jnp.dot(by_value, value - jax.lax.stop_gradient(value)) + jnp.dot(by_given, given - given_point)
    return value, log_q


def _at(value: Array, slope: Array) -> Array:
    """A value with the gradient of another expression of it."""
    return slope + jax.lax.stop_gradient(value - slope)


def _density_gradient(
    frozen: AbstractBijection, base: Array, encoding: Array, given: Array, log_prior: Callable[[Array], Array]
) -> tuple[Float[Array, " dim"], Float[Array, " given"]]:
    """Gradients of log q(value | given) by value and by given, at the value that `base` is pushed to.

    With J = dF/du and h(u) = log prior(u) - log |J|: d log q / dvalue = J^-T dh/du, and along `given`, where u moves
    so that the value stays, d log q / dgiven = dh/dgiven - (dF/dgiven)^T (d log q / dvalue).
    """

    def transform(base: Array, given: Array) -> tuple[Array, Array]:
        return frozen.transform_and_log_det(base, jnp.concatenate([encoding, given]))

    dim = base.shape[0]
    _, pull_back = jax.vjp(transform, base, given)
    cotangents = (jnp.eye(dim + 1, dim), jnp.zeros(dim + 1).at[dim].set(1.0))
    by_base, by_given = jax.vmap(pull_back)(cotangents)
    slope = jax.grad(log_prior)(base) - by_base[dim]
    by_value = solve_lower(by_base[:dim].T[::-1, ::-1], slope[::-1])[::-1]
    return jax.lax.stop_gradient((by_value, -by_given[dim] - by_value @ by_given[:dim]))


def solve_lower(lower: Float[Array, "dim dim"], target: Float[Array, " dim"]) -> Float[Array, " dim"]:
    """Solves `lower @ x = target` by forward substitution, unrolled: for the small dimensions of one member."""
    solution: list[Array] = []
    for i in range(target.shape[0]):
        known = sum((lower[i, j] * solution[j] for j in range(i)), start=jnp.zeros((), target.dtype))
        solution.append((target[i] - known) / lower[i, i])
    return jnp.stack(solution)


class Linear(eqx.Module):
    """gain * (x @ weight) + bias, with a fixed 0-1 mask on the weight where one is given.

    The gain, fixed per output, sets how fast the output learns to depend on x against how fast it moves as a whole.
    """

    weight: Float[Array | np.ndarray, "in out"]
    bias: Float[Array | np.ndarray, " out"]
    mask: np.ndarray | None = None
    gain: tuple[float, ...] | None = eqx.field(static=True, default=None)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        weight = self.weight if self.mask is None else jnp.where(self.mask, self.weight, 0.0)
        product = x @ weight
        return product + self.bias if self.gain is None else product * np.array(self.gain, product.dtype) + self.bias


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


class Conditioner(eqx.Module):
    """A linear map of the condition plus a perceptron of it.

    The linear part alone makes Gaussian posteriors exact; the perceptron adds what is not linear.
    """

    linear: Linear
    perceptron: Perceptron | None

    def __init__(
        self,
        rng: np.random.Generator,
        weight: np.ndarray,
        bias: np.ndarray,
        hidden: Sequence[int],
        gain: tuple[float, ...] | None = None,
    ):
        self.linear = Linear(as_weight(weight), as_weight(bias), gain=gain)
        self.perceptron = Perceptron(rng, [weight.shape[0], *hidden, weight.shape[1]]) if hidden else None

    def __call__(self, condition: Float[Array, " in"]) -> Float[Array, " out"]:
        out = self.linear(condition)
        return out if self.perceptron is None else out + self.perceptron(condition)


def as_weight(array: np.ndarray) -> np.ndarray:
    return array.astype(jnp.result_type(float))
