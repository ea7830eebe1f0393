"""Shapes and types of every function of the package are checked while the tests run."""

import pytest
from jaxtyping import install_import_hook

install_import_hook("pavi", "beartype.beartype")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process runs both schemes of a test of models: they share the exact answer."""
    for item in items:
        if isinstance(item, pytest.Function) and "scheme" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group(item.originalname))
