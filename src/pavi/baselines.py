"""The families PAVI is compared with, for use as `pavi.fit(..., family=...)`."""

from pavi.families import ADAVI, ASVI, UIVI, CascadingFlows, MeanField, UnamortizedFlows

__all__ = ["ADAVI", "ASVI", "UIVI", "CascadingFlows", "MeanField", "UnamortizedFlows"]
