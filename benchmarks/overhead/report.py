"""What a record of call_overhead.py says: the tables and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.tables import Table, number

MEMORY_BOUND_MB = 300  # what the package promises for 1,000 tuned shapes


def interval(pair: list[float | None]) -> str:
    low, high = pair
    return "–" if low is None or high is None else f"{low:.3f} to {high:.3f}"


def calls_table(data: dict[str, Any]) -> Table:
    a = data["arguments"]
    what = "x".join(map(str, a["shape"]))
    table = Table(
        f"Host time of one call (us), {what} * {a['filters']} filters {a['kernel']}x{a['kernel']}, "
        f"{a['dtype']}",
        (
            "setting, layout",
            "PyTorch",
            "quartiles",
            "ours",
            "quartiles",
            "ours / PyTorch",
            "95 % interval",
            "sampling= given / PyTorch",
            "PyTorch again / PyTorch",
        ),
        note=f"{a['blocks']} blocks per call, taking turns in one process with "
        "torch.backends.cudnn.benchmark = True; medians, ratios paired block by block. "
        "'PyTorch again' is a second module of PyTorch's: the error of the method.",
    )
    for record in data["results"].get("calls", []):
        times = record["times"]

        def us(name: str, times: dict[str, Any] = times) -> tuple[str, str]:
            if name not in times:
                return "–", "–"
            found = times[name]["us"]
            return number(found["median"], 2), f"{found['q1']:.2f} to {found['q3']:.2f}"

        ours = times.get("ours", {})
        table.rows.append(
            (
                f"{record['setting']}, {record['layout']}",
                *us("pytorch"),
                *us("ours"),
                number(ours.get("ratio")),
                interval(ours.get("ratio_interval_95", [None, None])),
                number(times.get("ours, sampling=", {}).get("ratio")),
                number(times["pytorch, again"]["ratio"]),
            )
        )
    return table


def table_table(data: dict[str, Any]) -> Table:
    table = Table(
        "Host time of a hit against the number of problems in the table (us)",
        (
            "problems",
            "first problem",
            "PyTorch, the same",
            "ratio to the smallest table, PyTorch's drift divided out",
            "16 problems in turn",
            "PyTorch, the same 16",
        ),
    )
    steps = data["results"].get("table", [])
    for step in steps:
        us, base = step["us"], steps[0]["us"]
        drift = us["pytorch"]["median"] / base["pytorch"]["median"]
        ratio = us["first problem"]["median"] / base["first problem"]["median"] / drift
        turn = us.get("16 problems in turn", {}).get("median")
        control = us.get("pytorch, 16 in turn", {}).get("median")
        table.rows.append(
            (
                str(step["held"] if step["held"] is not None else f"({step['filled']})"),
                number(us["first problem"]["median"], 2),
                number(us["pytorch"]["median"], 2),
                number(ratio),
                number(turn, 2),
                number(control, 2),
            )
        )
    return table


def growth_mb(records: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """(shapes, growth of resident memory since the first shape in MiB)."""
    first = records[0]["resident_kb"]["VmRSS"]
    return [(r["shapes"], (r["resident_kb"]["VmRSS"] - first) / 1024) for r in records]


def memory_table(data: dict[str, Any]) -> Table:
    a = data["arguments"]
    table = Table(
        "Growth of host memory over many shapes, forward and backward unless it says otherwise",
        ("implementation", "shapes", "growth MiB", "KiB per shape", "seconds"),
        note=f"Ours: {a['memory_sampling']}; both with a benchmark limit of "
        f"{a['memory_benchmark_limit']}; each in a process of its own, since its first shape.",
    )
    for name, records in data["results"].get("memory", {}).items():
        if len(records) < 2:
            continue
        shapes, growth = growth_mb(records)[-1]
        table.rows.append(
            (
                name,
                str(shapes),
                f"{growth:.1f}",
                f"{growth * 1024 / max(1, shapes - 1):.1f}",
                f"{records[-1]['seconds']:.1f}",
            )
        )
    return table


def tables(data: dict[str, Any]) -> list[Table]:
    shown = [calls_table(data), table_table(data), memory_table(data)]
    return [table for table in shown if table.rows]


def plot(data: dict[str, Any], path: Path) -> None:
    """Host time by setting; hit cost against table size; memory against shapes."""
    from common import plotting

    results = data["results"]
    panels = [
        (draw, results[part])
        for part, draw in (("calls", draw_calls), ("table", draw_table), ("memory", draw_memory))
        if results.get(part)
    ]
    fig, axes = plotting.figure(1, max(1, len(panels)), width=5 * max(1, len(panels)), height=4.5)
    for axis, (draw, found) in zip(axes[0], panels, strict=False):
        draw(axis, found)
        axis.legend(fontsize=7)
    plotting.save(fig, path, data["environment"])


def draw_calls(axis: Any, records: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for r in records for name in r["times"]))
    for index, name in enumerate(names):
        have = [(i, r["times"][name]["us"]) for i, r in enumerate(records) if name in r["times"]]
        axis.bar(
            [i + (index - len(names) / 2) * 0.2 for i, _ in have],
            [us["median"] for _, us in have],
            0.2,
            yerr=[
                [us["median"] - us["q1"] for _, us in have],
                [us["q3"] - us["median"] for _, us in have],
            ],
            label=name,
        )
    axis.set_xticks(range(len(records)))
    labels = [f"{r['setting']}\n{r['layout']}" for r in records]
    axis.set_xticklabels(labels, fontsize=6, rotation=45)
    axis.set(title="host time of one call", ylabel="us")


def draw_table(axis: Any, steps: list[dict[str, Any]]) -> None:
    for name in ("first problem", "pytorch", "16 problems in turn", "pytorch, 16 in turn"):
        have = [(s["filled"], s["us"][name]) for s in steps if name in s["us"]]
        if have:
            middle = [us["median"] for _, us in have]
            low = [m - us["q1"] for m, (_, us) in zip(middle, have, strict=True)]
            high = [us["q3"] - m for m, (_, us) in zip(middle, have, strict=True)]
            axis.errorbar([n for n, _ in have], middle, [low, high], label=name, marker=".")
    axis.set(title="a hit in a full table", xlabel="problems in the table", xscale="log")
    axis.set(ylabel="us", ylim=(0, None))


def draw_memory(axis: Any, by_implementation: dict[str, list[dict[str, Any]]]) -> None:
    for name, found in by_implementation.items():
        if found:
            points = growth_mb(found)
            axis.plot([n for n, _ in points], [mb for _, mb in points], label=name)
    axis.axhline(MEMORY_BOUND_MB, color="gray", linestyle=":", label="bound")
    axis.set(title="growth of host memory", xlabel="shapes", ylabel="MiB")
