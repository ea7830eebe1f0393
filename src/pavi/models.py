"""Models of population studies, ready to fit: plain NumPyro models, for users to read and change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import constraints
from tqdm.auto import tqdm

from pavi.errors import SettingError
from pavi.mixing import Mean, log_mean_softmax


class SharedLabel(dist.Distribution):
    """Several vectors that share one unknown label, summed out: a mixture whose component is drawn once for all.

    Args:
        logits: of the labels, shape (..., labels).
        locs: one vector per label, shape (labels, features).
        scales: one number per label, shape (labels,).
        num_vectors: vectors per draw.
    """

    support = constraints.independent(constraints.real, 2)
    pytree_data_fields = ("logits", "locs", "scales")
    pytree_aux_fields = ("num_vectors",)

    def __init__(
        self, logits: Array, locs: Array, scales: Array, num_vectors: int, *, validate_args: bool | None = None
    ) -> None:
        self.logits, self.locs, self.scales, self.num_vectors = logits, locs, scales, num_vectors
        super().__init__(jnp.shape(logits)[:-1], (num_vectors, jnp.shape(locs)[-1]), validate_args=validate_args)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        label_key, noise_key = jax.random.split(key)
        shape = (*sample_shape, *self.batch_shape)
        label = jax.random.categorical(label_key, self.logits, shape=shape)
        noise = jax.random.normal(noise_key, (*shape, *self.event_shape))
        return self.locs[label][..., None, :] + self.scales[label][..., None, None] * noise

    def log_joint(self, value: Float[Array, "*batch vector feature"]) -> Float[Array, "*batch label"]:
        """log p(value, label) for every label.

        Squares are those of differences: fingerprints may lie a hundred times farther from zero than vectors from them, and
        of differences of squares no digit would be left.
        """
        count, features = value.shape[-2:]
        middle = value.mean(-2)
        within = ((value - middle[..., None, :]) ** 2).sum((-2, -1))
        around = within[..., None] + count * ((middle[..., None, :] - self.locs) ** 2).sum(-1)
        log_norm = count * features * (jnp.log(self.scales) + 0.5 * jnp.log(2 * jnp.pi))
        return jax.nn.log_softmax(self.logits) - 0.5 * around / self.scales**2 - log_norm

    def averaged(self, mean: Mean) -> SharedLabel:
        """The same with the mean of the labels' chances; vectors and scales must not differ in what is averaged over."""
        return SharedLabel(log_mean_softmax(self.logits, mean), self.locs, self.scales, self.num_vectors)

    def log_prob(self, value: Float[Array, "*batch vector feature"]) -> Float[Array, "*batch"]:
        return jax.nn.logsumexp(self.log_joint(value), -1)


def parcellation(
    num_subjects: int = 1000,
    num_sessions: int = 2,
    num_vertices: int = 59_412,
    num_features: int = 64,
    num_networks: int = 7,
    *,
    fingerprint_scale: float = 6.0,
    population_scale: float = 6.0,
    spread: float = 1.0,
    labels: str = "summed",
    temperature: float = 1.0,
) -> Callable[[], None]:
    """The paper's model of functional networks of the cortex (`eq:HCPL`), as a NumPyro model without arguments.

    Each vertex of each subject belongs to one of a few networks. A network has a fingerprint `mu` and a spread `kappa`; the
    population has logits for each vertex, from which subjects deviate by `gamma`. Second arguments of the paper's normal
    distributions are read as standard deviations. The deterministic site `label_probs` says how likely each label is.

    Args:
        num_subjects: members of the plate "subject".
        num_sessions: sessions per subject, which share the labels.
        num_vertices: members of the plate "vertex".
        num_features: length of a fingerprint.
        num_networks: number of labels.
        fingerprint_scale: prior standard deviation of the fingerprints.
        population_scale: prior standard deviation of the population's logits.
        spread: prior standard deviation of the logarithms of `kappa` and `gamma`.
        labels: "summed" sums the labels out exactly; observed site `x` of shape (subject, vertex, session, feature).
            "relaxed" draws them as points of the simplex (Gumbel-Softmax, the paper's form: logits plus Gumbel noise,
            `scores`, through a softmax) and makes sessions a plate; `x` has the shape (subject, session, vertex, feature).
        temperature: of relaxed labels.

    Example:
        >>> import pavi
        >>> model = pavi.models.parcellation(1000, 2, 59_412, 64, 7)
        >>> pavi.read_template(model, ["x"]).num_latents
        416300346
    """
    if labels not in ("summed", "relaxed"):
        raise SettingError(f"parcellation(labels={labels!r}): expected 'summed' or 'relaxed'.")

    def model() -> None:
        mu = numpyro.sample("mu", dist.Normal(0.0, fingerprint_scale).expand([num_networks, num_features]).to_event(2))
        kappa = numpyro.sample("kappa", dist.LogNormal(0.0, spread).expand([num_networks]).to_event(1))
        gamma = numpyro.sample("gamma", dist.LogNormal(0.0, spread).expand([num_networks]).to_event(1))
        subjects = numpyro.plate("subject", num_subjects, dim=-2 if labels == "summed" else -3)
        with numpyro.plate("vertex", num_vertices, dim=-1):
            normal = dist.Normal(0.0, population_scale).expand([num_networks]).to_event(1)
            population = numpyro.sample("population_logits", normal)
            with subjects:
                logits = numpyro.sample("logits", dist.Normal(population, gamma).to_event(1))
                if labels == "summed":
                    shared = SharedLabel(logits, mu, kappa, num_sessions)
                    x = numpyro.sample("x", shared)
                    numpyro.deterministic("label_probs", jax.nn.softmax(shared.log_joint(x)))
                    return
                scores = numpyro.sample("scores", dist.Gumbel(logits, 1.0).to_event(1))
                label = numpyro.deterministic("label_probs", jax.nn.softmax(scores / temperature))
                with numpyro.plate("session", num_sessions, dim=-2):
                    scale = (label @ kappa)[..., None]
                    numpyro.sample("x", dist.Normal(label @ mu, scale).to_event(1))

    return model


