"""``cudnn-autotune record``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from cudnn_autotune.cli import options
from cudnn_autotune.cli.commands import tune_problems
from cudnn_autotune.cli.output_files import check_new, check_output, force_option, writing
from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.timers.offline.recorder import record as record_samples
from cudnn_autotune.timers.offline.recording import Recording
from cudnn_autotune.timers.timer import Timer

_SUFFIXES = (".json.gz", ".json")

Opener = Callable[[ConvProblem], tuple[Timer, Candidates]]


@click.command()
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@click.option("--input", type=options.SIZES, required=True, metavar="N,C,H,W", help="Of the layer.")
@options.shape_options
@click.option(
    "--time-limit", type=options.POSITIVE, default="20", metavar="S", help="Seconds for all of it."
)
@click.option("--rounds", type=click.IntRange(1), default=40, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@force_option
@click.pass_context
def record(ctx: click.Context, /, out: Path, **given: Any) -> None:
    """Record raw samples of every candidate for a convolution on this GPU, for audit --replay.

    OUT is a file (.json.gz or .json). The convolution is one --op of the layer that --input and
    --weight describe.
    """
    problem = _problem(given)
    opener = _opener(ctx)
    if not out.name.endswith(_SUFFIXES):
        raise options.refuse("OUT", f"must end in {' or '.join(_SUFFIXES)}, got {out}")
    check_output("OUT", out)
    check_new("OUT", out, given["force"])
    torch.backends.cudnn.allow_tf32 = True  # as in the problem, for PyTorch's own path
    timer, candidates = opener(problem)
    try:
        made = record_samples(
            timer,
            candidates,
            problem,
            rounds=given["rounds"],
            seed=given["seed"],
            time_limit_ms=given["time_limit"] * 1e3,
        )
    except RuntimeError as error:
        raise click.ClickException(f"{problem.text}: {error}") from error
    with writing("OUT", out):
        try:
            made.save(out)
        except ValueError as error:
            raise click.ClickException(f"OUT: {error}; ask for fewer --rounds") from error
    click.echo(_told(made, out))


def _problem(given: dict[str, Any]) -> ConvProblem:
    if given["weight"] is None:
        raise options.refuse("--weight", "is needed beside --input")
    if len(given["op"]) != 1:
        raise options.refuse("--op", "must be given once: a recording is of one convolution")
    (problem,) = tune_problems.of_layer({**given, "input": [given["input"]]})
    return problem


def _opener(ctx: click.Context) -> Opener:
    """Returns what opens a convolution on the GPU.

    A program that invokes this command may pass another opener as the context's object.
    """
    if ctx.obj is not None:
        return ctx.obj
    if not torch.cuda.is_available():
        raise click.UsageError("there is no CUDA GPU here to record")
    from cudnn_autotune.audit.gpu import open_timer

    return open_timer


def _told(made: Recording, out: Path) -> str:
    ran = sum(not candidate.error for candidate in made.candidates)
    text = (
        f"{made.problem.text}: {ran} of {len(made.candidates)} candidates, "
        f"{len(made.cold.time_ms)} rounds, {len(made.solo)} alone -> {out} "
        f"({math.ceil(out.stat().st_size / 1024)} KiB)"
    )
    return "; ".join([text, *made.remarks])
