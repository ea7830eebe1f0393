"""Encodings: where what is known of each member comes from."""

from pavi.encodings.free import FreeEncodings, ReadEncodings
from pavi.encodings.set_encoder import SetEncoder, View

__all__ = ["FreeEncodings", "ReadEncodings", "SetEncoder", "View"]
