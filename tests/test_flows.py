"""Laws of flows: invertible, with the log-determinant that autodiff finds, and a gradient with the right mean."""

import equinox as eqx
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flowjax import bijections as bij
from flowjax.bijections import AbstractBijection
from jax.scipy.stats import norm

import pavi
from pavi.flows import Path, enter, push

FLOWS = [
    pavi.Affine("diag", hidden=()),
    pavi.Affine("diag", hidden=(16,)),
    pavi.Affine("tril", hidden=(8, 12)),
    pavi.MAF(hidden=(16, 8)),
    pavi.MAF(hidden=(32, 32)),
    pavi.Spline(hidden=(16,), knots=5),
]


def shaken(flow, dim, cond_dim, seed=0, counts=0):
    """A built flow with random weights, away from its tame start."""
    built = flow.build(np.random.default_rng(seed), dim, cond_dim, counts)
    leaves, structure = jax.tree.flatten(eqx.filter(built, eqx.is_inexact_array))
    rng = np.random.default_rng(seed + 1)
    leaves = [jnp.asarray(leaf + 0.3 * rng.normal(size=leaf.shape), jnp.float32) for leaf in leaves]
    return eqx.combine(jax.tree.unflatten(structure, leaves), eqx.filter(built, eqx.is_inexact_array, inverse=True))


@pytest.mark.parametrize("flow", FLOWS, ids=str)
@pytest.mark.parametrize("dim", [1, 3])
def test_inverse_and_log_det(flow, dim):
    built = shaken(flow, dim, 4)
    base, condition = jnp.linspace(-1.0, 1.5, dim), jnp.array([0.3, -1.0, 0.5, 0.2])
    value, log_det = built.transform_and_log_det(base, condition)
    back, inverse_log_det = built.inverse_and_log_det(value, condition)
    assert np.allclose(back, base, atol=2e-4)
    assert np.allclose(inverse_log_det, -log_det, atol=1e-3)
    jacobian = jax.jacfwd(lambda b: built.transform(b, condition))(base)
    assert np.allclose(np.linalg.slogdet(jacobian)[1], log_det, atol=1e-3)
    assert np.allclose(jacobian, np.tril(jacobian), atol=1e-6)


@pytest.mark.parametrize("flow", FLOWS, ids=str)
def test_flows_depend_on_the_condition(flow):
    built = shaken(flow, 2, 3)
    values = [built.transform(jnp.ones(2), jnp.full(3, c)) for c in (0.0, 1.0)]
    assert not np.allclose(*values)


PARTS = [jnp.array([0.2, -0.4, 0.1]), jnp.array([0.5]), jnp.array([-0.3, 0.8])]


@pytest.mark.parametrize("flow", [*FLOWS, pavi.PointMass(hidden=(8,))], ids=str)
@pytest.mark.parametrize("counts", [0, 2])
def test_a_condition_in_parts_is_the_condition(flow, counts):
    """Values, log-determinants and all their gradients are those of the parts put together."""
    built, base = shaken(flow, 2, 6, counts=counts), jnp.array([0.4, -0.7])
    params, static = eqx.partition(built, eqx.is_inexact_array)

    def whole(params, parts):
        value, log_det = eqx.combine(params, static).transform_and_log_det(base, jnp.concatenate(parts))
        return value @ jnp.array([1.0, -2.0]) + log_det

    def in_parts(params, parts):
        bijection, condition = enter(eqx.combine(params, static), parts)
        value, log_det = bijection.transform_and_log_det(base, condition)
        return value @ jnp.array([1.0, -2.0]) + log_det

    expected, found = (jax.value_and_grad(function, (0, 1))(params, PARTS) for function in (whole, in_parts))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    without_last, with_zero = in_parts(params, PARTS[:2]), in_parts(params, [*PARTS[:2], jnp.zeros(2)])
    np.testing.assert_allclose(without_last, with_zero, rtol=1e-6)


def test_bijections_without_an_entry_are_shown_all_parts():
    chain = bij.Affine(jnp.zeros(2), jnp.ones(2))
    assert enter(chain, PARTS)[0] is chain
    layer = bij.MaskedAutoregressive(jax.random.key(0), transformer=bij.Affine(), dim=2, cond_dim=6, nn_width=4, nn_depth=1)
    condition = enter(layer, PARTS[:2])[1]
    np.testing.assert_array_equal(condition, jnp.concatenate([*PARTS[:2], jnp.zeros(2)]))


