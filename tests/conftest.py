"""Shapes and types of every function of the package are checked while the tests run."""

from jaxtyping import install_import_hook

install_import_hook("pavi", "beartype.beartype")
