"""What families share whose rows are read as they are: nothing is computed from the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from pavi.cascade import Study
from pavi.encodings import FreeEncodings
from pavi.families.base import Glimpse, Reading, Units, Weights
from pavi.template import Level, Template


class Rowed:
    """A family in which a member's encoding is its row."""

    whole_plates: ClassVar[bool] = False

    def measure(self, template: Template, data: Mapping[str, Any], arguments: Any) -> Units:
        return Units({}, {})

    def encode(self, weights: Weights, units: Units, glimpse: Glimpse) -> tuple[Mapping[Level, Any], Mapping]:
        return weights.rows, {}

    def extend(
        self, weights: Weights, kept: Mapping[str, np.ndarray], template: Template, data: Mapping[str, Any]
    ) -> Weights:
        return Weights(weights.shared, FreeEncodings().extend(weights.rows, kept, template, data), {})

    def settle(self, study: Study, arguments: Any, data: Mapping[str, Any], units: Units, weights: Weights) -> Reading:
        return Reading(self, weights)  # type: ignore[arg-type]  # the rest of the family is its subclass's
