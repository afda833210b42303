"""The tables of a record of auto_against_pytorch."""

from __future__ import annotations

from typing import Any

from common.numbers import geometric_mean
from common.tables import Table, columns, dry_run_note, number

from auto_against_pytorch.layers import KINDS, OPS

WORSE = 0.99
_SHOWN = 15


def tables(data: dict[str, Any]) -> list[Table]:
    """A summary by kind and operation, and the layers that are worst."""
    results = data["results"]
    header = columns("kind|operation|layers|geometric mean|least|most|below 0.99")
    note = "PyTorch's time over that of auto." + dry_run_note(data)
    if results.get("not measured"):
        note += f" {results['not measured']} layers were not measured, because time was short."
    note += "".join(f" {failure}." for failure in results.get("failures", []))
    summary = Table("auto against PyTorch's benchmark mode with limit 10", header, note=note)
    rows = results.get("rows", [])
    groups = [(kind, op) for kind in KINDS for op in OPS]
    for kind, op in [*groups, ("all", "all")]:
        found = [
            row["PyTorch over auto"]
            for row in rows
            if (kind == "all" or row["kind"] == kind) and (op == "all" or row["op"] == op)
        ]
        if found:
            shown = map(number, (geometric_mean(found), min(found), max(found)))
            worse = sum(ratio < WORSE for ratio in found)
            summary.rows.append([kind, op, str(len(found)), *shown, str(worse)])
    worst = Table(
        "The layers with the least of these",
        columns(
            "layer|PyTorch (us)|auto (us)|PyTorch over auto|95 % interval|cold operands|engine"
        ),
    )
    for row in sorted(rows, key=lambda row: row["PyTorch over auto"])[:_SHOWN]:
        worst.rows.append(
            [
                row["case"],
                number(row["PyTorch (us)"], 1),
                number(row["auto (us)"], 1),
                number(row["PyTorch over auto"]),
                f"{row['least']:.3f} to {row['most']:.3f}",
                number(cold) if (cold := row.get("PyTorch over auto, cold operands")) else "",
                str(row["engine"] or "-"),
            ]
        )
    return [summary, worst]
