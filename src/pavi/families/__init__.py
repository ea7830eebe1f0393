"""Variational families: ways to build q for a template."""

from pavi.families.adavi import ADAVI
from pavi.families.asvi import ASVI
from pavi.families.base import Family, Glimpse, Informed, Joint, Reading, Units, Weights
from pavi.families.cascading import CascadingFlows
from pavi.families.implicit import UIVI
from pavi.families.mean_field import MeanField
from pavi.families.pavi import PAVI
from pavi.families.polished import Normal, Polished, outside
from pavi.families.unamortized import UnamortizedFlows

__all__ = [
    "ADAVI",
    "ASVI",
    "PAVI",
    "UIVI",
    "CascadingFlows",
    "Family",
    "Glimpse",
    "Informed",
    "Joint",
    "MeanField",
    "Normal",
    "Polished",
    "Reading",
    "UnamortizedFlows",
    "Units",
    "Weights",
    "outside",
]
