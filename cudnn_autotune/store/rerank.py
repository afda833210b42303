"""A measured ranking, ranked again for tighter constraints. Nothing is timed."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.engines.unlisted import MATMUL
from cudnn_autotune.sampling import ties


def restricted_to(
    selection: Selection,
    chosen: Measurement,
    rejected: Container[str],
    deterministic: bool,
    workspace_limit: int | None,
) -> Selection | None:
    """What of ``selection`` may serve, the one to take first; None where nothing may.

    The chosen one stays if it may serve. Else the fastest of the others takes its place, by its
    time alone at a steady clock where that is known of all that are near (``sustained_ms``, and
    ``time_ms`` by the evidence's ``burst_weight``; near is who is within its
    ``sustained_reach``), else by ``time_ms``; of those within ``ties.TIE_WIDTH`` the first by
    ``ties.break_ties``. The others keep their order.

    Args:
        chosen: the entry of ``selection`` that serves where nothing is constrained.
        rejected: texts of the candidates whose output was wrong.
        workspace_limit: bytes; None: no limit.
    """
    by_text = {entry.candidate.text: entry.candidate for entry in selection.ranking}

    def fits(candidate: Candidate) -> bool:
        is_small = workspace_limit is None or candidate.workspace_bytes <= workspace_limit
        return is_small and not (deterministic and varies(candidate))

    def may_serve(entry: Measurement) -> bool:
        if entry.candidate.text in rejected or not fits(entry.candidate):
            return False
        if entry is not chosen and entry.time_ms is None:
            return False
        # The time of PyTorch's own path is that of the plan which it runs: without it, unknown.
        if entry.runs:
            plan = by_text.get(entry.runs)
            return plan is None or fits(plan)
        return True

    serving = [entry for entry in selection.ranking if may_serve(entry)]
    if not serving:
        return None
    out = set(by_text) - {entry.candidate.text for entry in serving}
    evidence = selection.evidence
    if any(entry is chosen for entry in serving):
        first, tied = chosen, [text for text in evidence.tied if text not in out]
        evidence = replace(evidence, tied=tuple(tied))
    else:
        equal, rule = ties.break_ties(_fastest(serving, evidence))
        first = next(entry for entry in serving if entry.candidate is equal[0])
        evidence = replace(
            evidence,
            rule=f"re-ranked: {rule}",
            tied=tuple(candidate.text for candidate in equal),
            regret_bound=None,
            confidence=None,
            sustained_clock_mhz=None,
        )
    others = [entry for entry in serving if entry is not first]
    return replace(selection, ranking=(first, *others), evidence=evidence)


def varies(candidate: Candidate) -> bool:
    """Whether its bits may differ from run to run."""
    # cuBLAS promises the same bits only under conditions of its own.
    return "NONDETERMINISTIC" in candidate.numerical_notes or candidate.text == MATMUL.text


def _fastest(entries: Sequence[Measurement], evidence: Evidence) -> dict[Candidate, float]:
    """Times of those that are as good as equally fast as the fastest; every entry is timed."""
    times = {entry: entry.time_ms for entry in entries if entry.time_ms is not None}
    near = min(times.values()) * evidence.sustained_reach
    # Whom the race left further behind was not run alone, and need not be.
    for compared in (list(times), [entry for entry, ms in times.items() if ms <= near]):
        alone = {e: e.score(evidence.burst_weight) for e in compared if e.sustained_ms is not None}
        if len(alone) == len(compared):
            return _tied(alone)
    return _tied(times)


def _tied(times: Mapping[Measurement, float]) -> dict[Candidate, float]:
    limit = min(times.values()) * (1 + ties.TIE_WIDTH)
    return {entry.candidate: ms for entry, ms in times.items() if ms <= limit}
