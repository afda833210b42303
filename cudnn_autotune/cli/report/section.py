"""A section of the page, on one decision: why it was made, how it was measured, its candidates, and
the time axis of their plots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cudnn_autotune.cli import wording
from cudnn_autotune.cli.far import Far, far
from cudnn_autotune.core.display import count, milliseconds
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.roofline import Peaks
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.tuning.gain import Against, against_pytorch, own_path_entry

MOST_CANDIDATES = 12
"""The number of candidates listed for each decision, not counting those that explain it."""


def section(decision: Decision, peaks: Peaks | None = None) -> dict[str, Any]:
    """Returns what the template shows of a decision, by the names that it has there."""
    chosen, against = decision.chosen, against_pytorch(decision)
    distance = far(decision, peaks)
    listed = _listed(decision)
    return {
        "decision": decision,
        "candidate": decision.candidate,
        "time_ms": chosen.reported_ms if chosen else None,
        # The plots show times in short batches.
        "best_ms": chosen.time_ms if chosen else None,
        "against": against,
        "far": distance,
        "why": why(decision, against, distance),
        "facts": facts(decision),
        "rows": _rows(decision, listed),
        "left_out": len(decision.selection.ranking) - len(listed) + decision.omitted,
        "axis": Axis.of(listed),
    }


def _listed(decision: Decision) -> list[Measurement]:
    """The first candidates, and the chosen, tied and rejected ones and PyTorch's pick."""
    ranking = decision.selection.ranking
    wanted = {text for text, _ in decision.rejected} | set(decision.selection.evidence.tied)
    wanted.add(OWN_PATH.text)
    for entry in (decision.chosen, own_path_entry(decision.selection)):
        if entry is not None:
            wanted.add(entry.candidate.text)
    return [
        entry
        for place, entry in enumerate(ranking)
        if place < MOST_CANDIDATES or entry.candidate.text in wanted
    ]


