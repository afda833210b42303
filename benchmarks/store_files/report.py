"""What a record of store.py says: the tables and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import numbers
from common.tables import Table, number

TARGET_S = 0.5
COLUMNS = {
    "open_ms": "open (ms)",
    "first_us": "first lookup (µs)",
    "again_us": "again (µs)",
    "miss_us": "a miss (µs)",
    "put_ms": "put (ms)",
}


def tables(data: dict[str, Any]) -> list[Table]:
    results, arguments = data["results"], data["arguments"]
    dry = " DRY RUN." if data["environment"].get("device") == "cpu" else ""
    stores = Table(
        "A store by its size",
        ("decisions", "file (MB)", *COLUMNS.values()),
        note=f"Medians; {arguments['candidates']} candidates a decision; the file is in the page "
        "cache. Opening indexes the lines, the first lookup of a decision parses it; a put writes "
        f"the file anew and waits for the disk. The target: 100,000 open in {TARGET_S} s." + dry,
    )
    for store in results.get("stores", []):
        medians = [numbers.median(store[column]) for column in COLUMNS]
        stores.rows.append(
            (
                f"{store['entries']:,}",
                number(store["bytes"] / 1e6, 1),
                *(number(value, 1) for value in medians),
            )
        )
    writers = Table(
        "Processes that write into one store, a decision at a time",
        ("processes", "decisions each", "all (s)", "a put (ms)", "lost"),
        note="From the first put to the last; the file is locked for each." + dry,
    )
    for run in results.get("writers", []):
        puts = run["processes"] * run["decisions"]
        writers.rows.append(
            (
                str(run["processes"]),
                str(run["decisions"]),
                number(run["seconds"], 1),
                number(run["seconds"] * 1e3 / puts, 1),
                str(run["lost"]),
            )
        )
    shown = [table for table in (stores, writers) if table.rows] or [stores]
    shown[-1].note += "".join(f" {failure}." for failure in results.get("failures", []))
    return shown


def plot(data: dict[str, Any], path: Path) -> None:
    """Opening, lookups and puts against the number of decisions."""
    from common import plotting

    stores = data["results"].get("stores", [])
    fig, axes = plotting.figure(1, 1, width=6.5, height=4)
    axis = axes[0][0]
    entries = [store["entries"] for store in stores]
    for column, label in COLUMNS.items():
        scale = 1e-3 if column.endswith("_us") else 1.0
        medians = [numbers.median(store[column]) * scale for store in stores]
        axis.plot(entries, medians, "o-", label=label.split(" (")[0])
    axis.axhline(TARGET_S * 1e3, color="gray", linestyle=":", linewidth=0.9)
    axis.set(xlabel="decisions", ylabel="ms; dotted: the target to open")
    axis.grid(alpha=0.3)
    if stores:  # there is no logarithm of nothing
        axis.set(xscale="log", yscale="log")
        axis.legend(fontsize=8)
    plotting.save(fig, path, data["environment"])
