"""Encoding schemes: where the per-member vectors that condition the flows come from."""

from pavi.encodings.free import FreeEncodings

__all__ = ["FreeEncodings"]
