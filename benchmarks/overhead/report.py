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
    fig, axes = plotting.figure(1, 3, width=15, height=4.5)
    calls, table, memory = axes[0]
    records = results.get("calls", [])
    names = list(dict.fromkeys(name for r in records for name in r["times"]))
    for index, name in enumerate(names):
        have = [(i, r["times"][name]["us"]) for i, r in enumerate(records) if name in r["times"]]
        calls.bar(
            [i + (index - len(names) / 2) * 0.2 for i, _ in have],
            [us["median"] for _, us in have],
            0.2,
            yerr=[
                [us["median"] - us["q1"] for _, us in have],
                [us["q3"] - us["median"] for _, us in have],
            ],
            label=name,
        )
    calls.set_xticks(range(len(records)))
    labels = [f"{r['setting']}\n{r['layout']}" for r in records]
    calls.set_xticklabels(labels, fontsize=6, rotation=45)
    calls.set(title="host time of one call", ylabel="us")
    for name in ("first problem", "pytorch", "16 problems in turn", "pytorch, 16 in turn"):
        have = [(s["filled"], s["us"][name]) for s in results.get("table", []) if name in s["us"]]
        if have:
            middle = [us["median"] for _, us in have]
            low = [m - us["q1"] for m, (_, us) in zip(middle, have, strict=True)]
            high = [us["q3"] - m for m, (_, us) in zip(middle, have, strict=True)]
            table.errorbar([n for n, _ in have], middle, [low, high], label=name, marker=".")
    table.set(title="a hit in a full table", xlabel="problems in the table", xscale="log")
    table.set(ylabel="us", ylim=(0, None))
    for name, found in results.get("memory", {}).items():
        if found:
            points = growth_mb(found)
            memory.plot([n for n, _ in points], [mb for _, mb in points], label=name)
    memory.axhline(MEMORY_BOUND_MB, color="gray", linestyle=":", label="bound")
    memory.set(title="growth of host memory", xlabel="shapes", ylabel="MiB")
    for axis in axes[0]:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    plotting.save(fig, path, data["environment"])
