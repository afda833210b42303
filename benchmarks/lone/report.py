"""What a record of lone_layer.py says: the tables and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import numbers
from common.tables import Table, number, percent

RANDOM, OWN = "random", "the model's"


def cases(results: dict[str, Any]) -> list[str]:
    """``layer/op``, as measured in the model or alone."""
    found: dict[str, None] = {}
    for row in results.get("inside", []):
        found.update(dict.fromkeys(row["picks"]))
    for part in ("plain", "queued"):
        found.update(dict.fromkeys(row["case"] for row in results.get(part, [])))
    return list(found)


def inside_ms(results: dict[str, Any], case: str) -> dict[str, float]:
    """Engine -> time of a call in the model: the median over the blocks in which it served."""
    times: dict[str, list[float]] = {}
    for row in results.get("inside", []):
        text, spread = row["picks"].get(case), row["calls"].get(case)
        if text is not None and spread is not None:
            times.setdefault(text, []).append(spread["median"])
    return {text: numbers.median(row) for text, row in times.items()}


def queued_of(results: dict[str, Any], case: str, text: str | None, data: str) -> dict[str, Any]:
    for row in results.get("queued", []):
        if (row["case"], row["text"], row["data"]) == (case, text, data):
            return dict(row)
    return {}


def pick_of(results: dict[str, Any], case: str, mode: str) -> str | None:
    texts = [row["picks"].get(case) for row in results.get("inside", []) if row["mode"] == mode]
    return next((text for text in texts if text is not None), None)


def readings(rows: list[dict[str, Any]], column: str) -> list[float]:
    return [v for row in rows for v in row.get("telemetry", {}).get(column, []) if v is not None]


def board(rows: list[dict[str, Any]]) -> str:
    """``1755 MHz, 690 W, 55 °C`` over those rows: medians of NVML's readings; – without."""
    told = []
    for columns, unit in (
        (("sm_clock_mhz",), "MHz"),
        (("power_instant_w", "power_w"), "W"),
        (("temperature_c",), "°C"),
    ):
        values = next((found for c in columns if (found := readings(rows, c))), [])
        if values:
            told.append(f"{numbers.median(values):.0f} {unit}")
    return ", ".join(told) or "–"


def calls(count: int | str) -> str:
    return f"{count} call{'' if int(count) == 1 else 's'}"


def readings_tables(data: dict[str, Any]) -> list[Table]:
    """Each layer's reference engine: every reading of its time, and the board meanwhile."""
    results, reference = data["results"], data["arguments"]["reference"]
    shown = []
    for case in cases(results):
        text = pick_of(results, case, reference)
        in_model = inside_ms(results, case).get(text or "")
        table = Table(
            f"What reads which time: {case} of {data['arguments']['model']} by {text or reference}",
            ("reading", "ms a call", "against the model", "clock by the GPU (MHz)", "NVML: median"),
            note="Plain: events around so many calls from an idle GPU, launches and all. Queued: "
            "from an idle GPU behind a full queue, the time of a call once so many were made. NVML "
            "reads every 20 ms: short runs have no reading." + dry_run_note(data),
        )

        def add(
            name: str,
            ms: float | None,
            clock: float | None,
            board_: str,
            table: Table = table,
            in_model: float | None = in_model,
        ) -> None:
            behind = percent(ms / in_model) if ms and in_model else "–"
            table.rows.append((name, number(ms, 4), behind, number(clock, 0), board_))

        for row in results.get("plain", []):
            if row["case"] == case:
                add(f"alone, plain, {calls(row['iterations'])}", row["mean_ms"], None, board([row]))
        alone = queued_of(results, case, text, RANDOM)
        for count, found in alone.get("after", {}).items():
            name = f"alone, queued, after {calls(count)}"
            add(name, found["time_ms"], found["clock_mhz"], "–")
        for data_, told in ((RANDOM, "random operands"), (OWN, "the model's operands")):
            row = queued_of(results, case, text, data_)
            if row:
                steady = row["steady"]
                name = f"alone, steady, {told}"
                add(name, steady["time_ms"], steady["clock_mhz"], board([row]))
        blocks = [r for r in results.get("inside", []) if r["picks"].get(case) == text]
        if blocks and in_model:
            add("in the model", in_model, None, board(blocks))
        if table.rows:
            shown.append(table)
    return shown


