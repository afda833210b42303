"""The command line, ``cudnn-autotune``."""

from __future__ import annotations

import click

from cudnn_autotune.audit.commands import audit
from cudnn_autotune.audit.record_command import record
from cudnn_autotune.versions import version


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version(), prog_name="cudnn-autotune")
def main() -> None:
    """Search, choose, remember and run cuDNN's convolution engines."""


@main.command()
def demo() -> None:
    """Every sampling mode on two well-known layers, side by side.

    Without a GPU: what cuDNN offers for them on an L4 and an H200, and the layer on the CPU.
    """
    from cudnn_autotune import demo as demonstration

    demonstration.run()


main.add_command(audit)
main.add_command(record)
