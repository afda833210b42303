"""Ranking a measured selection again for tighter constraints, without timing.

What is not here is such a constraint, too: an implementation that this process has not registered,
such as one of another application that shares the store.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from cudnn_autotune.engines import registry
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling import ties


def restricted_to(
    selection: Selection,
    chosen: Measurement,
    rejected: Container[str],
    deterministic: bool,
    workspace_limit: int | None,
) -> Selection | None:
    """Returns ``selection`` with the entries that meet the constraints, the one to choose first.

    The chosen entry stays first if it meets the constraints. Otherwise the fastest entry takes its
    place, and the others keep their order. Entries are compared by ``Measurement.score``, which
    combines ``sustained_ms`` and ``time_ms`` by the evidence's ``burst_weight``, if all of them
    have a ``sustained_ms``, or at least all within the evidence's ``sustained_reach`` times the
    least ``time_ms``; otherwise they are compared by ``time_ms``. ``ties.break_ties`` chooses among
    entries within ``ties.TIE_WIDTH`` of the best.

    Args:
        chosen: The entry of ``selection`` that was chosen without the constraints.
        rejected: Texts of the candidates whose output was wrong.

    Returns:
        The selection, or None if no entry meets the constraints.
    """
    by_text = {entry.candidate.text: entry.candidate for entry in selection.ranking}

    def fits(candidate: Candidate) -> bool:
        is_small = workspace_limit is None or candidate.workspace_bytes <= workspace_limit
        varying = deterministic and varies(candidate)
        return is_small and not varying and not registry.is_absent(candidate.text)

    def may_serve(entry: Measurement) -> bool:
        if entry.candidate.text in rejected or not fits(entry.candidate):
            return False
        if entry is not chosen and entry.time_ms is None:
            return False
        # PyTorch's own path was timed with the plan `runs`, which must meet the constraints too. If
        # that plan was not measured itself, its workspace is unknown, and the path may serve.
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
    """Returns whether the candidate's output may differ in its bits from run to run."""
    # cuBLAS promises bitwise equal results only under conditions that are not checked here.
    return "NONDETERMINISTIC" in candidate.numerical_notes or candidate.id.kind == "matmul"


def _fastest(entries: Sequence[Measurement], evidence: Evidence) -> dict[Candidate, float]:
    """Returns the times in ms of the timed candidates that are tied with the fastest."""
    times = {entry: entry.time_ms for entry in entries if entry.time_ms is not None}
    near = min(times.values()) * evidence.sustained_reach
    # Sustained runs are made of the contenders only, so slower entries need not have one.
    for compared in (list(times), [entry for entry, ms in times.items() if ms <= near]):
        alone = {e: e.score(evidence.burst_weight) for e in compared if e.sustained_ms is not None}
        if len(alone) == len(compared):
            return _tied(alone)
    return _tied(times)


def _tied(times: Mapping[Measurement, float]) -> dict[Candidate, float]:
    limit = min(times.values()) * (1 + ties.TIE_WIDTH)
    return {entry.candidate: ms for entry, ms in times.items() if ms <= limit}
