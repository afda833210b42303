"""Draws a record's regrets and tuning times."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from cudnn_autotune.audit.model import PYTORCH_MODES, STEADY, SUSTAINED, Record
from cudnn_autotune.audit.report import headline
from cudnn_autotune.audit.summary import regrets_of, shared_cases, summarize, tuning_of
from cudnn_autotune.tools import write

# The axis is linear below 1 %, because the oracle does not resolve much smaller regrets.
_LINEAR_PERCENT = 1.0
_TICKS_PERCENT = (-2, -1, 0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10000)
_LEAST_TUNING_MS = 0.1
SUFFIXES = (".png", ".svg", ".pdf")


def plot(record: Record, path: Path) -> None:
    """Draws the distributions of each mode's regrets and tuning times into a file, whose suffix
    must be one of :data:`SUFFIXES`. If this raises OSError, an older file is as it was."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = shared_cases(record)
    modes = [mode for mode, figures in summarize(record).items() if figures.regret is not None]
    height = 1.6 + 0.34 * max(3, len(modes))
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, height), sharey=True, constrained_layout=True, width_ratios=(5, 3)
    )
    fastest = slowest = 1.0
    for place, mode in enumerate(modes):
        regrets = regrets_of(record, mode, cases, STEADY)
        tuning = np.array([ms for of_run in tuning_of(record, mode, cases) for ms in of_run])
        fastest, slowest = min(fastest, regrets.min()), max(slowest, regrets.max())
        colour = "tab:orange" if mode in PYTORCH_MODES else "tab:blue"
        _row(left, place, 100 * (regrets - 1), colour)
        mean = float(np.exp(np.mean(np.log(regrets))))
        left.plot(100 * (mean - 1), place, "|", color="black", markersize=16, mew=2)
        label = f" {mean:.4f}  worst {regrets.max():.2f}"
        left.text(1.01, place, label, va="center", fontsize=9, transform=_at_right_of(left))
        if tuning.size:
            _row(right, place, np.maximum(tuning, _LEAST_TUNING_MS), colour)
    left.set_yticks(range(len(modes)), modes)
    left.set_ylim(len(modes) - 0.4, -0.6)
    left.set_xscale("symlog", linthresh=_LINEAR_PERCENT)
    most = 100 * (slowest - 1) * 1.3 + 0.5
    # PyTorch's own may be faster than the oracle's best.
    left.set_xlim(-0.4 if fastest >= 1 - 0.003 else -3, most)
    ticks = [tick for tick in _TICKS_PERCENT if left.get_xlim()[0] <= tick <= most]
    left.set_xticks(ticks, map(str, ticks))
    left.set_xticks([], minor=True)
    left.set_xlabel("slower than the best, % (bar: geometric mean)")
    left.set_title(f"what was picked, {_truths(record)}", fontsize=10)
    right.set_xscale("log")
    right.set_xlabel("ms a case")
    right.set_title("wall time of choosing", fontsize=10)
    for axis in (left, right):
        axis.grid(axis="x", alpha=0.3)
        axis.tick_params(labelsize=9)
    figure.suptitle(_origin(record), fontsize=8.5, color="dimgray")
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=110)
    pyplot.close(figure)
    write(path, drawn.getvalue())


def _at_right_of(axis: Any) -> Any:
    """Returns coordinates with x as a share of the axis, and y as a row."""
    from matplotlib.transforms import blended_transform_factory

    return blended_transform_factory(axis.transAxes, axis.transData)


def _row(axis: Any, place: int, values: np.ndarray[Any, Any], colour: str) -> None:
    """Draws each value as a dot, scattered so that one sees how many are equal."""
    scatter = np.random.default_rng(0).uniform(-0.28, 0.28, len(values))
    axis.plot(values, place + scatter, ".", color=colour, alpha=0.45, markersize=6, mew=0)


def _truths(record: Record) -> str:
    shared = shared_cases(record)
    count = sum(SUSTAINED in record.oracle[case].truths for case in shared)
    if not count:
        return "bursts"
    return "steady clock" if count == len(shared) else "steady clock where throttled, else bursts"


def _origin(record: Record) -> str:
    known = record.environment
    cases = len(shared_cases(record))
    parts = [
        headline(record),
        "1 case" if cases == 1 else f"{cases} cases",
        f"cuDNN {known.get('cudnn')}, torch {known.get('torch')}",
        str(known.get("date", ""))[:10],
    ]
    return " · ".join(parts)
