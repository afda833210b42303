"""Options of the command line: click callbacks that read a text and refuse one that does not fit,
saying what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

T = TypeVar("T")


def read_by(read: Callable[[str], T], allowed: str) -> Callable[..., T | None]:
    """A callback that passes an option's text through ``read``, which raises ValueError."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> T | None:
        if value is None:
            return None
        try:
            return read(value)
        except ValueError as error:
            raise click.BadParameter(f"must be {allowed}, got {value!r}") from error

    return callback


def _share(text: str) -> tuple[int, int]:
    part, parts = (int(number) for number in text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError
    return part, parts


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError
    return number


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ValueError
    return names


def _runs(text: str) -> dict[str, int]:
    """The number for modes that are not named is under ``""``."""
    runs: dict[str, int] = {}
    for part in text.split(","):
        mode, _, number = part.rpartition("=")
        if int(number) < 1 or mode.strip() in runs:
            raise ValueError
        runs[mode.strip()] = int(number)
    return {"": 1, **runs}


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


share = read_by(_share, "I/N with 1 <= I <= N, as 1/4")
positive = read_by(_positive, "a finite number above 0")
names = read_by(_names, "names with commas between, each once")
runs = read_by(_runs, "a number of 1 or more, or MODE=NUMBER, with commas between")
sizes = read_by(_sizes, "whole numbers with commas between")


def refuse(option: str, message: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint=f"'{option}'")


def check_modes(option: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    """Raises BadParameter for a mode that is not allowed."""
    for name in given:
        if name not in allowed:
            raise refuse(option, f"{name!r} is not one of {', '.join(allowed)}")


def layer_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--layers``, ``--cases``."""
    path = click.Path(dir_okay=False)
    for option in (
        click.option(
            "--cases", metavar="TEXT", help="Only cases whose id has one of TEXT,TEXT,..."
        ),
        click.option(
            "--layers", type=path, metavar="FILE", help="A layer list; else the one that ships."
        ),
    ):
        command = option(command)
    return command
