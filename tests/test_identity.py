"""What tells fits apart: checksums that are the same wherever an array lies, and what a model makes of its prior."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from pavi.identity import BLOCK, Identity, checksum, digest
from pavi.reading import read_study
from pavi.units import densities_of_prior


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, bool])
@pytest.mark.parametrize("shape", [(), (7,), (0, 3), (50, 3, 2)])
def test_checksums_do_not_depend_on_where_an_array_lies(dtype, shape):
    array = (50 * np.random.default_rng(0).normal(size=shape)).astype(dtype)
    assert checksum(array) == checksum(jnp.asarray(array))
    assert digest([array]) == digest([jnp.asarray(array)])


def test_checksums_see_every_change_and_the_order_of_numbers():
    array = np.random.default_rng(0).normal(size=(3, BLOCK // 2)).astype(np.float32)  # more than is summed at a time
    turned = array.T
    assert checksum(array) == checksum(jnp.asarray(array)) != checksum(turned)
    assert checksum(turned) == checksum(jnp.asarray(turned)) == checksum(np.ascontiguousarray(turned))
    for place in ((0, 0), (1, 17), (2, BLOCK // 2 - 1)):
        other = array.copy()
        other[place] = np.nextafter(other[place], np.float32(np.inf))
        assert checksum(other) != checksum(array)
    assert digest([array]) != digest([array.reshape(-1)])


def test_log_densities_are_compared_up_to_rounding_and_what_is_not_known_not_at_all():
    one = Identity({"batch": "5", "data": "a"}, {"x": -100.0, "mu": np.nan})
    assert one.difference(Identity({"batch": "5"}, {"x": -100.01, "mu": np.nan})) is None
    assert "Its batch:\n6" in one.difference(Identity({"batch": "6"}, {}))
    assert "'x' is usually -101" in one.difference(Identity({}, {"x": -101.0}))


def test_data_that_cannot_be_drawn_have_no_log_density():
    class Told(dist.Normal):
        def sample(self, key, sample_shape=()):
            raise NotImplementedError

    def model(kind):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("item", 3):
            numpyro.sample("x", kind(mu, 1))

    def densities(kind):
        study, arguments, _ = read_study(model, {"x": np.zeros(3)}, (kind,), None)
        return densities_of_prior(study, arguments, np.zeros(2, np.uint32))

    assert densities(Told) == {}
    assert densities(dist.Normal).keys() == {"mu", "x"}
