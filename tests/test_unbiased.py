"""The central claim (paper, `sec:no_bias`): averaged over every branching, the reduced ELBO is the full ELBO."""

import sys
from pathlib import Path

import pytest

import pavi

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from unbiasedness import CASES, compare


@pytest.mark.parametrize(
    "family",
    [pavi.PAVI(flow=pavi.Affine("tril", hidden=(8,))), pavi.baselines.UnamortizedFlows(flow=pavi.Affine(hidden=()))],
    ids=["PAVI", "SVI"],
)
@pytest.mark.parametrize("case", CASES)
def test_mean_over_all_branchings_is_the_full_elbo(case, family):
    count, _, value_error, grad_error = compare(*CASES[case], family)
    assert count == 18
    assert value_error < 1e-5
    assert grad_error < 1e-5
