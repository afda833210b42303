"""``cudnn-autotune demo``."""

from __future__ import annotations

from pathlib import Path

import click

from cudnn_autotune.audit.plot import plot
from cudnn_autotune.cli import demo as demonstration
from cudnn_autotune.cli.output_files import check_output, plot_option, writing


@click.command()
@plot_option("Draw what the modes choose on the recordings")
def demo(plot_path: Path | None) -> None:
    """Every sampling mode on two well-known layers, side by side.

    Without a GPU: every mode on recordings of an H200, what cuDNN offers for the two layers on an
    L4 and an H200, and the layers on the CPU.
    """
    check_output("--plot", plot_path)
    replayed = demonstration.run()
    if plot_path is not None:
        with writing("--plot", plot_path):
            plot(replayed or demonstration.replay(), plot_path)
        click.echo(f"Drawn: {plot_path}")
