"""The search of `fit.polish` for the posterior's mode: its steps, and what members that are lost count for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import norm

from pavi.evidence import Weighed, _shortfall, sum_tile
from pavi.inner import net
from pavi.polishing import _as_found, _Newton, _Place, _rise


def place(theta, gradient, information):
    theta, gradient = np.asarray(theta, float), np.asarray(gradient, float)
    return _Newton(theta, 0.0, gradient, np.asarray(information, float), np.linalg.inv(information), 1.0)


def test_members_that_are_lost_keep_their_evidence_and_have_no_score():
    evidence = jnp.array([-10.0, jnp.nan, -20.0, -30.0, -5.0])
    scores = jnp.array([[1.0], [2.0], [3.0], [jnp.nan], [7.0]])
    weighed = Weighed(evidence, scores, None, jnp.array([0.9, 0.8, 0.0, 0.7, 0.9]), None)
    look = sum_tile(weighed, jnp.ones((5, 1)), np.array([True, True, True, True, False]))
    # The second's is not known and counts as the lowest; the last only fills up the tile.
    np.testing.assert_allclose(look.evidence, [-10.0, -30.0, -20.0, -30.0, 0.0])
    np.testing.assert_allclose(look.score, [2.0])
    np.testing.assert_allclose(look.squares, [[4.0]])
    assert look.counting == pytest.approx(0.9)


def test_a_number_that_may_not_go_far_does_not_hold_the_others_back():
    information = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.0], [0.0, 0.0, 4.0]])
    here = place([0.0, 0.0, 0.0], [1.0, 10.0, 2.0], information)
    whole = here.step(np.full(3, 100.0), None, [slice(0, 3)])
    np.testing.assert_allclose(whole, np.linalg.solve(information, here.gradient))
    held = here.step(np.array([100.0, 1.0, 100.0]), None, [slice(0, 3)])
    assert held[1] == 1.0
    # The others are where the gradient is zero, given that one.
    np.testing.assert_allclose((here.gradient - information @ held)[[0, 2]], 0.0, atol=1e-12)


def test_steps_follow_how_far_the_gradient_fell():
    """An information that is many times too large along a long way is put right, that of the other site left alone."""
    true, thought, blocks = np.diag([4.0, 9.0]), np.diag([100.0, 9.0]), [slice(0, 1), slice(1, 2)]
    top = np.array([10.0, 0.1])
    last = place([0.0, 0.0], true @ top, thought)
    near = place([0.1, 0.0], true @ (top - [0.1, 0.0]), thought)  # one standard deviation
    np.testing.assert_allclose(_as_found(near, last, blocks), thought)
    far = place([1.0, 0.0], true @ (top - [1.0, 0.0]), thought)
    np.testing.assert_allclose(_as_found(far, last, blocks), true)
    np.testing.assert_allclose(far.theta + far.step(np.full(2, 100.0), last, blocks), top)
    past = place([11.0, 0.0], true @ (top - [11.0, 0.0]), thought)  # here the gradient has changed its sign
    np.testing.assert_allclose(_as_found(past, last, blocks), thought)


@pytest.mark.parametrize(
    ("part", "noise", "up"), [(1.0, -80.0, True), (1.0, -180.0, False), (2.5, 0.0, False), (2.5, 80.0, False)]
)
def test_slopes_tell_whether_a_step_leads_up_where_rounding_hides_it(part, noise, up):
    """Steps of a part of the way to the top of -x**2 / 2, heights off by some noise, of which 100 may be rounding."""
    here = place([-10.0], [10.0], [[1.0]])
    theta = here.theta + part * 10.0
    there = _Place(theta, here.height + 50.0 - theta[0] ** 2 / 2 + noise, -theta, None, None)
    assert (_rise(here, there, 100.0) >= 0) == up


def test_steps_that_go_back_and_forth_are_shortened():
    true, thought, blocks = np.array([[4.0]]), np.array([[2.0]]), [slice(0, 1)]
    here, last = place([1.0], true @ [-1.0], thought), None
    for _ in range(3):
        step = here.step(np.full(1, 10.0), last, blocks)
        there = here.theta + step
        here, last = place(there, -true @ there, thought), here
    # Twice as long as they should be, steps would lead from 1 to -1 and back for ever.
    assert abs(here.theta[0]) < 1e-9


def test_the_logarithm_of_a_mean_of_draws_falls_less_short():
    """Draws of seven normal numbers x, weighed by exp(c (x + x**2 / 2) for each): a net, shifted, and its mirror image."""
    half, c = net(16, 7), 0.25

    @jax.vmap
    def found(key):
        shifted = (half + jax.random.uniform(key, (7,))) % 1.0
        x = norm.ppf(jnp.clip(jnp.concatenate([shifted, 1 - shifted]), 1e-6, 1 - 1e-6))
        terms = (c * (x + x**2 / 2)).sum(1)
        mean = jax.nn.logsumexp(terms) - jnp.log(32.0)
        return mean, mean + _shortfall(terms)

    exact = 7 * (0.5 * c**2 / (1 - c) - 0.5 * np.log(1 - c))
    plain, mended = (float(each.mean()) - exact for each in found(jax.random.split(jax.random.key(0), 4000)))
    assert plain < -0.01
    assert plain + 0.2 * abs(plain) < mended < 0
