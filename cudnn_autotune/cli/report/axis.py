"""A time axis that fits a few candidates: the marks of the page's interval plots lie on it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cudnn_autotune.engines.selection import Measurement

# As far as sampling.screening lets candidates into a race: what is slower is only marked as beyond.
_FARTHEST = 1.5
# Nor is there more room than this on the other side.
_LEAST = 0.9
# The least width, relative: a field of ties does not fill the page with noise.
_NARROWEST = 0.02
# No call is as short; below it widths and steps would be no numbers any more.
_FLOOR_MS = 1e-9
_MARGIN = 4.0
_TICKS = 5


@dataclass(frozen=True)
class Axis:
    """From ``low_ms`` to ``high_ms``, as percents of a width with a margin on either side."""

    low_ms: float
    high_ms: float

    @classmethod
    def of(cls, entries: Iterable[Measurement]) -> Axis | None:
        """None where nothing was timed."""
        timed = [(e.time_ms, e) for e in entries if e.time_ms]
        if not timed:
            return None
        first_ms, first = min(timed, key=lambda pair: pair[0])
        times = [t for ms, e in timed for t in (ms, e.sustained_ms) if t]
        best = max(min(times), _FLOOR_MS)
        # Only the fastest one's interval counts: those of candidates that left after two samples
        # are wider than all else, and are cut off.
        low = max(min(best, first.low_ms or first_ms), _LEAST * best)
        high = min(max(*times, first.high_ms or first_ms), _FARTHEST * best)
        return cls(low, max(high, low * (1 + _NARROWEST)))

    def percent(self, ms: float) -> float:
        """Where a time lies; those outside lie on the edge."""
        share = (ms - self.low_ms) / (self.high_ms - self.low_ms)
        return round(_MARGIN + min(max(share, 0.0), 1.0) * (100 - 2 * _MARGIN), 2)

    def is_beyond(self, ms: float) -> bool:
        return ms > self.high_ms * (1 + 1e-9)

    def ticks(self) -> list[float]:
        """Round times, two to five of them."""
        width = self.high_ms - self.low_ms
        scale = 10.0 ** math.floor(math.log10(width / _TICKS))
        steps = [scale * step for step in (1, 2, 5, 10) if width / (scale * step) <= _TICKS]
        step = steps[0]
        first = math.ceil(self.low_ms / step)
        found = [step * index for index in range(first, math.floor(self.high_ms / step) + 1)]
        return found or [self.low_ms]