def products(jaxpr):
    """Shapes of the results of all products of matrices."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation.outvars[0].aval.shape
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from products(inner)


def test_what_members_share_is_multiplied_once():
    built = shaken(pavi.Affine("diag", hidden=()), 2, 6)
    own, shared = jnp.zeros((50, 3)), [jnp.zeros(1), jnp.zeros(2)]

    def values(own, shared):
        def one(own):
            bijection, condition = enter(built, [own, *shared])
            return bijection.transform(jnp.zeros(2), condition)

        return jax.vmap(one)(own)

    shapes = list(products(jax.make_jaxpr(values)(own, shared).jaxpr))
    assert sum(50 in shape for shape in shapes) == 1
    assert len(shapes) == 3


@pytest.mark.parametrize("flow", FLOWS, ids=str)
def test_the_density_has_the_gradient_of_the_true_density(flow):
    """By value and by given, with the weights held constant, as an exact inverse of the flow says."""
    built = shaken(flow, 2, 5)
    encoding, given = jnp.array([0.2, -0.4, 0.1]), jnp.array([0.5, -0.3])
    base = jnp.array([0.4, -0.7])

    def prior(base, given):
        return norm.logpdf(base, given[0], 1.3).sum()

    def exact(value, given):
        inverse, log_det = built.inverse_and_log_det(value, jnp.concatenate([encoding, given]))
        return prior(inverse, given) + log_det

    def pushed(moved, given):
        # The value moves with the base here; `moved` stands for anything upstream of it.
        value, log_q = push(
            built, flow.path(2), base + moved, [encoding, given], [encoding, given], lambda b: prior(b, given)
        )
        return log_q, value

    value = built.transform(base, jnp.concatenate([encoding, given]))
    log_q, (by_moved, by_given) = jax.value_and_grad(lambda m, g: pushed(m, g)[0], (0, 1))(jnp.zeros(2), given)
    jac_moved, jac_given = jax.jacfwd(lambda m, g: pushed(m, g)[1], (0, 1))(jnp.zeros(2), given)
    exact_value, exact_given = jax.grad(exact, (0, 1))(value, given)
    assert np.allclose(log_q, exact(value, given), atol=1e-3)
    assert np.allclose(by_moved, exact_value @ jac_moved, atol=2e-3)
    assert np.allclose(by_given, exact_given + exact_value @ jac_given, atol=2e-3)


def gradients(flow, path, dim, num=4000):
    """Gradients by the weights of an ELBO's one-sample estimates."""
    built = shaken(flow, dim, 2)
    params, static = eqx.partition(built, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(params)
    encoding, given = jnp.array([0.5]), jnp.array([-0.2])

    def elbo(leaves, base):
        bijection = eqx.combine(jax.tree.unflatten(structure, leaves), static)
        value, log_q = push(bijection, path, base, [encoding, given], None, lambda b: norm.logpdf(b).sum())
        return norm.logpdf(value, 0.3, 0.8).sum() - log_q

    bases = jax.random.normal(jax.random.key(0), (num, dim))
    per_draw = jax.jit(jax.vmap(jax.grad(elbo), (None, 0)))(leaves, bases)
    return np.concatenate([np.asarray(leaf).reshape(num, -1) for leaf in per_draw], axis=1)


@pytest.mark.parametrize(
    "flow", [pavi.Affine("tril", hidden=(8,)), pavi.MAF(hidden=(8, 8)), pavi.Spline(hidden=(8,))], ids=str
)
def test_path_gradients_have_the_mean_of_full_gradients(flow):
    path, full = gradients(flow, flow.path(2), 2), gradients(flow, Path.NONE, 2)
    difference = path - full
    error = difference.mean(0) / (difference.std(0) / np.sqrt(len(difference)) + 1e-6)
    assert np.abs(error).max() < 5


def test_path_gradients_vanish_at_the_optimum():
    """Where q is exact, every single draw has zero gradient, not just their mean."""
    flow = pavi.MAF(hidden=(8, 8))
    built = flow.build(np.random.default_rng(0), 2, 1)
    params, static = eqx.partition(built, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(params)
    scale = pavi.flows.affine.INITIAL_SCALE

    def elbo(leaves, base):
        bijection = eqx.combine(jax.tree.unflatten(structure, leaves), static)
        value, log_q = push(bijection, flow.path(2), base, [jnp.zeros(1)], None, lambda b: norm.logpdf(b).sum())
        return norm.logpdf(value, 0.0, scale).sum() - log_q

    grads = jax.vmap(jax.grad(elbo), (None, 0))(leaves, jax.random.normal(jax.random.key(0), (50, 2)))
    assert max(float(jnp.abs(leaf).max()) for leaf in grads) < 1e-3


def test_path_gradients_can_be_left_out():
    for flow in (pavi.MAF, pavi.Spline):
        assert flow().path(4) is Path.TRIANGULAR
        assert flow(path_gradients=False).path(4) is Path.NONE


def test_point_mass_finds_the_mode():
    import numpyro
    import numpyro.distributions as dist

    def model():
        sigma = numpyro.sample("sigma", dist.Gamma(3.0, 1.0))
        with numpyro.plate("item", 4):
            numpyro.sample("x", dist.Normal(0, sigma))

    x = np.array([1.0, -2.0, 0.5, 1.5], np.float32)
    fit = pavi.fit(model, {"x": x}, family=pavi.PAVI(flow=pavi.PointMass(hidden=())), progress_bar=False)
    grid = np.linspace(0.2, 5, 20_000)
    mode = grid[np.argmax(2 * np.log(grid) - grid - 4 * np.log(grid) - (x**2).sum() / (2 * grid**2))]
    draws = fit.sample(5)["sigma"].values
    assert np.ptp(draws) == 0
    assert abs(draws.mean() - mode) < 0.01 * mode


@pytest.mark.parametrize(
    "make",
    [
        lambda: pavi.Affine(scale="full"),
        lambda: pavi.MAF(hidden=()),
        lambda: pavi.Spline(knots=1),
        lambda: pavi.PAVI(flow="maf"),
        lambda: pavi.FreeEncodings(size=0),
    ],
)
def test_settings_that_make_no_sense(make):
    with pytest.raises(pavi.SettingError, match="expected"):
        make()


def test_a_narrow_posterior_keeps_its_density():
    """Ten million times narrower than its distance from zero: the inverse of the flow finds nothing but rounding."""

    class Narrow(AbstractBijection):
        shape: tuple = (1,)
        cond_shape: tuple = (0,)

        def transform_and_log_det(self, x, condition=None):
            return 1e3 + 1e-4 * x, jnp.log(1e-4)

        def inverse_and_log_det(self, y, condition=None):
            return (y - 1e3) / 1e-4, -jnp.log(1e-4)

    nothing, base = jnp.zeros(0), jnp.array([0.3])
    _, log_q = push(Narrow(), Path.INVERSE, base, [nothing], None, lambda base: norm.logpdf(base).sum())
    assert float(log_q) == pytest.approx(float(norm.logpdf(0.3) - jnp.log(1e-4)), abs=1e-4)
