"""The command line, ``cudnn-autotune``."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from cudnn_autotune import command_options as options
from cudnn_autotune.audit.plot import SUFFIXES
from cudnn_autotune.commands.audit import audit
from cudnn_autotune.commands.diff import diff
from cudnn_autotune.commands.env import env
from cudnn_autotune.commands.exchange import export, import_
from cudnn_autotune.commands.prune import prune
from cudnn_autotune.commands.record import record
from cudnn_autotune.commands.report import report
from cudnn_autotune.commands.show import show
from cudnn_autotune.commands.tune import tune
from cudnn_autotune.versions import version


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version(), prog_name="cudnn-autotune")
def main() -> None:
    """Search, choose, remember and run cuDNN's convolution engines."""


@main.command()
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"Draw what the modes choose on the recordings ({', '.join(SUFFIXES)}; needs matplotlib).",
)
def demo(plot: Path | None) -> None:
    """Every sampling mode on two well-known layers, side by side.

    Without a GPU: every mode on recordings of an H200 and on a simulated L4, what cuDNN offers for
    the two layers on an L4 and an H200, and the layers on the CPU.
    """
    from cudnn_autotune import demo as demonstration

    if plot is not None:
        if plot.suffix.lower() not in SUFFIXES:
            raise options.refuse("--plot", f"must end in {', '.join(SUFFIXES)}")
        try:
            importlib.import_module("matplotlib")
        except ImportError as error:
            raise options.refuse("--plot", f"needs matplotlib: {error}") from error
        try:
            plot.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise options.refuse("--plot", f"cannot make its folder: {error}") from error
    demonstration.run(plot=plot)


main.add_command(audit)
main.add_command(record)
main.add_command(tune)
main.add_command(show)
main.add_command(export)
main.add_command(import_)
main.add_command(diff)
main.add_command(prune)
main.add_command(env)
main.add_command(report)
