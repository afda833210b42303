"""``cudnn-autotune demo``: every mode on the forum's convolution and on a ResNet-50 layer.

Without a GPU it shows the modes on the recordings of an H200 that the package ships, cuDNN's
engines for the two layers, and the layers on the CPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cudnn_autotune import sampling
from cudnn_autotune.audit import offline_cases, report
from cudnn_autotune.audit.model import Record
from cudnn_autotune.core.extension import extension_available
from cudnn_autotune.core.versions import environment
from cudnn_autotune.engines.configs import candidates
from cudnn_autotune.engines.problem import OPERATIONS, ConvProblem
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
    batch: int
    in_channels: int
    out_channels: int
    size: int
    dtype: torch.dtype
    memory_format: torch.memory_format

    def problem(self, op: str) -> ConvProblem:
        return ConvProblem(
            op,
            (self.batch, self.in_channels, self.size, self.size),
            (self.out_channels, self.in_channels, 3, 3),
            padding=1,
            dtype=self.dtype,
            memory_format=self.memory_format,
        )

    def module(self, mode: str | None, device: str) -> Conv2d:
        conv = Conv2d(self.in_channels, self.out_channels, 3, padding=1, bias=False, sampling=mode)
        return conv.to(device, self.dtype, memory_format=self.memory_format)  # type: ignore[call-overload]

    def input(self, device: str) -> torch.Tensor:
        shape = (self.batch, self.in_channels, self.size, self.size)
        x = torch.randn(shape, device=device).to(self.dtype)
        return x.contiguous(memory_format=self.memory_format).requires_grad_()


LAYERS = (
    Layer(
        "the forum's convolution: 64x3x224x224, 64 filters of 3x3, float32",
        64, 3, 64, 224, torch.float32, torch.contiguous_format,
    ),
    Layer(
        "a layer of ResNet-50: 64x128x28x28, 128 filters of 3x3, float16 channels_last",
        64, 128, 128, 28, torch.float16, torch.channels_last,
    ),
)  # fmt: skip


def run(console: Console | None = None) -> Record | None:
    """Prints the demonstration; on a GPU it leaves this process without choices.

    Returns:
        What the modes choose on the recordings; None on a GPU, where they are not replayed.
    """
    console = console or Console()
    if not (torch.cuda.is_available() and extension_available()):
        return _without_gpu(console)
    before = store_settings.get_store_settings()
    store_settings.set_store(mode="off")  # the demo neither shows nor stores earlier choices
    try:
        with events.SEARCHES.shown_elsewhere():
            _with_gpu(console)
    finally:
        store_settings.restore_settings(before)
    return None


def replay() -> Record:
    """Runs every mode ten times on every shipped recording, which takes some seconds."""
    cases = [offline_cases.RecordedCase.shipped(name) for name in recordings.names()]
    first, *others = (case.recording.environment for case in cases)
    shared = {k: v for k, v in first.items() if all(other.get(k) == v for other in others)}
    modes = sampling.names()
    record = Record("replay", settings={"modes": list(modes), "runs": _RUNS}, environment=shared)
    offline_cases.audit(record, cases, dict.fromkeys(modes, _RUNS), limits=Limits())
    return record


def _with_gpu(console: Console) -> None:
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
    x = layer.input("cuda")
    y = layer.module(mode, "cuda")(x)
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


def _without_gpu(console: Console) -> Record:
    console.print(
        "No GPU here: the modes on recordings of an H200, what cuDNN offers elsewhere, and the "
        "layers on the CPU."
    )
    with console.status("replaying"):
        replayed = replay()
    regrets = report.tables(replayed)[0]  # `audit --replay` shows the others
    console.print(*regrets.rich(console.width), sep="\n")
    if extension_available():
        for layer in LAYERS:
            console.print(_offer_table(layer))
    else:
        console.print("(This build has no cuDNN: it was made with a CPU-only torch.)")
    for layer in LAYERS:
        # A whole batch takes seconds on a CPU, and float16 longer, so this runs one image in
        # float32.
        small = Layer(layer.title, 1, layer.in_channels, layer.out_channels, layer.size,
                      torch.float32, layer.memory_format)  # fmt: skip
        x = small.input("cpu")
        start = time.perf_counter()
        y = small.module(None, "cpu")(x)
        y.backward(torch.randn_like(y))
        elapsed = (time.perf_counter() - start) * 1e3
        console.print(f"one image through {layer.title.split(':')[0]}, forward and backward on "
                      f"the CPU: {elapsed:.1f} ms")  # fmt: skip
    return replayed


def _offer_table(layer: Layer) -> Table:
    table = Table(title=layer.title, title_justify="left")
    table.add_column("GPU")
    table.add_column("direction")
    table.add_column("configs", justify="right")
    table.add_column("engines", justify="right")
    table.add_column("most MiB", justify="right")
    table.add_column("the heuristics' first", overflow="fold", min_width=24)
    for device in ("l4", "h200"):
        for op in OPERATIONS:
            offered = candidates(layer.problem(op), device)
            largest = max(c.workspace_bytes for c in offered)
            table.add_row(
                device.upper(),
                op,
                str(len(offered)),
                str(len({c.engine for c in offered})),
                f"{largest / 2**20:.1f}",
                offered[0].text,
            )
        table.add_section()
    return table
