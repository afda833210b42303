"""What a record of models.py says: the tables and the plot."""

from __future__ import annotations

from typing import Any

from common import numbers
from common.tables import NONE, Table, dry_run_note, number

from .cases import PYTORCH, REFERENCE, STEPS, WAYS

OURS = next(name for name in WAYS if name != REFERENCE)
Run = dict[str, Any]


def rows(data: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Run]]:
    """(model, step, layout) -> PyTorch's mode -> the process that measured it."""
    found: dict[tuple[str, str, str], dict[str, Run]] = {}
    for run in data["results"].get("runs", []):
        key = (run["model"], run["step"], run["layout"])
        found.setdefault(key, {})[run["pytorch"]] = run
    return found


def ratios(run: Run) -> list[float]:
    """The reference's time over ours, round by round."""
    times = run.get("times_ms", {})
    if len(times) < len(WAYS):
        return []
    return [theirs / mine for theirs, mine in zip(times[REFERENCE], times[OURS], strict=True)]


def not_found(caches: dict[str, int]) -> int:
    """How many graphs Inductor compiled for want of an entry in its caches."""
    return sum(
        count for key, count in caches.items() if key.endswith(("cache_miss", "cache_bypass"))
    )


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
        columns += [f"nn.Conv2d (ms), {PYTORCH[mode]}", "ours (ms)", "nn.Conv2d / ours"]
    table = Table(
        "Steps of compiled models: PyTorch's convolutions over ours",
        columns,
        note=f"Batch {asked['batch']}, {asked['size']} x {asked['size']}; inference in float16, "
        "training (forward and backward) in bfloat16 by autocast; "
        f"torch.compile in mode {asked['mode']}; ours by {asked['sampling']}. CUDA graphs of whole "
        f"steps in turns, {asked['rounds']} blocks of {asked['block_ms']:.0f} ms each. Medians; of "
        "ratios, which are taken round by round, quartiles too: above 1, ours are faster."
        + dry_run_note(data),
    )
    by_calls = []
    for row, runs in rows(data).items():
        cells = [_label(row)]
        for mode in modes:
            run = runs.get(mode, {})
            times = run.get("times_ms", {})
            if run.get("replayed") == "calls":
                by_calls.append(f"{_label(row)}, {PYTORCH[mode]}")
            medians = [numbers.median(times[way]) if way in times else None for way in WAYS]
            cells += [*map(number, medians), _quartiles(ratios(run))]
        table.rows.append(tuple(cells))
    if by_calls:
        table.note += f" By plain calls, since no graph was captured: {'; '.join(by_calls)}."
    return table


def _first_steps(data: dict[str, Any]) -> Table:
    asked = data["arguments"]
    table = Table(
        "The wait for the first step",
        (
            "model, step, layout",
            "PyTorch",
            *(f"{way.label} (s)" for way in WAYS.values()),
            "not found",
            "choices",
            "tuned",
            "choosing (s)",
        ),
        note="Compiling, tuning and running; of nn.Conv2d first, then of ours in the same process. "
        + (
            "What Inductor compiles was compiled before, and is in its folder. "
            "Not found: graphs that Inductor's caches missed or passed by all the same. "
            if asked["warm"]
            else ""
        )
        + ("" if asked["fresh"] else "What an earlier process has chosen is not tuned again."),
    )
    for row, runs in rows(data).items():
        for mode, run in runs.items():
            ways = run["ways"]
            choices = ways.get(OURS, {}).get("choices", {})
            table.rows.append(
                (
                    _label(row),
                    PYTORCH[mode],
                    *(number(ways.get(name, {}).get("first_step_s"), 1) for name in WAYS),
                    str(sum(not_found(way["caches"]) for way in ways.values())),
                    str(choices.get("made", NONE)),
                    str(choices["from"].get("tuned", 0) if choices else NONE),
                    number(choices["choosing_ms"] / 1e3 if choices else None, 1),
                )
            )
    return table


def _errors(data: dict[str, Any]) -> Table:
    kinds = ("outputs", "gradients")
    columns = [f"{way.label}: {what}" for way in WAYS.values() for what in kinds]
    table = Table(
        "How far the results are off",
        ["model, step, layout", "PyTorch", *columns, "further off than nn.Conv2d"],
        note="The norm of the difference from what float32 gives, over the norm of that: of the "
        "outputs, and of the gradients of the convolutions' weights (their median).",
    )
    for row, runs in rows(data).items():
        for mode, run in runs.items():
            found = [run["ways"].get(name, {}).get("errors", {}) for name in WAYS]
            values = [off.get(what) for off in found for what in kinds]
            cells = [NONE if value is None else f"{value:.1e}" for value in values]
            beyond = ", ".join(found[-1].get("beyond", [])) or "none"
            table.rows.append((_label(row), PYTORCH[mode], *cells, beyond))
    return table


def _quartiles(values: list[float]) -> str:
    if not values:
        return NONE
    q1, q3 = (numbers.quantile(values, q) for q in (0.25, 0.75))
    return f"{numbers.median(values):.3f} ({q1:.3f} to {q3:.3f})"
