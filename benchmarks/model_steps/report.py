"""What a record of models.py says: the tables and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import numbers
from common.tables import NONE, Table, number

from .cases import PYTORCH, REFERENCE, STEPS, WAYS

Run = dict[str, Any]


def rows(data: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Run]]:
    """(model, step, layout) -> PyTorch's mode -> the process that measured it."""
    found: dict[tuple[str, str, str], dict[str, Run]] = {}
    for run in data["results"].get("runs", []):
        key = (run["model"], run["step"], run["layout"])
        found.setdefault(key, {})[run["pytorch"]] = run
    return found


def ratios(run: Run, way: str) -> list[float]:
    """The reference's time over this way's, round by round."""
    times = run.get("times_ms", {})
    if REFERENCE not in times or way not in times:
        return []
    return [theirs / mine for theirs, mine in zip(times[REFERENCE], times[way], strict=True)]


def not_found(caches: dict[str, int]) -> int:
    """How many graphs Inductor compiled for want of an entry in its caches."""
    return sum(
        count for key, count in caches.items() if key.endswith(("cache_miss", "cache_bypass"))
    )


def compared() -> list[str]:
    """The ways that are compared with the reference."""
    return [name for name in WAYS if name != REFERENCE]


def tables(data: dict[str, Any]) -> list[Table]:
    found = [_steps(data), _first_steps(data), _errors(data)]
    found[-1].note += "".join(f" {text}." for text in data["results"].get("failures", []))
    return found


def _label(row: tuple[str, str, str]) -> str:
    model, step, layout = row
    return f"{model}, {STEPS[step]}, {layout}"


def _measured(data: dict[str, Any]) -> list[str]:
    """The modes of PyTorch that the record has."""
    modes = {run["pytorch"] for run in data["results"].get("runs", [])}
    return [mode for mode in PYTORCH if mode in modes]


def _steps(data: dict[str, Any]) -> Table:
    asked, modes = data["arguments"], _measured(data)
    columns = ["model, step, layout"]
    for mode in modes:
        columns.append(f"{WAYS[REFERENCE].label} (ms), {PYTORCH[mode]}")
        for name in compared():
            columns += [f"{WAYS[name].label} (ms)", f"{WAYS[REFERENCE].label} / it"]
    is_dry_run = data["environment"].get("device") == "cpu"
    table = Table(
        "Steps of compiled models: PyTorch's convolutions over ours",
        columns,
        note=f"Batch {asked['batch']}, {asked['size']} x {asked['size']}; inference in float16, "
        "training (forward and backward) in bfloat16 by autocast; "
        f"torch.compile in mode {asked['mode']}; ours by {asked['sampling']}. CUDA graphs of whole "
        f"steps in turns, {asked['rounds']} blocks of {asked['block_ms']:.0f} ms each. Medians; of "
        "ratios, which are taken round by round, quartiles too: above 1, ours are faster."
        + (" DRY RUN: a miniature on a CPU, in float32 and without graphs." if is_dry_run else ""),
    )
    by_calls = []
    for row, runs in rows(data).items():
        cells = [_label(row)]
        for mode in modes:
            run = runs.get(mode, {})
            times = run.get("times_ms", {})
            if run.get("replayed") == "calls" and not is_dry_run:
                by_calls.append(f"{_label(row)}, {PYTORCH[mode]}")
            for name in (REFERENCE, *compared()):
                cells.append(_median(times.get(name)))
                if name != REFERENCE:
                    cells.append(_quartiles(ratios(run, name)))
        table.rows.append(tuple(cells))
    if by_calls:
        table.note += f" By plain calls, since no graph was captured: {'; '.join(by_calls)}."
    return table


