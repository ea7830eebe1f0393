"""Shapes and types of every function of the package are checked while the tests run."""

import pytest
from jaxtyping import install_import_hook

install_import_hook("pavi", "beartype.beartype")


# Files whose tests share a fitted fixture.
TOGETHER = {"test_amortize", "test_placement", "test_posterior"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process runs tests that share what is costly: both schemes of a test of models, and some whole files."""
    for item in items:
        if isinstance(item, pytest.Function) and "scheme" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group(item.originalname))
        elif item.path.stem in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
