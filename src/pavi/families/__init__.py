"""Variational families: PAVI itself and what it is compared with, one file each, all a `Family`."""

from pavi.families.base import Family, Units, Weights
from pavi.families.pavi import PAVI
from pavi.families.unamortized import UnamortizedFlows

__all__ = ["PAVI", "Family", "UnamortizedFlows", "Units", "Weights"]
