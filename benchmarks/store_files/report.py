"""What a record of store.py says."""

from __future__ import annotations

from typing import Any

from common import numbers
from common.tables import Table, number

COLUMNS = {"open_ms": "open, one lookup", "add_ms": "an addition", "import_ms": "import of all"}


def tables(data: dict[str, Any]) -> list[Table]:
    results, arguments = data["results"], data["arguments"]
    dry = " DRY RUN." if data["environment"].get("device") == "cpu" else ""
    stores = Table(
        "A store by its size",
        ("decisions", "file (MB)", *(f"{name} (ms)" for name in COLUMNS.values()), "load"),
        note=f"Medians; {arguments['candidates']} candidates were timed for each decision. An "
        "addition waits for the disk; an import starts a process, and has the file in the page "
        "cache. Of 10,000: 20 MB, 200 ms, 5 ms and 10,000 ms are the targets." + dry,
    )
    for store in results.get("entries", []):
        medians = (number(numbers.median(store[column]), 1) for column in COLUMNS)
        size, load = number(store["bytes"] / 1e6, 1), number(store["load"], 1)
        stores.rows.append((f"{store['entries']:,}", size, *medians, load))
    writers = Table(
        "Processes that add to one store at the same time",
        ("processes", "decisions each", "an addition (ms)", "the slowest (ms)", "lost", "load"),
        note="The file is locked for each; 50 ms of 8 processes are the target." + dry,
    )
    for run in results.get("writers", []):
        times = numbers.median(run["add_ms"]), max(run["add_ms"]), run["load"]
        middle, slowest, load = (number(value, 1) for value in times)
        facts = (str(run["processes"]), str(run["decisions"]), middle, slowest)
        writers.rows.append((*facts, str(run["lost"]), load))
    shown = [table for table in (stores, writers) if table.rows] or [stores]
    shown[-1].note += "".join(f" {failure}." for failure in results.get("failures", []))
    return shown
