"""What a record of workspace_place.py says: the table and the plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from common.cases import layer_text
from common.tables import Table, dry_run_note, number, percent

NONE = "–"
_TOLD = 1.01
_PARTS = ("near", "far")


def ratio(engine: dict[str, Any]) -> float:
    """Time on near pages over that on far ones; medians over the pages."""
    near, far = (statistics.median(engine["times_ms"][half]) for half in _PARTS)
    return near / far


def all_engines(data: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """(case id, engine) of a record, however far it came."""
    return [
        (case_id, engine)
        for case_id, entry in data["results"]["cases"].items()
        for engine in entry["engines"]
    ]


def _times(engine: dict[str, Any], half: str) -> str:
    times = engine["times_ms"][half]
    least, middle, most = (f(times) * 1e3 for f in (min, statistics.median, max))
    return f"{number(middle, 1)} ({number(least, 1)} to {number(most, 1)})"


def tables(data: dict[str, Any]) -> list[Table]:
    options = data["arguments"]
    table = Table(
        "The same engine with its workspace on near and on far pages",
        ("layer", "engine", "workspace (B)", "near pages (us)", "far pages (us)", "near over far"),
        note=f"Near and far: to one multiprocessor, by cycles; {options['pages']} pages of either "
        f"kind in turns, {options['rounds']} batches of hot calls on each; times at one clock, "
        "medians and ranges over pages. The leading candidates that need a page or less."
        + dry_run_note(data),
    )
    for case_id, entry in data["results"]["cases"].items():
        for engine in entry["engines"]:
            table.rows.append(
                (
                    layer_text(case_id),
                    engine["text"],
                    str(engine["workspace_bytes"]),
                    *(_times(engine, half) for half in _PARTS),
                    percent(ratio(engine)),
                )
            )
        for failed in entry["failed"]:
            row = f"{failed['step']}: {failed['error']}"
            table.rows.append((layer_text(case_id), row, *[NONE] * 4))
    ratios = [ratio(engine) for _, engine in all_engines(data)]
    if ratios:
        slower = sum(value > _TOLD for value in ratios)
        faster = sum(value < 1 / _TOLD for value in ratios)
        table.rows.append(
            (
                "all",
                f"{slower} of {len(ratios)} slower by more than 1 % on near pages, {faster} faster",
                NONE,
                NONE,
                NONE,
                percent(statistics.geometric_mean(ratios)),
            )
        )
    return [table]


def plot(data: dict[str, Any], path: Path) -> None:
    """Each page's time over the median of the far ones, by engine."""
    from common import plotting

    found = sorted(all_engines(data), key=lambda row: ratio(row[1]))
    fig, axes = plotting.figure(1, 1, width=10, height=1.2 + 0.28 * max(1, len(found)))
    axis = axes[0, 0]
    for half, color, place in (("near", "C1", -0.12), ("far", "C0", 0.12)):
        label: str | None = f"on {half} pages"
        for row, (_, engine) in enumerate(found):
            base = statistics.median(engine["times_ms"]["far"])
            times = [(ms / base - 1) * 100 for ms in engine["times_ms"][half]]
            axis.plot(
                times,
                [row + place] * len(times),
                "o",
                color=color,
                alpha=0.6,
                markersize=4,
                label=label,
            )
            label = None
    names = [f"{layer_text(case_id)}: {engine['text'][:60]}" for case_id, engine in found]
    axis.set_yticks(range(len(found)), names, fontsize=6)
    axis.axvline(0, color="gray", linewidth=0.8)
    axis.set_xlabel("time of a call over that on far pages, %")
    axis.grid(axis="x", alpha=0.3)
    if found:
        axis.legend(fontsize=7)
    plotting.save(fig, path, data["environment"])
