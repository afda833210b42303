"""Computes regrets of picks, and selects the cases that can be compared.

The *regret* of a pick is its time over the best time of its case, by the oracle: 1.0 is the best. A
gap below the oracle's own standard error is a tie, and counts as 1.0. Means are geometric.

PyTorch does not say which engine it took. Its process timed its call and the pick of our reference
mode in turns, so ``regret(PyTorch) = ratio(PyTorch / reference) * regret(reference)``, where both
are as measured, and a tie is resolved last.
"""

from __future__ import annotations

import math
from collections import Counter

from cudnn_autotune.audit.model import (
    BURST,
    BURST_COLD,
    BURST_HOT,
    STEADY,
    SUSTAINED,
    Oracle,
    Pick,
    PytorchRow,
    Ratio,
    Record,
    Truth,
)

WITHIN = 0.01
"""Relative gap to the best within which a pick is as good, and between picks within which there
is no flip."""
NOT_YET = "not complete yet"
"""The reason for leaving out a case that is not complete yet."""


def truth_of(oracle: Oracle | None, name: str) -> Truth | None:
    """Returns the truth of that name (of ``model.TRUTHS``), or None if it was not measured."""
    if oracle is None:
        return None
    if name == STEADY:
        return oracle.truths.get(SUSTAINED) or truth_of(oracle, BURST)
    if name == BURST:
        return _mean_truth(oracle.truths.get(BURST_COLD), oracle.truths.get(BURST_HOT))
    return oracle.truths.get(name)


def _mean_truth(cold: Truth | None, hot: Truth | None) -> Truth | None:
    if cold is None or hot is None:
        return None
    times = {
        t: math.sqrt(ms * hot.times_ms[t]) for t, ms in cold.times_ms.items() if t in hot.times_ms
    }
    best = min(times, key=times.__getitem__, default="")
    errors = {
        text: math.hypot(_error(cold, text, best), _error(hot, text, best)) / 2
        for text in times
        if text != best
    }
    return Truth(times, errors) if times else None


def _error(truth: Truth, text: str, best: str) -> float:
    """Returns the error of the distance from ``best``, which may not be the best in this truth."""
    own = truth.errors.get(text, 0.0)
    return max(own, truth.errors.get(best, 0.0)) if best != truth.best else own


def measured_regret(truth: Truth | None, text: str | None) -> float | None:
    """Returns a pick's time over the best as measured; None if the truth lacks the candidate."""
    if truth is None or text not in truth.times_ms:
        return None
    return truth.times_ms[text] / truth.times_ms[truth.best]


def tied(regret: float, error: float) -> float:
    """Returns the regret, or 1.0 if it differs from that by no more than ``error``."""
    return 1.0 if abs(regret - 1) <= error else regret


def regret(truth: Truth | None, text: str | None) -> float | None:
    """Returns a pick's time over the best, with ties as 1.0; None if the truth lacks it."""
    measured = measured_regret(truth, text)
    if measured is None or truth is None or text is None:
        return None
    return tied(measured, truth.errors.get(text, 0.0))


def pytorch_regret(oracle: Oracle, row: PytorchRow, name: str) -> tuple[float, float] | None:
    """Returns PyTorch's regret as measured, and its relative standard error."""
    truth = truth_of(oracle, name)
    measured = measured_regret(truth, row.reference)
    if name == STEADY:
        name = SUSTAINED if SUSTAINED in oracle.truths else BURST
    ratio = ratio_of(row, name)
    if truth is None or measured is None or ratio is None:
        return None
    return ratio.median * measured, math.hypot(
        ratio.error, truth.errors.get(str(row.reference), 0.0)
    )


def missed(truth: Truth | None, text: str | None) -> list[str]:
    """Returns the candidates that are more than 1 % faster than ``text``, fastest first."""
    if truth is None or text not in truth.times_ms:
        return []
    limit = truth.times_ms[text] / (1 + WITHIN)
    faster = [other for other, ms in truth.times_ms.items() if ms < limit]
    return sorted(faster, key=truth.times_ms.__getitem__)


def ratio_of(row: PytorchRow, name: str) -> Ratio | None:
    """Returns PyTorch's time over our reference pick's, or None if it was not measured."""
    if name != BURST:
        return row.ratios.get(name)
    cold, hot = row.ratios.get(BURST_COLD), row.ratios.get(BURST_HOT)
    if cold is None or hot is None:
        return None
    return Ratio(
        math.sqrt(cold.median * hot.median),
        math.sqrt(cold.low * hot.low),
        math.sqrt(cold.high * hot.high),
        math.hypot(cold.error, hot.error) / 2,
    )


def shared_cases(record: Record) -> list[str]:
    """Returns the cases on which modes are compared: judged, and picked for in every run.

    Modes that picked nothing in any case are ignored.
    """
    modes = _available(record)
    return [case for case in record.cases if not _lacking(record, case, modes)]


def left_out(record: Record) -> dict[str, str]:
    """Returns the cases that are not compared, and why: a measurement failed or is not done yet."""
    modes = _available(record)
    lacking = {case: _lacking(record, case, modes) for case in record.cases}
    return {case: why for case, why in lacking.items() if why}


def unavailable(record: Record, mode: str) -> str:
    """Says why a mode picked nothing at all; empty if it picked something, or has not run yet."""
    rows: list[Pick | PytorchRow] = []
    for by_case in record.picks.get(mode, {}).values():
        rows += by_case.values()
    rows += record.pytorch.get(mode, {}).values()
    if not rows or not all(row.error for row in rows):
        return ""
    return Counter(row.error for row in rows).most_common(1)[0][0]


def _available(record: Record) -> list[str]:
    return [mode for mode in (*record.picks, *record.pytorch) if not unavailable(record, mode)]


def _lacking(record: Record, case: str, modes: list[str]) -> str:
    """Says why a case is not compared; empty if all of ``modes`` picked for it."""
    oracle = record.oracle.get(case)
    truth = truth_of(oracle, STEADY)
    for mode in modes:
        for run, by_case in record.picks.get(mode, {}).items():
            pick = by_case.get(case)
            if pick is None:
                return NOT_YET
            if pick.text is None:
                return f"{mode}#{run}: {pick.error}"
            if truth is not None and oracle is not None and pick.text not in truth.times_ms:
                why = oracle.failed.get(pick.text, "not measured")
                return f"oracle: {pick.text}, which {mode}#{run} picked: {why}"
        if mode in record.pytorch:
            row = record.pytorch[mode].get(case)
            if row is None or row.error:
                return NOT_YET if row is None else f"{mode}: {row.error}"
    if oracle is None:
        return NOT_YET
    return "" if truth is not None else f"oracle: {oracle.error}"