def _rows(decision: Decision, listed: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Returns the candidates, each with its labels: kind (chosen, tied, rejected, other) and text.

    The kind of a candidate's first label sets the style of its row.
    """
    chosen, own = decision.chosen, own_path_entry(decision.selection)
    errors, tied = dict(decision.rejected), set(decision.selection.evidence.tied)

    def tags(entry: Measurement) -> Iterator[tuple[str, str]]:
        text = entry.candidate.text
        if entry is chosen:
            yield "chosen", "chosen"
        elif text in errors:
            yield "rejected", f"wrong: relative error {error_text(errors[text])}"
        elif text in tied:
            yield "tied", "tied"
        if text == OWN_PATH.text:
            yield "other", "PyTorch's own path"
        elif entry is own:
            yield "other", "PyTorch's pick"

    return [{"entry": entry, "tags": list(tags(entry))} for entry in listed]


def why(
    decision: Decision, against: Against | None, distance: Far | None = None
) -> tuple[str, ...]:
    """Sentences on the rule that decided, the other candidates, the gain over PyTorch, and the
    limit."""
    evidence, chosen = decision.selection.evidence, decision.chosen
    if chosen is None:
        return ("Every candidate's output was wrong: PyTorch's own path serves it.",)
    found = []
    others = len(evidence.tied) - 1
    if evidence.rule:
        found.append(f"Rule: {evidence.rule_in_words}.")
    if others > 0:
        found.append(f"{count(others, 'other')} could not be told from it.")
    if evidence.regret_bound is not None:
        sure = "" if evidence.confidence is None else f" ({100 * evidence.confidence:.3g} % sure)"
        found.append(f"{_bound(evidence.regret_bound)}{sure}.")
    if chosen.time_ms is None:
        found.append("Nothing was timed: cuDNN's own order decided.")
    if against is not None:
        found.append(_compared(against, chosen))
    if distance is not None:
        found.append(_from_limit(distance))
    if decision.rejected:
        wrong = count(len(decision.rejected), "candidate")
        found.append(f"{wrong} gave wrong results and could not be chosen.")
    return tuple(found)


def _bound(share: float) -> str:
    if share == 0:
        return "No candidate is faster"
    regret = "less than 0.1" if share < 0.001 else f"at most {100 * share:.1f}"
    return f"{regret[0].upper()}{regret[1:]} % slower than the fastest"


def _compared(against: Against, chosen: Measurement) -> str:
    if against.text == chosen.candidate.text:
        return "PyTorch would run the same."
    where = "alone at a steady clock" if against.is_sustained else "in short batches"
    how = ""
    if against.is_rough:
        how = ", by a single launch"
    elif not against.is_sure:
        how = "; the two could not be told apart"
    sentence = f"PyTorch would run {against.text}: {milliseconds(against.pytorch_ms)} ms"
    return f"{sentence} against {milliseconds(against.ours_ms)} ms, {where}{how}."


def _from_limit(distance: Far) -> str:
    limit = f"{milliseconds(distance.limit.limit_ms)} ms"
    if distance.times_limit < 1:
        return (
            f"Below the limit of {limit} that {wording.bound(distance.limit)} sets: by the cache, "
            "or with fewer products than a direct convolution."
        )
    times = f"{distance.times_limit:.2f} times the limit of {limit}"
    return f"{times} that {wording.bound(distance.limit)} sets."


def facts(decision: Decision) -> tuple[tuple[str, str], ...]:
    """Names and texts of how the decision was measured, without the empty ones."""
    evidence, provenance = decision.selection.evidence, decision.provenance
    limit = decision.workspace_limit
    found = [
        ("sampling mode", decision.sampling),
        ("candidates", _candidates(decision)),
        ("launches timed", f"{decision.selection.total_samples:,}"),
        ("search took", f"{wording.duration(evidence.wall_ms)}, "
                        f"{wording.duration(evidence.gpu_ms)} of it on the GPU"),
        ("SM clock", _clock(decision)),
        ("clock held back by", ", ".join(evidence.throttle_reasons)),
        ("disturbed samples", str(evidence.disturbed) if evidence.disturbed else ""),
        ("output checked", _checked(decision)),
        ("measured for", wording.conditions(decision.problem)),
        ("deterministic only", "yes" if decision.problem.deterministic else ""),
        ("workspace limit", "" if limit is None else wording.size(limit)),
        ("benchmark limit", str(decision.benchmark_limit) if decision.benchmark_limit else ""),
        ("measured", when(provenance.time)),
        ("driver", provenance.driver),
        ("torch", provenance.torch),
        ("cudnn_autotune", provenance.cudnn_autotune),
    ]  # fmt: skip
    return tuple((name, text) for name, text in found if text)


def _candidates(decision: Decision) -> str:
    kept = len(decision.selection.ranking)
    return f"{kept} kept" + (f" of {kept + decision.omitted}" if decision.omitted else "")


def _clock(decision: Decision) -> str:
    evidence = decision.selection.evidence
    parts = []
    if evidence.clock_mhz is not None:
        parts.append(f"{evidence.clock_mhz:.0f} MHz in short batches")
    if evidence.sustained_clock_mhz is not None:
        parts.append(f"{evidence.sustained_clock_mhz:.0f} alone")
    if parts and evidence.max_clock_mhz is not None:
        parts.append(f"{evidence.max_clock_mhz:.0f} at most")
    return ", ".join(parts)


def _checked(decision: Decision) -> str:
    error = decision.relative_error
    return "no" if error is None else f"relative error {error_text(error)}"


def error_text(value: float) -> str:
    """A relative error as text."""
    return "infinite" if math.isinf(value) else f"{value:.2g}"


def when(time: str) -> str:
    """A provenance's time as text, as ``2025-11-21 17:28 UTC``."""
    return f"{time[:10]} {time[11:16]} UTC"


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
