"""Distributions whose density, averaged over some of their parameters, is again that of one of their kind.

With finitely many values, or finitely many components, averaging acts on the chances alone. What would have to be evaluated
once for every point is then evaluated once in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array

Mean = Callable[[Array], Array]
# The smallest chance whose logarithm is taken.
SMALLEST = 1e-37
_BERNOULLI = (dist.BernoulliLogits, dist.BernoulliProbs)
_CATEGORICAL = (dist.CategoricalLogits, dist.CategoricalProbs)


@runtime_checkable
class Averageable(Protocol):
    """A distribution that can say what it is on average over logits; its other parameters are the same in all points."""

    def averaged(self, mean: Mean) -> dist.Distribution: ...


def averages(fn: dist.Distribution) -> bool:
    """Whether there is such a distribution for one like this."""
    if math.prod(fn.batch_shape) != 1:  # a product of densities has no simple mean
        return False
    if isinstance(fn, dist.ExpandedDistribution):
        return averages(fn.base_dist)
    return isinstance(fn, (Averageable, *_BERNOULLI, *_CATEGORICAL))


def averaged(fn: dist.Distribution, mean: Mean) -> dist.Distribution:
    """The distribution whose density is the mean of `fn`'s over points, for one that `averages`.

    Args:
        mean: takes the mean of an array over the points.
    """
    if isinstance(fn, dist.ExpandedDistribution):
        return averaged(fn.base_dist, mean).expand(fn.batch_shape)
    if isinstance(fn, Averageable):
        return fn.averaged(mean)
    if isinstance(fn, _BERNOULLI):
        heads, tails = (mean(jax.nn.sigmoid(sign * fn.logits)) for sign in (1, -1))
        return dist.BernoulliLogits(_log(heads) - _log(tails))
    assert isinstance(fn, _CATEGORICAL)
    return dist.CategoricalLogits(log_mean_softmax(fn.logits, mean))


def log_mean_softmax(logits: Array, mean: Mean) -> Array:
    """Logits of the mean of chances."""
    return _log(mean(jax.nn.softmax(logits)))


def _log(chance: Array) -> Array:
    return jnp.log(jnp.maximum(chance, SMALLEST))
