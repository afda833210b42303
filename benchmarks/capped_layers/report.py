"""What a record of capped.py says: the tables and the plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from common.cases import layer_text
from common.tables import Table, dry_run_note, number, percent

TRUTHS = ("burst", "sustained")


def judged(entry: dict[str, Any]) -> dict[str, Any]:
    """``burst`` and ``sustained``, those of them that were measured, as ``audit.model.Truth``."""
    from cudnn_autotune.audit.analysis import truth_of
    from cudnn_autotune.audit.model import BURST, Oracle, Truth
    from cudnn_autotune.core import json_dataclass

    found: dict[str, Any] = {}
    if "burst" in entry:
        burst = {k: json_dataclass.decode(Truth, v) for k, v in entry["burst"]["truths"].items()}
        mean = truth_of(Oracle(burst), BURST)
        if mean is not None:
            found["burst"] = mean
    if "sustained" in entry:
        found["sustained"] = json_dataclass.decode(Truth, entry["sustained"]["truth"])
    return found


def regrets(entry: dict[str, Any], truths: dict[str, Any], mode: str, name: str) -> list[float]:
    """Of the mode's picks, one a run, those that the truth knows; 1 is the best."""
    from cudnn_autotune.audit.analysis import raw_regret

    texts = [pick.get("text") for pick in entry["picks"].get(mode, [])]
    found = [raw_regret(truths.get(name), text) for text in texts]
    return [value for value in found if value is not None]


def clock_of(entry: dict[str, Any], text: str) -> float | None:
    """At the end of its solo blocks, MHz."""
    clocks = [b["clock_mhz"] for b in entry["solo"] if b["text"] == text and b.get("clock_mhz")]
    return statistics.fmean(clocks) if clocks else None


def most_power(entry: dict[str, Any]) -> float | None:
    """Highest reading in any solo block, W."""
    readings = []
    for block in entry["solo"]:
        trace = block.get("telemetry", {})
        for column in ("power_instant_w", "power_w"):
            readings += [v for v in trace.get(column, []) if v is not None]
    return max(readings, default=None)


def layers_table(data: dict[str, Any]) -> Table:
    table = Table(
        "Layers at the power limit: in bursts and in the long run",
        (
            "layer",
            "burst winner",
            "burst, ms",
            "sustained winner",
            "sustained, ms",
            "burst winner sustained, ms",
            "off by",
            "error",
            "clock: bursts, the two alone (MHz)",
            "power up to (W)",
        ),
        note=f"Burst: short rounds after pauses. Sustained: alone for {data['arguments']['solo_s']}"
        " s, at the steady clock, twice, in mirrored order, brought to one power where the board's"
        " limit held the clock; means of cold and hot operands." + dry_run_note(data),
    )
    for case_id, entry in data["results"]["cases"].items():
        truths = judged(entry)
        burst, sustained = truths.get("burst"), truths.get("sustained")
        if burst is None:
            reasons = "; ".join(f["error"] for f in entry["failed"]) or "not measured"
            table.rows.append((layer_text(case_id), reasons, *["–"] * 8))
            continue
        first = (layer_text(case_id), burst.best, number(burst.times_ms[burst.best], 4))
        at_burst = entry["burst"].get("clock_mhz")
        if sustained is None:
            clock = number(at_burst, 0)
            table.rows.append((*first, *["–"] * 5, clock, number(most_power(entry), 0)))
            continue
        alone = sustained.times_ms.get(burst.best)
        clocks = [at_burst, clock_of(entry, burst.best), clock_of(entry, sustained.best)]
        error = max(sustained.errors.values(), default=0.0)
        table.rows.append(
            (
                *first,
                sustained.best,
                number(sustained.times_ms[sustained.best], 4),
                number(alone, 4),
                "–" if alone is None else percent(alone / sustained.times_ms[sustained.best]),
                f"{error * 100:.1f} %",
                ", ".join(number(clock, 0) for clock in clocks),
                number(most_power(entry), 0),
            )
        )
    return table


def regret_table(data: dict[str, Any], name: str) -> Table:
    modes = data["arguments"]["modes"].split(",")
    table = Table(
        f"How far each mode's pick is from the best, {name}",
        ("layer", *modes),
        note="Each run by itself; – where the pick was not measured to the end. Tuning here "
        "includes loading kernels, for whichever mode meets them first.",
    )
    for case_id, entry in data["results"]["cases"].items():
        truths = judged(entry)
        cells = []
        for mode in modes:
            found = regrets(entry, truths, mode, name)
            cells.append(", ".join(percent(value) for value in found) or "–")
        table.rows.append((layer_text(case_id), *cells))
    times = []
    for mode in modes:
        tuning = [
            pick["tuning_ms"]
            for entry in data["results"]["cases"].values()
            for pick in entry["picks"].get(mode, [])
            if pick.get("tuning_ms") is not None
        ]
        times.append(number(statistics.median(tuning) / 1e3, 2) if tuning else "–")
    table.rows.append(("tuning of a layer (s), median", *times))
    return table


def tables(data: dict[str, Any]) -> list[Table]:
    return [layers_table(data), *(regret_table(data, name) for name in reversed(TRUTHS))]


def plot(data: dict[str, Any], path: Path) -> None:
    """Time of a call and SM clock in the solo blocks of the two winners, layer by layer."""
    from common import plotting

    shown = {}
    for case_id, entry in data["results"]["cases"].items():
        truths = judged(entry)
        if len(truths) == len(TRUTHS):
            shown[case_id] = (entry, truths)
    rows = max(1, len(shown))
    fig, axes = plotting.figure(rows, 2, width=11, height=2.8 * rows)
    for row, (case_id, (entry, truths)) in enumerate(shown.items()):
        times, clocks = axes[row]
        winners: dict[str, list[str]] = {}
        for name in TRUTHS:
            winners.setdefault(truths[name].best, []).append(name)
        for index, (text, names) in enumerate(winners.items()):
            label: str | None = f"{text} ({' and '.join(names)} winner)"
            for block in entry["solo"]:
                if block["text"] != text or "trace" not in block:
                    continue
                trace, style = block["trace"], {"color": f"C{index}", "linewidth": 0.9}
                times.plot(trace["t_ms"], trace["time_ms"], label=label, **style)
                points = [
                    (t, c)
                    for t, c in zip(trace["t_ms"], trace["clock_mhz"], strict=True)
                    if c is not None
                ]
                clocks.plot([t for t, _ in points], [c for _, c in points], **style)
                label = None
        times.set_title(layer_text(case_id), fontsize=9)
        times.set_ylabel("ms a call")
        times.legend(fontsize=6, loc="upper left", bbox_to_anchor=(0, -0.2), frameon=False)
        clocks.set_ylabel("SM clock, MHz")
        for axis in (times, clocks):
            axis.set_xlabel("ms since the block began, from an idle GPU")
    plotting.save(fig, path, data["environment"])
