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

from pavi.flows.networks import Columns, Entry

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


class Conditional(AbstractBijection):
    """A bijection that is shown what an `Entry` reads of the condition, after the counts of data that this begins with."""

    shape: tuple[int, ...]
    cond_shape: tuple[int, ...]
    entry: Entry
    shown: AbstractBijection
    counts: int = eqx.field(static=True)

    def __init__(self, columns: Columns, counts: int, shown: AbstractBijection):
        self.shape, self.cond_shape, self.counts = shown.shape, (columns.size + counts,), counts
        self.entry, self.shown = columns.entry(), shown

    def read(self, parts: Sequence[Float[Array, " _"]]) -> Float[Array, " readings"]:
        """What is shown of a condition that comes in parts."""
        first, *rest = parts
        readings = self.entry([first[self.counts :], *rest])
        return jnp.concatenate([first[: self.counts], readings]) if self.counts else readings

    def transform_and_log_det(self, x: Array, condition: Array | None = None) -> tuple[Array, Array]:
        assert condition is not None
        return self.shown.transform_and_log_det(x, self.read([condition]))

    def inverse_and_log_det(self, y: Array, condition: Array | None = None) -> tuple[Array, Array]:
        assert condition is not None
        return self.shown.inverse_and_log_det(y, self.read([condition]))


def enter(bijection: AbstractBijection, parts: Sequence[Float[Array, " _"]]) -> tuple[AbstractBijection, Array]:
    """A bijection and its condition, given in parts; those left out at the end are zero."""
    if isinstance(bijection, Conditional):
        return bijection.shown, bijection.read(parts)
    condition = jnp.concatenate(list(parts))
    missing = 0 if bijection.cond_shape is None else bijection.cond_shape[0] - len(condition)
    return bijection, jnp.pad(condition, (0, missing))


def push(
    bijection: AbstractBijection,
    path: Path,
    base: Float[Array, " dim"],
    parts: Sequence[Float[Array, " _"]],
    given: Sequence[Float[Array, " _"]] | None,
    log_prior: Callable[[Float[Array, " dim"]], Float[Array, ""]],
) -> tuple[Float[Array, " dim"], Float[Array, ""]]:
    """Pushes one draw of the prior through a flow: the value and its log q, both in unconstrained space (`eq:q_full`).

    Args:
        parts: the condition.
        given: the same as it depends on draws alone and not on weights; None if it does not depend on any.
    """
    shown, condition = enter(bijection, parts)
    value, log_det = shown.transform_and_log_det(base, condition)
    if path is Path.NONE or _WITHOUT_PATHS.get():
        return value, log_prior(base) - log_det
    frozen = jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf) if eqx.is_inexact_array(leaf) else leaf, bijection)
    shown, condition = enter(frozen, jax.lax.stop_gradient(list(parts)) if given is None else given)
    if path is Path.INVERSE:
        # Gradients come from the inverse, values from the draw: a narrow posterior's inverse loses its digits to rounding.
        base_of_value, inverse_log_det = shown.inverse_and_log_det(value, condition)
        return value, log_prior(_at(base, base_of_value)) + _at(-log_det, inverse_log_det)
    point, there, log_det = jax.lax.stop_gradient((base, condition, log_det))
    by_value, by_condition = _density_gradient(shown, point, there, log_prior)
    log_q = log_prior(point) - log_det + jnp.dot(by_value, value - jax.lax.stop_gradient(value))
    return value, log_q if given is None else log_q + jnp.dot(by_condition, condition - there)


def _at(value: Array, slope: Array) -> Array:
    """A value with the gradient of another expression of it."""
    return slope + jax.lax.stop_gradient(value - slope)


def _density_gradient(
    frozen: AbstractBijection, base: Array, condition: Array, log_prior: Callable[[Array], Array]
) -> tuple[Float[Array, " dim"], Float[Array, " condition"]]:
    """Gradients of log q(value | condition) by value and by condition, at the value that `base` is pushed to.

    With J = dF/du and h(u) = log prior(u) - log |J|: d log q / dvalue = J^-T dh/du, and along the condition c, where u moves
    so that the value stays, d log q / dc = dh/dc - (dF/dc)^T (d log q / dvalue).
    """
    dim = base.shape[0]
    _, pull_back = jax.vjp(frozen.transform_and_log_det, base, condition)
    cotangents = (jnp.eye(dim + 1, dim), jnp.zeros(dim + 1).at[dim].set(1.0))
    by_base, by_condition = jax.vmap(pull_back)(cotangents)
    slope = jax.grad(log_prior)(base) - by_base[dim]
    by_value = solve_lower(by_base[:dim].T[::-1, ::-1], slope[::-1])[::-1]
    return jax.lax.stop_gradient((by_value, -by_condition[dim] - by_value @ by_condition[:dim]))


def solve_lower(lower: Float[Array, "dim dim"], target: Float[Array, " dim"]) -> Float[Array, " dim"]:
    """Solves `lower @ x = target` by forward substitution, unrolled: for the small dimensions of one member."""
    solution: list[Array] = []
    for i in range(target.shape[0]):
        known = sum((lower[i, j] * solution[j] for j in range(i)), start=jnp.zeros((), target.dtype))
        solution.append((target[i] - known) / lower[i, i])
    return jnp.stack(solution)
