"""Branchings: uniform, distinct, coherent, and the same work for any plate."""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pavi.branch import LARGEST_PAIRWISE, choose_batch, distinct, draw_branch


@pytest.mark.parametrize(("size", "count", "draws"), [(6, 2, 20_000), (5, 3, 20_000), (7, 3, 20_000), (300, 2, 400_000)])
def test_every_subset_is_equally_likely(size, count, draws):
    keys = jax.random.split(jax.random.key(0), draws)
    drawn = np.sort(np.asarray(jax.jit(jax.vmap(lambda key: distinct(key, size, count)))(keys)), axis=1)
    subsets = list(itertools.combinations(range(size), count))
    found = Counter(map(tuple, drawn.tolist()))
    assert set(found) <= set(subsets)
    assert stats.chisquare([found[subset] for subset in subsets]).pvalue > 1e-3


@pytest.mark.parametrize(
    ("size", "count"), [(10**9, 100), (1000, 400), (10**4, LARGEST_PAIRWISE + 200), (257, 64), (100, 99)]
)
def test_members_are_distinct_and_in_range(size, count):
    drawn = np.asarray(distinct(jax.random.key(1), size, count))
    assert len(set(drawn.tolist())) == count
    assert drawn.min() >= 0
    assert drawn.max() < size


def test_the_compiled_draw_does_not_grow_with_the_plate():
    def operations(size):
        text = jax.jit(lambda key: distinct(key, size, 50)).lower(jax.random.key(0)).compile()
        return text.cost_analysis().get("flops", 0), text.memory_analysis().temp_size_in_bytes

    small, large = operations(10**3), operations(10**9)
    assert all(most <= least for most, least in zip(large, small, strict=True))


def test_weights_are_one_over_the_inclusion_probability():
    sizes, batch = {"a": 6, "b": 4}, {"a": 2, "b": 3}
    values = jnp.arange(24.0).reshape(6, 4)

    def estimate(key):
        branch = draw_branch(key, sizes, batch)
        return branch.weigh(("a", "b"), values[jnp.ix_(*branch.at(("a", "b")))])

    estimates = np.asarray(jax.vmap(estimate)(jax.random.split(jax.random.key(2), 20_000)))
    assert abs(estimates.mean() - values.sum()) < 4 * estimates.std() / np.sqrt(len(estimates))


def test_a_whole_plate_is_taken_in_order():
    branch = draw_branch(jax.random.key(0), {"a": 4}, {"a": 4})
    assert branch.indices["a"].tolist() == [0, 1, 2, 3]
    assert branch.weights["a"].tolist() == [1, 1, 1, 1]


def test_batch_fills_the_budget_with_one_cap_for_all_plates():
    plates = {"subject": 1000, "session": 2, "vertex": 50_000}
    work = {("vertex",): 7, ("subject", "vertex"): 7, ("subject", "session", "vertex"): 64}
    batch = choose_batch(plates, work, 10**6)
    assert batch["session"] == 2
    assert batch["subject"] == batch["vertex"]
    touched = 7 * batch["vertex"] + (7 + 128) * batch["subject"] * batch["vertex"]
    assert 0.9 * 10**6 < touched <= 10**6
    assert choose_batch({"a": 5}, {("a",): 1}, 100) == {"a": 5}
