"""What a record of gpu_tests.py says: the table and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.plotting import figure, save
from common.tables import Table

OUTCOMES = ("passed", "failed", "error", "skipped")


def tables(data: dict[str, Any]) -> list[Table]:
    files = data["results"]["files"]
    table = Table(
        "GPU tests, file by file",
        ("file", *OUTCOMES, "seconds"),
        note="Skipped: " + "; ".join(data["results"]["skip_reasons"])
        if data["results"]["skip_reasons"]
        else "",
    )
    for name, counts in files.items():
        row = [str(counts[outcome]) for outcome in OUTCOMES]
        table.rows.append((name, *row, f"{counts['seconds']:.1f}"))
    total = [str(sum(f[outcome] for f in files.values())) for outcome in OUTCOMES]
    table.rows.append(("all", *total, f"{sum(f['seconds'] for f in files.values()):.1f}"))
    return [table]


def plot(data: dict[str, Any], path: Path) -> None:
    files = data["results"]["files"]
    fig, axes = figure(width=8, height=0.4 * len(files) + 1.2)
    axis = axes[0][0]
    names = list(files)[::-1]
    axis.barh(names, [files[name]["seconds"] for name in names], color="tab:green")
    for name in names:
        bad = files[name]["failed"] + files[name]["error"]
        text = f" {files[name]['passed']} passed" + (f", {bad} failed" if bad else "")
        axis.text(files[name]["seconds"], name, text, va="center", fontsize=8)
    axis.set_xlabel("seconds")
    axis.set_title("tests on the GPU")
    axis.margins(x=0.2)
    save(fig, path, data["environment"])
