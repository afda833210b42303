"""``cudnn-autotune compare``."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import torch

from cudnn_autotune.cli import decision_table
from cudnn_autotune.cli.commands import tune_problems
from cudnn_autotune.cli.wording import say
from cudnn_autotune.comparing import compare as comparing
from cudnn_autotune.comparing.result import ModelComparison
from cudnn_autotune.comparing.ways import WAYS, calibrate
from cudnn_autotune.core.display import bar_console, html_table
from cudnn_autotune.core.versions import environment
from cudnn_autotune.engines.problem import DTYPES_BY_NAME
from cudnn_autotune.models import memory_format
from cudnn_autotune.tools import options

_INTERRUPTED = 130
_PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>cudnn-autotune compare</title>
<style>body { font: 1rem/1.5 system-ui, sans-serif; margin: 2rem; color-scheme: light dark; }
table { border-collapse: collapse; }
th, td { padding: .3rem .8rem; border-top: 1px solid #8888; }</style>
"""


@click.command()
@click.argument("model")
@options.input_option
@click.option("--train/--inference", help="Forward and backward, or forward. [default: inference]")
@options.dtype_option
@click.option(
    "--autocast",
    type=click.Choice(["float16", "bfloat16"]),
    help="The dtype of autocast. [default: off]",
)
@options.channels_last_option
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    help="The device. [default: cuda where there is one]",
)
@click.option(
    "--ways",
    type=options.NAMES,
    default=",".join(WAYS),
    show_default=True,
    metavar="A[,B,...]",
    help="The ways to compare.",
)
@click.option(
    "--time-limit",
    type=options.POSITIVE,
    default=300.0,
    show_default=True,
    metavar="S",
    help="The most seconds of each way's first call.",
)
@click.option("--json", "json_path", type=options.FILE, help="Write the figures into FILE.")
@click.option("--html", "html_path", type=options.FILE, help="Write the table into FILE.")
@options.force_option
def compare(
    model: str, json_path: Path | None, html_path: Path | None, force: bool, **given: Any
) -> None:
    """Run a model by PyTorch and by this package in several ways, and name the fastest.

    MODEL is torchvision:NAME, timm:NAME, or MODULE:CALLABLE: my_net:make is what make() in
    my_net.py, in this folder, returns: a model, or (model, inputs). Inputs of --input are random
    numbers. Each way has a process of its own, in which nothing is tuned
    or compiled yet; all take turns. A way that fails or is not ready within --time-limit says why.
    Ctrl-C shows and writes what was measured until then.
    """
    options.check_modes("--ways", given["ways"], list(WAYS))
    for option, path in (("--json", json_path), ("--html", html_path)):
        is_there = path is not None and path.exists() and not force
        if is_there and sys.stdin.isatty():
            is_there = not click.confirm(f"{path} is there already. Replace it?")
        options.check_output(option, path, force=not is_there)
    has_gpu = torch.cuda.is_available()
    if given["device"] == "cuda" and not has_gpu:
        raise options.refuse("--device", "there is no CUDA GPU here; `--device cpu` tries it out")
    device = torch.device(given["device"] or ("cuda" if has_gpu else "cpu"))
    dtype, last, train = DTYPES_BY_NAME[given["dtype"]], given["channels_last"], given["train"]
    torch.manual_seed(0)
    made, own_inputs = tune_problems.load(model, given["input"])
    if bar_console() is None:  # a log is silent for as long as the ways take
        ways = ", ".join(given["ways"])
        say(f"comparing {ways}; each may take {given['time_limit']:g} s to be ready", err=True)
    try:
        made = made.to(device).train(train)
        inputs: list[Any]
        if own_inputs is None:
            inputs = tune_problems.random_inputs(given["input"], torch.float32, device, last)
        else:
            inputs = tune_problems.placed(own_inputs, device)
        if not train and model.startswith(("torchvision:", "timm:")):
            calibrate(made, inputs)  # it has no trained weights, nor statistics
        if last:
            memory_format.apply(made, torch.channels_last)
        found = comparing.compare(
            made.to(dtype),
            *tune_problems.placed(inputs, device, dtype),
            train=train,
            autocast=DTYPES_BY_NAME.get(given["autocast"]),
            ways=given["ways"],
            time_limit_s=given["time_limit"],
        )
    except Exception as error:  # the user's own code runs here
        raise tune_problems.failed(model, given["input"], error) from error
    found = replace(found, subject=f"{model}: {found.subject}")
    found.show(decision_table.console())
    if json_path is not None:
        options.write("--json", json_path, json.dumps(found.to_json(), indent=1).encode())
    if html_path is not None:
        options.write("--html", html_path, _page(found).encode())
    if found.was_interrupted:
        sys.exit(_INTERRUPTED)
    if found.fastest is None:
        sys.exit(1)


def _page(found: ModelComparison) -> str:
    """Returns a page with the comparison, and where and how it was made."""
    here = environment()
    facts = {
        "GPU": here["gpu"] or "none",
        "torch": here["torch"],
        "cuDNN": here["cudnn"] or "none",
        "cudnn_autotune": here["cudnn_autotune"],
        "date": datetime.now().astimezone().isoformat(" ", "minutes"),
        "command": shlex.join(["cudnn-autotune", *sys.argv[1:]]),
    }
    return f"{_PAGE}{found._repr_html_()}{html_table('Environment', facts.items())}"