class Cohort(NamedTuple):
    """A simulated cohort: data `x` of shape (subject, vertex, session, feature), and the truth behind it."""

    x: Any
    labels: Array
    mu: Array
    kappa: Array
    gamma: Array
    population_logits: Array


def simulate_cohort(
    num_subjects: int = 1000,
    num_sessions: int = 2,
    num_vertices: int = 59_412,
    num_features: int = 64,
    num_networks: int = 7,
    *,
    fingerprint_scale: float = 6.0,
    population_scale: float = 6.0,
    spread: float = 1.0,
    dtype: Any = jnp.float16,
    store: Any = None,
    seed: int = 0,
) -> Cohort:
    """Draws a cohort from the model `parcellation(labels="summed")`, one subject at a time.

    Args:
        num_subjects: as in `parcellation`, like the next four.
        num_sessions: sessions per subject.
        num_vertices: vertices per subject.
        num_features: length of a fingerprint.
        num_networks: number of labels.
        fingerprint_scale: standard deviation of the fingerprints. Smaller makes labels harder to tell.
        population_scale: standard deviation of the population's logits.
        spread: standard deviation of the logarithms of `kappa` and `gamma`.
        dtype: of the data. Half precision holds them well enough where spreads are not much smaller than fingerprints; with
            the paper's scales some are, and their `kappa` comes out right with float32. bfloat16 is too coarse for both.
        store: an array to write the data to subject by subject, such as `zarr.create_array(...)` or a memory map of the
            right shape; by default they stay on the device.
        seed: for the random numbers.

    Example:
        >>> import pavi
        >>> cohort = pavi.models.simulate_cohort(5, 2, 12, 4, 3)
        >>> cohort.x.shape
        (5, 12, 2, 4)
    """
    keys = jax.random.split(jax.random.key(seed), 5)
    mu = fingerprint_scale * jax.random.normal(keys[0], (num_networks, num_features))
    kappa = jnp.exp(spread * jax.random.normal(keys[1], (num_networks,)))
    gamma = jnp.exp(spread * jax.random.normal(keys[2], (num_networks,)))
    population = population_scale * jax.random.normal(keys[3], (num_vertices, num_networks))

    def subject(key: Array) -> tuple[Array, Array]:
        logit_key, label_key, noise_key = jax.random.split(key, 3)
        logits = population + gamma * jax.random.normal(logit_key, population.shape)
        label = jax.random.categorical(label_key, logits)
        noise = jax.random.normal(noise_key, (num_vertices, num_sessions, num_features))
        return (mu[label][:, None] + kappa[label][:, None, None] * noise).astype(dtype), label.astype(jnp.uint8)

    each = jax.random.split(keys[4], num_subjects)
    if store is None:
        x, labels = jax.jit(lambda each: jax.lax.map(subject, each))(each)
        return Cohort(x, labels, mu, kappa, gamma, population)
    draw, found = jax.jit(subject), []
    for number in tqdm(range(num_subjects), desc="subjects", leave=False, dynamic_ncols=True):
        x, label = draw(each[number])
        store[number] = np.asarray(x)
        found.append(np.asarray(label))
    return Cohort(store, jnp.asarray(np.stack(found)), mu, kappa, gamma, population)
