"""``cudnn-autotune compare``."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from cudnn_autotune.cli import decision_table
from cudnn_autotune.cli.commands import tune_problems
from cudnn_autotune.cli.wording import say
from cudnn_autotune.comparing import compare as comparing
from cudnn_autotune.comparing.ways import WAYS, calibrate
from cudnn_autotune.core.display import bar_console
from cudnn_autotune.engines.problem import DTYPES_BY_NAME
from cudnn_autotune.models import memory_format
from cudnn_autotune.tools import options

_INTERRUPTED = 130
_PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>cudnn-autotune compare</title>
<style>body { font: 1rem/1.5 system-ui, sans-serif; margin: 2rem; color-scheme: light dark; }
table { border-collapse: collapse; } tr:first-child { font-weight: 600; }
td { padding: .3rem .8rem; border-top: 1px solid #8888; }</style>
"""


@click.command()
@click.argument("model")
@options.input_option
@click.option("--train/--inference", help="Forward and backward, or forward. [default: inference]")
@options.dtype_option
@click.option("--autocast", type=click.Choice(["float16", "bfloat16"]), help="[default: off]")
@options.channels_last_option
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), help="[default: cuda where there is one]"
)
@click.option(
    "--ways", type=options.NAMES, default=",".join(WAYS), show_default=True, metavar="A[,B,...]"
)
@click.option(
    "--time-limit",
    type=options.POSITIVE,
    default=300.0,
    show_default=True,
    metavar="S",
    help="For the first call of each way, in seconds.",
)
@click.option("--json", "json_path", type=options.FILE, help="Write the figures there.")
@click.option("--html", "html_path", type=options.FILE, help="Write the table there.")
def compare(model: str, json_path: Path | None, html_path: Path | None, **given: Any) -> None:
    """Run a model by PyTorch and by this package in several ways, and tell the fastest.

    MODEL is torchvision:NAME, timm:NAME, or MODULE:CALLABLE: my_net:make is what make() in
    my_net.py, in this folder, returns. Inputs are random numbers; for others call
    cudnn_autotune.compare() in Python. Each way has a process of its own, in which nothing is tuned
    or compiled yet; all take turns. A way that fails or is not ready within --time-limit says why.
    Ctrl-C shows and writes what was measured until then.
    """
    options.check_modes("--ways", given["ways"], list(WAYS))
    options.check_output("--json", json_path)
    options.check_output("--html", html_path)
    has_gpu = torch.cuda.is_available()
    if given["device"] == "cuda" and not has_gpu:
        raise options.refuse("--device", "there is no CUDA GPU here; `--device cpu` tries it out")
    device = torch.device(given["device"] or ("cuda" if has_gpu else "cpu"))
    dtype, last, train = DTYPES_BY_NAME[given["dtype"]], given["channels_last"], given["train"]
    torch.manual_seed(0)
    made = tune_problems.load(model)
    if bar_console() is None:  # a log is silent for as long as the ways take
        ways = ", ".join(given["ways"])
        say(f"comparing {ways}; each may take {given['time_limit']:g} s to be ready", err=True)
    try:
        made = made.to(device).train(train)
        inputs = tune_problems.random_inputs(given["input"], torch.float32, device, last)
        if not train and model.startswith(("torchvision:", "timm:")):
            calibrate(made, inputs)  # it has no trained weights, nor statistics
        if last:
            memory_format.apply(made, torch.channels_last)
        found = comparing.compare(
            made.to(dtype),
            *(tensor.to(dtype) for tensor in inputs),
            train=train,
            autocast=DTYPES_BY_NAME.get(given["autocast"]),
            ways=given["ways"],
            time_limit_s=given["time_limit"],
        )
    except Exception as error:  # the user's own code runs here
        raise click.ClickException(f"{model}: {type(error).__name__}: {error}") from error
    found = replace(found, subject=f"{model}: {found.subject}")
    found.show(decision_table.console())
    if json_path is not None:
        options.write("--json", json_path, json.dumps(found.to_json(), indent=1).encode())
    if html_path is not None:
        options.write("--html", html_path, (_PAGE + found._repr_html_()).encode())
    if found.was_interrupted:
        sys.exit(_INTERRUPTED)
    if found.fastest is None:
        sys.exit(1)
