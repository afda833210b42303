"""What a record of online.py says: the tables and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import numbers
from common.tables import NONE, Table, number, percent

# What the calls of a trial did -> what that is called in a table. Older records have "chores" for
# "preparing".
_PHASES = {
    "chores": "a candidate is built and checked",
    "preparing": "a candidate is built and checked",
    "undecided": "take turns only",
}
_REGRETS = ("against_auto", "regret", "auto_regret", "single_regret", "auto_single_regret")


def tables(data: dict[str, Any]) -> list[Table]:
    shown = [first_call_table(data), overhead_table(data), convergence_table(data)]
    return [table for table in shown if table.rows]


def first_call_table(data: dict[str, Any]) -> Table:
    table = Table(
        "First call of a layer: wall time until its output is there (ms)",
        ("layer", "heuristic", "online", "online / heuristic", "processes of each"),
        note="Medians over fresh processes, the two modes taking turns.",
    )
    found = data["results"].get("first_call", {}).get("compared", {})
    for name, entry in found.items():
        cells = [number(numbers.median(entry["first_ms"][m]), 2) for m in ("heuristic", "online")]
        table.rows.append((name, *cells, number(entry["ratio"]), str(entry["processes"])))
    if len(found) > 1:
        ratios = [entry["ratio"] for entry in found.values()]
        table.rows.append(("median", "", "", number(numbers.median(ratios)), ""))
    return table


def overhead_table(data: dict[str, Any]) -> Table:
    found = data["results"].get("overhead", {}).get("compared", {})
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
    for name in (phase for phase in _PHASES if phase in found):
        entry = found[name]
        difference, to_quiet = entry["difference_us"], entry["difference_to_quiet_us"]
        table.rows.append(
            (
                _PHASES[name],
                number(entry["heuristic_us"]["median"], 2),
                number(entry["online_us"]["median"], 2),
                number(difference["median"], 2),
                f"{difference['q1']:.2f} to {difference['q3']:.2f}",
                number(to_quiet["median"], 2),
                number(to_quiet.get("mean"), 2),  # not in the oldest records
                str(int(difference["n"])),
            )
        )
    return table


def _regret(fraction: float | None) -> str:
    return NONE if fraction is None else percent(1 + fraction)


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
    entries = data["results"].get("convergence", [])
    good = [entry for entry in entries if "error" not in entry]
    for entry in entries:
        if "error" in entry:
            table.rows.append((entry["case"], *[""] * 9, entry["error"]))
            continue
        table.rows.append(
            (
                entry["case"],
                str(entry["calls"]),
                f"{entry['seconds']:.1f}",
                str(entry["candidates"]),
                *(_regret(entry.get(key)) for key in _REGRETS),
                _regret(entry["regret_bound"]) + ("*" if entry.get("is_undecided") else ""),
                entry["picked"],
            )
        )
    if len(good) > 1:
        calls, seconds = (
            numbers.median([entry[k] for entry in good]) for k in ("calls", "seconds")
        )
        means = []
        for key in _REGRETS:
            some = [1 + entry[key] for entry in good if key in entry]
            means.append(percent(numbers.geometric_mean(some)) if some else NONE)
        name = "medians, geometric means"
        table.rows.append((name, f"{calls:.0f}", f"{seconds:.1f}", "", *means, "", ""))
    return table


def plot(data: dict[str, Any], path: Path) -> None:
    """First calls by layer; host time by what the calls did; calls and regret by case."""
    from common import plotting

    results = data["results"]
    decided = [e for e in results.get("convergence", []) if "error" not in e]
    panels = {
        draw_first_calls: results.get("first_call", {}).get("compared"),
        draw_overhead: results.get("overhead", {}).get("compared"),
        draw_convergence: decided,
    }
    drawn = {draw: found for draw, found in panels.items() if found}
    count = max(1, len(drawn))
    fig, axes = plotting.figure(1, count, width=5.5 * count, height=5)
    for axis, (draw, found) in zip(axes[0], drawn.items(), strict=False):
        draw(axis, found)
        axis.legend(fontsize=7)
    plotting.save(fig, path, data["environment"])


def draw_first_calls(axis: Any, found: dict[str, Any]) -> None:
    for offset, mode in enumerate(("heuristic", "online")):
        points = [
            (place + 0.3 * offset, ms)
            for place, entry in enumerate(found.values())
            for ms in entry["first_ms"][mode]
        ]
        axis.plot(*zip(*points, strict=True), ".", label=mode)
    places = [place + 0.15 for place in range(len(found))]
    labels = [name.split("/")[0] for name in found]
    axis.set_xticks(places, labels, rotation=30, ha="right", fontsize=7)
    axis.set(title="first call of a layer", ylabel="ms", ylim=(0, None))


def draw_overhead(axis: Any, found: dict[str, Any]) -> None:
    phases = [name for name in _PHASES if name in found]
    for offset, mode in enumerate(("heuristic_us", "online_us")):
        medians = [found[name][mode]["median"] for name in phases]
        places = [place + 0.4 * offset for place in range(len(phases))]
        axis.bar(places, medians, 0.4, label=mode.removesuffix("_us"))
    axis.set_xticks([place + 0.2 for place in range(len(phases))], phases)
    # Building a candidate takes milliseconds, a call microseconds.
    axis.set(title="host time of one call, medians", ylabel="us", yscale="log")


def draw_convergence(axis: Any, found: list[dict[str, Any]]) -> None:
    for key, label in (("regret", "online"), ("auto_regret", "auto")):
        percents = [100 * entry[key] for entry in found]
        axis.plot([entry["calls"] for entry in found], percents, "o", label=label, alpha=0.7)
    axis.set(title="what was decided, and when", xlabel="calls until decided", ylabel="regret %")
    axis.set_xscale("log")
