"""``cudnn-autotune demo``: every mode on well-known layers, and measured whole models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

import click
import torch
from rich.console import Console

from cudnn_autotune import sampling
from cudnn_autotune.audit import offline_cases, recordings, report
from cudnn_autotune.audit.model import BURST_COLD, Record
from cudnn_autotune.core.display import milliseconds, progress_bar
from cudnn_autotune.core.table import Table
from cudnn_autotune.core.versions import environment
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.problem import OPERATIONS, ConvProblem
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.timers.measuring import operands, run_operator
from cudnn_autotune.tuning import events, settings
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.choice_log import choices
from cudnn_autotune.tuning.gain import own_path_entry
from cudnn_autotune.tuning.remembering import forget

_RUNS = 10
_NEXT = (
    "What was chosen, and what searching took: cudnn-autotune demo --details",
    "Next, a script of yours, unchanged:       cudnn-autotune run SCRIPT ARGUMENTS...",
)


class Layer(NamedTuple):
    """A layer to show, and its recording on an H200."""

    name: str
    recording: str
    fields: dict[str, Any]


LAYERS = (
    Layer(
        "The forum's convolution, 64x3x224x224, 64 of 3x3, float32",
        "h200_forum",
        {"input_shape": (64, 3, 224, 224), "weight_shape": (64, 3, 3, 3), "padding": 1},
    ),
    Layer(
        "A layer of ResNet-50, 64x128x28x28, 128 of 3x3, float16 channels_last",
        "h200_resnet50_fprop",
        {
            "input_shape": (64, 128, 28, 28),
            "weight_shape": (128, 128, 3, 3),
            "padding": 1,
            "dtype": torch.float16,
            "memory_format": torch.channels_last,
        },
    ),
)
RECORDED = (
    *((layer.name, layer.recording) for layer in LAYERS),
    (
        "A layer of VGG, 128x512x28x28, 512 of 3x3, float16 channels_last, gradient of the input",
        "h200_vgg_dgrad",
    ),
)
"""The problems that are shown without a GPU, and their recordings."""


class Tried(NamedTuple):
    """One problem: the candidates that the modes chose, and the one that PyTorch would run."""

    picks: dict[str, str]
    """The candidate that a mode chose, as its text."""
    pytorch: str
    """The candidate that PyTorch would run, as its text; empty if no mode timed it."""
    times_ms: Mapping[str, float]
    """Milliseconds of a call of each candidate, all measured in the same way."""

    @classmethod
    def of(
        cls,
        chosen: Mapping[str, str],
        found: Iterable[Selection],
        times_ms: Mapping[str, float] | None = None,
    ) -> Tried:
        """Returns what the modes chose.

        Args:
            chosen: The candidate of each mode, as its text.
            found: The modes' selections.
            times_ms: The candidates' times; None takes those of the mode with most launches.
        """
        timed = [one for one in found if own_path_entry(one) is not None]
        longest = max(timed, key=lambda one: one.total_samples, default=None)
        own = None if longest is None else own_path_entry(longest)
        if times_ms is None:
            ranking = () if longest is None else longest.ranking
            times_ms = {e.candidate.text: e.time_ms for e in ranking if e.time_ms}
        pytorch = "" if own is None else own.candidate.text
        # PyTorch's own path runs that candidate.
        picks = {mode: pytorch if text == OWN_PATH.text else text for mode, text in chosen.items()}
        return cls(picks, pytorch, times_ms)


def answer(name: str, tried: Sequence[Tried]) -> str:
    """Returns one line: PyTorch's time of a layer, and the ratio of that to each mode's."""
    theirs = _summed(one.times_ms.get(one.pytorch) for one in tried)
    if theirs is None:
        return f"{name}: PyTorch's time is not known"
    by_ratio: dict[str, list[str]] = {}
    known = sampling.names() if torch.cuda.is_available() else offline_cases.modes()
    for mode in sorted(known, key=lambda mode: mode != settings.DEFAULT_SAMPLING):
        ours = _summed(one.times_ms.get(one.picks.get(mode, "")) for one in tried)
        ratio = "" if ours is None else f"{theirs / ours:.2f}x"
        by_ratio.setdefault(ratio, []).append(mode)
    ordered = sorted(by_ratio.items(), key=lambda one: float(one[0][:-1] or 0), reverse=True)
    ratios = (
        f"{ratio or 'not timed'} by {'every mode' if len(by_ratio) == 1 else ', '.join(named)}"
        for ratio, named in ordered
    )
    return f"{name}: PyTorch {milliseconds(theirs)} ms; {'; '.join(ratios)}"


def _summed(times_ms: Iterable[float | None]) -> float | None:
    known = list(times_ms)
    return None if None in known else sum(ms for ms in known if ms is not None)


@click.command()
@click.option("--details", is_flag=True, help="Tables of what each mode chose, and at what cost.")
def demo(details: bool) -> None:
    """Show what this GPU gains on two well-known layers, by every sampling mode.

    Without a GPU: on recordings of an H200, and what was measured of whole models on one. Earlier
    choices are neither shown nor stored.
    """
    console = Console()
    if not torch.cuda.is_available():
        _replay(console, details)
    else:
        before = store_settings.get_store_settings()
        store_settings.set_store(mode="off")
        try:
            with events.SEARCHES.shown_elsewhere():
                _measure(console, details)
        finally:
            store_settings.restore_settings(before)
    if not details:
        _print(console, *_NEXT)


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)


def _replay(console: Console, details: bool) -> None:
    cases = {name: offline_cases.RecordedCase.shipped(name) for name in recordings.names()}
    modes = offline_cases.modes()
    first = next(iter(cases.values())).recording.environment
    _print(console, f"No GPU here: in short batches, from recordings of an {first['gpu']}.")
    for name, recording in RECORDED:
        case = cases[recording]
        times_ms = case.oracle().truths[BURST_COLD].times_ms
        all_found = {mode: offline_cases.select(case.open(1), mode, 1, Limits()) for mode in modes}
        found = {mode: one for mode, one in all_found.items() if one is not None}
        chosen = {mode: one.winner.candidate.text for mode, one in found.items()}
        _print(console, answer(name, [Tried.of(chosen, found.values(), times_ms)]))
    _print(console, *measured())
    if not details:
        return
    record = Record("replay", settings={"modes": list(modes), "runs": _RUNS}, environment=first)
    with console.status(f"replaying, {_RUNS} times on each"):
        runs = dict.fromkeys(modes, _RUNS)
        offline_cases.audit(record, list(cases.values()), runs, limits=Limits())
    regrets = report.tables(record)[0]  # `audit --replay` shows the others
    regrets.show(console)


def measured() -> Iterator[str]:
    """Yields a line for each kind of whole models that was measured, and one for a layer, each with
    the names of its records."""
    file = resources.files("cudnn_autotune.cli").joinpath("measured.json")
    shown = json.loads(file.read_text(encoding="utf-8"))
    layer = shown["layer"]
    case, ours, theirs = layer["case"], layer["ours_us"], layer["cudnn_us"]
    yield (
        f"A kernel of this package, {case}: {milliseconds(ours / 1e3)} ms, the best of cuDNN's "
        f"{milliseconds(theirs / 1e3)} ms: {theirs / ours:.2f}x (record {layer['record']})"
    )
    for panel in shown["panels"]:
        (best, most), *_, (last, least) = panel["models"].items()
        yield (
            f"{panel['title']}, of {len(panel['models'])} models over torch.compile: {least:.2f}x "
            f"({last}) to {most:.2f}x ({best}), geometric mean {panel['mean']:.2f}x "
            f"({'records' if panel['records'][1:] else 'record'} {', '.join(panel['records'])})"
        )


def _measure(console: Console, details: bool) -> None:
    found = environment()
    here = f"{found['gpu']}, cuDNN {found['cudnn']}, torch {found['torch']}"
    _print(console, f"{here}: forward and backward, in short batches.")
    with progress_bar(console) as progress:
        total = len(LAYERS) * len(OPERATIONS) * len(sampling.names())
        task = progress.add_task("tuning", total=total)
        for layer in LAYERS:
            made: list[Choice] = []
            for op in OPERATIONS:
                for mode in sampling.names():
                    progress.update(task, description=f"{mode:>16}")
                    made += _tune(ConvProblem(op, **layer.fields), mode)
                    progress.advance(task)
            by_op = [[choice for choice in made if choice.problem.op == op] for op in OPERATIONS]
            tried = [
                Tried.of({one.sampling: one.text for one in of}, [one.selection for one in of])
                for of in by_op
            ]
            _print(progress.console, answer(layer.name, tried))
            if details:
                table = _choice_table(layer.name, made)
                table.show(progress.console)


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
