"""The tables of a record of warm_start."""

from __future__ import annotations

from typing import Any

from common import numbers
from common.tables import NONE, Table, columns, dry_run_note, number

from .modes import MODES, REFERENCE

TARGET = 1.1
_KERNELS = {"found": "found compiled", "none": "none found"}
COLUMNS = {"forward_ms": "outputs", "both_ms": "gradients"}


def of_mode(results: dict[str, Any], mode: str) -> list[dict[str, Any]]:
    """The processes of one row."""
    return [p for p in results.get("processes", []) if p["mode"] == mode]


def ratio(results: dict[str, Any], mode: str, column: str) -> float | None:
    """Of a mode's median over the reference's."""
    mine = [p[column] for p in of_mode(results, mode)]
    reference = [p[column] for p in of_mode(results, REFERENCE)]
    if not mine or not reference:
        return None
    return numbers.median(mine) / numbers.median(reference)


def tables(data: dict[str, Any]) -> list[Table]:
    results, arguments = data["results"], data["arguments"]
    # Records of before have none.
    has_measurements = any("measurements" in p for p in results.get("processes", []))
    table = Table(
        f"First {_step(arguments)} of {arguments['model']} in a fresh process; "
        "kernels compiled at run time: " + _KERNELS[arguments.get("kernels", "found")],
        columns(
            f"mode|outputs (ms)|/ {REFERENCE}|gradients (ms)|/ {REFERENCE}|a later step (ms)"
            "|choices|of the store|launches timed|"
            + "other measurements|" * has_measurements
            + "processes"
        ),
        note=f"Batch {arguments['batch']}, float16, channels_last. Wall time from a model on the "
        "GPU of which nothing has run, until its outputs are there, and until its gradients are; "
        f"{REFERENCE} and PyTorch without a store. "
        f"Medians (and quartiles); the target for a filled store is {TARGET} of {REFERENCE}."
        + dry_run_note(data),
    )
    for mode, about in MODES.items():
        found = of_mode(results, mode)
        if not found:
            continue
        cells: list[str] = []
        for column in COLUMNS:
            times = [p[column] for p in found]
            q1, q3 = (numbers.quantile(times, q) for q in (0.25, 0.75))
            over = ratio(results, mode, column)
            cells += [f"{numbers.median(times):.0f} ({q1:.0f} to {q3:.0f})", number(over)]
        cells.append(number(numbers.median([p["later_ms"] for p in found]), 1))
        cells += _choices(found)
        if has_measurements:
            counts = [p["measurements"] for p in found if "measurements" in p]
            cells.append(_range(counts) if counts else NONE)
        table.rows.append((about.label, *cells, str(len(found))))
    table.note += "".join(f" {failure}." for failure in results.get("failures", []))
    return [table]


def _step(arguments: dict[str, Any]) -> str:
    return "inference" if arguments.get("inference") else "step"


def _choices(found: list[dict[str, Any]]) -> tuple[str, str, str]:
    choices = [p["choices"] for p in found if "choices" in p]
    if not choices:
        return NONE, NONE, NONE
    return (
        _range(c["made"] for c in choices),
        _range(c["from"].get("store", 0) for c in choices),
        _range(c["timed_launches"] for c in choices),
    )


def _range(values: Any) -> str:
    """Of whole numbers: one if all are equal."""
    found = sorted(set(values))
    return f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]}"
