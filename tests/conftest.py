"""Shapes and types of every function of the package are checked while the tests run."""

import os
import warnings
from contextlib import nullcontext

from beartype._decor._nontype._wrap import _wrapargs, _wrapreturn
from jaxtyping import install_import_hook

install_import_hook("pavi", "beartype.beartype")

# Beartype records warnings while it wraps a function, nested ones whenever they are defined, so also in the thread in which
# functions are traced. Recording is not safe between threads: a warning that a test waits for would be lost.
for module in (_wrapargs, _wrapreturn):
    module.catch_warnings = lambda record: nullcontext([])

# ArviZ notes in a file that it has warned today. Workers that do so at the same time get in each other's way, so the process
# that starts them is the first.
if "PYTEST_XDIST_WORKER" not in os.environ:
    with warnings.catch_warnings(action="ignore"):
        import arviz  # noqa: F401
