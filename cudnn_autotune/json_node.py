"""Reading JSON that others wrote: every value with its place, every complaint with it."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

MOST = 1e15
"""The largest number; above it JSON readers of other languages may give up."""
_MOST_SHOWN = 80
_short = reprlib.Repr()  # it neither looks at all of a long list nor goes down all of a deep one
_short.maxlevel = 3
_short.maxstring = _short.maxother = _short.maxlong = _MOST_SHOWN


def shown(value: object) -> str:
    """What a message says of a value that is not allowed: its ``repr``, cut short; at once however
    long or deeply nested the value is."""
    try:
        text = _short.repr(value)
    except Exception:  # whatever it is, the message is to come out
        return f"a {type(value).__name__}"
    return cut(text)


def cut(text: str) -> str:
    """A text that somebody else wrote, as a message says it: the first of its characters."""
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


class Node:
    """A value in a JSON tree. Every method raises ValueError, ``place: what is wrong``."""

    def __init__(self, value: Any, place: str) -> None:
        self.value = value
        self.place = place

    def error(self, allowed: str) -> ValueError:
        return ValueError(f"{self.place}: must be {allowed}, got {shown(self.value)}")

    def fields(self, *names: str) -> dict[str, Node]:
        """Of an object that has exactly these."""
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
        return {name: Node(value, self._under(name)) for name, value in self.value.items()}

    def items(self) -> list[Node]:
        if not isinstance(self.value, list):
            raise self.error("a list")
        return [Node(value, f"{self.place}[{i}]") for i, value in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.error("a text")
        return self.value

    def one_of(self, allowed: Sequence[str]) -> str:
        if self.value not in allowed or not isinstance(self.value, str):
            raise self.error("one of " + ", ".join(allowed))
        return self.value

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.error("true or false")
        return self.value

    def integer(self, least: int = 0, most: int = 2**63 - 1) -> int:
        value = self.value
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not least <= value <= most:
            highest = "2**63 - 1" if most == 2**63 - 1 else most
            raise self.error(f"a whole number from {least} to {highest}")
        return int(value)

    def number(self, *, above: float | None = None) -> float:
        """At most 1e15, and at least 0, or more than ``above``."""
        value = self.value
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # NaN is in no range.
        if is_number and (value >= 0 if above is None else above < value) and value <= MOST:
            return float(value)
        limit = "from 0" if above is None else f"above {above:g}"
        raise self.error(f"a number {limit} to {MOST:g}")

    def number_or_null(self, *, above: float | None = None) -> float | None:
        return None if self.value is None else self.number(above=above)

    def _under(self, name: str) -> str:
        return f"{self.place}.{cut(name)}" if self.place else cut(name)
