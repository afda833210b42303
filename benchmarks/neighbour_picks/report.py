"""What a record of neighbours.py says: the tables and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import numbers
from common.tables import Table, number, percent

from .arms import AT_ONCE, RACE, Arm
from .judged import ALL, Judged, spread

# The rule of `sampling.neighbour`.
SIMILAR = "chosen for a similar problem"


def tables(data: dict[str, Any]) -> list[Table]:
    judged = Judged(data["results"])
    shown = [_at_once(data, judged), _by_change(judged), _budgets(data, judged)]
    return [table for table in shown if table.rows] or shown[:1]


def _at_once(data: dict[str, Any], judged: Judged) -> Table:
    arms = [*(arm.name for arm in AT_ONCE), RACE.name]
    results, mode = data["results"], data["arguments"]["sampling"]
    notes = [
        f"Regret of a layer of which other shapes are remembered ({data['arguments']['changes']}): "
        "its pick's time over the fastest of all that was picked for it, that won on its "
        "neighbours, or that led its race; interleaved short batches, mean of cold and hot; a gap "
        "within the error is 1.0. Means are geometric. Choosing: wall time of the first call in a "
        f"fresh process, plans built and kernels compiled included. {RACE.name}: {mode}, to its "
        "end, without the store.",
        *_remarks(results),
    ]
    if data["environment"].get("device") == "cpu":
        notes.append("DRY RUN: on a simulated GPU.")
    table = Table(
        "A neighbour's config served at once, against the heuristics' first",
        ("served", "cases", "mean", "p95", "worst", "within 1 %", "mean cold", "mean hot",
         "choosing (ms)"),
        note=" ".join(notes),
    )  # fmt: skip
    for op in (ALL, "fprop", "dgrad", "wgrad"):
        names = judged.compared(arms, op)
        if not names:
            continue
        for arm in arms:
            caches = [
                numbers.geometric_mean(judged.regrets(arm, names, truth))
                for truth in ("burst cold", "burst hot")
            ]
            wall_ms = numbers.median(judged.wall_ms(arm, names))
            regrets = judged.regrets(arm, names)
            cells = (*spread(regrets), *(f"{mean:.4f}" for mean in caches), number(wall_ms, 1))
            table.rows.append((f"{arm}, {op}", str(len(names)), *cells))
    return table


def _remarks(results: dict[str, Any]) -> list[str]:
    """Who had no neighbour to serve, and what failed."""
    cases = results.get("cases", {})
    told = [case["picks"].get("neighbour", {}) for case in cases.values()]
    rules = [t["rule"] for t in told if "rule" in t]
    alone = sum(rule != SIMILAR for rule in rules)
    found = [f"{alone} of {len(rules)} had no neighbour's config that builds, and were served the "
             "heuristics' first."] if alone else []  # fmt: skip
    for name, case in cases.items():
        entries = {**case["changes"], **case["picks"], "judge": case}
        found += [f"{name}, {key}: {e['error']}." for key, e in entries.items() if "error" in e]
    return [*found, *(f"{failure}." for failure in results.get("failures", []))]


def _by_change(judged: Judged) -> Table:
    """Each neighbour alone: what if it were the nearest?"""
    table = Table(
        "By what the neighbour differs in: its config on the layer",
        ("neighbour", "distance", "cases", "mean", "p95", "worst", "within 1 %", "does not run"),
        note="Distance: the root of the sum of squares of log2 of the ratios of all sizes, median.",
    )
    for change in dict.fromkeys(c for case in judged.cases.values() for c in case["changes"]):
        told = {
            name: case["changes"][change]
            for name, case in judged.cases.items()
            if "text" in case["changes"].get(change, {})
        }
        regrets = {name: judged.regret(name, t) for name, t in told.items()}
        good = [regret for regret in regrets.values() if regret is not None]
        if good:
            far = numbers.median([t["distance"] for t in told.values()])
            failed = len(regrets) - len(good)
            cells = (number(far, 2), str(len(good)), *spread(good), str(failed))
            table.rows.append((change, *cells))
    return table


def budgets_of(results: dict[str, Any]) -> list[float | None]:
    """Those that were asked for, the endless one last."""
    texts = [name for name in results.get("arms", []) if name.startswith("race@")]
    found = sorted({float(t.removeprefix("race@").removesuffix("+neighbours")) for t in texts})
    return [*found, None]


def _pair(budget_ms: float | None) -> list[str]:
    return [Arm("", neighbours, budget_ms).name for neighbours in (False, True)]


def _budgets(data: dict[str, Any], judged: Judged) -> Table:
    table = Table(
        "Races that begin with what won on neighbours, within a budget",
        ("budget", "cases", "mean without", "with", "p95 without", "with", "within 1 % without",
         "with", "wall (ms) without", "with", "with / without"),
        note="Without: cuDNN's candidates in its own order. Wall: median time until the choice; "
        "with / without: median of the cases' ratios. A budget below 600 ms compiles no kernel.",
    )  # fmt: skip
    for budget_ms in budgets_of(data["results"]):
        pair = _pair(budget_ms)
        names = judged.compared(pair)
        if not names:
            continue
        both = [spread(judged.regrets(arm, names)) for arm in pair]
        wall_ms = [judged.wall_ms(arm, names) for arm in pair]
        ratio = numbers.median([b / a for a, b in zip(*wall_ms, strict=True)])
        cells = [both[i][column] for column in (0, 1, 3) for i in (0, 1)]
        table.rows.append(
            (
                "none" if budget_ms is None else f"{budget_ms:g} ms",
                str(len(names)),
                *cells,
                *(number(numbers.median(row), 0) for row in wall_ms),
                percent(ratio),
            )
        )
    return table


def plot(data: dict[str, Any], path: Path) -> None:
    """Left: the share of cases within a regret, by who served; right: regret by budget."""
    from common import plotting

    judged = Judged(data["results"])
    fig, axes = plotting.figure(1, 2, width=10, height=3.8)
    left, right = axes[0]
    arms = [*(arm.name for arm in AT_ONCE), RACE.name]
    names = judged.compared(arms)
    for place, arm in enumerate(arms):
        regrets = sorted(judged.regrets(arm, names))
        if regrets:
            shares = [i / len(regrets) for i in range(len(regrets) + 1)]
            left.step([regrets[0], *regrets], shares, where="post", color=f"C{place}", label=arm)
    left.set_xlabel("time over the fastest")
    left.set_ylabel("share of the layers")
    left.set_title("served at once, and raced", fontsize=10)
    budgets = [budget_ms for budget_ms in budgets_of(data["results"]) if budget_ms is not None]
    for place, neighbours in enumerate((False, True)):
        points = []
        for budget_ms in budgets:
            found = judged.compared(_pair(budget_ms))
            arm = Arm("", neighbours, budget_ms).name
            if found:
                mean = numbers.geometric_mean(judged.regrets(arm, found))
                points.append((budget_ms, mean))
        label = "beginning with neighbours" if neighbours else "in cuDNN's order"
        right.plot([x for x, _ in points], [y for _, y in points], "o-", color=f"C{place}",
                   label=label)  # fmt: skip
    right.set_xlabel("budget, ms of wall time")
    right.set_ylabel("mean time over the fastest")
    right.set_title("a race within a budget", fontsize=10)
    for axis in (left, right):
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    plotting.save(fig, path, data["environment"])
