"""Options of the command line: click callbacks that read a text and refuse one that does not fit,
saying what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from cudnn_autotune.engines.problem import DTYPES, OPERATIONS

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


def whole_numbers(text: str) -> tuple[int, ...]:
    """``"1,2"`` as ``(1, 2)``; ValueError where it is something else."""
    return tuple(int(part) for part in text.split(","))


def _padding(text: str) -> tuple[int, ...] | str:
    return text if text in ("same", "valid") else whole_numbers(text)


share = read_by(_share, "I/N with 1 <= I <= N, as 1/4")
positive = read_by(_positive, "a finite number above 0")
names = read_by(_names, "names with commas between, each once")
runs = read_by(_runs, "a number of 1 or more, or MODE=NUMBER, with commas between")
sizes = read_by(whole_numbers, "whole numbers with commas between")
padding = read_by(_padding, "same, valid, or whole numbers with commas between")


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


def shape_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a layer is beside its ``--input``, as ``tune_problems.of_layer`` reads it."""
    per_dimension: dict[str, Any] = {
        "callback": sizes,
        "metavar": "A[,B,...]",
        "help": "Of a layer.",
    }
    for option in (
        click.option("--channels-last", is_flag=True, help="Else contiguous."),
        click.option(
            "--dtype",
            type=click.Choice(list(DTYPES.values())),
            default="float32",
            show_default=True,
        ),
        click.option("--groups", type=click.IntRange(1), help="Of a layer."),
        click.option("--dilation", **per_dimension),
        click.option("--padding", callback=padding, metavar="A[,B,...]", help="Or same, or valid."),
        click.option("--stride", **per_dimension),
        click.option(
            "--op", multiple=True, type=click.Choice(OPERATIONS), help="[default: all three]"
        ),
        click.option("--weight", callback=sizes, metavar="K,C,R,S", help="Of a layer."),
    ):
        command = option(command)
    return command
