"""``cudnn-autotune audit``."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

import cudnn_autotune
from cudnn_autotune import sampling
from cudnn_autotune.audit import layers, offline_cases, plot, record_file, recordings, report
from cudnn_autotune.audit.judged_turns import OracleSettings
from cudnn_autotune.audit.model import PEAKS, PYTORCH_MODES, Record
from cudnn_autotune.audit.schedule import AuditConfig, Session
from cudnn_autotune.expert import Board, Telemetry
from cudnn_autotune.sampling import Limits
from cudnn_autotune.tools import ProcessFailure, encode, gpu_peaks, options, progress_bar


def _share(text: str) -> tuple[int, int]:
    part, parts = (int(number) for number in text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError
    return part, parts


def _counts(text: str) -> dict[str, int]:
    """Runs by mode; the number for modes that are not named is under ``""``."""
    runs: dict[str, int] = {}
    for part in text.split(","):
        mode, _, number = part.rpartition("=")
        if int(number) < 1 or mode.strip() in runs:
            raise ValueError
        runs[mode.strip()] = int(number)
    return {"": 1, **runs}


def _drawable(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """The callback of an option for a file that matplotlib is to draw."""
    if value is None:
        return None
    if value.suffix.lower() not in plot.SUFFIXES:
        raise click.BadParameter(f"must end in {', '.join(plot.SUFFIXES)}")
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise click.BadParameter(f"needs matplotlib: {error}") from error
    return value


_SHARE = options.Parsed(_share, "I/N with 1 <= I <= N, as 1/4")
_RUNS = options.Parsed(_counts, "a number of 1 or more, or MODE=NUMBER, with commas between")
_ONLY_ON_A_GPU = ("layers", "cases", "share", "sustained")


@click.command()
@click.option(
    "--replay",
    "replayed",
    multiple=True,
    metavar="RECORDING",
    help="Replay a recording instead of measuring, a file or one that ships: "
    f"{', '.join(recordings.names())}; may be given several times.",
)
@click.option(
    "--runs",
    default="1",
    type=_RUNS,
    metavar="N|MODE=N,...",
    help="Fresh processes for each mode, as 3, or 1,auto=5.",
    show_default=True,
)
@click.option(
    "--modes", type=options.NAMES, metavar="A,B", help="The modes to judge. [default: all]"
)
@click.option(
    "--layers", type=options.FILE, metavar="FILE", help="A layer list; else the one that ships."
)
@click.option("--cases", metavar="TEXT", help="Only cases whose id has one of TEXT,TEXT,...")
@click.option(
    "--share", type=_SHARE, metavar="I/N", help="The I-th of N random shares of the cases."
)
@click.option(
    "--time-limit",
    type=options.POSITIVE,
    metavar="S",
    help="About the seconds that the audit may take.",
)
@click.option(
    "--budget-ms", type=options.POSITIVE, metavar="MS", help="The most ms of each choice."
)
@click.option(
    "--sustained",
    type=click.Choice(["throttled", "always"]),
    is_flag=False,
    flag_value="throttled",
    help="Also measure at the steady clock, where the board throttles or always: seconds a case.",
)
@click.option(
    "--import",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="Import first: where modes of your own are registered.",
)
@click.option(
    "--json",
    "json_path",
    type=options.FILE,
    metavar="FILE",
    help="Write the record (.gz: compressed); one of a GPU that is there already is continued.",
)
@click.option(
    "--plot",
    "plot_path",
    type=options.FILE,
    callback=_drawable,
    metavar="FILE",
    help=f"Draw the record ({', '.join(plot.SUFFIXES)}; needs matplotlib).",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="The seed of the random order."
)
@click.pass_context
def audit(ctx: click.Context, /, **given: Any) -> None:
    """Measure how far each mode's picks are from the fastest, and what picking costs.

    On the GPU that is here: every mode and run in a fresh process, PyTorch's benchmark modes
    beside them, then a long measurement of everything that was picked or could be the best. With
    --replay: on recordings, in this process, without a GPU.
    """
    for name in given["modules"]:
        _import(name)
    kind = "replay" if given["replayed"] else "gpu"
    if kind == "replay":
        _check_options_of_replay(given)
    modes = _modes(kind, given["modes"])
    runs = _runs(modes, given["runs"])
    json_path, plot_path = given["json_path"], given["plot_path"]
    options.check_output("--json", json_path)
    options.check_output("--plot", plot_path)
    console = Console()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    fresh = Record(
        kind,
        settings={
            "modes": list(modes),
            "runs": runs,
            "budget_ms": given["budget_ms"],
            "seed": given["seed"],
        },
        # A program that invokes this command may pass further entries of the record's environment
        # as the context's object.
        environment={**cudnn_autotune.environment(), "date": now, **(ctx.obj or {})},
    )
    if kind == "gpu":
        record = audit_gpu(fresh, modes, given)
    else:
        record = _replay(fresh, given, console)
    # Measurements are not lost if the disk is full, or if the reader of a pipe has exited.
    try:
        if json_path is not None:
            with options.writing("--json", json_path):
                record_file.save(record, json_path)
    finally:
        report.show(record, console)
    if plot_path is not None:
        with options.writing("--plot", plot_path):
            plot.plot(record, plot_path)


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:  # the user's own code runs here
        reason = f"{type(error).__name__}: {error}"
        raise options.refuse("--import", f"cannot import {name!r}: {reason}") from error


def _check_options_of_replay(given: dict[str, Any]) -> None:
    for name in _ONLY_ON_A_GPU:
        if given[name] is not None:
            raise options.refuse("--" + name.replace("_", "-"), "not with --replay")


def _modes(kind: str, wanted: Sequence[str] | None) -> tuple[str, ...]:
    ours = sampling.names() if kind == "gpu" else offline_cases.modes()
    allowed = (*ours, *PYTORCH_MODES) if kind == "gpu" else ours
    options.check_modes("--modes", wanted or (), allowed)
    return tuple(wanted or allowed)


def _runs(modes: Sequence[str], given: dict[str, int]) -> dict[str, int]:
    ours = [mode for mode in modes if mode not in PYTORCH_MODES]
    options.check_modes("--runs", [mode for mode in given if mode], ours)
    return {mode: given.get(mode, given[""]) for mode in ours}


def _replay(record: Record, given: dict[str, Any], console: Console) -> Record:
    with options.refusing("--replay"):
        cases = [_recorded(name) for name in given["replayed"]]
    ids = [case.id for case in cases]
    if len(set(ids)) < len(ids):
        raise options.refuse("--replay", f"each one once, got {', '.join(ids)}")
    record.settings["source"] = ids
    gpus = {str(case.described()["gpu"]) for case in cases}
    record.environment["gpu"] = ", ".join(sorted(gpus))
    _check_replaceable(given["json_path"])
    with progress_bar(console) as progress:
        task = progress.add_task("runs", total=None)
        offline_cases.audit(
            record,
            cases,
            record.settings["runs"],
            limits=Limits(budget_ms=given["budget_ms"]),
            seed=given["seed"],
            time_limit_s=given["time_limit"],
            progress=lambda done, of: progress.update(task, completed=done, total=of),
        )
    return record


def _recorded(name: str) -> offline_cases.RecordedCase:
    """Opens a file, or else a recording that the package ships. Raises ValueError if it is
    neither."""
    if os.path.exists(name):
        return offline_cases.RecordedCase(Path(name))
    if name in recordings.names():
        return offline_cases.RecordedCase.shipped(name)
    raise ValueError(
        f"{name!r} is neither a file nor one of the recordings that ship: "
        f"{', '.join(recordings.names())}"
    )


def _check_replaceable(path: Path | None) -> None:
    """A record that took GPU time is not overwritten by one that did not."""
    if path is None or not path.exists():
        return
    with options.refusing("--json"):
        earlier = record_file.load(path)
    if earlier.kind == "gpu":
        raise options.refuse("--json", f"{path} holds an audit of a GPU; choose another file")


def audit_gpu(fresh: Record, modes: Sequence[str], given: dict[str, Any]) -> Record:
    """Continues the record in ``given["json_path"]``, or fills ``fresh``."""
    with options.refusing("--layers"):
        listed = layers.load(given["layers"])
    with options.refusing("--cases"):
        cases = layers.select(listed, given["cases"], given["share"] or (1, 1))
    if not cases:
        raise options.refuse("--share", "leaves none of the cases")
    config = AuditConfig(
        runs=fresh.settings["runs"],
        pytorch=[mode for mode in modes if mode in PYTORCH_MODES],
        reference=_reference(fresh.settings["runs"]),
        oracle=OracleSettings(solo=given["sustained"] or "never", seed=given["seed"]),
        budget_ms=given["budget_ms"],
        time_limit_s=given["time_limit"],
        modules=given["modules"],
    )
    if not torch.cuda.is_available():
        raise click.UsageError("there is no CUDA GPU here; --replay RECORDING works without one")
    fresh.settings |= {
        "reference": config.reference,
        "oracle": dataclasses.asdict(config.oracle),
        "layers": Path(given["layers"]).name if given["layers"] else None,
        "cases": given["cases"],
        "share": given["share"],
        "time_limit_s": config.time_limit_s,
    }
    gpu = Board.of(0)
    fresh.environment |= {k: v for k, v in gpu.fixed().items() if v is not None}
    if (peaks := gpu_peaks.known_or_measured()) is not None:
        fresh.environment[PEAKS] = encode(peaks)
    fresh.cases = {case.id: encode(case) for case in cases}
    path: Path | None = given["json_path"]
    with options.refusing("--json"):
        record = record_file.resumed(path, fresh)
    with Telemetry(gpu) as telemetry:

        def tell(line: str) -> None:
            click.echo(line, err=True)

        def save() -> None:
            record.telemetry = telemetry.summary()
            _save(record, path, tell)

        session = Session(config, record, [case.id for case in cases], save, tell)
        try:
            session.run()
        except ProcessFailure as error:
            raise click.ClickException(f"the audit cannot start: {error}") from error
    return record


def _save(record: Record, path: Path | None, tell: Callable[[str], None]) -> None:
    """Saves the record during the audit. An error is only reported, since ``audit`` saves again at
    the end."""
    try:
        if path is not None:
            record_file.save(record, path)
    except OSError as error:
        tell(f"--json: cannot write {path} now: {error.strerror or error}")


def _reference(runs: dict[str, int]) -> str:
    if not runs:
        raise options.refuse("--modes", "PyTorch's modes need one of ours to be compared with")
    return "auto" if "auto" in runs else list(runs)[-1]
