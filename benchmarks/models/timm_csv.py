"""A record of timm's models as the CSV files and tables that timm's own benchmark makes: a file for
each way to run a model, with its columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common import numbers
from common.tables import NONE, Table, number

from .cases import PYTORCH, TIMM_PREFIX, WAYS
from .report import Key, Row, rows

# Step of a case -> timm's prefix of its columns. timm's step of training has an optimizer.
PREFIXES = {"infer": "infer", "optimize": "train"}
_TITLES = {"infer": "Inference", "optimize": "Training with SGD"}
_COLUMNS = ("samples_per_sec", "step_time", "batch_size", "img_size")


@dataclass(frozen=True)
class _Result:
    """A model's step: the row of a case, and what of the model timm's columns have."""

    row: Row
    name: str
    side: int
    parameters: int

    def samples_per_sec(self, key: Key) -> float | None:
        ms = self.row.times_ms.get(key)
        return None if ms is None else 1e3 * self.row.batch / ms


def is_of_timm(data: dict[str, Any]) -> bool:
    """Whether a record compares ``torch.compile`` and this package in a step of timm's models that
    its benchmark has, too."""
    if data["benchmark"] != "models":
        return False
    steps = ({way for way, _ in _ways(results)} for results in _results(data).values())
    return any("compile" in ways and any(WAYS[way].is_ours for way in ways) for ways in steps)


def files(data: dict[str, Any]) -> dict[str, str]:
    """Returns CSV files by the ends of their names, such as ``infer-eager.csv``. Rates are samples
    a second, times milliseconds, parameters millions. The fastest model is the first one, as in
    timm's files."""
    found = {}
    for step, results in _results(data).items():
        prefix = PREFIXES[step]
        header = ["model", *(f"{prefix}_{column}" for column in _COLUMNS), "param_count"]
        for key, name in _ways(results).items():
            lines = [
                (
                    *(one.name, round(rate, 2), round(one.row.times_ms[key], 3)),
                    *(one.row.batch, one.side, round(one.parameters / 1e6, 2)),
                )
                for one in results
                if (rate := one.samples_per_sec(key)) is not None
            ]
            lines.sort(key=lambda line: line[1], reverse=True)
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([header, *lines])
            found[f"{prefix}-{name}.csv"] = text.getvalue()
    return found


def tables(data: dict[str, Any]) -> list[Table]:
    """Returns a table of samples a second for each step."""
    return [_table(step, results) for step, results in _results(data).items() if results]


def _table(step: str, results: list[_Result]) -> Table:
    ways = _ways(results)
    ours = [key for key in ways if WAYS[key[0]].is_ours]
    table = Table(
        f"{_TITLES[step]}: images per second",
        [
            *("model", "images", "batch", "parameters, millions"),
            *(_label(key) for key in ways),
            *(f"{_label(key)} / best of PyTorch's" for key in ours),
        ],
        texts=1,
    )
    gains: Mapping[Key, list[float]] = {key: [] for key in ours}
    for one in sorted(results, key=lambda one: one.name):
        rates = {key: one.samples_per_sec(key) for key in ways}
        theirs = [rate for key, rate in rates.items() if key not in ours and rate is not None]
        cells = [number(rates[key], 0) for key in ways]
        for key in ours:
            rate = rates[key]
            gain = rate / max(theirs) if rate is not None and theirs else None
            gains[key] += [] if gain is None else [gain]
            cells.append(number(gain))
        size = (str(one.side), str(one.row.batch), number(one.parameters / 1e6, 2))
        table.rows.append((one.name, *size, *cells))
    means = [number(numbers.geometric_mean(gains[key])) if gains[key] else NONE for key in ours]
    table.rows.append(("geometric mean", *[""] * (3 + len(ways)), *means))
    return table


def _label(key: Key) -> str:
    way, mode = key
    return WAYS[way].label + (f", {PYTORCH[mode]}" if mode else "")


def _ways(results: list[_Result]) -> dict[Key, str]:
    """Ways that were measured, PyTorch's first, with their names in files. The first of PyTorch's
    modes that a way has is named by the way alone."""
    known = {key for one in results for key in one.row.times_ms}
    found: dict[Key, str] = {}
    for way in sorted(WAYS, key=lambda way: WAYS[way].is_ours):
        for mode in ("", *PYTORCH):
            if (way, mode) in known:
                found[way, mode] = way if way not in found.values() else f"{way}-{mode}"
    return found


def _results(data: dict[str, Any]) -> dict[str, list[_Result]]:
    """Returns the results of each step, in the first of the layouts."""
    shapes = {
        (run["model"], run["batch"]): (run["input_shape"][-1], run["parameters"])
        for run in data["results"].get("runs", [])
        if run["model"].startswith(TIMM_PREFIX) and "parameters" in run
    }
    found: dict[str, list[_Result]] = {step: [] for step in PREFIXES}
    layout = data["arguments"]["layouts"].partition(",")[0]
    for row in rows(data) if shapes else []:
        model = row.case[0]
        if row.step in found and row.layout == layout and (model, row.batch) in shapes:
            name = model.removeprefix(TIMM_PREFIX)
            found[row.step].append(_Result(row, name, *shapes[model, row.batch]))
    return found
