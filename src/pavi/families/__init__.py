"""Variational families: ways to build q for a template."""

from pavi.families.base import Family, Glimpse, Reading, Units, Weights
from pavi.families.pavi import PAVI
from pavi.families.unamortized import UnamortizedFlows

__all__ = ["PAVI", "Family", "Glimpse", "Reading", "UnamortizedFlows", "Units", "Weights"]
