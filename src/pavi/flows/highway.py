"""Highway flows: layers through which a share of their input passes unchanged (Ambrogioni et al. 2021)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flowjax.bijections import AbstractBijection
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from pavi.flows.networks import as_weight

# What the bend keeps of negative numbers where nothing passes it by.
LEAK = 0.2
# Triangular layers start with half passing by, and the rest multiplied by this; bends start nearly all passed by.
INITIAL_DIAGONAL, INITIAL_BEND = 0.1, 3.0


class Highway(AbstractBijection):
    """An upper triangular layer, a bend, a lower triangular layer and a bend, each with its gate.

    A gate g mixes a layer f with the identity: g x + (1 - g) f(x). The triangular layers are affine with a positive
    diagonal; a bend multiplies negative numbers by a constant. Everything has a closed-form inverse and determinant.
    """

    shape: tuple[int, ...]
    cond_shape: tuple[int, ...]
    triangles: Float[Array | np.ndarray, "2 below"]
    log_diagonals: Float[Array | np.ndarray, "2 dim"]
    biases: Float[Array | np.ndarray, "2 dim"]
    gates: Float[Array | np.ndarray, " 2"]
    bends: Float[Array | np.ndarray, " 2"]

    def __init__(self, dim: int):
        self.shape, self.cond_shape = (dim,), (0,)
        self.triangles = as_weight(np.zeros((2, dim * (dim - 1) // 2)))
        self.log_diagonals = as_weight(np.full((2, dim), np.log(INITIAL_DIAGONAL)))
        self.biases = as_weight(np.zeros((2, dim)))
        self.gates, self.bends = as_weight(np.zeros(2)), as_weight(np.full(2, INITIAL_BEND))

    def _affine(self, k: int) -> tuple[Array, Array]:
        """Matrix and shift of a triangular layer, its gate included."""
        dim, gate = self.shape[0], jax.nn.sigmoid(self.gates[k])
        rows, columns = np.tril_indices(dim, -1)
        place = (columns, rows) if k == 0 else (rows, columns)
        own = jnp.zeros((dim, dim)).at[place].set(self.triangles[k]) + jnp.diag(jnp.exp(self.log_diagonals[k]))
        return gate * jnp.eye(dim) + (1 - gate) * own, (1 - gate) * self.biases[k]

    def _leak(self, k: int) -> Array:
        gate = jax.nn.sigmoid(self.bends[k])
        return gate + (1 - gate) * LEAK

    def transform_and_log_det(self, x: Array, condition: Array | None = None) -> tuple[Array, Array]:
        del condition
        log_det = jnp.zeros(())
        for k in range(2):
            matrix, shift = self._affine(k)
            x = matrix @ x + shift
            slope = jnp.where(x > 0, 1.0, self._leak(k))
            x = x * slope
            log_det += jnp.log(jnp.diag(matrix)).sum() + jnp.log(slope).sum()
        return x, log_det

    def inverse_and_log_det(self, y: Array, condition: Array | None = None) -> tuple[Array, Array]:
        del condition
        log_det = jnp.zeros(())
        for k in (1, 0):
            matrix, shift = self._affine(k)
            slope = jnp.where(y > 0, 1.0, self._leak(k))
            y = solve_triangular(matrix, y / slope - shift, lower=k == 1)
            log_det -= jnp.log(jnp.diag(matrix)).sum() + jnp.log(slope).sum()
        return y, log_det
