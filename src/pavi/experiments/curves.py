"""Figures of ELBOs over steps: plate amortization, encoding sizes and reduced plates (paper, `fig:convergence_speed`,
`fig:encoding_size`, `fig:card_redu`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from tqdm.auto import tqdm

from pavi.encodings import FreeEncodings, SetEncoder
from pavi.experiments.measuring import forget_compiled
from pavi.experiments.problems import REGIMES, gre, gre_evidence, simulate_gre
from pavi.experiments.records import Row, Table
from pavi.experiments.stepwise import elbos
from pavi.families import PAVI, Family, UnamortizedFlows
from pavi.flows import MAF

DIM, DRAWS = 8, 64


class Curve(NamedTuple):
    """One line of a figure: a family trained with some groups in every step, for how long, and how much data say."""

    family: Family
    batch: int
    steps: int
    regime: str = "informative"


class Figure(NamedTuple):
    groups: int
    curves: Mapping[str, Curve]


def convergence() -> Figure:
    """Plate amortization against one flow per group (figure 2, left): D=8, 100 groups, 2 in every step.

    Encodings have the library's sizes: 128 numbers, as in the paper, make the same rate of learning a much longer step.
    """
    flow = MAF((32, 32))
    free, single = PAVI(flow=flow), UnamortizedFlows(flow)
    curves = {"PAVI-E, informative": Curve(PAVI(SetEncoder(), flow), 2, 3_000)}
    for regime, longest in (("informative", 30_000), ("balanced", 30_000), ("weak", 60_000)):
        curves[f"PAVI-F, {regime}"] = Curve(free, 2, 10_000, regime)
        curves[f"one flow per group, {regime}"] = Curve(single, 2, longest, regime)
    return Figure(100, curves)


def encoding_sizes() -> Figure:
    """Encodings of 2 to 16 numbers where 8 are sufficient (figure 2, right): D=8, 20 groups, 2 in every step."""
    sizes = (2, 4, 6, 8, 16)
    return Figure(20, {f"size {size}": Curve(PAVI(FreeEncodings(size), MAF((32, 32))), 2, 20_000) for size in sizes})


def reduced_plates() -> Figure:
    """From 1 to all of 20 groups in every step (`fig:card_redu`)."""
    flow = MAF((32, 32))
    free, encoder, plain = PAVI(FreeEncodings(8), flow), PAVI(SetEncoder(), flow), PAVI(SetEncoder(memory=1.0), flow)
    curves = {f"PAVI-F, {batch} of 20": Curve(free, batch, 5_000) for batch in (1, 2, 4, 8, 16, 20)}
    curves |= {f"PAVI-E, {batch} of 20": Curve(encoder, batch, 2_000) for batch in (1, 2, 8, 20)}
    return Figure(20, curves | {f"PAVI-E that sees {batch} of 20": Curve(plain, batch, 2_000) for batch in (1, 2, 8)})


def trace(figure: Figure, table: Table, datasets: int, progress: bool) -> None:
    """Fills a table with ELBOs at steps that are evenly spread in their logarithm; one data set and seed per number."""
    jobs = [(name, number) for name in figure.curves for number in range(datasets)]
    missing = [job for job in jobs if not table.has(method=job[0], dataset=job[1])]
    for name, number in tqdm(missing, desc="curves", disable=not progress, dynamic_ncols=True):
        table.add(_curve(figure.groups, name, figure.curves[name], number))
        forget_compiled()


def _curve(groups: int, name: str, curve: Curve, number: int) -> list[Row]:
    points, sigma = REGIMES[curve.regime]
    x = simulate_gre(groups, points, sigma, DIM, 1000 + number)
    exact = round(gre_evidence(x, sigma), 3)
    at: Sequence[int] = np.unique(np.geomspace(10, curve.steps, 40).astype(int)).tolist()
    batch = {"group": curve.batch, "point": points}
    found = elbos(gre(groups, points, sigma, DIM), {"x": x}, curve.family, batch, at, seed=number, samples=DRAWS)
    return [
        {"method": name, "dataset": number, "step": step, "elbo": round(elbo, 3), "exact": exact} for step, elbo in found
    ]


FIGURES: Mapping[str, Callable[[], Figure]] = {
    "convergence": convergence,
    "encoding-sizes": encoding_sizes,
    "reduced-plates": reduced_plates,
}
