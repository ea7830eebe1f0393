"""A site's conditional prior for one member: draws, points and densities in unconstrained space."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float, PRNGKeyArray
from numpyro.distributions import constraints
from numpyro.distributions.transforms import ExpTransform, Transform, biject_to

from pavi.errors import SettingError

# Draws whose mean stands for the center of a prior that has no simple one.
CENTER_DRAWS = 16


class Prior(NamedTuple):
    """A site's conditional prior for one member, seen in unconstrained space as a flat vector."""

    fn: dist.Distribution
    transform: Transform
    inner: dist.Distribution | None
    """The same in unconstrained space, where its form is known: no overflow on the way there and back."""
    sign: Any = None
    """Minus one mirrors draws at their mean, where the prior is symmetric in unconstrained space."""

    @classmethod
    def of(cls, fn: dist.Distribution, sign: Any = None) -> Prior:
        return cls(fn, biject_to(fn.support), _inner(fn), sign)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.fn.batch_shape, *self.transform.inverse_shape(self.fn.event_shape))

    def draw(self, key: PRNGKeyArray) -> Float[Array, " size"]:
        plain = self.fn if self.inner is None else self.inner
        if self.sign is not None and _symmetric(plain):
            return (plain.mean + self.sign * (plain.sample(key) - plain.mean)).reshape(-1)
        if self.inner is not None:
            return self.inner.sample(key).reshape(-1)
        drawn = self.transform.inv(self.fn.sample(key)).reshape(-1)
        # A draw that rounds onto the edge of its support has no finite image.
        return jnp.where(jnp.isfinite(drawn), drawn, 0.0)

    def center(self) -> Float[Array, " size"]:
        """About where the prior puts the value."""
        plain = self.fn if self.inner is None else self.inner
        if _symmetric(plain):
            return jnp.broadcast_to(plain.mean, plain.shape()).reshape(-1)
        return jax.vmap(self.draw)(jax.random.split(jax.random.key(0), CENTER_DRAWS)).mean(0)

    def quantile(self, chances: Float[Array, " size"]) -> Float[Array, " size"]:
        """The value whose numbers lie above the prior's with the given chances, one by one.

        Raises:
            SettingError: if the distribution has no quantile function.
        """
        plain = self.fn if self.inner is None else self.inner
        try:
            value = _quantile(plain, chances.reshape(plain.shape()))
        except (NotImplementedError, TypeError) as error:
            raise SettingError(
                f"Points of the prior {type(_base(plain)).__name__} are asked for, but it has no quantile function. Leave "
                "out `inner_points`, or write the latent as a function of a Normal, a Uniform or the like."
            ) from error
        return value.reshape(-1) if self.inner is not None else self.transform.inv(value).reshape(-1)

    def constrain(self, value: Float[Array, " size"]) -> tuple[Array, Float[Array, ""]]:
        """The value in its own space and log |d value / d unconstrained|."""
        inner = value.reshape(self.shape)
        outer = self.transform(inner)
        return outer, self.transform.log_abs_det_jacobian(inner, outer).sum()

    def log_prob(self, value: Float[Array, " size"]) -> Float[Array, ""]:
        """Log-density over unconstrained space."""
        if self.inner is not None:
            return self.inner.log_prob(value.reshape(self.shape)).sum()
        outer, log_det = self.constrain(value)
        return self.fn.log_prob(outer).sum() + log_det

    def log_probs(self, value: Float[Array, " size"]) -> Array:
        """Log-densities of the constrained value, one per batch element."""
        inner = value.reshape(self.shape)
        outer = self.transform(inner)
        if self.inner is None:
            return self.fn.log_prob(outer)
        return self.inner.log_prob(inner) - self.transform.log_abs_det_jacobian(inner, outer)


def _inner(fn: dist.Distribution) -> dist.Distribution | None:
    """The distribution of the logarithm of a log-normal and the like; None where there is no such form."""
    if isinstance(fn, dist.Independent):
        inner = _inner(fn.base_dist)
        return None if inner is None else inner.to_event(fn.reinterpreted_batch_ndims)
    if isinstance(fn, dist.ExpandedDistribution):
        inner = _inner(fn.base_dist)
        return None if inner is None else inner.expand(fn.batch_shape)
    if isinstance(fn, dist.TransformedDistribution) and len(fn.transforms) == 1:
        plain = fn.base_dist.support == constraints.real and isinstance(fn.transforms[0], ExpTransform)
        return fn.base_dist if plain and fn.support == constraints.positive else None
    return None


def _symmetric(fn: dist.Distribution) -> bool:
    """Whether a distribution over unconstrained space is known to be symmetric around its mean."""
    return isinstance(_base(fn), dist.Normal | dist.MultivariateNormal)


def _base(fn: dist.Distribution) -> dist.Distribution:
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn


def _quantile(fn: dist.Distribution, chances: Array) -> Array:
    base = _base(fn)
    if isinstance(base, dist.MultivariateNormal):
        normal = jax.scipy.stats.norm.ppf(chances)
        return base.loc + (base.scale_tril @ normal[..., None])[..., 0]
    return base.icdf(chances)
