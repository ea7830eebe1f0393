"""Row updates touch the addressed rows only, and do there what a dense optimizer would."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pavi import rows


def test_gather_and_scatter_address_the_product_of_indices():
    array = jnp.arange(60.0).reshape(4, 5, 3)
    index = (jnp.array([2, 0]), jnp.array([1, 4, 3]))
    part = rows.gather(array, index)
    assert part.shape == (2, 3, 3)
    assert np.allclose(part[1, 2], array[0, 3])
    back = rows.scatter(array, index, -part)
    expected = np.asarray(array).copy()
    expected[np.ix_([2, 0], [1, 4, 3])] *= -1
    assert np.allclose(back, expected)


def test_rows_have_their_own_adam():
    """Rows visited on different schedules end where separate dense optimizers with those visits would."""
    optimizer = optax.adam(0.1)
    array = jnp.zeros((3, 2))
    state = rows.init_optimizer(optimizer, array)
    target = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    visits = [[0], [0, 1], [0], [1, 0], [0]]
    for members in visits:
        index = (jnp.array(members),)
        part, part_state = rows.gather(array, index), rows.gather(state, index)
        updates, part_state = rows.update(optimizer, part - target[index[0]], part_state, part)
        array = rows.scatter(array, index, part + updates)
        state = rows.scatter(state, index, part_state)
    for member, count in [(0, 5), (1, 2), (2, 0)]:
        row, row_state = jnp.zeros(2), optimizer.init(jnp.zeros(2))
        for _ in range(count):
            updates, row_state = optimizer.update(row - target[member], row_state)
            row = optax.apply_updates(row, updates)
        assert np.allclose(array[member], row, atol=1e-6)


def test_scatter_is_in_place_in_a_compiled_loop():
    size = 10**6

    def body(k, array):
        index = (k * 7 + jnp.arange(10),)
        return rows.scatter(array, index, rows.gather(array, index) + 1)

    loop = jax.jit(lambda array: jax.lax.fori_loop(0, 100, body, array), donate_argnums=0)
    compiled = loop.lower(jax.ShapeDtypeStruct((size, 2), jnp.float32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1000


def test_on_the_host_rows_are_read_and_written_at_the_product_of_indices():
    """Whatever the layout: in one piece or not, one number per row, several or none, and values of another kind."""
    index = (np.array([2, 0]), np.array([1, 9, 3]))  # the fifth column is the last, so nothing is written at the tenth
    several = (np.stack([index[0], index[0][::-1]]), np.stack([index[1], index[1] - 1]))
    for tail in ((3,), (), (0,)):
        plain = np.arange(4 * 5 * int(np.prod(tail)), dtype=np.float64).reshape(4, 5, *tail)
        for array in (plain.copy(), np.asfortranarray(plain), np.repeat(plain, 2, axis=0)[::2]):
            expected = plain[np.ix_([2, 0], [1, 4, 3])]
            np.testing.assert_array_equal(rows.read(array, index), expected)
            both = rows.read(array, several)
            np.testing.assert_array_equal(both[0], expected)
            np.testing.assert_array_equal(both[1], plain[np.ix_([0, 2], [0, 4, 2])])
            rows.write(array, index, -expected.astype(np.float32) - 1)
            changed = plain.copy()
            changed[np.ix_([2, 0], [1, 3])] = -plain[np.ix_([2, 0], [1, 3])] - 1
            np.testing.assert_array_equal(array, changed)