def blocks_differ(results: dict[str, Any]) -> str:
    """How far two blocks of one mode, one engine, lie apart: what of a gap is noise."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in results.get("inside", []):
        for case, text in row["picks"].items():
            if text is not None and case in row["calls"]:
                key = (case, row["mode"], text)
                found.setdefault(key, []).append(row["calls"][case]["median"])
    apart = [max(row) / min(row) for row in found.values() if len(row) > 1]
    if not apart:
        return "Nothing says how far two blocks of one engine lie apart."
    return (
        f"Two blocks of one mode and engine lie {(numbers.median(apart) - 1) * 100:.1f} % apart in "
        f"the median, {(max(apart) - 1) * 100:.1f} % at most."
    )


def host_note(results: dict[str, Any]) -> str:
    rows = [row for row in results.get("inside", []) if row["step_ms"] and row["host_ms"]]
    if not rows:
        return ""
    share = numbers.median([row["host_ms"] / row["step_ms"] for row in rows])
    waits = "the GPU does not wait for it" if share < 1 else "the GPU waits for it"
    return f"The host enqueues a step in {share * 100:.0f} % of the time that it takes: {waits}."


def dry_run_note(data: dict[str, Any]) -> str:
    if data["environment"].get("device") != "cpu":
        return ""
    return (
        " DRY RUN: the engines and the queued times are a simulation's, the model and the plain "
        "times a CPU's; they have nothing to do with one another."
    )


def modes_table(data: dict[str, Any]) -> Table:
    results = data["results"]
    table = Table(
        "Which mode picks what the model wants",
        (
            "layer, mode",
            "engine",
            "alone after 10 (ms)",
            "alone, steady (ms)",
            "in the model (ms)",
            "off the best in the model",
            "step (ms)",
        ),
        note="An engine's time in the model is the median over all blocks in which it served; the "
        f"best is the best of what the modes picked. {blocks_differ(results)}" + dry_run_note(data),
    )
    for case in cases(results):
        in_model = inside_ms(results, case)
        best = min(in_model.values(), default=None)
        for mode in data["arguments"]["modes"].split(","):
            text = pick_of(results, case, mode)
            if text is None:
                continue
            alone = queued_of(results, case, text, RANDOM)
            early = alone.get("after", {}).get("10", {}).get("time_ms")
            steps = [r["step_ms"] for r in results.get("inside", []) if r["mode"] == mode]
            ms = in_model.get(text)
            table.rows.append(
                (
                    f"{case}, {mode}",
                    text,
                    number(early, 4),
                    number(alone.get("steady", {}).get("time_ms"), 4),
                    number(ms, 4),
                    "–" if ms is None or best is None else percent(ms / best),
                    number(numbers.median(steps) if steps else None, 2),
                )
            )
    return table


def operands_table(data: dict[str, Any]) -> Table:
    table = Table(
        "What the model gives the layers",
        ("layer", "modules alike", "input", "weight", "zeros: input, weight, gradient"),
        note=host_note(data["results"]),
    )
    for row in data["results"].get("layer", []):
        zeros = [row["operands"][key]["zeros"] for key in ("x", "w", "g")]
        table.rows.append(
            (
                row["layer"],
                str(row["modules"]),
                "x".join(map(str, row["input_shape"])),
                "x".join(map(str, row["weight_shape"])),
                ", ".join(f"{share * 100:.0f} %" for share in zeros),
            )
        )
    return table


def tables(data: dict[str, Any]) -> list[Table]:
    return [operands_table(data), *readings_tables(data), modes_table(data)]


def plot(data: dict[str, Any], path: Path) -> None:
    """Time of a call and clock of each engine alone, from an idle GPU on; dashed: in the model."""
    from common import plotting

    results = data["results"]
    names = [c for c in cases(results) if any(r["case"] == c for r in results.get("queued", []))]
    rows = max(1, len(names))
    fig, axes = plotting.figure(rows, 2, width=11, height=2.8 * rows)
    for row, case in enumerate(names):
        times, clocks = axes[row]
        in_model = inside_ms(results, case)
        engines = [r for r in results["queued"] if r["case"] == case]
        colours = {t: f"C{i}" for i, t in enumerate(dict.fromkeys(r["text"] for r in engines))}
        for found in engines:
            trace, own = found["trace"], found["data"] == OWN
            style = {"color": colours[found["text"]], "linewidth": 0.8}
            style |= {"linestyle": ":"} if own else {}
            label = found["text"] + (", the model's operands" if own else "")
            times.plot(trace["t_ms"], trace["time_ms"], label=label, **style)
            points = [
                (t, c)
                for t, c in zip(trace["t_ms"], trace["clock_mhz"], strict=True)
                if c is not None
            ]
            clocks.plot([t for t, _ in points], [c for _, c in points], **style)
        for text, ms in in_model.items():
            if text in colours:
                times.axhline(ms, color=colours[text], linestyle="--", linewidth=0.8)
        times.set_xscale("log")
        clocks.set_xscale("log")
        times.set_title(f"{case} (dashed: in the model)", fontsize=9)
        times.set_ylabel("ms a call")
        times.legend(fontsize=6, loc="upper left", bbox_to_anchor=(0, -0.2), frameon=False)
        clocks.set_ylabel("SM clock, MHz")
        for axis in (times, clocks):
            axis.set_xlabel("ms since the first call, from an idle GPU")
    plotting.save(fig, path, data["environment"])
