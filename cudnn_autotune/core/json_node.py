"""A reader of JSON of unknown origin. Every value knows its place, and every error names it."""

from __future__ import annotations

import difflib
import gzip
import io
import json
import os
import reprlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NoReturn

LARGEST_NUMBER = 1e15
"""The largest number that is allowed; readers in other languages may not accept larger ones."""
_MOST_SHOWN = 80
# It shortens long lists and deep nesting, so that a message stays short.
_short = reprlib.Repr()
_short.maxlevel = 3
_short.maxstring = _short.maxother = _short.maxlong = _MOST_SHOWN


def shown(value: object) -> str:
    """Returns a value's ``repr`` for an error message, cut short.

    It takes no longer for a long or deeply nested value.
    """
    try:
        text = _short.repr(value)
    except Exception:  # a `__repr__` that fails must not hide the message
        return f"a {type(value).__name__}"
    return cut(text)


def cut(text: str) -> str:
    """Returns the first characters of a text of unknown origin, for an error message."""
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def is_unicode(text: str) -> bool:
    """Returns whether a text can be written in UTF-8. Half of a surrogate pair cannot: JSON may
    have one by an escape, and to encode it raises an error."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_json(path: Path | Traversable, most_bytes: int) -> Any:
    """Returns the tree in a JSON file, which is compressed if its name ends in ``.gz``.

    Raises:
        ValueError: the file or its uncompressed content has more than ``most_bytes``, or is not
            JSON.
        OSError: it cannot be read.
    """
    with open(path, "rb", opener=_opened) if isinstance(path, Path) else path.open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) <= most_bytes and path.name.endswith(".gz"):
        data = _decompressed(data, most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"larger than {most_bytes} bytes")
    try:
        return json.loads(data, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("not JSON that can be read: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not JSON, or truncated: {error}") from error


def _opened(path: str, flags: int) -> int:
    # Opening a named pipe would otherwise wait for its writer.
    return os.open(path, flags | os.O_NONBLOCK)


def _decompressed(data: bytes, most_bytes: int) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return file.read(most_bytes)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"not gzip, or truncated: {error}") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number that JSON may hold")


class Node:
    """A value in a JSON tree. Each method raises ValueError as ``place: what is wrong``."""

    __slots__ = ("place", "value")

    def __init__(self, value: Any, place: str) -> None:
        self.value = value
        self.place = place

    def error(self, allowed: str) -> ValueError:
        return ValueError(f"{self.place}: must be {allowed}, got {shown(self.value)}")

    def fields(self, *names: str) -> dict[str, Node]:
        """Returns the values of an object that has exactly these names."""
        given = self.object()
        for name in names:
            if name not in given:
                raise ValueError(f"{self._under(name)}: is missing")
        for name in given:
            if name not in names:
                raise ValueError(f"{self._under(name)}: is not a known field")
        return given

    def object(self) -> dict[str, Node]:
        if not isinstance(self.value, dict):
            raise self.error("an object")
        for name in self.value:
            Node(name, f"a name in {self.place}").text()
        return {name: Node(value, self._under(name)) for name, value in self.value.items()}

    def under(self, name: str, value: Any) -> Node:
        """Returns the node of an object's value under a name."""
        return Node(value, self._under(name))

    def items(self) -> Iterator[Node]:
        """Yields the values of a list, which may be long."""
        if not isinstance(self.value, list):
            raise self.error("a list")
        return (Node(value, f"{self.place}[{i}]") for i, value in enumerate(self.value))

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.error("a text")
        if not is_unicode(self.value):
            raise self.error("a text of valid Unicode")
        return self.value

    def one_of(self, allowed: Sequence[str]) -> str:
        if self.value not in allowed or not isinstance(self.value, str):
            raise self.error("one of " + ", ".join(allowed))
        return self.value

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.error("true or false")
        return self.value

    def integer(self, least: int = 0) -> int:
        value = self.value
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not least <= value < 2**63:
            raise self.error(f"a whole number from {least} to 2**63 - 1")
        return int(value)

    def number(self) -> float:
        """Returns a number from 0 to 1e15."""
        value = self.value
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= LARGEST_NUMBER:  # NaN fails every comparison
            raise self.error(f"a number from 0 to {LARGEST_NUMBER:g}")
        return float(value)

    def number_or_null(self) -> float | None:
        return None if self.value is None else self.number()

    def _under(self, name: str) -> str:
        return f"{self.place}.{cut(name)}" if self.place else cut(name)


def did_you_mean(name: object, allowed: Iterable[str | None]) -> str:
    """Returns the end of an error's text, with the nearest allowed name; empty if none is near."""
    names = [one for one in allowed if one is not None]
    near = difflib.get_close_matches(name, names, 1) if isinstance(name, str) else ()
    return f"; did you mean {near[0]!r}?" if near else ""
