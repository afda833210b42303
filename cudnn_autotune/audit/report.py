"""Renders a record as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console

from cudnn_autotune.audit.layers import Case
from cudnn_autotune.audit.model import (
    BURST,
    BURST_COLD,
    BURST_HOT,
    PEAKS,
    PYTORCH_MODES,
    STEADY,
    SUSTAINED,
    Record,
)
from cudnn_autotune.audit.summary import (
    NOT_YET,
    AgainstPytorch,
    ModeSummary,
    left_out,
    missed,
    shared_cases,
    summarize,
    truth_of,
)
from cudnn_autotune.expert import Peaks, limit
from cudnn_autotune.tools import NONE, Table, decode

_FEW_CASES = 3
_MOST_LEFT_OUT = 12
_MOST_FAR = 12


def show(record: Record, console: Console | None = None) -> None:
    """Prints every table of the record."""
    console = console or Console()
    for table in tables(record):
        table.show(console)


def tables(record: Record) -> list[Table]:
    """Returns every table of the record that has rows."""
    summaries = summarize(record)
    found = [_regrets(record, summaries), _pytorch(record, summaries)]
    if len(shared_cases(record)) <= _FEW_CASES:
        found.append(_picked(record))
    found += [_missed(record), _farthest(record), _lacking(record), _left_out(record)]
    return [table for table in found if table.rows]


def headline(record: Record) -> str:
    """Says in a sentence what kind of audit this is."""
    of = {
        "gpu": f"Measured on {record.environment.get('gpu')}",
        "replay": f"Replayed from a recording of {record.environment.get('gpu')}",
    }
    return of[record.kind] + ("" if record.complete else "; not complete yet")


def milliseconds(ms: float) -> str:
    """Returns a time with its unit, as ``0.012 ms`` or ``1.50 s``."""
    return f"{ms / 1e3:.2f} s" if ms >= 1000 else f"{ms:.1f} ms" if ms >= 0.1 else f"{ms:.3f} ms"


def _percent(share: float) -> str:
    # 999 of 1000 must not read 100 %.
    text = f"{100 * share:.0f} %"
    return text if share in (0.0, 1.0) or text not in ("0 %", "100 %") else f"{100 * share:.2f} %"


def _regrets(record: Record, summaries: Mapping[str, ModeSummary]) -> Table:
    shared = shared_cases(record)
    some_sustained = any(SUSTAINED in record.oracle[case].truths for case in shared)
    others = [*([BURST] if some_sustained else []), BURST_COLD, BURST_HOT]
    columns = ["mode", "picks", "time / best", "p95", "worst", "within 1 %"]
    columns += [*others, "flips", "tuning", "all cases", "bound holds"]
    table = Table("Picked against best", columns, note=_note(record, shared, some_sustained))
    for mode, summary in summaries.items():
        if summary.unavailable:
            filler = [NONE] * (len(columns) - 2)
            table.rows.append((mode, "not possible", *filler))
            continue
        regret = summary.regret
        if regret is None:
            continue
        means = [summary.regrets.get(name) for name in others]
        table.rows.append(
            (
                mode,
                str(regret.picks),
                f"{regret.mean:.4f}",
                f"{regret.p95:.4f}",
                f"{regret.worst:.4f}",
                _percent(regret.within_1_percent),
                *(f"{mean.mean:.4f}" if mean else NONE for mean in means),
                _flips(summary),
                milliseconds(summary.tuning.median_ms) if summary.tuning else NONE,
                milliseconds(summary.tuning.total_ms) if summary.tuning else NONE,
                _percent(summary.coverage.share) if summary.coverage else NONE,
            )
        )
    return table


def _flips(summary: ModeSummary) -> str:
    if summary.flips is None:
        return NONE
    if summary.flips.of <= _FEW_CASES:
        return _percent(summary.flips.pairs)
    return f"{summary.flips.cases} of {summary.flips.of}"


def _note(record: Record, shared: Sequence[str], some_sustained: bool) -> str:
    truths = [truth_of(record.oracle[case], STEADY) for case in shared]
    errors = [max(truth.errors.values()) for truth in truths if truth and truth.errors]
    parts = [f"{headline(record)}. {len(shared)} of {len(record.cases)} cases."]
    if some_sustained:
        known = sum(SUSTAINED in record.oracle[case].truths for case in shared)
        parts.append(
            f"Best: alone until the clock is steady ({known} of the cases), else in bursts."
        )
    else:
        parts.append("Best: in bursts.")
    parts.append("Bursts: short batches that take turns, the cache cold and hot.")
    if errors:
        parts.append(
            f"Standard error of the oracle's ratios, median over cases of the largest: "
            f"{100 * float(np.median(errors)):.2f} %; gaps below it are ties."
        )
    parts.append(
        "Means are geometric. Flips: cases (of few cases: pairs of runs) in which fresh runs' "
        "picks differ by more than 1 % and the oracle's error. Tuning: wall time of choosing, of "
        "a case and of all. Bound holds: share of picks whose regret is within the bound that the "
        "mode reports."
    )
    if any(mode in record.pytorch for mode in PYTORCH_MODES):
        parts.append(
            "PyTorch's rows: its time against our reference pick in its own process, times that "
            "pick's regret."
        )
    parts += [
        f"{mode} is not possible: {summary.unavailable}."
        for mode, summary in summarize(record).items()
        if summary.unavailable
    ]
    return " ".join(parts)


def _pytorch(record: Record, summaries: Mapping[str, ModeSummary]) -> Table:
    reference = record.settings.get("reference", "ours")
    table = Table(
        f"PyTorch's time / {reference}'s time, taking turns in one process",
        ("PyTorch's mode", "truth", "cases", "mean", "least", "most", "ours > 1 % slower"),
        texts=2,
        note="pytorch_off: benchmark=False; pytorch_on_10: benchmark=True with PyTorch's default "
        "limit; pytorch_on_0: without a limit. Above 1, ours is faster. All cases that were timed.",
    )
    for mode, summary in summaries.items():
        for truth, ratios in summary.against.items():
            if truth != STEADY:
                table.rows.append((mode, truth, *_against(ratios)))
    return table


def _against(ratios: AgainstPytorch) -> tuple[str, ...]:
    return (
        str(ratios.cases),
        f"{ratios.mean:.4f}",
        f"{ratios.least:.3f}",
        f"{ratios.most:.3f}",
        f"{len(ratios.slower)} of {ratios.cases}",
    )


def _picked(record: Record) -> Table:
    """Shows which candidate each mode takes, if there are few cases."""
    table = Table("What each mode takes", ("case", "mode", "candidate: how often"), texts=3)
    for case in shared_cases(record):
        for mode, runs in record.picks.items():
            picks = [by_case[case] for by_case in runs.values() if case in by_case]
            counts = Counter(pick.text for pick in picks if pick.text)
            if counts:
                counted = ", ".join(f"{text}: {count}" for text, count in counts.most_common())
                table.rows.append((case, mode, counted))
    return table


def _missed(record: Record) -> Table:
    """Shows where the reference mode missed the best candidate."""
    mode = record.settings.get("reference", "auto")
    runs = record.picks.get(mode, {})
    table = Table(
        f"What {mode} missed by more than 1 %",
        ("case", "taken, instead of", "runs", "slower"),
        texts=2,
    )
    for case in shared_cases(record):
        truth = truth_of(record.oracle[case], STEADY)
        picks = Counter(by_case[case].text for by_case in runs.values())
        for text, count in picks.most_common():
            better = missed(truth, text)
            if truth is None or text is None or not better:
                continue
            slower = truth.times_ms[text] / truth.times_ms[better[0]] - 1
            pick = f"{text}, instead of {better[0]}"
            share = f"{count} of {picks.total()}"
            table.rows.append((case, pick, share, f"{100 * slower:.1f} %"))
    hidden = len(table.rows) - _MOST_LEFT_OUT
    if hidden > 0:
        table.rows = sorted(table.rows, key=lambda row: -float(row[-1].split()[0]))
        del table.rows[_MOST_LEFT_OUT:]
        table.note = f"and {hidden} more"
    return table


def _farthest(record: Record) -> Table:
    """Shows where another kernel could win most: how far the fastest candidates are from what the
    GPU could do."""
    table = Table(
        "Farthest from the roofline",
        ("case", "fastest with a cold cache", "ms", "limit, ms", "time / limit", "bound by"),
        texts=2,
    )
    if PEAKS not in record.environment:
        return table
    peaks = decode(Peaks, record.environment[PEAKS], "peaks")
    rows = []
    for case in shared_cases(record):
        truth = truth_of(record.oracle[case], BURST_COLD)
        if truth is None:
            continue
        least = limit(Case(**record.cases[case]).problem(), peaks)
        time_ms = truth.times_ms[truth.best]
        times = f"{time_ms:.4g}", f"{least.limit_ms:.4g}", f"{least.times(time_ms):.2f}"
        rows.append((least.gain_ms(time_ms), (case, truth.best, *times, least.bound_by)))
    rows.sort(key=lambda row: -row[0])
    table.rows += [row for gain_ms, row in rows[:_MOST_FAR] if gain_ms > 0]
    table.note = (
        "By the time that could be won. The limit: every tensor read from memory or written there "
        "once, every product computed once, at the highest rates that were measured on this GPU."
    )
    return table


def _lacking(record: Record) -> Table:
    """Shows which samples modes needed and recordings lack; such picks say little about the GPU."""
    columns = ("case", "asked for by", "lacking")
    table = Table("What the recording lacks", columns, texts=3)
    for case in record.cases:
        for mode, runs in record.picks.items():
            picks = [by_case[case] for by_case in runs.values() if case in by_case]
            if lacking := {what for pick in picks for what in pick.lacking}:
                table.rows.append((case, mode, "; ".join(sorted(lacking))))
    return table


def _left_out(record: Record) -> Table:
    table = Table("Not compared", ("case", "why"), texts=2)
    reasons = {case: why for case, why in left_out(record).items() if why != NOT_YET}
    table.rows += list(reasons.items())[:_MOST_LEFT_OUT]
    notes = [f"and {len(reasons) - _MOST_LEFT_OUT} more"] if len(reasons) > _MOST_LEFT_OUT else []
    table.note = "; ".join(notes + record.failures[-3:])
    if record.failures and not table.rows:
        table.rows.append((NONE, "processes failed"))
    return table
