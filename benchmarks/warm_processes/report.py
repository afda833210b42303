"""What a record of warm_start.py says: the tables and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import numbers
from common.tables import NONE, Table, dry_run_note, number

from .modes import MODES, REFERENCE, SETTINGS

TARGET = 1.1
COLUMNS = {"forward_ms": "outputs", "both_ms": "gradients"}


def of_mode(results: dict[str, Any], setting: str, mode: str) -> list[dict[str, Any]]:
    """The processes of one row."""
    found = results.get("processes", [])
    return [p for p in found if (p["setting"], p["mode"]) == (setting, mode)]


def ratio(results: dict[str, Any], setting: str, mode: str, column: str) -> float | None:
    """Of a mode's median over the reference's."""
    mine = [p[column] for p in of_mode(results, setting, mode)]
    reference = [p[column] for p in of_mode(results, setting, REFERENCE)]
    if not mine or not reference:
        return None
    return numbers.median(mine) / numbers.median(reference)


def tables(data: dict[str, Any]) -> list[Table]:
    shown = [*(_processes(data, setting) for setting in SETTINGS), _stores(data)]
    found = [table for table in shown if table.rows] or shown[:1]
    failures = data["results"].get("failures", [])
    found[-1].note += "".join(f" {failure}." for failure in failures)
    return found


def _processes(data: dict[str, Any], setting: str) -> Table:
    results, arguments = data["results"], data["arguments"]
    table = Table(
        f"First step of {arguments['model']} in a fresh process; kernels compiled at run time: "
        f"{SETTINGS[setting]}",
        (
            "mode",
            "outputs (ms)",
            f"/ {REFERENCE}",
            "gradients (ms)",
            f"/ {REFERENCE}",
            "a later step (ms)",
            "choices",
            "of the store",
            "launches timed",
            "processes",
        ),
        note=f"Batch {arguments['batch']}, float16, channels_last. Wall time from a model on the "
        "GPU of which nothing has run, until its outputs are there, and until its gradients are; "
        f"{REFERENCE} and PyTorch without a store. "
        f"Medians (and quartiles); the target for a filled store is {TARGET} of {REFERENCE}."
        + dry_run_note(data),
    )
    for mode, about in MODES.items():
        found = of_mode(results, setting, mode)
        if not found:
            continue
        cells: list[str] = []
        for column in COLUMNS:
            times = [p[column] for p in found]
            q1, q3 = (numbers.quantile(times, q) for q in (0.25, 0.75))
            over = ratio(results, setting, mode, column)
            cells += [f"{numbers.median(times):.0f} ({q1:.0f} to {q3:.0f})", number(over)]
        cells.append(number(numbers.median([p["later_ms"] for p in found]), 1))
        table.rows.append((about.label, *cells, *_choices(found), str(len(found))))
    return table


def _choices(found: list[dict[str, Any]]) -> tuple[str, str, str]:
    told = [p["choices"] for p in found if "choices" in p]
    if not told:
        return NONE, NONE, NONE
    return (
        _range(c["made"] for c in told),
        _range(c["from"].get("store", 0) for c in told),
        _range(c["timed_launches"] for c in told),
    )


def _range(values: Any) -> str:
    """Of whole numbers: one if all are equal."""
    found = sorted(set(values))
    return f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _stores(data: dict[str, Any]) -> Table:
    table = Table(
        "The store that serves it",
        ("process", "decisions", "file (KB)", "opening (ms)", "all lookups (ms)", "found"),
        note="Opening and lookups: after the step, medians. Files of JSON, one line a decision.",
    )
    for setting in SETTINGS:
        for mode, about in MODES.items():
            told = [p["store"] for p in of_mode(data["results"], setting, mode) if "store" in p]
            if not told:
                continue
            medians = {
                key: numbers.median([s[key] for s in told])
                for key in ("bytes", "open_ms", "lookups_ms")
            }
            table.rows.append(
                (
                    f"{about.label}; kernels {SETTINGS[setting]}",
                    _range(s["entries"] for s in told),
                    number(medians["bytes"] / 1e3, 1),
                    number(medians["open_ms"], 2),
                    number(medians["lookups_ms"], 2),
                    f"{_range(s['found'] for s in told)} of {_range(s['lookups'] for s in told)}",
                )
            )
    return table


def plot(data: dict[str, Any], path: Path) -> None:
    """Every process, by mode; a panel for each setting."""
    from common import plotting

    results = data["results"]
    shown = [s for s in SETTINGS if any(of_mode(results, s, mode) for mode in MODES)]
    fig, axes = plotting.figure(1, max(1, len(shown)), width=6 * max(1, len(shown)), height=3.6)
    for axis, setting in zip(axes[0], shown, strict=False):
        modes = [mode for mode in MODES if of_mode(results, setting, mode)]
        for offset, column in enumerate(COLUMNS):
            for row, mode in enumerate(modes):
                times = [p[column] for p in of_mode(results, setting, mode)]
                axis.plot(
                    times,
                    [row + 0.24 * offset - 0.12] * len(times),
                    "o",
                    color=f"C{offset}",
                    alpha=0.6,
                    label=f"first {COLUMNS[column]}" if row == 0 else None,
                )
            reference = [p[column] for p in of_mode(results, setting, REFERENCE)]
            if reference:
                limit = TARGET * numbers.median(reference)
                axis.axvline(limit, color=f"C{offset}", linestyle=":", linewidth=0.9)
        axis.set_yticks(range(len(modes)), [MODES[mode].label for mode in modes], fontsize=8)
        axis.set_ylim(len(modes) - 0.5, -0.5)
        axis.set_xscale("log")
        axis.set_xlabel(f"ms; dotted: {TARGET} of {REFERENCE}'s median")
        axis.set_title(f"kernels compiled at run time: {SETTINGS[setting]}", fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    plotting.save(fig, path, data["environment"])
