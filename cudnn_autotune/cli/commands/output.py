"""What commands print: nothing that comes from a file steers the terminal."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import click

from cudnn_autotune.cli.report.wording import printable


def say(line: str, err: bool = False) -> None:
    """Prints a line."""
    click.echo(printable(line), err=err)


@contextmanager
def warnings_in_lines() -> Iterator[None]:
    """Warnings go to standard error, a line each, without the line of code that they are of."""
    with warnings.catch_warnings():

        def show(message: Warning | str, *_: object, **__: object) -> None:
            say(f"Warning: {' '.join(str(message).split())}", err=True)

        warnings.showwarning = show
        yield
