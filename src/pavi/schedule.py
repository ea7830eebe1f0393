"""When to learn how fast, and when to stop.

The learning rate starts high, falls within some hundred steps to its full value, stays there until the
ELBO has settled given its own noise, then decays to zero over as many steps again: the first part finds the optimum, the
second removes the jitter around it.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from jaxtyping import Float

from pavi.template import Template

# The rate starts this many times higher, and falls by a factor e in this many steps.
EARLY_RATE, EARLY_STEPS = 4.0, 100
LONGEST_CHUNK = 1000
SHORTEST_CHUNK = 50
# Without `steps`: a row is visited at least this often at the full rate, and at most this often in all.
FEWEST_VISITS = 40
MOST_VISITS = 10_000
# A fit of at least this many steps is worth full compilation.
LONG_FIT = 10_000


class Stop(Enum):
    """Why a fit ended, and what to do about it."""

    SETTLED = "the ELBO settled: no gain beyond its own noise; the learning rate was then decayed to zero"
    STEPS = "all the steps asked for were taken"
    LIMIT = "the ELBO was still rising when the step limit called for the decay; pass `steps` to train longer"
    INTERRUPTED = "interrupted from the keyboard; this is the fit so far"
    NON_FINITE = "most steps had a gradient that was not finite; look for overflow or invalid parameters in the model"


def early_rates(steps: np.ndarray) -> Float[np.ndarray, " steps"]:
    """Rates before any decay, as fractions of the full rate: far from the optimum, noise matters less than pace."""
    return (1 + (EARLY_RATE - 1) * np.exp(-steps / EARLY_STEPS)).astype(np.float32)


class Schedule:
    """Decides the learning rate of the coming steps and when to stop. Rates are fractions of the full rate."""

    def __init__(
        self,
        template: Template,
        batch: dict[str, int],
        steps: int | None,
        decays: bool,
        load: float,
        early: bool = True,
        pace: float = 1.0,
    ):
        """`load` is how much of the work a step may do it does: small steps are cheap, so more of them are taken.

        Without `early` the rates do not start high: for training that goes on from an earlier one. All rates are
        multiplied by `pace`.
        """
        self.early, self.pace = early, pace
        epochs = [np.prod([template.plate(p).size / batch[p] for p in level]) for level in template.levels]
        self.fewest = int(FEWEST_VISITS * max(epochs, default=1)) + int(300 / np.clip(load, 0.2, 1.0))
        self.limit = max(int(MOST_VISITS * max(epochs, default=1)), 2 * self.fewest) if steps is None else steps
        self.tolerance = max(0.02, 1e-3 * template.num_latents / max(epochs, default=1))  # nats
        self.decays = decays
        self.asked = steps is not None
        self.reason = Stop.STEPS
        # Where the decay starts and ends, once known.
        self.decay = (int(0.4 * self.limit), self.limit) if self.asked else None
        self.stop: Stop | None = None

    @property
    def short(self) -> bool:
        """Whether the fit will likely be over before full compilation would have paid."""
        return (self.limit if self.asked else 2 * self.fewest) < LONG_FIT

    @property
    def total(self) -> int | None:
        return self.decay[1] if self.decay else None

    def rates(self, start: int) -> Float[np.ndarray, " steps"]:
        """Rates of the next chunk of steps; its length is how many to take."""
        end = int(min(start + max(SHORTEST_CHUNK, start // 10), start + LONGEST_CHUNK, self.total or np.inf))
        steps = np.arange(start, end)
        steady = np.full(len(steps), self.pace, np.float32)
        if not self.decays:
            return steady
        rates = self.pace * early_rates(steps) if self.early else steady
        if self.decay is None:
            return rates
        begin, finish = self.decay
        progress = np.clip((steps - begin) / max(finish - begin, 1), 0.0, 1.0)
        return (rates * 0.5 * (1 + np.cos(np.pi * progress))).astype(np.float32)

    def update(self, elbos: list[np.ndarray]) -> None:
        """Looks at all ELBOs so far; sets `stop` when it is time."""
        taken = sum(len(chunk) for chunk in elbos)
        if self.decay is None and taken >= self.fewest:
            settled = self._settled(np.concatenate(elbos))
            if settled or taken >= self.limit // 2:
                # With an optimizer of the caller's own, its learning rate is the caller's business.
                self.decay = (taken, 2 * taken if self.decays else taken)
                self.reason = Stop.SETTLED if settled else Stop.LIMIT
        if self.decay is not None and taken >= self.decay[1]:
            self.stop = self.reason

    def _settled(self, elbos: np.ndarray) -> bool:
        """Whether the last third of the run gained no more over the third before it than noise would explain."""
        window = len(elbos) // 3
        recent = elbos[-2 * window :]
        # A rare draw far off its posterior says nothing of the trend.
        middle = np.nanmedian(recent)
        recent = np.maximum(recent, middle - 20 * np.nanmedian(np.abs(recent - middle)))
        before, latest = recent[:window], recent[window:]
        # Differences of neighbours measure the noise free of the trend.
        noise = np.sqrt(0.5 * np.nanmean(np.diff(recent) ** 2) * 2 / window)
        return bool(np.nanmean(latest) - np.nanmean(before) < noise + self.tolerance)
