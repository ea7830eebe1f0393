"""Set Transformer blocks (Lee et al. 2019): learned summaries of a set of any size, in any order.

A *block* lets some queries look at a set: multi-head attention, then a perceptron, both added to the queries. A set too
large for memory is read in chunks, with a running softmax, so the result does not depend on the chunking. An empty set
adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from pavi.flows.networks import Perceptron
from pavi.packing import fill_randomly

# Members of a set that are looked at together.
CHUNK = 4096
FAR = -1e9


class Block(eqx.Module):
    """Queries look at a set (the MAB of the Set Transformer)."""

    attention: eqx.nn.MultiheadAttention
    perceptron: Perceptron

    def __init__(self, rng: np.random.Generator, width: int, heads: int):
        key = np.zeros(2, np.uint32)
        shapes = eqx.filter_eval_shape(eqx.nn.MultiheadAttention, heads, width, key=key)
        self.attention = fill_randomly(rng, shapes)
        self.perceptron = Perceptron(rng, [width, width, width])

    def __call__(
        self,
        queries: Float[Array, "query width"],
        members: Float[Array, "member width"],
        present: Bool[Array, " member"],
        prepare: Callable[[Array], Array] = lambda members: members,
    ) -> Float[Array, "query width"]:
        """`prepare` maps a chunk of members before it is looked at."""
        heads = self.attention.num_heads
        asked = jax.vmap(self.attention.query_proj)(queries).reshape(len(queries), heads, -1)

        def look(carry: tuple[Array, Array, Array], chunk: tuple[Array, Array]) -> tuple[tuple[Array, Array, Array], None]:
            top, total, weighted = carry
            prepared = prepare(chunk[0])
            keys = jax.vmap(self.attention.key_proj)(prepared).reshape(len(prepared), heads, -1)
            values = jax.vmap(self.attention.value_proj)(prepared).reshape(len(prepared), heads, -1)
            logits = jnp.einsum("qhd,nhd->hqn", asked, keys) / np.sqrt(keys.shape[-1])
            logits = jnp.where(chunk[1], logits, FAR)
            higher = jax.lax.stop_gradient(jnp.maximum(top, logits.max(-1)))
            share = jnp.where(chunk[1], jnp.exp(logits - higher[..., None]), 0.0)
            fade = jnp.exp(top - higher)
            weighted = weighted * fade[..., None] + jnp.einsum("hqn,nhd->hqd", share, values)
            return (higher, total * fade + share.sum(-1), weighted), None

        shape = (heads, len(queries))
        start = (jnp.full(shape, FAR), jnp.zeros(shape), jnp.zeros((*shape, self.attention.vo_size)))
        if len(members) <= CHUNK:
            (_, total, weighted), _ = look(start, (members, present))
        else:
            fill = -len(members) % CHUNK
            chunks = jnp.pad(members, ((0, fill), (0, 0))).reshape(-1, CHUNK, members.shape[1])
            (_, total, weighted), _ = jax.lax.scan(look, start, (chunks, jnp.pad(present, (0, fill)).reshape(-1, CHUNK)))
        seen = (weighted / jnp.maximum(total, 1e-6)[..., None]).transpose(1, 0, 2).reshape(len(queries), -1)
        mixed = queries + jax.vmap(self.attention.output_proj)(seen)
        return mixed + self.perceptron(mixed)


class SetTransformer(eqx.Module):
    """One summary of a set: members look at the set through a few inducing points (ISAB), a seed looks at them (PMA)."""

    inducing: Float[Array | np.ndarray, "point width"]
    seed: Float[Array | np.ndarray, "one width"]
    induce: Block
    spread: Block
    pool: Block

    def __init__(self, rng: np.random.Generator, width: int, heads: int, inducing: int):
        drawn = rng.normal(size=(inducing + 1, width)).astype(jnp.result_type(float))
        self.inducing, self.seed = drawn[:-1], drawn[-1:]
        self.induce, self.spread, self.pool = (Block(rng, width, heads) for _ in range(3))

    def __call__(self, members: Float[Array, "member width"], present: Bool[Array, " member"]) -> Float[Array, " width"]:
        points = self.induce(jnp.asarray(self.inducing), members, present)
        everyone = jnp.ones(len(points), bool)
        return self.pool(jnp.asarray(self.seed), members, present, lambda chunk: self.spread(chunk, points, everyone))[0]
