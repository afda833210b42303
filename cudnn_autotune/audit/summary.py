"""The figures of each mode in a record, over the cases that can be compared.

The *regret* of a pick is its time over the best time of its case, by the oracle: 1.0 is the best. A
gap below the oracle's own standard error is a tie, and counts as 1.0. Means are geometric.

PyTorch does not say which engine it took. Its process timed its call and the pick of our reference
mode in turns. So ``regret(PyTorch)`` is ``ratio(PyTorch / reference) * regret(reference)``, both as
measured; a tie is resolved last.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean

import numpy as np
import numpy.typing as npt

from cudnn_autotune.audit.model import (
    BURST,
    BURST_COLD,
    BURST_HOT,
    STEADY,
    SUSTAINED,
    TRUTHS,
    Oracle,
    Pick,
    PytorchRow,
    Ratio,
    Record,
    Truth,
)

Values = npt.NDArray[np.float64]

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


@dataclass(frozen=True)
class Regrets:
    """Regrets over cases and runs; 1.0 is the best."""

    mean: float
    """Geometric mean."""
    p95: float
    worst: float
    within_1_percent: float
    """Share of picks at most 1 % slower than the best."""
    picks: int


@dataclass(frozen=True)
class Flips:
    """Numbers of fresh runs whose picks differ by more than 1 % and by more than the oracle's
    error."""

    cases: int
    """Number of cases that have two runs that differ."""
    of: int
    pairs: float
    """The share of pairs of runs that differ, over all cases."""


@dataclass(frozen=True)
class Tuning:
    """The wall time of choosing, in milliseconds."""

    median_ms: float
    """Median over cases and runs."""
    total_ms: float
    """The sum over the cases of a run; median over the runs."""


@dataclass(frozen=True)
class Coverage:
    """The picks whose true regret was within the bound that the mode reported."""

    share: float
    of: int


@dataclass(frozen=True)
class AgainstPytorch:
    """PyTorch's time over our reference mode's in the same process; above 1, ours is faster."""

    mean: float
    """Geometric mean."""
    least: float
    most: float
    cases: int
    slower: tuple[str, ...]
    """The cases in which ours is more than 1 % slower."""


@dataclass(frozen=True)
class ModeSummary:
    """The figures of one mode, over all its runs and the cases that all modes share."""

    runs: int
    cases: int
    picked: dict[str, int] = field(default_factory=dict)
    """Number of picks of each candidate, by its text."""
    regret: Regrets | None = None
    """Regrets by the steady truth: sustained if measured, else burst."""
    regrets: dict[str, Regrets] = field(default_factory=dict)
    """Regrets by truth, over the cases that have it."""
    flips: Flips | None = None
    """None if there is a single run."""
    tuning: Tuning | None = None
    coverage: Coverage | None = None
    """None if the mode reports no bound."""
    against: dict[str, AgainstPytorch] = field(default_factory=dict)
    """The comparisons by truth, for PyTorch's modes only; over all timed cases, since this needs
    no oracle."""
    unavailable: str = ""
    """The reason if the mode picked nothing at all; else empty."""


def summarize(record: Record) -> dict[str, ModeSummary]:
    """Returns the figures of every mode, PyTorch's included, over the cases that all could do."""
    cases = shared_cases(record)
    return {mode: _summary(record, mode, cases) for mode in (*record.picks, *record.pytorch)}


def regrets_of(record: Record, mode: str, cases: Sequence[str], name: str) -> Values:
    """Returns the regrets of a mode's picks in these cases, by the truth of that name."""
    found: list[float | None] = []
    for case in cases:
        oracle = record.oracle[case]
        if mode in record.pytorch:
            known = pytorch_regret(oracle, record.pytorch[mode][case], name)
            found.append(known and tied(*known))
        else:
            texts = [by_case[case].text for by_case in record.picks[mode].values()]
            found += [regret(truth_of(oracle, name), text) for text in texts]
    return np.array([value for value in found if value is not None])


