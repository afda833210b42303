"""The tables of a record of pytorch_tests."""

from __future__ import annotations

from collections import Counter
from typing import Any

from common.junit import OUTCOMES
from common.tables import Table, dry_run_note


def tables(data: dict[str, Any]) -> list[Any]:
    results = data["results"]
    table = Table("PyTorch's tests of convolutions", ("run", *OUTCOMES))
    for name, counts in results["counts"].items():
        table.rows.append((name, *(str(counts[outcome]) for outcome in OUTCOMES)))
    table.note = (
        f"Under enable() {results.get('problems', 0)} problems were tuned.{dry_run_note(data)}"
    )
    rest = results.get("not_passed", [])
    failures = Table("Failures under enable()", ("test", "reason"))
    failures.rows += [
        (row["test"], row["reason"] or "none known") for row in rest if is_failure(row)
    ]
    others = Counter(row["reason"] for row in rest if not is_failure(row))
    skips = Table("Skipped, or expected to fail", ("tests", "PyTorch's reason"))
    skips.rows += [(str(count), why) for why, count in sorted(others.items())]
    return [part for part in (table, failures, skips) if part.rows]


def is_failure(row: dict[str, str]) -> bool:
    return row["outcome"] in ("failed", "error") or not row["reason"]
