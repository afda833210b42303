"""``cudnn-autotune demo``: every mode on the forum's convolution and on a ResNet-50 layer."""

from __future__ import annotations

from dataclasses import dataclass

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cudnn_autotune import sampling
from cudnn_autotune.audit import offline_cases, report
from cudnn_autotune.audit.model import Record
from cudnn_autotune.core.extension import extension_available
from cudnn_autotune.core.versions import environment
from cudnn_autotune.engines.problem import OPERATIONS
from cudnn_autotune.nn.modules import Conv2d
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.timers import recordings
from cudnn_autotune.tuning import events
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.choice_log import choices
from cudnn_autotune.tuning.remembering import forget

_RUNS = 10


@dataclass(frozen=True)
class Layer:
    """A convolution with a 3x3 kernel and padding 1."""

    title: str
    input_shape: tuple[int, int, int, int]
    out_channels: int
    dtype: torch.dtype
    memory_format: torch.memory_format


LAYERS = (
    Layer(
        "the forum's convolution: 64x3x224x224, 64 filters of 3x3, float32",
        (64, 3, 224, 224), 64, torch.float32, torch.contiguous_format,
    ),
    Layer(
        "a layer of ResNet-50: 64x128x28x28, 128 filters of 3x3, float16 channels_last",
        (64, 128, 28, 28), 128, torch.float16, torch.channels_last,
    ),
)  # fmt: skip


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
    modes = sampling.names()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("tuning", total=len(LAYERS) * len(modes))
        for layer in LAYERS:
            chosen: dict[str, dict[str, Choice]] = {op: {} for op in OPERATIONS}
            for mode in modes:
                progress.update(task, description=f"{mode:>16}")
                for choice in _tune(layer, mode):
                    chosen[choice.problem.op][mode] = choice
                progress.advance(task)
            progress.console.print(_choice_table(layer, chosen))


def _tune(layer: Layer, mode: str) -> list[Choice]:
    """Runs one forward and backward of the layer in ``mode``; returns the choices that it made."""
    forget()
    x = torch.randn(layer.input_shape, device="cuda").to(layer.dtype)
    x = x.contiguous(memory_format=layer.memory_format).requires_grad_()
    conv = Conv2d(x.shape[1], layer.out_channels, 3, padding=1, bias=False, sampling=mode)
    y = conv.to("cuda", layer.dtype, memory_format=layer.memory_format)(x)  # type: ignore[call-overload]
    y.backward(torch.randn_like(y))
    torch.cuda.synchronize()
    made = choices()
    forget()
    return made


def _choice_table(layer: Layer, chosen: dict[str, dict[str, Choice]]) -> Table:
    """Returns a table with a row for each mode; modes that chose the same engine are adjacent."""
    table = Table(title=layer.title, title_justify="left")
    table.add_column("engine and knobs", overflow="fold", ratio=1)
    table.add_column("chosen by", no_wrap=True)
    for column in ("time, ms", "MiB", "launches", "tuning, ms"):
        table.add_column(column, justify="right")
    for op, by_mode in chosen.items():
        for text in dict.fromkeys(choice.text for choice in by_mode.values()):
            same = [(mode, choice) for mode, choice in by_mode.items() if choice.text == text]
            for mode, choice in same:
                table.add_row(
                    f"{op}: {text}" if mode == same[0][0] else "",
                    mode,
                    "not timed" if choice.time_ms is None else f"{choice.time_ms:.4f}",
                    f"{choice.workspace_bytes / 2**20:.1f}",
                    str(choice.total_samples),
                    f"{choice.tuning_ms:.1f}",
                )
        table.add_section()
    return table
