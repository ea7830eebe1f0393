"""What it costs to leave data and rows where they are: step time from a memory map, Zarr and host memory.

    python benchmarks/streaming.py                 # 60 subjects, 6,000 vertices: 184 MB
    python benchmarks/streaming.py --subjects 200

The model is `pavi.models.parcellation`; every source gives the same fit (`tests/test_placement.py`). The second table is
how fast the moments of all members are written to Zarr, against the same numbers written at once.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import zarr

import pavi
from pavi.models import parcellation, simulate_cohort

VERTICES, SESSIONS, FEATURES, NETWORKS = 6000, 2, 64, 7
FAMILY = pavi.PAVI(flow=pavi.Affine())


def sources(folder: Path, x: np.ndarray) -> dict[str, tuple[Any, dict]]:
    np.save(folder / "x.npy", x)
    array = zarr.create_array(
        folder / "x.zarr", shape=x.shape, chunks=(4, 256, *x.shape[2:]), dtype=x.dtype, compressors=None
    )
    array[:] = x
    mapped = np.load(folder / "x.npy", mmap_mode="r")
    return {
        "in memory": (jax.numpy.asarray(x), {}),
        "memory map": (mapped, {}),
        "Zarr, chunks of 4 x 256": (zarr.open_array(folder / "x.zarr", mode="r"), {}),
        "rows in host memory": (jax.numpy.asarray(x), {"placement": "host"}),
        "rows and data in memory maps": (mapped, {"placement": folder / "rows"}),
    }


def step_seconds(fit: pavi.Fit) -> float:
    """Seconds per step in the second half of a fit."""
    seconds = fit.history["seconds"]
    half = len(seconds) // 2
    return (seconds[-1] - seconds[half]) / (len(seconds) - half - 1)


def write_rates(fit: pavi.Fit, folder: Path) -> None:
    """How fast moments are written."""
    found, taken = None, []
    for _ in range(2):
        started = time.perf_counter()
        found = fit.moments(sites=["logits", "label_probs"], num_samples=8, store=folder / "moments.zarr")
        taken.append(time.perf_counter() - started)
    assert found is not None
    arrays = {name: found[name].values for name in ("logits", "label_probs")}
    numbers = sum(array.nbytes for array in arrays.values())
    started = time.perf_counter()
    for name, array in arrays.items():
        target = zarr.create_array(folder / f"plain-{name}.zarr", shape=array.shape, chunks="auto", dtype=array.dtype)
        target[:] = array
    plain = time.perf_counter() - started
    started = time.perf_counter()
    fit.moments(sites=["logits", "label_probs"], num_samples=8)
    computed = time.perf_counter() - started
    print("\n| moments of logits and label_probs | MB | seconds | MB/s |\n|---|---|---|---|")
    for name, seconds in (("computed only", computed), ("to Zarr", min(taken)), ("the same numbers to Zarr at once", plain)):
        print(f"| {name} | {numbers / 1e6:.0f} | {seconds:.1f} | {numbers / seconds / 1e6:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--subjects", type=int, default=60)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs=2, default=[30, 512], help="subjects and vertices per step")
    arguments = parser.parse_args()
    cohort = simulate_cohort(arguments.subjects, SESSIONS, VERTICES, FEATURES, NETWORKS, dtype=np.float32)
    model = parcellation(arguments.subjects, SESSIONS, VERTICES, FEATURES, NETWORKS)
    batch = dict(zip(("subject", "vertex"), arguments.batch, strict=True))
    settings = {"family": FAMILY, "batch": batch, "num_particles": 1, "starts": 1, "steps": arguments.steps}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = sources(folder, np.asarray(cohort.x))
        times: dict[str, list[float]] = {source: [] for source in found}
        fit = None
        for _ in range(arguments.rounds):
            for source, (x, placed) in found.items():
                fit = pavi.fit(model, {"x": x}, progress_bar=False, **settings, **placed)
                times[source].append(step_seconds(fit))
        print(f"{jax.devices()[0].device_kind}, {cohort.x.nbytes / 1e6:.0f} MB of data, {batch} per step\n")
        print("| data | ms per step | times in memory |\n|---|---|---|")
        least = min(times["in memory"])
        for source, taken in times.items():
            print(f"| {source} | {1e3 * min(taken):.2f} | {min(taken) / least:.2f} |")
        assert fit is not None
        write_rates(fit, folder)


if __name__ == "__main__":
    main()
