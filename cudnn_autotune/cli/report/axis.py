"""The time axis of the page's interval plots."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cudnn_autotune.engines.selection import Measurement

# The axis ends at this multiple of the best time. A race admits no slower candidates, and the plot
# marks them as beyond.
_FARTHEST = 1.5
# The axis begins at this multiple of the best time, or later.
_LEAST = 0.9
# The axis is at least this wide, relative to its begin, so that ties do not fill it with noise.
_NARROWEST = 0.02
# No call is shorter than this. Below it the axis's width and steps would not be finite.
_FLOOR_MS = 1e-9
# Empty room on either side, in percent of the width.
_MARGIN = 4.0
_TICKS = 5


@dataclass(frozen=True)
class Axis:
    """Maps times from ``low_ms`` to ``high_ms`` to percents of a width that has margins."""

    low_ms: float
    high_ms: float

    @classmethod
    def of(cls, entries: Iterable[Measurement]) -> Axis | None:
        """The axis for these candidates, or None if none of them was timed."""
        timed = [(e.time_ms, e) for e in entries if e.time_ms]
        if not timed:
            return None
        first_ms, first = min(timed, key=lambda pair: pair[0])
        times = [t for ms, e in timed for t in (ms, e.sustained_ms) if t]
        best = max(min(times), _FLOOR_MS)
        # Only the fastest candidate's interval counts. Those of candidates that left the race after
        # two samples are wider than the rest of the plot, and are cut off.
        low = max(min(best, first.low_ms or first_ms), _LEAST * best)
        high = min(max(*times, first.high_ms or first_ms), _FARTHEST * best)
        return cls(low, max(high, low * (1 + _NARROWEST)))

    def percent(self, ms: float) -> float:
        """The place of a time on the axis. Times outside of it lie on its edge."""
        share = (ms - self.low_ms) / (self.high_ms - self.low_ms)
        return round(_MARGIN + min(max(share, 0.0), 1.0) * (100 - 2 * _MARGIN), 2)

    def is_beyond(self, ms: float) -> bool:
        return ms > self.high_ms * (1 + 1e-9)

    def ticks(self) -> list[float]:
        """Two to five round times; fewer if the axis holds none."""
        width = self.high_ms - self.low_ms
        scale = 10.0 ** math.floor(math.log10(width / _TICKS))
        steps = [scale * step for step in (1, 2, 5, 10) if width / (scale * step) <= _TICKS]
        step = steps[0]
        first = math.ceil(self.low_ms / step)
        found = [step * index for index in range(first, math.floor(self.high_ms / step) + 1)]
        return found or [self.low_ms]
