"""What is written to disk: a saved fit in one file, arrays as they are, settings as JSON, no pickled code; Zarr stores.

A saved fit is a NumPy `.npz` archive with a JSON entry that describes a tree; arrays in the tree are entries of their own.
It is written beside its final name and moved there when whole, so a crash never leaves half a file behind.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xarray as xr

from pavi.errors import LoadError, SettingError
from pavi.packing import FORMAT

# Threads that write to a Zarr store, and parts that wait for them.
WRITERS, MOST_WRITES = 4, 8


def write(path: str | os.PathLike, tree: Any) -> None:
    """Writes a tree of arrays, numbers, strings, containers, frozen records and importable functions."""
    arrays: dict[str, Any] = {}
    text = json.dumps({"format": FORMAT, "tree": _encode(tree, arrays)})
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    with open(partial, "wb") as file:
        np.savez(file, __tree__=np.frombuffer(text.encode(), np.uint8), **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, target)


def read(path: str | os.PathLike) -> Any:
    """Reads back what `write` wrote."""
    if not Path(path).is_file():
        raise LoadError(f"There is no saved fit at {str(path)!r}. `fit.save(path)` writes one.")
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            described = json.loads(bytes(archive["__tree__"]).decode())
            if described["format"] != FORMAT:
                raise LoadError(
                    f"{str(path)!r} has format {described['format']}, this version of the package reads {FORMAT}. Load it "
                    "with the version that wrote it."
                )
            return _decode(described["tree"], archive)
    except (zipfile.BadZipFile, KeyError, ValueError, OSError, EOFError) as error:
        raise LoadError(
            f"{str(path)!r} is not a whole saved fit ({type(error).__name__}: {error}). It may be cut short or written by "
            "something else; save the fit again or use another copy."
        ) from error


def _encode(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if value is ...:
        return {"is": "ellipsis"}
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        name = f"array_{len(arrays)}"
        arrays[name] = np.asarray(value)
        return {"is": "array", "name": name}
    if isinstance(value, list | tuple):
        fields = getattr(value, "_fields", None)
        items = [_encode(item, arrays) for item in value]
        if fields:
            return {"is": "record", "type": _name(type(value)), "fields": dict(zip(fields, items, strict=True))}
        return {"is": "list" if isinstance(value, list) else "tuple", "items": items}
    if isinstance(value, Mapping):
        return {"is": "mapping", "items": [[_encode(k, arrays), _encode(v, arrays)] for k, v in value.items()]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _encode(getattr(value, field.name), arrays) for field in dataclasses.fields(value)}
        return {"is": "record", "type": _name(type(value)), "fields": fields}
    if callable(value) and hasattr(value, "__qualname__") and "<" not in value.__qualname__:
        return {"is": "import", "name": _name(value)}
    raise SettingError(
        f"Cannot save {value!r} (a {type(value).__name__}). Model arguments can be arrays, numbers, strings, lists, tuples "
        "and dicts of those."
    )


def _decode(value: Any, archive: Mapping[str, np.ndarray]) -> Any:
    if not isinstance(value, dict):
        return value
    match value["is"]:
        case "ellipsis":
            return ...
        case "array":
            return archive[value["name"]]
        case "list":
            return [_decode(item, archive) for item in value["items"]]
        case "tuple":
            return tuple(_decode(item, archive) for item in value["items"])
        case "mapping":
            return {_decode(k, archive): _decode(v, archive) for k, v in value["items"]}
        case "import":
            return _find(value["name"])
        case "record":
            return _find(value["type"])(**{k: _decode(v, archive) for k, v in value["fields"].items()})
    raise LoadError(f"Unknown entry {value['is']!r} in a saved fit.")


def _name(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found = importlib.import_module(module)
        for piece in path.split("."):
            found = getattr(found, piece)
    except (ImportError, AttributeError) as error:
        raise LoadError(f"The saved fit uses {name}, which cannot be imported here: {error}.") from error
    return found


def write_zarr(
    store: str | os.PathLike,
    layout: xr.Dataset,
    chunks: Mapping[str, tuple[int, ...]],
    parts: Iterable[tuple[str, tuple[slice, ...], Callable[[], np.ndarray]]],
) -> xr.Dataset:
    """Writes float32 arrays to a Zarr store part by part, while the next parts are computed; the store, opened lazily.

    Args:
        layout: names, shapes, dims and coordinates; its values are not read.
        chunks: of each array.
        parts: (name, where, what fetches the values); parts are fetched and written side by side.
    """
    try:
        import zarr
    except ImportError as error:
        raise SettingError("A Zarr store needs Zarr: install the `zarr` extra.") from error
    group = zarr.open_group(str(store), mode="w")
    for name, values in layout.coords.items():
        group.create_array(str(name), data=np.asarray(values), dimension_names=[str(dim) for dim in values.dims])
    arrays = {
        name: group.create_array(
            name,
            shape=layout[name].shape,
            chunks=chunks[name],
            dtype="float32",
            dimension_names=[str(dim) for dim in layout[name].dims],
        )
        for name in chunks
    }

    def put(name: str, place: tuple[slice, ...], fetch: Callable[[], np.ndarray]) -> None:
        arrays[name][place] = fetch().astype(np.float32, copy=False)

    with ThreadPoolExecutor(WRITERS) as pool:
        writing: list[Future] = []
        for part in parts:
            writing.append(pool.submit(put, *part))
            while len(writing) > MOST_WRITES:
                writing.pop(0).result()
        for each in writing:
            each.result()
    return xr.open_zarr(store, consolidated=False, chunks=None)
