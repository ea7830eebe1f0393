"""How many steps' data and rows are read at a time, where these do not lie on the device, and the bytes they take there.

Many at a time keep what every call costs small, which on a CPU is as much as a step: it puts a step's temporary arrays into
memory that is new to it. Few keep the device free for what does not fit there as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pavi.memory import in_all
from pavi.template import Level, Template

# Bytes that are read at a time, what part of all that is read at most, and at most for how many steps: with rows in host
# memory, and without.
MOST_BYTES, LARGEST_PART = 2**27, 1 / 2
MOST_HOSTED, MOST_STEPS = 16, 64
# What is on the device at once, in blocks of so many steps. Of data the present one and the next; of rows also what the
# block before made of them, and that once more with what the present one makes, while it is made and when it has been.
DATA_BLOCKS, ROW_BLOCKS = 2, 6


def steps_ahead(template: Template, batch: Mapping[str, int], data: Mapping[str, Any], rows: Mapping[Level, Any]) -> int:
    """How many steps to read for at a time.

    Args:
        batch: members of each plate that a step looks at.
        data: by site, arrays or whatever has their shape and dtype; those that do not lie on the device.
        rows: by level, trees of such; those of rows that do not lie on the device, with the state of their optimizer.
    """
    everything = sum(in_all(each) for each in (*data.values(), *rows.values()))
    block = min(MOST_BYTES, int(LARGEST_PART * everything))
    each = sum(_per_step(template, batch, data, rows))
    return int(np.clip(block // max(each, 1), 2, MOST_HOSTED if rows else MOST_STEPS))


def bytes_ahead(
    template: Template, batch: Mapping[str, int], here: Mapping[str, int], data: Mapping[str, Any], rows: Mapping[Level, Any]
) -> int:
    """Bytes of these on a device that looks at the members `here`, all devices together at those of the batch."""
    of_data, of_rows = _per_step(template, here, data, rows)
    steps = steps_ahead(template, batch, data, rows)
    # For each member of two blocks, where it was in each step of its own block and of the one before.
    places = 2 * steps * 2 * steps * sum(here[plate] for plate in {plate for level in rows for plate in level})
    return steps * (DATA_BLOCKS * of_data + ROW_BLOCKS * of_rows) + 4 * places


def _per_step(
    template: Template, batch: Mapping[str, int], data: Mapping[str, Any], rows: Mapping[Level, Any]
) -> tuple[int, int]:
    """Bytes of data and of rows that one step looks at."""

    def part(level: Level, tree: Any) -> int:
        return in_all(tree) // math.prod(template.sizes(level)) * math.prod(batch[plate] for plate in level)

    of_data = sum(part(template.site(name).level, array) for name, array in data.items())
    return of_data, sum(part(level, tree) for level, tree in rows.items())
