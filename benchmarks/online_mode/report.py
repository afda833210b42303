"""What a record of online.py says: the tables and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import numbers
from common.tables import Table, number, percent

from .turns import ARMS


def first_call_table(data: dict[str, Any]) -> Table:
    table = Table(
        "First call of a layer: wall time until its output is there (ms)",
        ("layer", "heuristic", "online", "online / heuristic", "processes of each"),
        note="Medians over fresh processes, the two modes taking turns.",
    )
    found = data["results"].get("first_call", {}).get("compared", {})
    for name, entry in found.items():
        medians = {mode: numbers.median(times) for mode, times in entry["first_ms"].items()}
        table.rows.append(
            (
                name,
                number(medians["heuristic"], 2),
                number(medians["online"], 2),
                number(entry["ratio"]),
                str(entry["processes"]),
            )
        )
    if len(found) > 1:
        ratios = [entry["ratio"] for entry in found.values()]
        table.rows.append(("median", "", "", number(numbers.median(ratios)), ""))
    return table


def quartiles(spread: dict[str, float]) -> str:
    return f"{spread['q1']:.2f} to {spread['q3']:.2f}"


def compared_overhead(data: dict[str, Any]) -> dict[str, Any]:
    """Of a record. The phase "preparing" was called "chores" in older records."""
    found = data["results"].get("overhead", {}).get("compared", {})
    return {"preparing" if key == "chores" else key: value for key, value in found.items()}


def overhead_table(data: dict[str, Any]) -> Table:
    found = compared_overhead(data)
    quiet = found.get("quiet_us")
    thread = found.get("tuner_cpu_us_a_turn")
    table = Table(
        "Host time of one call while `online` is undecided (us), 1x16x8x8 * 16 filters 3x3",
        (
            "the calls",
            "heuristic, decided",
            "online",
            "difference, paired",
            "quartiles",
            "difference to a quiet process",
            "its mean",
            "blocks",
        ),
        note="Medians of blocks that take turns."
        + (f" heuristic in a quiet process: {quiet['median']:.2f} us." if quiet else "")
        + (f" CPU time of the tuner's thread: {thread:.2f} us a turn." if thread else ""),
    )
    for name, what in (
        ("preparing", "a candidate is built and checked"),
        ("undecided", "take turns only"),
    ):
        if name not in found:
            continue
        entry = found[name]
        table.rows.append(
            (
                what,
                number(entry["heuristic_us"]["median"], 2),
                number(entry["online_us"]["median"], 2),
                number(entry["difference_us"]["median"], 2),
                quartiles(entry["difference_us"]),
                number(entry["difference_to_quiet_us"]["median"], 2),
                # Not in records of before 2026-11-21 20:00.
                number(entry["difference_to_quiet_us"].get("mean"), 2),
                str(int(entry["difference_us"]["n"])),
            )
        )
    return table


# Not in records of before 2026-11-21 23:00.
_SINGLE = ("single_regret", "auto_single_regret")


def _regret(fraction: float | None) -> str:
    return "–" if fraction is None else percent(1 + fraction)


def convergence_table(data: dict[str, Any]) -> Table:
    table = Table(
        "Until `online` has decided, and what its pick is worth",
        (
            "case",
            "calls",
            "seconds",
            "candidates",
            "against auto's pick",
            "regret, in batches",
            "auto's",
            "regret, in single calls",
            "auto's",
            "bound",
            "picked",
        ),
        note="Regret: against the fastest of both modes' contenders, timed after both had chosen: "
        "in batches, by interleaved rounds, cold and hot; in single calls, each after another's "
        "kernel. Bound: what the mode itself says of its pick; *: undecided, the best so far.",
    )
    good = []
    for entry in data["results"].get("convergence", []):
        if "error" in entry:
            table.rows.append((entry["case"], entry["error"], *[""] * 9))
            continue
        good.append(entry)
        bound = entry["regret_bound"]
        table.rows.append(
            (
                entry["case"],
                str(entry["calls"]),
                f"{entry['seconds']:.1f}",
                str(entry["candidates"]),
                percent(1 + entry["against_auto"]),
                percent(1 + entry["regret"]),
                percent(1 + entry["auto_regret"]),
                *(_regret(entry.get(key)) for key in _SINGLE),
                _regret(bound) + ("*" if entry.get("is_undecided") else ""),
                entry["picked"],
            )
        )
    if len(good) > 1:
        means = [
            numbers.geometric_mean([1 + entry[key] for entry in good])
            for key in ("against_auto", "regret", "auto_regret")
        ]
        single = [[1 + e[key] for e in good if key in e] for key in _SINGLE]
        middle = [numbers.median([e[key] for e in good]) for key in ("calls", "seconds")]
        table.rows.append(
            (
                "medians, geometric means",
                f"{middle[0]:.0f}",
                f"{middle[1]:.1f}",
                "",
                *map(percent, means),
                *(percent(numbers.geometric_mean(some)) if some else "–" for some in single),
                "",
                "",
            )
        )
    return table


def turns_table(data: dict[str, Any]) -> Table:
    table = Table(
        "One call of each finalist, by what ran before it (us; quartiles)",
        ("case", "finalist", *ARMS),
        note="calls: as `online` times them; idle: single calls to an idle GPU; queued: single "
        "calls, the GPU busy before; second: the second of two; batch: the mean of eight.",
    )
    for entry in data["results"].get("turns", []):
        if "error" in entry:
            table.rows.append((entry["case"], entry["error"], *[""] * len(ARMS)))
            continue
        times = entry["times_ms"]
        for text in times["batch"]:
            cells = [_us(times[arm].get(text)) for arm in ARMS]
            table.rows.append((entry["case"], text, *cells))
        regrets = [entry["regret"].get(arm) for arm in ARMS]
        cells = ["–" if regret is None else percent(1 + regret) for regret in regrets]
        table.rows.append((entry["case"], "its fastest, in batches", *cells))
    return table


def _us(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "–"
    median, low, high = (1e3 * spread[key] for key in ("median", "q1", "q3"))
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def tables(data: dict[str, Any]) -> list[Table]:
    shown = [
        first_call_table(data),
        overhead_table(data),
        convergence_table(data),
        turns_table(data),
    ]
    return [table for table in shown if table.rows]


def plot(data: dict[str, Any], path: Path) -> None:
    """First calls by layer; host time by phase; calls and regret by case."""
    from common import plotting

    results = data["results"]
    panels = [
        (draw, found)
        for draw, found in (
            (draw_first_calls, results.get("first_call", {}).get("compared")),
            (draw_overhead, compared_overhead(data)),
            (
                draw_convergence,
                [e for e in results.get("convergence", []) if "error" not in e],
            ),
        )
        if found
    ]
    fig, axes = plotting.figure(1, max(1, len(panels)), width=5.5 * max(1, len(panels)), height=5)
    for axis, (draw, found) in zip(axes[0], panels, strict=False):
        draw(axis, found)
    plotting.save(fig, path, data["environment"])


def draw_first_calls(axis: Any, found: dict[str, Any]) -> None:
    for index, entry in enumerate(found.values()):
        for offset, (mode, color) in enumerate((("heuristic", "C0"), ("online", "C1"))):
            times = entry["first_ms"][mode]
            places = [index + 0.3 * offset] * len(times)
            axis.plot(places, times, ".", color=color, label=mode if index == 0 else None)
    axis.set_xticks([i + 0.15 for i in range(len(found))])
    axis.set_xticklabels(
        [name.split("/")[0] for name in found], rotation=30, ha="right", fontsize=7
    )
    axis.set(title="first call of a layer", ylabel="ms", ylim=(0, None))
    axis.legend(fontsize=7)


def draw_overhead(axis: Any, found: dict[str, Any]) -> None:
    phases = [name for name in ("preparing", "undecided") if name in found]
    for offset, mode in enumerate(("heuristic_us", "online_us")):
        spreads = [found[name][mode] for name in phases]
        axis.bar(
            [i + 0.4 * offset for i in range(len(phases))],
            [s["median"] for s in spreads],
            0.4,
            yerr=[
                [s["median"] - s["q1"] for s in spreads],
                [s["q3"] - s["median"] for s in spreads],
            ],
            label=mode.removesuffix("_us"),
        )
    if "quiet_us" in found:
        quiet = found["quiet_us"]["median"]
        axis.axhline(quiet, color="gray", linestyle=":", label="heuristic, quiet process")
    axis.set_xticks([i + 0.2 for i in range(len(phases))])
    axis.set_xticklabels(phases)
    # To build and check a candidate takes milliseconds, a call microseconds.
    axis.set(title="host time of one call", ylabel="us", yscale="log")
    axis.legend(fontsize=7)


def draw_convergence(axis: Any, found: list[dict[str, Any]]) -> None:
    for key, label in (("regret", "online"), ("auto_regret", "auto")):
        percents = [100 * entry[key] for entry in found]
        axis.plot([entry["calls"] for entry in found], percents, "o", label=label, alpha=0.7)
    axis.set(title="what was decided, and when", xlabel="calls until decided", ylabel="regret %")
    axis.set_xscale("log")
    axis.legend(fontsize=7)
