"""What a record of audit_layers.py says: tables and the plot."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.tables import Table

from cudnn_autotune.audit import plot as audit_plot
from cudnn_autotune.audit.analysis import (
    NOT_YET,
    left_out,
    ratio_of,
    shared_cases,
    truth_of,
    unavailable,
)
from cudnn_autotune.audit.layers import Case
from cudnn_autotune.audit.model import BURST, BURST_COLD, BURST_HOT, STEADY, SUSTAINED, Record
from cudnn_autotune.audit.summary import ModeSummary, Regrets, summarize

NONE = "–"
REGRETS = ("mean", "p95", "worst", "within 1 %")
TUNING = ("tuning: median", "mean", "all cases")
REGRET_COLUMNS = ("mode", "runs", *REGRETS, "flips", *TUNING, "bound holds")
RATIO_COLUMNS = ("PyTorch's mode", "measured", "cases", "mean", "least", "most")


def tables(data: dict[str, Any]) -> list[Table]:
    record: Record = data["audit"]
    summaries = {m: told for m, told in summarize(record).items() if not told.unavailable}
    found = [
        _regrets(record, summaries, data["earlier_sessions"]),
        _by_truth(record, summaries),
        _against_pytorch(record, summaries),
        _by_kind(record),
    ]
    return [table for table in found if table.rows]


def plot(data: dict[str, Any], path: Path) -> None:
    audit_plot.plot(data["audit"], path)


def ms_text(ms: float) -> str:
    return f"{ms / 1e3:.1f} s" if ms >= 10_000 else f"{ms:.1f} ms" if ms >= 0.1 else f"{ms:.3f} ms"


def percent_text(share: float) -> str:
    return f"{100 * share:.1f} %"


def tuning_times(record: Record, mode: str) -> list[float]:
    """Milliseconds of each choice: of all compared cases, and all runs."""
    shared = shared_cases(record)
    if mode in record.pytorch:
        rows = [record.pytorch[mode][case].tuning_ms for case in shared]
    else:
        rows = [by[case].tuning_ms for by in record.picks[mode].values() for case in shared]
    return [ms for ms in rows if ms is not None]


def _regrets(
    record: Record, summaries: Mapping[str, ModeSummary], earlier: Sequence[dict[str, Any]]
) -> Table:
    table = Table(
        "Time of what was picked, over the fastest's",
        REGRET_COLUMNS,
        note=_note(record, earlier),
    )
    for mode, told in summaries.items():
        if told.regret is None:
            continue
        times = tuning_times(record, mode)
        table.rows.append(
            (
                mode,
                str(told.runs),
                *_figures(told.regret),
                f"{told.flips.cases} of {told.flips.of}" if told.flips else NONE,
                ms_text(statistics.median(times)) if times else NONE,
                ms_text(statistics.fmean(times)) if times else NONE,
                ms_text(told.tuning.total_ms) if told.tuning else NONE,
                percent_text(told.coverage.share) if told.coverage else NONE,
            )
        )
    return table


def _figures(told: Regrets) -> tuple[str, str, str, str]:
    within = percent_text(told.within_1_percent)
    return f"{told.mean:.4f}", f"{told.p95:.3f}", f"{told.worst:.3f}", within


def _note(record: Record, earlier: Sequence[dict[str, Any]]) -> str:
    shared = shared_cases(record)
    networks = {name for case in shared if (name := _network(record.cases[case]))}
    throttled = sum(SUSTAINED in record.oracle[case].truths for case in shared)
    truths = [truth_of(record.oracle[case], STEADY) for case in shared]
    errors = [max(truth.errors.values()) for truth in truths if truth and truth.errors]
    parts = [f"{len(shared)} of {len(record.cases)} cases; networks: {len(networks)}."]
    if throttled:
        parts.append(
            f"The fastest: alone until the clock is steady ({throttled} cases), else in bursts, "
            "mean of cold and hot cache."
        )
    else:
        parts.append("The fastest: in bursts that take turns, mean of cold and hot cache.")
    if errors:
        parts.append(
            "Standard error of the oracle's ratios, each case's largest: "
            f"median {100 * statistics.median(errors):.2f} %, most {100 * max(errors):.2f} %; a "
            "gap below it is a tie, 1.0."
        )
    parts.append(
        "Means are geometric. Flips: cases in which fresh processes' picks differ by more than 1 % "
        "and than the oracle's error. Tuning: wall time of choosing, plan building included. Bound "
        "holds: share of picks whose regret is within the bound that the mode reports. PyTorch's "
        f"rows: its time over {record.settings.get('reference')}'s pick, in its own process, times "
        "that pick's regret."
    )
    parts += [
        f"{mode} is not possible: {why}."
        for mode in (*record.picks, *record.pytorch)
        if (why := unavailable(record, mode))
    ]
    reasons = Counter(why for why in left_out(record).values() if why != NOT_YET)
    if reasons:
        told = "; ".join(f"{why} ({count})" for why, count in reasons.most_common(3))
        parts.append(f"Not compared: {sum(reasons.values())} cases: {told}.")
    if record.failures:
        parts.append(f"Processes that failed: {'; '.join(record.failures[:3])}.")
    if earlier:
        commits = dict.fromkeys(session["environment"]["commit"][:10] for session in earlier)
        parts.append(f"Continues {len(earlier)} sessions of commit {', '.join(commits)}.")
    return " ".join(parts)


def _case(described: Mapping[str, Any]) -> Case | None:
    """None for a simulated scene."""
    return Case(**described) if "op" in described else None


def _network(described: Mapping[str, Any]) -> str:
    case = _case(described)
    return case.network if case else ""


def _truths(record: Record) -> list[str]:
    known = {name for case in shared_cases(record) for name in record.oracle[case].truths}
    return [BURST_COLD, BURST_HOT, *([SUSTAINED] if SUSTAINED in known else [])]


def _by_truth(record: Record, summaries: Mapping[str, ModeSummary]) -> Table:
    truths = _truths(record)
    if SUSTAINED in truths:  # else the first table has it
        truths.append(BURST)
    counts = {
        name: sum(truth_of(record.oracle[case], name) is not None for case in shared_cases(record))
        for name in truths
    }
    table = Table(
        f"The same by how the fastest is measured: {', '.join(REGRETS)}",
        ("mode", *(f"{name} ({counts[name]} cases)" for name in truths)),
        note="burst: the mean of cold and hot." if BURST in truths else "",
    )
    for mode, told in summaries.items():
        cells = (told.regrets.get(name) for name in truths)
        row = [", ".join(_figures(cell)) if cell else NONE for cell in cells]
        if told.regrets:
            table.rows.append((mode, *row))
    return table


def _against_pytorch(record: Record, summaries: Mapping[str, ModeSummary]) -> Table:
    ours = record.settings.get("reference")
    table = Table(
        f"PyTorch's time over {ours}'s, taking turns in one process",
        (*RATIO_COLUMNS, f"{ours} > 1 % slower", "its worst case"),
        note="pytorch_off: benchmark=False; pytorch_on_10: benchmark=True, PyTorch's default limit "
        f"of 10 plans; pytorch_on_0: without a limit. Above 1, {ours} is faster. All cases that it "
        "has timed, judged by the oracle or not.",
    )
    for mode, summary in summaries.items():
        for name, told in summary.against.items():
            if name in (STEADY, BURST):  # of the others
                continue
            rows = record.pytorch[mode]
            ratios = {c: r.median for c, row in rows.items() if (r := ratio_of(row, name))}
            table.rows.append(
                (
                    mode,
                    name,
                    str(told.cases),
                    f"{told.mean:.4f}",
                    f"{told.least:.3f}",
                    f"{told.most:.3f}",
                    f"{percent_text(len(told.slower) / told.cases)} ({len(told.slower)})",
                    min(ratios, key=ratios.__getitem__),
                )
            )
    return table


def _by_kind(record: Record) -> Table:
    """The first table's means by direction and dtype."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for case_id in shared_cases(record):
        if case := _case(record.cases[case_id]):
            kinds.setdefault((case.op, case.dtype), []).append(case_id)
    modes = [m for m in (*record.picks, *record.pytorch) if not unavailable(record, m)]
    table = Table("Its means by direction and dtype", ("", "cases", *modes))
    for (op, dtype), cases in sorted(kinds.items()):
        part = dataclasses.replace(record, cases={case: record.cases[case] for case in cases})
        told = summarize(part)
        means = (told[mode].regret for mode in modes)
        row = [f"{mean.mean:.4f}" if mean else NONE for mean in means]
        table.rows.append((f"{op}, {dtype}", str(len(cases)), *row))
    return table
