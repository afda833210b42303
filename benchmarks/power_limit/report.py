"""What a record of board_power.py says: the table and the plot."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from common.cases import layer_text
from common.tables import Table, dry_run_note, number, percent

from cudnn_autotune.timers.board_power import ARRIVAL_MS, FAR, NEAR

from .analysis import Analysis, analysis

NONE = "–"


def share(value: float | None) -> str:
    """0.0123 -> "1.23 %"."""
    return NONE if value is None else f"{value * 100:.2f} %"


def off(ratio: float | None) -> str:
    return NONE if ratio is None else percent(ratio, 2)


def tables(data: dict[str, Any]) -> list[Table]:
    options = data["arguments"]
    table = Table(
        "Blocks of one engine at the power limit: as measured, and brought to the limit",
        (
            "layer",
            "candidate",
            "SM clock (MHz)",
            "spread as measured",
            "spread at the limit",
            "blocks with a reading",
            "at the limit, over long blocks",
        ),
        note=f"Alone for {options['block_s']} s, in turns, hot operands. Spread: standard "
        "deviation of the logarithm, from block to block. As measured: the last third of a block. "
        f"At the limit: by the readings of instant power that fell into it after {ARRIVAL_MS:.0f} "
        f"ms. Long blocks: of {options['long_s']} s, their last three quarters. Last line: power "
        "as a function of the clock, over all readings within 10 % of the limit, each candidate "
        "with a level of its own (a slope that errors of the clock flatten), and the exponent by "
        "which the blocks of a candidate agree best; medians over the candidates."
        + dry_run_note(data),
    )
    found = analysis(data)
    for case_id, entry in data["results"]["cases"].items():
        for one in found.alone:
            if one.case == case_id:
                table.rows.append(
                    (
                        layer_text(case_id),
                        one.text,
                        number(one.clock_mhz, 0),
                        share(one.spread),
                        share(one.spread_at_limit),
                        f"{len(one.brought_ms)} of {len(one.at_limit_ms)}",
                        off(one.ratio),
                    )
                )
        for failed in entry["failed"]:
            row = f"{failed['step']}: {failed['error']}"
            table.rows.append((layer_text(case_id), row, *[NONE] * 5))
    table.rows.append(_last_line(found))
    return [table, far] if (far := _far(found)).rows else [table]


def _far(found: Analysis) -> Table:
    table = Table(
        "Blocks far from the limit: a call over that of long blocks",
        ("layer", "candidate", "as measured", "brought to the limit"),
        note=f"Of the blocks of the table before, all whose readings are {NEAR * 100:.0f} to "
        f"{FAR * 100:.0f} % from the limit; root mean square of the differences.",
    )
    squares: list[tuple[float, float]] = []
    for one in found.alone:
        for measured, brought in one.far_ratios:
            squares.append((math.log(measured) ** 2, math.log(brought) ** 2))
            row = (layer_text(one.case), one.text, percent(measured), percent(brought))
            table.rows.append(row)
    if squares:
        rms = [share(math.sqrt(statistics.fmean(some))) for some in zip(*squares, strict=True)]
        table.rows.append(("all", NONE, *rms))
    return table


def _last_line(found: Analysis) -> tuple[str, ...]:
    fit = found.fit
    return (
        "all",
        "no exponent: too few readings"
        if fit is None
        else f"power ~ clock^{fit.exponent:.2f}, correlation {fit.correlation:.2f}, "
        f"{fit.readings} readings; blocks agree best by {number(found.agreeing, 2)}",
        NONE,
        share(found.median("spread")),
        share(found.median("spread_at_limit")),
        f"{sum(len(one.brought_ms) for one in found.alone)} of "
        f"{sum(len(one.at_limit_ms) for one in found.alone)}",
        off(found.median("ratio")),
    )


def plot(data: dict[str, Any], path: Path) -> None:
    """Time of each short block over the candidate's long blocks', layer by layer."""
    from common import plotting

    found = analysis(data)
    shown = {
        case_id: [one for one in found.alone if one.case == case_id and one.long_ms is not None]
        for case_id in data["results"]["cases"]
    }
    shown = {case_id: rows for case_id, rows in shown.items() if rows}
    panels = max(1, len(shown))
    fig, axes = plotting.figure(panels, 1, width=10, height=0.6 + 2.2 * panels, sharex=True)
    for axis, (case_id, rows) in zip(axes[:, 0], shown.items(), strict=False):
        for name, place, color in (("as measured", -0.15, "C1"), ("at the limit", 0.15, "C0")):
            label: str | None = name
            for row, one in enumerate(rows):
                assert one.long_ms is not None
                times = one.measured_ms if name == "as measured" else one.brought_ms
                axis.plot(
                    [(ms / one.long_ms - 1) * 100 for ms in times],
                    [row + place] * len(times),
                    "o",
                    color=color,
                    alpha=0.6,
                    markersize=5,
                    label=label,
                )
                label = None
        axis.axvline(0, color="gray", linewidth=0.8)
        axis.set_yticks(range(len(rows)), [one.text for one in rows], fontsize=7)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_title(layer_text(case_id), fontsize=9)
        axis.grid(axis="x", alpha=0.3)
    if shown:
        axes[0, 0].legend(fontsize=7)
    axes[-1, 0].set_xlabel("a block's time over the long blocks', %")
    plotting.save(fig, path, data["environment"])
