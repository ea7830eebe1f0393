"""Variational families: ways to build q for a template."""

from pavi.families.asvi import ASVI
from pavi.families.base import Family, Glimpse, Reading, Units, Weights
from pavi.families.mean_field import MeanField
from pavi.families.pavi import PAVI
from pavi.families.unamortized import UnamortizedFlows

__all__ = ["ASVI", "PAVI", "Family", "Glimpse", "MeanField", "Reading", "UnamortizedFlows", "Units", "Weights"]
