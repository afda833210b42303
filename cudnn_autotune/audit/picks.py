"""Converts a mode's selection into the pick that an audit records."""

from __future__ import annotations

from cudnn_autotune.audit.model import BURST, SUSTAINED, Pick
from cudnn_autotune.engines.selection import Selection


def pick_of(selection: Selection | None, tuning_ms: float) -> Pick:
    """The pick of a mode's ``selection``; None means that no candidate ran."""
    if selection is None:
        return Pick(tuning_ms=tuning_ms, error="no candidate runs")
    winner, evidence = selection.winner, selection.evidence
    # A leader that had a sustained run, but no contenders, was still chosen by the race.
    alone = sum(timed.sustained_ms is not None for timed in selection.ranking)
    return Pick(
        text=winner.candidate.text,
        tuning_ms=tuning_ms,
        time_ms=winner.time_ms,
        regret_bound=evidence.regret_bound,
        bound_truth=SUSTAINED if alone > 1 else BURST,
        rule=evidence.rule,
        remarks=evidence.remarks,
    )
