"""Imports point one way: a module imports only from those above it, in the order of the design."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "pavi"

ORDER = [
    "errors",
    "rows",
    "sources",
    "mixing",
    "models",
    "compiling",
    "packing",
    "memory",
    "template",
    "ahead",
    "inner",
    "tracing",
    "branch",
    "tiles",
    "mesh",
    "data",
    "flows",
    "encodings",
    "prior",
    "cascade",
    "families",
    "units",
    "baselines",
    "elbo",
    "schedule",
    "starting",
    "stepping",
    "identity",
    "train",
    "hosting",
    "streaming",
    "sharding",
    "checkpoint",
    "reading",
    "planning",
    "setting",
    "studying",
    "storage",
    "passes",
    "posterior",
    "proposing",
    "evidence",
    "journal",
    "members",
    "polishing",
    "fitting",
    "api",
    "amortize",
    "loading",
    "diagnostics",
    "plots",
    "experiments",
    "cli",
]


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pavi":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found


def test_imports_point_up():
    modules = {path.relative_to(SOURCE).parts[0].removesuffix(".py"): [] for path in SOURCE.rglob("*.py")}
    for path in SOURCE.rglob("*.py"):
        modules[path.relative_to(SOURCE).parts[0].removesuffix(".py")].append(path)
    modules.pop("__init__")
    assert set(modules) == set(ORDER), "every module has its place in the order"
    for module, paths in modules.items():
        allowed = set(ORDER[: ORDER.index(module)]) | {module}
        for path in paths:
            assert imported(path) <= allowed, f"{path.name} imports {imported(path) - allowed} from below it"


def test_modules_are_short():
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 450, path.name
