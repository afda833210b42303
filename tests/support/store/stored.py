"""Stores as a GPU would have filled them: real sampling modes, on recordings of an H200 and on
simulated GPUs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result

from cudnn_autotune import ConvProblem, sampling
from cudnn_autotune.audit import recordings
from cudnn_autotune.audit.offline.replay import ReplayTimer
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.sampling.strategy import Candidates, Limits
from cudnn_autotune.store import codec
from cudnn_autotune.store.decision import Decision, Provenance
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.file_store import Store
from cudnn_autotune.timers.timer import Timer
from cudnn_autotune_cli import main
from support.simulation import preset as simulated_timer
from support.store.decisions import resealed, under

H200 = Environment("NVIDIA H200", 132, "9.0", "", "9.19.0", "1.28.0")
NEWER_CUDNN = replace(H200, cudnn="9.20.0")
WHEN = "2025-11-21T17:28:03.000000Z"
# Before click 8.2, standard error is kept apart only where that is asked for.
APART = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}


def run(*arguments: str | Path | int, obj: object = None, input: str | None = None) -> Result:
    given = [str(argument) for argument in arguments]
    return CliRunner(**APART).invoke(main, given, obj=obj, input=input)


def succeeded(*arguments: str | Path | int, **more: Any) -> str:
    """What is printed on standard output, in one line."""
    done = run(*arguments, **more)
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


def refused(*arguments: str | Path | int, status: int = 2, **more: Any) -> str:
    """What is said of input that is not allowed: no traceback, a status of its own."""
    done = run(*arguments, **more)
    assert done.exit_code == status, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return " ".join(done.stderr.split())


def decide(
    problem: ConvProblem, timer: Timer, candidates: Candidates, mode: str = "auto"
) -> Decision:
    strategy: Any = sampling.get(mode)
    if hasattr(strategy, "seed"):  # of the order of turns, which is another one each time
        strategy = replace(strategy, seed=1)
    selection = strategy.select(candidates, timer, Limits())
    assert selection is not None
    return Decision(
        problem=problem,
        policy=Policy(mode),
        selection=selection,
        relative_error=2e-4,
        provenance=Provenance("580.159.04", torch.__version__, "0.1.0", WHEN),
    )


def recorded(name: str, mode: str = "auto", seed: int = 1) -> Decision:
    """What a mode decides on a recording that ships."""
    recording = recordings.load(name)
    timer = ReplayTimer(recording, seed)
    return decide(recording.problem, timer, timer.candidates, mode)


def simulation(preset: str, problem: ConvProblem, mode: str = "auto", seed: int = 1) -> Decision:
    """What a mode decides on a simulated GPU, whatever the problem."""
    timer = simulated_timer(preset, seed)
    return decide(problem, timer, timer.candidates, mode)


def layer(op: str = "fprop", channels: int = 64, **changes: Any) -> ConvProblem:
    given: dict[str, Any] = {
        "padding": 1,
        "dtype": torch.float16,
        "memory_format": torch.channels_last,
        **changes,
    }
    return ConvProblem(op, (16, channels, 28, 28), (64, channels, 3, 3), **given)


@functools.cache
def decisions() -> tuple[Decision, ...]:
    """Six, as a store gives them back: three of recordings, three of simulations.

    They have all the evidence that a mode gathers, under the name of the default mode."""
    made = (
        *(recorded(name, "sustained") for name in recordings.names()),
        simulation("h200-capped", layer("dgrad"), "sustained"),
        simulation("depthwise", layer("wgrad", 128), "sustained"),
        simulation(
            "quiet", layer("fprop", 256, allow_tf32=False, dtype=torch.float32), "sustained"
        ),
    )
    named = (under(one, mode="auto") for one in made)
    return tuple(codec.decode(codec.encode(one, H200), H200) for one in named)


def fill(
    place: Path, kept: Iterable[Decision] | None = None, environment: Environment = H200
) -> Path:
    """Puts them into a store; returns its file."""
    store = Store(place, environment)
    store.add(decisions() if kept is None else kept)
    return store.path


def misspelt(data: bytes) -> bytes:
    """A store's file with an operation in it that there is not."""
    lines = data.split(b"\n")
    spoilt = [
        resealed(line.replace(b'"wgrad x=', b'"wgrid x=')) if b'"wgrad x=' in line else line
        for line in lines
    ]
    assert spoilt != lines
    return b"\n".join(spoilt)


def later(decision: Decision, time: str) -> Decision:
    return replace(decision, provenance=replace(decision.provenance, time=time))


def slower(decision: Decision, factor: float) -> Decision:
    """The same, as on a machine on which everything takes ``factor`` times as long."""

    def times(value: float | None) -> float | None:
        return None if value is None else value * factor

    selection = decision.selection
    ranking = tuple(
        replace(
            entry,
            time_ms=times(entry.time_ms),
            low_ms=times(entry.low_ms),
            high_ms=times(entry.high_ms),
            sustained_ms=times(entry.sustained_ms),
        )
        for entry in selection.ranking
    )
    return replace(decision, selection=replace(selection, ranking=ranking))
