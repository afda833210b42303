"""``cudnn-autotune demo``: every mode on the forum's convolution and on a ResNet-50 layer."""

from __future__ import annotations

from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cudnn_autotune import sampling
from cudnn_autotune.audit import offline_cases, report
from cudnn_autotune.audit.model import Record
from cudnn_autotune.audit.table import Table
from cudnn_autotune.core.extension import extension_available
from cudnn_autotune.core.versions import environment
from cudnn_autotune.engines.problem import OPERATIONS, ConvProblem
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.timers import recordings
from cudnn_autotune.timers.measuring import operands, run_operator
from cudnn_autotune.tuning import events
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.choice_log import choices
from cudnn_autotune.tuning.remembering import forget

_RUNS = 10


LAYERS: dict[str, dict[str, Any]] = {
    "the forum's convolution: 64x3x224x224, 64 filters of 3x3, float32": {
        "input_shape": (64, 3, 224, 224),
        "weight_shape": (64, 3, 3, 3),
        "padding": 1,
    },
    "a layer of ResNet-50: 64x128x28x28, 128 filters of 3x3, float16 channels_last": {
        "input_shape": (64, 128, 28, 28),
        "weight_shape": (128, 128, 3, 3),
        "padding": 1,
        "dtype": torch.float16,
        "memory_format": torch.channels_last,
    },
}


@click.command()
def demo() -> None:
    """Every sampling mode on two well-known layers, side by side.

    Without a GPU: every mode on recordings of an H200. Earlier choices are neither shown nor
    stored.
    """
    console = Console()
    if not (torch.cuda.is_available() and extension_available()):
        _replay(console)
        return
    before = store_settings.get_store_settings()
    store_settings.set_store(mode="off")
    try:
        with events.SEARCHES.shown_elsewhere():
            _measure(console)
    finally:
        store_settings.restore_settings(before)


def _replay(console: Console) -> None:
    console.print("No GPU here: the modes on recordings of an H200, ten times on each.")
    cases = [offline_cases.RecordedCase.shipped(name) for name in recordings.names()]
    modes = sampling.names()
    record = Record(
        "replay",
        settings={"modes": list(modes), "runs": _RUNS},
        environment=cases[0].recording.environment,
    )
    with console.status("replaying"):
        offline_cases.audit(record, cases, dict.fromkeys(modes, _RUNS), limits=Limits())
    regrets = report.tables(record)[0]  # `audit --replay` shows the others
    console.print(*regrets.rich(console.width), sep="\n")


def _measure(console: Console) -> None:
    found = environment()
    console.print(f"{found['gpu']}, cuDNN {found['cudnn']}, torch {found['torch']}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        total = len(LAYERS) * len(OPERATIONS) * len(sampling.names())
        task = progress.add_task("tuning", total=total)
        for title, layer in LAYERS.items():
            made: list[Choice] = []
            for op in OPERATIONS:
                for mode in sampling.names():
                    progress.update(task, description=f"{mode:>16}")
                    made += _tune(ConvProblem(op, **layer), mode)
                    progress.advance(task)
            table = _choice_table(title, made)
            progress.console.print(*table.rich(console.width), sep="\n")


def _tune(problem: ConvProblem, mode: str) -> list[Choice]:
    """Computes the problem once; returns the choice that the mode made for it."""
    forget()
    run_operator(problem, operands(problem), mode)
    torch.cuda.synchronize()
    made = choices()
    forget()
    return made


def _choice_table(title: str, made: list[Choice]) -> Table:
    """Returns a table with a row for each choice; modes that chose the same engine are adjacent."""
    columns = ("chosen by", "engine and knobs", "time, ms", "MiB", "launches", "tuning, ms")
    engines = list(dict.fromkeys((choice.problem.op, choice.text) for choice in made))
    table = Table(title, columns, texts=2)
    for choice in sorted(made, key=lambda choice: engines.index((choice.problem.op, choice.text))):
        row = (
            choice.sampling,
            f"{choice.problem.op}: {choice.text}",
            "not timed" if choice.time_ms is None else f"{choice.time_ms:.4f}",
            f"{choice.workspace_bytes / 2**20:.1f}",
            str(choice.total_samples),
            f"{choice.tuning_ms:.1f}",
        )
        table.rows.append(row)
    return table
