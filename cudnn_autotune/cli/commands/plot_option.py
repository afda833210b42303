"""``--plot``, of the commands that draw a record."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cudnn_autotune.audit.plot import SUFFIXES


def plot_option(what: str) -> Callable[..., Any]:
    """``--plot``, as ``plot_path``: a file that a picture can be written to, so far as its name and
    matplotlib go."""
    return click.option(
        "--plot",
        "plot_path",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_drawable,
        metavar="FILE",
        help=f"{what} ({', '.join(SUFFIXES)}; needs matplotlib).",
    )


def _drawable(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    if value is None:
        return None
    if value.suffix.lower() not in SUFFIXES:
        raise click.BadParameter(f"must end in {', '.join(SUFFIXES)}")
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise click.BadParameter(f"needs matplotlib: {error}") from error
    return value
