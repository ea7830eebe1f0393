"""The methods of each experiment, with the paper's settings (`sec:details_arch`) unless a note says otherwise.

Notes. Optimizers, learning rates and stopping are the library's own for every method. PAVI's flows see their parents'
values, which the paper's do not; rows named "as in the paper" do without. A PAVI-F that is not given `steps` stops itself.
Sample-amortized methods are trained on fresh studies from the prior in every step rather than on 20,000 fixed ones: PAVI-E
(sa) on studies of at most 20 groups, the others on whole ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pavi.encodings import FreeEncodings, SetEncoder
from pavi.families import ADAVI, PAVI, UIVI, CascadingFlows, Family
from pavi.flows import MAF, Spline


@dataclasses.dataclass(frozen=True)
class Method:
    """A family and how it is trained.

    Args:
        family: what `fit` or `amortize` is given.
        steps: training steps; None where the fit stops itself.
        amortized: train on simulated studies (sample amortization).
        reduced: train on the experiment's reduced plates.
        largest: the most groups it is run with, in experiments that grow.
        starts: how many starts a fit tries; None for the library's choice.
    """

    family: Family
    steps: int | None = None
    amortized: bool = False
    reduced: bool = False
    largest: int = 20_000
    starts: int | None = None


def scaling() -> Mapping[str, Method]:
    flow = MAF((32, 32))
    small = SetEncoder(size=8, width=8, heads=2, inducing=32)
    large = SetEncoder(size=16, width=16, heads=2, inducing=64)
    return {
        "ADAVI (sa)": Method(ADAVI(encodings=small, flow=flow), 1500, amortized=True, largest=200),
        "CF (sa)": Method(CascadingFlows(8, sample_amortized=True), 1500, amortized=True, largest=200),
        "CF": Method(CascadingFlows(8), 4000, largest=200),
        "UIVI": Method(UIVI(), 4000, largest=200),
        "PAVI-F": Method(PAVI(FreeEncodings(8), flow), reduced=True),
        "PAVI-F as in the paper": Method(
            PAVI(FreeEncodings(8), flow, condition_on_parents=False), reduced=True, largest=200
        ),
        "PAVI-E": Method(PAVI(large, flow), 3000, reduced=True),
        "PAVI-E (sa)": Method(PAVI(large, flow), 3000, amortized=True),
    }


def mixture() -> Mapping[str, Method]:
    encoder = SetEncoder(size=16, width=16, heads=2, inducing=8)
    return {
        "CF": Method(CascadingFlows(16), 4000),
        "ADAVI": Method(ADAVI(encodings=encoder, flow=MAF((32,))), 3000, amortized=True),
        "UIVI": Method(UIVI(6, (64, 64)), 4000),
        "PAVI-E": Method(PAVI(encoder, MAF((32,))), 4000, reduced=True),
        "PAVI-F": Method(PAVI(FreeEncodings(16), MAF((32,))), reduced=True),
    }


def variance() -> Mapping[str, Method]:
    encoder = SetEncoder(size=32, width=32, heads=4, inducing=16)
    return {
        "CF": Method(CascadingFlows(32), 4000),
        "UIVI": Method(UIVI(3, (64, 64)), 4000),
        "PAVI-E": Method(PAVI(encoder, MAF((32, 32))), 4000, reduced=True),
        "PAVI-F": Method(PAVI(FreeEncodings(32), MAF((32, 32))), reduced=True),
    }


def neuroimaging() -> Mapping[str, Method]:
    """Eight starts, since networks merge. UIVI, which the paper could not train, takes few steps: each is slow.

    Flows are more expressive than the paper's affine ones, but do without the gradients that pay where a flow can be exact.
    """
    flows = {"scores": Spline(path_gradients=False), ...: MAF((32, 32), path_gradients=False)}
    return {
        "CF": Method(CascadingFlows(32), 4000, starts=8),
        "ADAVI": Method(ADAVI(), 1500),
        "PAVI-F": Method(PAVI(FreeEncodings({"mu": 32, ...: 8}), flows), 4000, reduced=True, starts=8),
        "UIVI": Method(UIVI(16, (128, 256, 512, 1024)), 100, starts=1),
    }
