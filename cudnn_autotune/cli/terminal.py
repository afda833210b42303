"""Prints lines for commands, so that no text from a file can control the terminal."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import click

from cudnn_autotune.cli.wording import printable


def say(line: str, err: bool = False) -> None:
    """Prints a line, with a sign in the place of characters that do not print."""
    click.echo(printable(line), err=err)


@contextmanager
def warnings_in_lines() -> Iterator[None]:
    """Prints each warning as one line on standard error, without the code that it came from."""
    with warnings.catch_warnings():

        def show(message: Warning | str, *_: object, **__: object) -> None:
            say(f"Warning: {' '.join(str(message).split())}", err=True)

        warnings.showwarning = show
        yield
