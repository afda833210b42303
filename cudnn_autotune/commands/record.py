"""``cudnn-autotune record``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
import torch

from cudnn_autotune import command_options as options
from cudnn_autotune.audit import layers
from cudnn_autotune.offline import simulated
from cudnn_autotune.offline.recording import record as record_samples
from cudnn_autotune.offline.recording_format import Recording
from cudnn_autotune.problem import OPERATIONS, ConvProblem
from cudnn_autotune.sampling.strategy import Candidates
from cudnn_autotune.sampling.timer import Timer

_SUFFIXES = (".json.gz", ".json")
_LAYER = "shape"

Source = Callable[[], tuple[Timer, Candidates, ConvProblem]]


@click.command()
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@options.layer_options
@click.option("--input", "input_shape", callback=options.sizes, metavar="N,C,...")
@click.option("--weight", "weight_shape", callback=options.sizes, metavar="K,C/GROUPS,...")
@click.option("--op", type=click.Choice(OPERATIONS), help="Of a shape. [default: fprop]")
@click.option("--stride", callback=options.sizes, metavar="A[,B,...]", help="Of a shape.")
@click.option("--padding", callback=options.sizes, metavar="A[,B,...]", help="Of a shape.")
@click.option("--dilation", callback=options.sizes, metavar="A[,B,...]", help="Of a shape.")
@click.option("--groups", type=click.IntRange(1), help="Of a shape.")
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32", "float64"]),
    help="Of a shape. [default: float16]",
)
@click.option("--contiguous", is_flag=True, help="Of a shape: not channels_last.")
@click.option(
    "--simulate",
    "preset",
    metavar="PRESET",
    help=f"Record a simulation: {', '.join(simulated.preset_names())}.",
)
@click.option(
    "--time-limit", callback=options.positive, metavar="S", help="Seconds for each recording."
)
@click.option("--rounds", type=click.IntRange(1), default=40, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def record(out: Path, **given: Any) -> None:
    """Record raw samples of every candidate for a convolution on this GPU, for --replay.

    OUT is a file (.json.gz or .json) for a single convolution, given by its --input and --weight
    or as one of the --cases of a layer list; for several of them a folder.
    """
    sources = _sources(given)
    targets = _targets(out, list(sources))
    limit_ms = {} if given["time_limit"] is None else {"time_limit_ms": given["time_limit"] * 1e3}
    for (name, open_source), target in zip(sources.items(), targets, strict=True):
        with _tf32():  # as the problems have it: PyTorch's own path goes by its flag
            timer, candidates, problem = open_source()
            try:
                made = record_samples(
                    timer,
                    candidates,
                    problem,
                    rounds=given["rounds"],
                    seed=given["seed"],
                    environment=_environment(given["preset"], timer),
                    **limit_ms,
                )
            except RuntimeError as error:
                raise click.ClickException(f"{name}: {error}") from error
        made.save(target)
        click.echo(_told(name, made, target))


def _sources(given: dict[str, Any]) -> dict[str, Source]:
    """Name -> what opens it, from the one of layer list, shape and simulation that is given."""
    of_shape = [name for name in ("input_shape", "weight_shape") if given[name] is not None]
    of_list = [name for name in ("layers", "cases") if given[name] is not None]
    if sum(map(bool, (of_shape, of_list, given["preset"]))) != 1:
        raise click.UsageError(
            "give one of --input with --weight, --cases (and --layers), or --simulate"
        )
    if not of_shape:
        for name in ("op", "stride", "padding", "dilation", "groups", "dtype"):
            if given[name] is not None:
                raise options.refuse(f"--{name}", "only with --input and --weight")
    if given["preset"]:
        return {given["preset"]: _simulation(given["preset"], given["seed"])}
    if len(of_shape) == 1:
        raise click.UsageError("--input and --weight belong together")
    cases = [_case_of_shape(given)] if of_shape else _listed(given)
    if not torch.cuda.is_available():
        raise click.UsageError("there is no CUDA GPU here; --simulate PRESET works without one")
    return {case.id: _on_gpu(case) for case in cases}


def _simulation(preset: str, seed: int) -> Source:
    try:
        timer = simulated.preset(preset, seed)
    except ValueError as error:
        raise options.refuse("--simulate", str(error)) from error
    # A simulated engine computes no problem in particular; a recording wants one.
    problem = ConvProblem("fprop", (1, 1, 1, 1), (1, 1, 1, 1))
    return lambda: (timer, timer.candidates, problem)


def _listed(given: dict[str, Any]) -> list[layers.Case]:
    try:
        cases = layers.load(given["layers"])
    except ValueError as error:
        raise options.refuse("--layers", str(error)) from error
    try:
        return layers.select(cases, given["cases"])
    except ValueError as error:
        raise options.refuse("--cases", str(error)) from error


def _case_of_shape(given: dict[str, Any]) -> layers.Case:
    fields = {
        name: given[name]
        for name in ("input_shape", "weight_shape", "groups", "dtype")
        if given[name] is not None
    }
    for name in ("stride", "padding", "dilation"):
        if given[name] is not None:
            fields[name] = given[name][0] if len(given[name]) == 1 else given[name]
    try:
        return layers.Case(
            layer=_LAYER,
            op=given["op"] or "fprop",
            channels_last=not given["contiguous"] and len(given["input_shape"]) > 3,
            **fields,
        )
    except ValueError as error:
        option = {"input_shape": "--input", "weight_shape": "--weight"}
        field = str(error).split()[0].rstrip(":")
        raise options.refuse(option.get(field, f"--{field}"), str(error)) from error


def _tf32() -> AbstractContextManager[None]:
    """cuDNN's TF32 on for a while, its other flags as they are."""
    cudnn = torch.backends.cudnn
    if not cudnn.is_available():
        return nullcontext()
    now = (cudnn.enabled, cudnn.benchmark, cudnn.benchmark_limit, cudnn.deterministic)
    flags: AbstractContextManager[None] = cudnn.flags(*now, allow_tf32=True)
    return flags


def _on_gpu(case: layers.Case) -> Source:
    def open_source() -> tuple[Timer, Candidates, ConvProblem]:
        from cudnn_autotune.audit.gpu import open_timer

        problem = case.problem()
        timer, candidates = open_timer(problem)
        return timer, candidates, problem

    return open_source


def _targets(out: Path, names: Sequence[str]) -> list[Path]:
    is_file = out.name.endswith(_SUFFIXES)
    if len(names) > 1 and is_file:
        raise options.refuse("OUT", f"must be a folder for {len(names)} recordings, got {out}")
    if len(names) == 1 and not is_file:
        raise options.refuse("OUT", f"must end in {' or '.join(_SUFFIXES)}, got {out}")
    folder = out.parent if is_file else out
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise options.refuse("OUT", f"cannot make {folder}: {error}") from error
    return [out] if is_file else [out / f"{name.replace('/', '_')}.json.gz" for name in names]


def _environment(preset: str | None, timer: Timer) -> dict[str, Any]:
    if preset is None:
        return {}
    assert isinstance(timer, simulated.SimulatedTimer)
    return {"gpu": timer.gpu.name, "driver": None, "cudnn": None}


def _told(name: str, made: Recording, target: Path) -> str:
    ran = sum(not candidate.error for candidate in made.candidates)
    size = target.stat().st_size / 1024
    text = (
        f"{name}: {ran} of {len(made.candidates)} candidates, {len(made.cold.time_ms)} rounds, "
        f"{len(made.solo)} alone -> {target} ({math.ceil(size)} KiB)"
    )
    return "; ".join([text, *made.remarks])
