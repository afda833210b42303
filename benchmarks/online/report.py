"""The tables of a record of online."""

from __future__ import annotations

from typing import Any

from common import numbers
from common.tables import NONE, Table, columns, number, percent

# What the calls of a trial did -> what that is called in a table. Older records have "chores" for
# "preparing".
_PHASES = {
    "chores": "a candidate is built and checked",
    "preparing": "a candidate is built and checked",
    "undecided": "take turns only",
}


def tables(data: dict[str, Any]) -> list[Table]:
    shown = [overhead_table(data), convergence_table(data), missed_table(data)]
    return [table for table in shown if table.rows]


def overhead_table(data: dict[str, Any]) -> Table:
    found = data["results"].get("overhead", {}).get("compared", {})
    quiet = found.get("quiet_us")
    thread = found.get("tuner_cpu_us_a_turn")
    table = Table(
        "Host time of one call while `online` is undecided (us), 1x16x8x8 * 16 filters 3x3",
        columns(
            "the calls|heuristic, decided|online|difference, paired|quartiles"
            "|difference to a quiet process|its mean|blocks"
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
    entries = data["results"].get("convergence", [])
    good = [entry for entry in entries if "error" not in entry]
    other = "auto" if any("auto" in entry for entry in good) else "race"  # auto in older records
    regrets = {
        f"against_{other}": f"against {other}'s pick",
        "regret": "regret, in batches",
        f"{other}_regret": f"{other}'s",
    }
    has_singles = any("single_regret" in entry for entry in good)  # in older records
    if has_singles:
        regrets["single_regret"] = "regret, in single calls"
        regrets[f"{other}_single_regret"] = f"{other}'s"
    table = Table(
        "Until `online` has decided, and what its pick is worth",
        ["case", "calls", "seconds", "candidates", *regrets.values(), "bound", "picked"],
        note="Regret: against the fastest of both modes' contenders, timed after both had chosen: "
        "in batches, by interleaved rounds, cold and hot"
        + ("; in single calls, each after another's kernel. " if has_singles else ". ")
        + "Bound: what the mode itself says of its pick; *: undecided, the best so far.",
    )
    for entry in entries:
        if "error" in entry:
            table.rows.append((entry["case"], *[""] * (4 + len(regrets)), entry["error"]))
            continue
        table.rows.append(
            (
                entry["case"],
                str(entry["calls"]),
                f"{entry['seconds']:.1f}",
                str(entry["candidates"]),
                *(_regret(entry.get(key)) for key in regrets),
                _regret(entry["regret_bound"]) + ("*" if entry.get("is_undecided") else ""),
                entry["picked"],
            )
        )
    if len(good) > 1:
        calls, seconds = (
            numbers.median([entry[k] for entry in good]) for k in ("calls", "seconds")
        )
        means = []
        for key in regrets:
            some = [1 + entry[key] for entry in good if key in entry]
            means.append(percent(numbers.geometric_mean(some)) if some else NONE)
        name = "medians, geometric means"
        table.rows.append((name, f"{calls:.0f}", f"{seconds:.1f}", "", *means, "", ""))
    return table


def missed_table(data: dict[str, Any]) -> Table:
    """Where `online` did not pick the fastest; older records do not say what became of it."""
    table = Table("What became of the fastest in `online`", ["case", "the fastest", "outcome"])
    for entry in data["results"].get("convergence", []):
        if "outcomes" in entry and entry["best"] != entry["picked"]:
            outcome = entry["outcomes"].get(entry["best"], "it did not take part")
            table.rows.append((entry["case"], entry["best"], outcome))
    return table
