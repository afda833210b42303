"""The command line, ``cudnn-autotune``."""

from __future__ import annotations

from pathlib import Path

import click

from cudnn_autotune.audit.plot import plot
from cudnn_autotune.commands.audit import audit
from cudnn_autotune.commands.diff import diff
from cudnn_autotune.commands.env import env
from cudnn_autotune.commands.exchange import export, import_
from cudnn_autotune.commands.output import warnings_in_lines
from cudnn_autotune.commands.output_file import check_output, writing
from cudnn_autotune.commands.plot_option import plot_option
from cudnn_autotune.commands.prune import prune
from cudnn_autotune.commands.record import record
from cudnn_autotune.commands.report import report
from cudnn_autotune.commands.show import show
from cudnn_autotune.commands.tune import tune
from cudnn_autotune.versions import version


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version(), prog_name="cudnn-autotune")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Search, choose, remember and run cuDNN's convolution engines."""
    ctx.with_resource(warnings_in_lines())


@main.command()
@plot_option("Draw what the modes choose on the recordings")
def demo(plot_path: Path | None) -> None:
    """Every sampling mode on two well-known layers, side by side.

    Without a GPU: every mode on recordings of an H200 and on a simulated L4, what cuDNN offers for
    the two layers on an L4 and an H200, and the layers on the CPU.
    """
    from cudnn_autotune import demo as demonstration
    from cudnn_autotune import demo_replay

    check_output("--plot", plot_path)
    replayed = demonstration.run()
    if plot_path is not None:
        with writing("--plot", plot_path):
            plot(replayed or demo_replay.replay(), plot_path)
        click.echo(f"Drawn: {plot_path}")


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
