"""The families PAVI is compared with, for use as `pavi.fit(..., family=...)`."""

from pavi.families import ASVI, MeanField, UnamortizedFlows

__all__ = ["ASVI", "MeanField", "UnamortizedFlows"]
