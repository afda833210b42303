"""The tables of a record of call_overhead."""

from __future__ import annotations

from typing import Any

from common.tables import Table, columns, dry_run_note, number


def tables(data: dict[str, Any]) -> list[Table]:
    shown = [calls_table(data), memory_table(data)]
    return [table for table in shown if table.rows]


def calls_table(data: dict[str, Any]) -> Table:
    a = data["arguments"]
    what = "x".join(map(str, a["shape"]))
    table = Table(
        f"Host time of one call (us), {what} * {a['filters']} filters {a['kernel']}x{a['kernel']}, "
        f"{a['dtype']}",
        columns(
            "setting, layout|PyTorch|quartiles|ours|quartiles|ours / PyTorch|95 % interval"
            "|sampling= given / PyTorch|enable() / PyTorch|our norm's kernels / PyTorch"
            "|PyTorch again / PyTorch"
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
                number(times.get("enable()", {}).get("ratio")),
                number(times.get("ours, by kernels", {}).get("ratio")),
                number(times["pytorch, again"]["ratio"]),
            )
        )
    return table


def memory_table(data: dict[str, Any]) -> Table:
    """Of older records; new_sizes.py measures memory now."""
    a = data["arguments"]
    table = Table(
        "Growth of host memory over many shapes, forward and backward unless it says otherwise",
        ("implementation", "shapes", "growth MiB", "KiB per shape", "seconds"),
        note=f"Ours: {a.get('memory_sampling')}; both with a benchmark limit of "
        f"{a.get('memory_benchmark_limit')}; each in a process of its own, since its first shape.",
    )
    for name, records in data["results"].get("memory", {}).items():
        if len(records) > 1:
            first, last = records[0], records[-1]
            growth_kb = last["resident_kb"]["VmRSS"] - first["resident_kb"]["VmRSS"]
            per_shape = growth_kb / max(1, last["shapes"] - 1)
            cells = (f"{growth_kb / 1024:.1f}", f"{per_shape:.1f}", f"{last['seconds']:.1f}")
            table.rows.append((name, str(last["shapes"]), *cells))
    return table
