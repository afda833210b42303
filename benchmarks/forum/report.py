"""What a record of forum_repro.py says: the tables and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import numbers
from common.convolution import MODES, OPS
from common.tables import Table, number

COLUMNS = (
    "mode",
    "engine (kernel for PyTorch)",
    "first call",
    "first 10 %",
    "last 25 %",
    "last / first 10 %",
    "spread of repeats",
)


def summarize(process: dict[str, Any], op: str) -> dict[str, Any]:
    """First call, early and late medians of one direction in one process, ms."""
    direction = process["directions"][op]
    durations = direction["duration_ms"]
    timed = durations[process["warmup"] :] or durations
    # What follows the first call is steady: the first holds tuning and lazy loading.
    steady = timed[1:] if process["warmup"] == 0 and len(timed) > 1 else timed
    edge = max(1, len(steady) // 10)
    late = steady[-max(1, len(steady) // 4) :]
    engine = direction.get("choice", {}).get("engine_config")
    kernels = direction.get("kernels") or []
    return {
        "first_ms": durations[0],
        "early_ms": numbers.median(steady[:edge]),
        "late_ms": numbers.median(late),
        "late_q1": numbers.quantile(late, 0.25),
        "late_q3": numbers.quantile(late, 0.75),
        "engine": engine or (kernels[0] if kernels else "unknown"),
    }


def tables(data: dict[str, Any]) -> list[Table]:
    processes = data["results"].get("processes", [])
    ops = sorted({op for p in processes for op in p["directions"]}, key=OPS.index)
    shown = []
    for op in ops:
        layer = data["results"]["layer"]
        table = Table(
            f"{layer['text']} {op}: time of one call (ms)",
            COLUMNS,
            note="Each mode in fresh processes, one after the other: medians; the first call holds "
            "the tuning.",
        )
        for mode in MODES:
            rows = [summarize(p, op) for p in processes if p["mode"] == mode]
            if not rows:
                continue
            late = [r["late_ms"] for r in rows]
            names = sorted({short_engine(r["engine"]) for r in rows})
            table.rows.append(
                (
                    mode,
                    " / ".join(names),
                    number(numbers.median([r["first_ms"] for r in rows]), 1),
                    number(numbers.median([r["early_ms"] for r in rows]), 4),
                    number(numbers.median(late), 4),
                    number(numbers.median([r["late_ms"] / r["early_ms"] for r in rows]), 3),
                    f"{(max(late) / min(late) - 1) * 100:.1f} %" if len(late) > 1 else "–",
                )
            )
        shown.append(table)
    return shown


def short_engine(text: str, width: int = 60) -> str:
    """A kernel's name without the template's tail."""
    text = text.removeprefix("void ").split("<")[0].split("(")[0]
    return text if len(text) <= width else text[: width - 1] + "…"


def thinned(durations: list[float], skip: int, at_most: int = 400) -> tuple[list[int], list[float]]:
    """(iteration, duration) from iteration `skip` on; above `at_most`, medians of equal windows."""
    width = max(1, -(-(len(durations) - skip) // at_most))
    places = list(range(skip, len(durations), width))
    return places, [numbers.median(durations[place : place + width]) for place in places]


def plot(data: dict[str, Any], path: Path) -> None:
    """Duration against iteration for each mode; below it SM clock and power over time."""
    from common import plotting

    processes = data["results"].get("processes", [])
    ops = sorted({op for p in processes for op in p["directions"]}, key=OPS.index)
    fig, axes = plotting.figure(len(ops) + 2, 1, width=10, height=3.2 * (len(ops) + 2))
    colours = {mode: f"C{i}" for i, mode in enumerate(MODES)}
    for row, op in enumerate(ops):
        axis = axes[row][0]
        labelled = set()
        for process in processes:
            mode = process["mode"]
            durations = process["directions"][op]["duration_ms"]
            skip = 1 if process["warmup"] == 0 and len(durations) > 1 else 0
            places, values = thinned(durations, skip)
            axis.plot(
                places,
                values,
                color=colours[mode],
                linewidth=0.8,
                alpha=0.8,
                label=None if mode in labelled else mode,
            )
            labelled.add(mode)
        steady = [d for p in processes for d in p["directions"][op]["duration_ms"][1:]]
        if steady:  # a spike must not flatten the curves
            axis.set_ylim(0.95 * min(steady), 1.3 * numbers.quantile(steady, 0.95))
        axis.set_title(f"{data['results']['layer']['text']}, {op}")
        axis.set_xlabel("iteration (the first one, which tunes, is not drawn)")
        axis.set_ylabel("ms")
        axis.legend(fontsize=7, ncols=4)
    for row, (column, unit) in enumerate((("sm_clock_mhz", "SM clock, MHz"), ("power_w", "W"))):
        axis = axes[len(ops) + row][0]
        for process in processes:
            trace = process["telemetry"]
            values = trace.get(column) or []
            if column == "power_w" and any(v is not None for v in trace["power_instant_w"]):
                values = trace["power_instant_w"]
            points = [(t, v) for t, v in zip(trace["t_s"], values, strict=True) if v is not None]
            axis.plot(
                [t for t, _ in points],
                [v for _, v in points],
                color=colours[process["mode"]],
                linewidth=0.8,
            )
        axis.set_ylabel(unit)
        axis.set_xlabel("seconds since the process's first call")
    plotting.save(fig, path, data["environment"])