def tuning_of(record: Record, mode: str, cases: Sequence[str]) -> list[list[float]]:
    """Returns the milliseconds of choosing, by run and case."""
    rows = [record.pytorch[mode]] if mode in record.pytorch else record.picks[mode].values()
    return [
        [ms for case in cases if (ms := by_case[case].tuning_ms) is not None] for by_case in rows
    ]


def _summary(record: Record, mode: str, cases: Sequence[str]) -> ModeSummary:
    runs = record.picks.get(mode, {})
    if why := unavailable(record, mode):
        return ModeSummary(len(runs) or 1, 0, unavailable=why)
    by_truth = {name: regrets_of(record, mode, cases, name) for name in TRUTHS}
    regrets = {name: _regrets(values) for name, values in by_truth.items() if values.size}
    picked = {case: [by_case[case] for by_case in runs.values()] for case in cases}
    picks = [pick for of_case in picked.values() for pick in of_case]
    return ModeSummary(
        len(runs) or 1,
        len(cases),
        dict(Counter(str(pick.text) for pick in picks).most_common()),
        regrets.get(STEADY),
        regrets,
        _flips(record, picked) if len(runs) > 1 and cases else None,
        _tuning(tuning_of(record, mode, cases)),
        _coverage(record, picked),
        _against(record.pytorch.get(mode, {})),
    )


def _regrets(values: Values) -> Regrets:
    return Regrets(
        mean=geometric_mean(values),
        p95=float(np.quantile(values, 0.95)),
        worst=float(values.max()),
        within_1_percent=float(np.mean(values <= 1 + WITHIN)),
        picks=len(values),
    )


def _flips(record: Record, picked: dict[str, list[Pick]]) -> Flips:
    cases = pairs = differing = 0
    for case, picks in picked.items():
        truth = truth_of(record.oracle[case], STEADY)
        assert truth is not None  # shared cases have one
        counts = Counter(str(pick.text) for pick in picks)
        among = sum(
            counts[one] * counts[other]
            for one, other in itertools.combinations(counts, 2)
            if _differ(truth, one, other)
        )
        cases += among > 0
        differing += among
        pairs += math.comb(len(picks), 2)
    return Flips(cases, len(picked), differing / pairs if pairs else 0.0)


def _differ(truth: Truth, one: str, other: str) -> bool:
    error = math.hypot(truth.errors.get(one, 0.0), truth.errors.get(other, 0.0))
    a, b = truth.times_ms[one], truth.times_ms[other]
    return max(a, b) / min(a, b) - 1 > max(WITHIN, error)


def _tuning(by_run: Sequence[Sequence[float]]) -> Tuning | None:
    every = [ms for of_run in by_run for ms in of_run]
    if not every:
        return None
    return Tuning(float(np.median(every)), float(np.median([sum(of_run) for of_run in by_run])))


def _coverage(record: Record, picked: dict[str, list[Pick]]) -> Coverage | None:
    within = []
    for case, picks in picked.items():
        for pick in picks:
            truth = truth_of(record.oracle[case], pick.bound_truth)
            measured = measured_regret(truth, pick.text)
            if pick.regret_bound is None or measured is None or truth is None:
                continue
            # The oracle itself may be off by two standard errors.
            error = 2 * truth.errors.get(str(pick.text), 0.0)
            within.append(measured - 1 <= pick.regret_bound + error)
    return Coverage(float(np.mean(within)), len(within)) if within else None


def _against(rows: dict[str, PytorchRow]) -> dict[str, AgainstPytorch]:
    found = {}
    for name in TRUTHS:
        ratios = {
            case: ratio.median
            for case, row in rows.items()
            if not row.error and (ratio := ratio_of(row, name))
        }
        if ratios:
            found[name] = AgainstPytorch(
                geometric_mean(ratios.values()),
                min(ratios.values()),
                max(ratios.values()),
                len(ratios),
                tuple(case for case, ratio in ratios.items() if ratio < 1 / (1 + WITHIN)),
            )
    return found
