"""The families PAVI is compared with, for use as `pavi.fit(..., family=...)`."""

from pavi.families import UnamortizedFlows

__all__ = ["UnamortizedFlows"]
