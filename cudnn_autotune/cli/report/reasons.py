"""Explains in words why a decision was made and how it was measured."""

from __future__ import annotations

import math

from cudnn_autotune.cli import wording
from cudnn_autotune.cli.gpu_peaks import Far
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.tuning.gain import Against


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
        found.append(f"{wording.count(others, 'other')} could not be told from it.")
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
        wrong = wording.count(len(decision.rejected), "candidate")
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
    sentence = f"PyTorch would run {against.text}: {wording.milliseconds(against.pytorch_ms)} ms"
    return f"{sentence} against {wording.milliseconds(against.ours_ms)} ms, {where}{how}."


def _from_limit(distance: Far) -> str:
    limit = f"{wording.milliseconds(distance.limit.limit_ms)} ms"
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
