"""``cudnn-autotune record``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
import torch
from click.core import ParameterSource

from cudnn_autotune.audit import layers
from cudnn_autotune.cli import options
from cudnn_autotune.cli.commands import tune_problems
from cudnn_autotune.cli.output_files import check_new, check_output, force_option, writing
from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.timers.offline.recorder import record as record_samples
from cudnn_autotune.timers.offline.recording import Recording
from cudnn_autotune.timers.timer import Timer

_SUFFIXES = (".json.gz", ".json")
_OF_LAYERS = ("op", "stride", "padding", "dilation", "groups", "dtype", "channels_last")

Opener = Callable[[ConvProblem], tuple[Timer, Candidates]]


@click.command()
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@options.layer_options
@click.option("--input", type=options.SIZES, metavar="N,C,H,W", help="Of a layer.")
@options.shape_options
@click.option(
    "--time-limit", type=options.POSITIVE, metavar="S", help="Seconds for each recording."
)
@click.option("--rounds", type=click.IntRange(1), default=40, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@force_option
@click.pass_context
def record(ctx: click.Context, /, out: Path, **given: Any) -> None:
    """Record raw samples of every candidate for a convolution on this GPU, for audit --replay.

    OUT is a file (.json.gz or .json) for a single convolution: an --op of the layer that --input
    and --weight describe, or one of the --cases of a layer list; for several of them a folder.
    """
    problems = _problems(ctx, given)
    opener = _opener(ctx)
    targets = _targets(out, list(problems), given["force"])
    limit_ms = {} if given["time_limit"] is None else {"time_limit_ms": given["time_limit"] * 1e3}
    for (name, problem), target in zip(problems.items(), targets, strict=True):
        with _tf32():  # as in the problems, since PyTorch's own path follows its flag
            timer, candidates = opener(problem)
            try:
                made = record_samples(
                    timer,
                    candidates,
                    problem,
                    rounds=given["rounds"],
                    seed=given["seed"],
                    **limit_ms,
                )
            except RuntimeError as error:
                raise click.ClickException(f"{name}: {error}") from error
        with writing("OUT", target):
            try:
                made.save(target)
            except ValueError as error:
                raise click.ClickException(f"OUT: {error}; ask for fewer --rounds") from error
        click.echo(_told(name, made, target))


def _problems(ctx: click.Context, given: dict[str, Any]) -> dict[str, ConvProblem]:
    """Returns the convolutions by name: those of a layer list, or those of one layer."""
    of_layer = given["input"] is not None or given["weight"] is not None
    of_list = given["layers"] is not None or given["cases"] is not None
    if of_layer == of_list:
        raise click.UsageError("give either --input with --weight, or --cases (and --layers)")
    if not of_layer:
        for name in _OF_LAYERS:
            if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
                raise options.refuse(
                    f"--{name.replace('_', '-')}", "only with --input and --weight"
                )
    return _of_layer(given) if of_layer else _listed(given)


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


def _of_layer(given: dict[str, Any]) -> dict[str, ConvProblem]:
    if given["input"] is None or given["weight"] is None:
        raise click.UsageError("--input and --weight belong together")
    problems = tune_problems.of_layer({**given, "input": [given["input"]]})
    return {f"layer/{problem.op}/{given['dtype']}": problem for problem in problems}


def _listed(given: dict[str, Any]) -> dict[str, ConvProblem]:
    try:
        cases = layers.load(given["layers"])
    except ValueError as error:
        raise options.refuse("--layers", str(error)) from error
    try:
        return {case.id: case.problem() for case in layers.select(cases, given["cases"])}
    except ValueError as error:
        raise options.refuse("--cases", str(error)) from error


def _tf32() -> AbstractContextManager[None]:
    """Allows cuDNN TF32 within the context, and leaves its other flags as they are."""
    cudnn = torch.backends.cudnn
    if not cudnn.is_available():
        return nullcontext()
    now = (cudnn.enabled, cudnn.benchmark, cudnn.benchmark_limit, cudnn.deterministic)
    flags: AbstractContextManager[None] = cudnn.flags(*now, allow_tf32=True)
    return flags


def _targets(out: Path, names: Sequence[str], force: bool) -> list[Path]:
    is_file = out.name.endswith(_SUFFIXES)
    if len(names) > 1 and is_file:
        raise options.refuse("OUT", f"must be a folder for {len(names)} recordings, got {out}")
    if len(names) == 1 and not is_file:
        raise options.refuse("OUT", f"must end in {' or '.join(_SUFFIXES)}, got {out}")
    targets = [out / f"{name.replace('/', '_')}.json.gz" for name in names]
    targets = [out] if is_file else targets
    for target in targets:
        check_output("OUT", target)
        check_new("OUT", target, force)
    return targets


def _told(name: str, made: Recording, target: Path) -> str:
    ran = sum(not candidate.error for candidate in made.candidates)
    size = target.stat().st_size / 1024
    text = (
        f"{name}: {ran} of {len(made.candidates)} candidates, {len(made.cold.time_ms)} rounds, "
        f"{len(made.solo)} alone -> {target} ({math.ceil(size)} KiB)"
    )
    return "; ".join([text, *made.remarks])
