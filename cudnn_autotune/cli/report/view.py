"""The data that the page's template shows in addition to a decision, with the time axis of its
plots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cudnn_autotune.cli.gpu_peaks import far
from cudnn_autotune.cli.report import reasons
from cudnn_autotune.engines.configs import ATEN
from cudnn_autotune.engines.roofline import Peaks
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.tuning.gain import against_pytorch, pytorchs_entry

MOST_CANDIDATES = 12
"""The number of candidates listed for each decision, not counting those that explain it."""


def section(decision: Decision, peaks: Peaks | None = None) -> dict[str, Any]:
    """Returns what the template shows of a decision, by the names that it has there."""
    chosen, against = decision.chosen, against_pytorch(decision)
    distance = far(decision, peaks)
    listed = _listed(decision)
    return {
        "decision": decision,
        "candidate": chosen.candidate if chosen else ATEN,
        "time_ms": chosen.reported_ms if chosen else None,
        # The plots show times in short batches.
        "best_ms": chosen.time_ms if chosen else None,
        "against": against,
        "far": distance,
        "why": reasons.why(decision, against, distance),
        "facts": reasons.facts(decision),
        "rows": _rows(decision, listed),
        "left_out": len(decision.selection.ranking) - len(listed) + decision.omitted,
        "axis": Axis.of(listed),
    }


def _listed(decision: Decision) -> list[Measurement]:
    """The first candidates, and the chosen, tied and rejected ones and PyTorch's pick."""
    ranking = decision.selection.ranking
    telling = {text for text, _ in decision.rejected} | set(decision.selection.evidence.tied)
    telling.add(ATEN.text)
    for entry in (decision.chosen, pytorchs_entry(decision.selection)):
        if entry is not None:
            telling.add(entry.candidate.text)
    return [
        entry
        for place, entry in enumerate(ranking)
        if place < MOST_CANDIDATES or entry.candidate.text in telling
    ]


def _rows(decision: Decision, listed: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Returns the candidates, each with its labels: kind (chosen, tied, rejected, other) and text.

    The kind of a candidate's first label sets the style of its row.
    """
    chosen, own = decision.chosen, pytorchs_entry(decision.selection)
    errors, tied = dict(decision.rejected), set(decision.selection.evidence.tied)

    def tags(entry: Measurement) -> Iterator[tuple[str, str]]:
        text = entry.candidate.text
        if entry is chosen:
            yield "chosen", "chosen"
        elif text in errors:
            yield "rejected", f"wrong: relative error {reasons.error_text(errors[text])}"
        elif text in tied:
            yield "tied", "tied"
        if text == ATEN.text:
            yield "other", "PyTorch's own path"
        elif entry is own:
            yield "other", "PyTorch's pick"

    return [{"entry": entry, "tags": list(tags(entry))} for entry in listed]


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
