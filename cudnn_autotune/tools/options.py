"""Option types and groups of options that several commands share, and the files that options name,
which are tried before anything is measured."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from cudnn_autotune.core import atomic_file
from cudnn_autotune.core.json_node import did_you_mean
from cudnn_autotune.engines.problem import DTYPES, OPERATIONS

_AGE_UNITS = {"h": "hours", "d": "days", "w": "weeks"}


class Parsed(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """The type of an option whose text ``read`` turns into a value. Where that raises ValueError,
    the message says what is ``allowed``."""

    name = "text"

    def __init__(self, read: Callable[[str], Any], allowed: str) -> None:
        self._read = read
        self._allowed = allowed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except ValueError:
            self.fail(f"must be {self._allowed}, got {value!r}", param, ctx)


def _number(least: float) -> Callable[[str], float]:
    """Reads a finite number of ``least`` or more."""

    def read(text: str) -> float:
        number = float(text)
        if not least <= number < math.inf:
            raise ValueError
        return number

    return read


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ValueError
    return names


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split(","))
    if min(sizes) < 1:
        raise ValueError
    return sizes


def _padding(text: str) -> tuple[int, ...] | str:
    if text in ("same", "valid"):
        return text
    return tuple(int(part) for part in text.split(","))


def _age(text: str) -> timedelta:
    # Five digits at most, because the calendar has no date 999999 days ago.
    match = re.fullmatch(r"([0-9]{1,5})\s*([hdw])", text.strip())
    if match is None:
        raise ValueError
    return timedelta(**{_AGE_UNITS[match[2]]: int(match[1])})


def _word(text: str) -> str:
    if not text.strip():
        raise ValueError
    return text.strip()


POSITIVE = Parsed(_number(math.nextafter(0, 1)), "a finite number above 0")
TOLERANCE = Parsed(_number(0), "a number of 0 or more, as 0.03")
NAMES = Parsed(_names, "names with commas between, each once")
SIZES = Parsed(_sizes, "whole numbers of 1 or more with commas between")
PADDING = Parsed(_padding, "same, valid, or whole numbers with commas between")
AGE = Parsed(_age, "up to 99999 hours, days or weeks, as 12h, 30d or 8w")
WORD = Parsed(_word, "a text that is not empty")
FILE = click.Path(dir_okay=False, path_type=Path)


def refuse(option: str, message: str) -> click.BadParameter:
    """Returns the error that names an option or argument, for the caller to raise."""
    return click.BadParameter(message, param_hint=f"'{option}'")


@contextmanager
def refusing(option: str) -> Iterator[None]:
    """Turns a ValueError within into the error that names an option."""
    try:
        yield
    except ValueError as error:
        raise refuse(option, str(error)) from error


def check_modes(option: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    """Raises BadParameter for a mode that is not allowed."""
    for name in given:
        if name not in allowed:
            said = did_you_mean(name, allowed)
            raise refuse(option, f"{name!r} is not one of {', '.join(allowed)}{said}")


def group(*options: Callable[..., Any]) -> Callable[..., Any]:
    """Returns one decorator that adds several options to a command, in the given order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


input_option = click.option(
    "--input",
    multiple=True,
    type=SIZES,
    metavar="N,C,H,W",
    help="The input's shape; several times for a model that takes several.",
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(list(DTYPES.values())),
    default="float32",
    show_default=True,
    help="A layer's dtype; a model's weights and inputs are converted to it.",
)
channels_last_option = click.option(
    "--channels-last", is_flag=True, help="The layout is channels_last. [default: contiguous]"
)

shape_options = group(
    input_option,
    click.option("--weight", type=SIZES, metavar="K,C,R,S", help="The shape of a layer's weight."),
    click.option(
        "--op",
        multiple=True,
        type=click.Choice(OPERATIONS),
        help="A layer's forward, gradient of the input, or of the weight. [default: all three]",
    ),
    click.option("--stride", type=SIZES, metavar="A[,B,...]", help="A layer's stride."),
    click.option(
        "--padding",
        type=PADDING,
        metavar="A[,B,...]",
        help="A layer's padding: numbers, same, or valid.",
    ),
    click.option("--dilation", type=SIZES, metavar="A[,B,...]", help="A layer's dilation."),
    click.option("--groups", type=click.IntRange(1), help="A layer's groups."),
    click.option("--bias", flag_value=True, default=None, type=bool, help="The layer adds a bias."),
    dtype_option,
    channels_last_option,
)
"""The options that describe a layer; ``tune_problems.of_layer`` reads them."""


force_option = click.option("--force", is_flag=True, help="Replace an existing file.")
"""``--force``, for :func:`check_output`."""


def check_output(option: str, path: Path | None, force: bool = True) -> None:
    """Makes the folder of a file that is to be written, and tries to write in it. Raises
    BadParameter if no regular file can be written there, or there is one already that is read-only
    or that ``force`` does not allow to replace."""
    if path is None:
        return
    if os.path.exists(path) and not force:
        raise refuse(option, f"{path} is there already; --force replaces it")
    try:
        place = atomic_file.replaceable(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, prefix=f".{place.name}."):
            pass
    except OSError as error:
        raise refuse(option, f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turns an OSError within into a ClickException that names the option and the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise click.ClickException(f"{option}: cannot write {path}: {reason}") from error


def write(option: str, path: Path, data: bytes) -> None:
    """Writes a whole file, and makes its folder. Raises BadParameter if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_file.write(path, data)
    except OSError as error:
        raise refuse(option, f"cannot write {path}: {error.strerror or error}") from error
