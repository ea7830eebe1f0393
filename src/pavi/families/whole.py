"""What families share that are trained on whole plates, all of whose weights are shared: nothing belongs to one member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from pavi.errors import SettingError
from pavi.families.base import Weights
from pavi.template import Template


class Whole:
    """A family over the very members it was trained on."""

    row_rate: ClassVar[float] = 1.0
    whole_plates: ClassVar[bool] = True

    def parts(self, template: Template) -> Mapping[str, slice]:
        return {}

    def extend(
        self, weights: Weights, kept: Mapping[str, np.ndarray], template: Template, data: Mapping[str, Any]
    ) -> Weights:
        raise SettingError(f"{type(self).__name__} is over the members it was trained on: fit the new study from scratch.")
