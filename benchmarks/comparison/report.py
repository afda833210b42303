"""What a record of compare_sampling.py says: the tables and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import numbers
from common.tables import Table

from .analysis import (
    case_regret,
    left_out,
    noise,
    processes,
    sampled,
    shared_cases,
    summarize,
    tuning_of,
)

COLUMNS = (
    "mode",
    "cases",
    "time / best",
    "95th pct.",
    "worst",
    "> 2 % off",
    "tuning a case",
    "all cases",
    "same pick",
    "same time",
)


def seconds(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms" if milliseconds < 1000 else f"{milliseconds / 1e3:.2f} s"


def tables(data: dict[str, Any]) -> list[Table]:
    results, arguments = data["results"], data["arguments"]
    names = processes(arguments)
    shared = shared_cases(results, names)
    errors = [noise(results["oracle"][case]["times_ms"]) for case in shared]
    note = (
        f"{len(shared)} of {len(results.get('cases', {}))} cases (layer, direction, dtype). "
        f"Best: the fastest of all survivors and picks, {arguments['rounds']} interleaved rounds, "
        f"{arguments['cache']} cache; standard error of a ratio, median over the cases: "
        f"{100 * numbers.median(errors):.2f} %. "
        if errors
        else ""
    )
    note += (
        "Time / best: geometric mean over cases and runs. Tuning: of a first call, median. "
        f"Same pick, same time: cases whose {arguments['runs']} fresh processes pick one config, "
        "or configs within 1 %. PyTorch rows: its call against our "
        f"{arguments['reference']} pick in its own process, times that pick's ratio to the best."
    )
    if reasons := left_out(results, names):
        told = "; ".join(f"{case}: {why}" for case, why in reasons.items())
        note += f" Left out: {told if len(told) < 400 else str(len(reasons)) + ' cases'}."
    other = {
        case
        for by_case in results.get("sampled", {}).values()
        for case, entry in by_case.items()
        if "problem_differs" in entry
    }
    if other:  # the pick was made for another problem than the oracle's: a bug to look into
        note += f" Tuned as another problem than judged: {', '.join(sorted(other))}."
    table = Table("Picked against best", COLUMNS, note=note)
    for mode in arguments["modes"].split(","):
        s = summarize(results, mode, names)
        if not s.regrets:
            continue
        table.rows.append(
            (
                mode,
                str(s.cases),
                f"{numbers.geometric_mean(s.regrets):.4f}",
                f"{numbers.quantile(s.regrets, 0.95):.3f}",
                f"{max(s.regrets):.3f}",
                f"{s.off_by(0.02)} of {len(s.regrets)}",
                seconds(numbers.median(s.tuning_ms)) if s.tuning_ms else "–",
                f"{s.total_tuning_s:.1f} s",
                "–" if s.agree is None else f"{s.agree[0]} of {s.agree[1]}",
                "–" if s.agreeing_in_time is None else "{} of {}".format(*s.agreeing_in_time),
            )
        )
    shown = [table]
    direct = against_pytorch(data, shared)
    if direct.rows:
        shown.append(direct)
    return shown


def against_pytorch(data: dict[str, Any], cases: list[str]) -> Table:
    """PyTorch's time over our reference mode's, side by side in one process."""
    reference = data["arguments"]["reference"]
    table = Table(
        f"PyTorch's time / {reference}'s time, taking turns in one process",
        ("PyTorch's mode", "cases", "geometric mean", "least", "most", f"{reference} loses > 2 %"),
    )
    for name, by_case in data["results"].get("sampled", {}).items():
        ratios = [float(by_case[c]["ratio"]) for c in cases if by_case.get(c, {}).get("ratio")]
        if ratios:
            table.rows.append(
                (
                    name.split("#")[0],
                    str(len(ratios)),
                    f"{numbers.geometric_mean(ratios):.4f}",
                    f"{min(ratios):.3f}",
                    f"{max(ratios):.3f}",
                    f"{sum(1 for r in ratios if r < 1 / 1.02)} of {len(ratios)}",
                )
            )
    return table


MOST_DRAWN = 1.3  # one regret of 5 would flatten all others


def plot(data: dict[str, Any], path: Path) -> None:
    """Sorted regrets and sorted tuning times of each mode."""
    from common import plotting

    results = data["results"]
    names = processes(data["arguments"])
    shared = shared_cases(results, names)
    fig, axes = plotting.figure(1, 2, width=12, height=5)
    for index, mode in enumerate(data["arguments"]["modes"].split(",")):
        mine = [name for name in names if name.split("#")[0] == mode]
        found = [case_regret(results, name, case) for name in mine for case in shared]
        regrets = sorted(min(v, MOST_DRAWN) for v in found if v is not None)
        spent = [tuning_of(sampled(results, name, case) or {}) for name in mine for case in shared]
        tuning = sorted(max(v, 0.1) for v in spent if v is not None)
        for axis, values in ((axes[0][0], regrets), (axes[0][1], tuning)):
            share = [(i + 0.5) / len(values) for i in range(len(values))]
            axis.plot(share, values, color=f"C{index}", label=mode, marker=".", markersize=3)
    axes[0][0].set(
        title="what was picked: time / best",
        xlabel="share of cases and runs",
        ylabel=f"ratio ({MOST_DRAWN} or more is drawn as {MOST_DRAWN})",
    )
    axes[0][1].set(
        title="what the first call spent on choosing",
        xlabel="share of cases and runs",
        ylabel="ms (0.1 or less is drawn as 0.1)",
        yscale="log",
    )
    for axis in axes[0]:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    plotting.save(fig, path, data["environment"])
