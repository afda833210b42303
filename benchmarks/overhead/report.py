"""What a record of call_overhead.py says: the tables and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.tables import Table, dry_run_note, number

MEMORY_BOUND_MB = 300  # what the package promises for 1,000 tuned shapes


def tables(data: dict[str, Any]) -> list[Table]:
    shown = [calls_table(data), table_table(data), memory_table(data)]
    return [table for table in shown if table.rows]


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
        "'PyTorch again' is a second module of PyTorch's: the error of the method."
        + dry_run_note(data),
    )
    for record in data["results"].get("calls", []):
        times = record["times"]
        us = [times[name]["us"] for name in ("pytorch", "ours")]
        both = [[number(u["median"], 2), f"{u['q1']:.2f} to {u['q3']:.2f}"] for u in us]
        low, high = times["ours"]["ratio_interval_95"]
        table.rows.append(
            (
                f"{record['setting']}, {record['layout']}",
                *both[0],
                *both[1],
                number(times["ours"]["ratio"]),
                f"{low:.3f} to {high:.3f}",
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
        us, base = (
            {name: spread["median"] for name, spread in s["us"].items()} for s in (step, steps[0])
        )
        drift = us["pytorch"] / base["pytorch"]
        table.rows.append(
            (
                str(step["held"] if step["held"] is not None else f"({step['filled']})"),
                number(us["first problem"], 2),
                number(us["pytorch"], 2),
                number(us["first problem"] / base["first problem"] / drift),
                number(us.get("16 problems in turn"), 2),
                number(us.get("pytorch, 16 in turn"), 2),
            )
        )
    return table


def growth_mb(records: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """``(shapes, growth of resident memory since the first shape in MiB)``."""
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
        if len(records) > 1:
            shapes, growth = growth_mb(records)[-1]
            per_shape = growth * 1024 / max(1, shapes - 1)
            cells = (f"{growth:.1f}", f"{per_shape:.1f}", f"{records[-1]['seconds']:.1f}")
            table.rows.append((name, str(shapes), *cells))
    return table


def plot(data: dict[str, Any], path: Path) -> None:
    """Host time by setting; hit cost against table size; memory against shapes."""
    from common import plotting

    draw = {"calls": draw_calls, "table": draw_table, "memory": draw_memory}
    panels = [part for part in draw if data["results"].get(part)]
    count = max(1, len(panels))
    fig, axes = plotting.figure(1, count, width=5 * count, height=4.5)
    for axis, part in zip(axes[0], panels, strict=False):
        draw[part](axis, data["results"][part])
        axis.legend(fontsize=7)
    plotting.save(fig, path, data["environment"])


def draw_calls(axis: Any, records: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for r in records for name in r["times"]))
    for index, name in enumerate(names):
        have = [(i, r["times"][name]["us"]) for i, r in enumerate(records) if name in r["times"]]
        places = [i + (index - len(names) / 2) * 0.2 for i, _ in have]
        axis.bar(places, [us["median"] for _, us in have], 0.2, label=name)
    labels = [f"{r['setting']}\n{r['layout']}" for r in records]
    axis.set_xticks(range(len(records)), labels, fontsize=6, rotation=45)
    axis.set(title="host time of one call, medians", ylabel="us")


def draw_table(axis: Any, steps: list[dict[str, Any]]) -> None:
    for name in ("first problem", "pytorch", "16 problems in turn", "pytorch, 16 in turn"):
        have = [(s["filled"], s["us"][name]["median"]) for s in steps if name in s["us"]]
        if have:
            axis.plot(*zip(*have, strict=True), ".-", label=name)
    axis.set(title="a hit in a full table, medians", xlabel="problems in the table", xscale="log")
    axis.set(ylabel="us", ylim=(0, None))


def draw_memory(axis: Any, by_implementation: dict[str, list[dict[str, Any]]]) -> None:
    for name, found in by_implementation.items():
        if found:
            axis.plot(*zip(*growth_mb(found), strict=True), label=name)
    axis.axhline(MEMORY_BOUND_MB, color="gray", linestyle=":", label="bound")
    axis.set(title="growth of host memory", xlabel="shapes", ylabel="MiB")
