"""The data that the page's template shows in addition to a decision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cudnn_autotune.cli.farthest import far
from cudnn_autotune.cli.report import reasons
from cudnn_autotune.cli.report.against import against_pytorch, pytorchs_entry
from cudnn_autotune.cli.report.axis import Axis
from cudnn_autotune.engines.configs import ATEN
from cudnn_autotune.engines.roofline import Peaks
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.store.decision import Decision

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