def _first_steps(data: dict[str, Any]) -> Table:
    asked = data["arguments"]
    warm_up = data["results"].get("warm_up", {})
    table = Table(
        "The wait for the first step",
        (
            "model, step, layout",
            "PyTorch",
            *(f"{way.label} (s)" for way in WAYS.values()),
            "compiled ahead (s)",
            "not found",
            "choices",
            "tuned",
            "choosing (s)",
            "SM clock (MHz)",
            "power (W)",
            "°C",
        ),
        note="Compiling, tuning and running; of nn.Conv2d first, then of ours in the same process. "
        + (
            "What Inductor compiles was compiled before, and is in its folder. Compiled ahead: "
            f"the time of that, all ways together, with {asked['warm']} processes side by side. "
            "Not found: graphs that Inductor's caches missed or passed by all the same. "
            if asked["warm"]
            else ""
        )
        + ("" if asked["fresh"] else "What an earlier process has chosen is not tuned again. ")
        + "Clock, power and temperature: medians while steps took turns.",
    )
    for row, runs in rows(data).items():
        cold = [
            way["first_step_s"] for way in warm_up.get("/".join(row), {}).get("ways", {}).values()
        ]
        for mode, run in runs.items():
            board, choices = run.get("board", {}), _choices(run)
            origins = choices.get("from", {})
            table.rows.append(
                (
                    _label(row),
                    PYTORCH[mode],
                    *(number(run["ways"].get(n, {}).get("first_step_s"), 1) for n in WAYS),
                    number(sum(cold) if len(cold) == len(WAYS) else None, 0),
                    str(sum(not_found(way["caches"]) for way in run["ways"].values())),
                    str(choices.get("made", NONE)),
                    str(origins.get("tuned", 0) if choices else NONE),
                    number(choices["choosing_ms"] / 1e3 if choices else None, 1),
                    number(board.get("sm_clock_mhz"), 0),
                    number(board.get("power_w"), 0),
                    number(board.get("temperature_c"), 0),
                )
            )
    return table


def _errors(data: dict[str, Any]) -> Table:
    columns = ["model, step, layout", "PyTorch"]
    columns += [
        f"{way.label}: {what}" for way in WAYS.values() for what in ("outputs", "gradients")
    ]
    table = Table(
        "How far the results are off",
        [*columns, "further off than nn.Conv2d"],
        note="The norm of the difference from what float32 gives, over the norm of that: of the "
        "outputs, and of the gradients of the convolutions' weights (their median).",
    )
    for row, runs in rows(data).items():
        for mode, run in runs.items():
            cells = [_label(row), PYTORCH[mode]]
            beyond: list[str] = []
            for name in WAYS:
                off = run["ways"].get(name, {}).get("errors", {})
                cells += [_error(off.get(what)) for what in ("outputs", "gradients")]
                beyond += off.get("beyond", [])
            table.rows.append((*cells, ", ".join(beyond) or "none"))
    return table


def _choices(run: Run) -> dict[str, Any]:
    """Of the last way that made some."""
    found: dict[str, Any] = {}
    for way in run["ways"].values():
        found = way.get("choices", found)
    return found


def _median(times: list[float] | None) -> str:
    return number(numbers.median(times) if times else None)


def _quartiles(values: list[float]) -> str:
    if not values:
        return NONE
    q1, q3 = (numbers.quantile(values, q) for q in (0.25, 0.75))
    return f"{numbers.median(values):.3f} ({q1:.3f} to {q3:.3f})"


def _error(value: float | None) -> str:
    return NONE if value is None else f"{value:.1e}"


def plot(data: dict[str, Any], path: Path) -> None:
    """The ratio of every row, with quartiles; a colour for each of PyTorch's modes."""
    from common import plotting

    found, modes = rows(data), _measured(data)
    fig, axes = plotting.figure(width=9, height=0.45 * max(1, len(found)) + 1.4)
    axis = axes[0][0]
    series = [(mode, way) for way in compared() for mode in modes]
    for index, (mode, way) in enumerate(series):
        points = [
            (place + 0.3 * (index / len(series) - 0.5), ratios(runs[mode], way))
            for place, runs in enumerate(found.values())
            if mode in runs and ratios(runs[mode], way)
        ]
        if not points:
            continue
        middles = [numbers.median(values) for _, values in points]
        low = [m - numbers.quantile(v, 0.25) for m, (_, v) in zip(middles, points, strict=True)]
        high = [numbers.quantile(v, 0.75) - m for m, (_, v) in zip(middles, points, strict=True)]
        axis.errorbar(
            middles,
            [place for place, _ in points],
            xerr=[low, high],
            fmt="o",
            capsize=3,
            color=f"C{index}",
            label=f"{WAYS[way].label}; {PYTORCH[mode]}",
        )
    axis.axvline(1.0, color="gray", linestyle=":", linewidth=0.9)
    axis.set_yticks(range(len(found)), [_label(row) for row in found], fontsize=8)
    axis.set_ylim(len(found) - 0.5, -0.5)
    axis.set_xlabel("time of a compiled step with nn.Conv2d over its time with ours")
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
    plotting.save(fig, path, data["environment"])
