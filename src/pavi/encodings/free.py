"""Free encodings (PAVI-F, paper `sec:PAVI-F_details`): one trainable vector per member of each plate level.

Unlike the paper's, they start from the data: see `FreeEncodings.init`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from pavi.data import summarize
from pavi.errors import SettingError
from pavi.template import Level, Site, Template

SMALLEST_DEFAULT = 8
LARGEST_DEFAULT = 64


@dataclasses.dataclass(frozen=True)
class FreeEncodings:
    """One trainable vector per member of each plate level.

    Args:
        size: numbers per member: one int for all, or a mapping from a level (a tuple of plate names, or one plate's
            name) or a site to an int, with `...` for the rest. Sites of one level share its vector; a site with a
            smaller size reads the start of it. By default, as many as the level's latents have numbers, at least 8.

    Example:
        >>> import pavi
        >>> family = pavi.PAVI(encodings=pavi.FreeEncodings(size={"group": 16, ...: 8}))
    """

    size: int | Mapping | None = None

    def __post_init__(self) -> None:
        sizes = self.size.values() if isinstance(self.size, Mapping) else [1 if self.size is None else self.size]
        if any(not isinstance(size, int) or size < 1 for size in sizes):
            raise SettingError(f"FreeEncodings(size={self.size!r}): expected sizes of at least 1.")
        if isinstance(self.size, Mapping):
            object.__setattr__(self, "size", MappingProxyType(dict(self.size)))

    def __hash__(self) -> int:
        return hash(tuple(self.size.items()) if isinstance(self.size, Mapping) else self.size)

    def check(self, template: Template) -> None:
        """Refuses sizes for levels or sites that the model does not have."""
        if not isinstance(self.size, Mapping):
            return
        known = {..., *template.levels, *(level[0] for level in template.levels if len(level) == 1)}
        known |= {site.name for site in template.latents}
        unknown = [key for key in self.size if key not in known]
        if unknown:
            raise SettingError(
                f"FreeEncodings: {unknown} is neither a level nor a latent site of the model. "
                f"Levels: {list(template.levels)}; sites: {[site.name for site in template.latents]}."
            )

    def site_size(self, template: Template, site: Site) -> int:
        """How many numbers of its level's encoding a site reads."""
        automatic = sum(other.size for other in template.latents if other.level == site.level)
        automatic = min(max(automatic, SMALLEST_DEFAULT), LARGEST_DEFAULT)
        if not isinstance(self.size, Mapping):
            return automatic if self.size is None else self.size
        keys = [site.name, site.level, *(site.level if len(site.level) == 1 else ()), ...]
        return next((self.size[key] for key in keys if key in self.size), automatic)

    def level_size(self, template: Template, level: Level) -> int:
        """Numbers per member of a level."""
        return max(self.site_size(template, site) for site in template.latents if site.level == level)

    def count_size(self, template: Template, level: Level) -> int:
        """How many numbers at the start of a level's encoding are counts of data."""
        del template, level
        return 0

    def init(
        self, template: Template, data: Mapping[str, Any], more: Mapping[Level, Any] = MappingProxyType({})
    ) -> dict[Level, Any]:
        """Encoding arrays of the full study: what the data say of each member, after what `more` is known, then zeros.

        So the shared flows learn what to make of a member's data from the first step on, and a member's own encoding
        only has to be refined in the steps that visit it.
        """
        rows = {}
        for level in template.levels:
            size = self.level_size(template, level)
            features = summarize(template, data, level, size, more)
            xp = np if isinstance(features, np.ndarray) else jnp
            fill = [(0, 0)] * len(level) + [(0, size - features.shape[-1])]
            rows[level] = xp.pad(features.astype(jnp.result_type(float)), fill)
        return rows

    def extend(
        self, rows: Mapping[Level, Any], kept: Mapping[str, np.ndarray], template: Template, data: Mapping[str, Any]
    ) -> dict[Level, np.ndarray]:
        """Rows of a study whose members `kept` names from an earlier one; new members' are guessed from their data.

        Args:
            rows: rows of the earlier study.
            kept: per plate, which earlier member each member is, or -1.
            template: the study as it is now.
            data: its data.
        """
        extended = {}
        for level, old in rows.items():
            if not level:
                extended[level] = np.asarray(old)
                continue
            features = np.asarray(summarize(template, data, level, old.shape[-1]))
            old_places = np.ix_(*(np.maximum(kept[plate], 0) for plate in level))
            known = np.ones(template.sizes(level), bool)
            for axis, plate in enumerate(level):
                shape = [1] * len(level)
                shape[axis] = -1
                known &= (kept[plate] >= 0).reshape(shape)
            new = np.asarray(old)[old_places]
            if not known.all():
                inputs = np.concatenate([features, np.ones((*features.shape[:-1], 1), features.dtype)], -1)
                slopes, *_ = np.linalg.lstsq(inputs[known], new[known], rcond=None)
                new[~known] = inputs[~known] @ slopes
            extended[level] = new
        return extended


@dataclasses.dataclass(frozen=True)
class ReadEncodings(FreeEncodings):
    """Encodings that a `SetEncoder` has computed: free ones of given sizes, of which the first numbers are counts."""

    counts: Mapping = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "counts", MappingProxyType(dict(self.counts)))

    def __hash__(self) -> int:
        return hash((super().__hash__(), tuple(self.counts.items())))

    def count_size(self, template: Template, level: Level) -> int:
        del template
        return self.counts[level]
