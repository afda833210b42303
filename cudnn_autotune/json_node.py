"""Reading JSON that others wrote: every value with its place, every complaint with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST = 1e15
"""The largest number; above it JSON readers of other languages may give up."""


class Node:
    """A value in a JSON tree. Every method raises ValueError, ``place: what is wrong``."""

    def __init__(self, value: Any, place: str) -> None:
        self.value = value
        self.place = place

    def error(self, allowed: str) -> ValueError:
        shown = repr(self.value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return ValueError(f"{self.place}: must be {allowed}, got {shown}")

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
            shown = "2**63 - 1" if most == 2**63 - 1 else most
            raise self.error(f"a whole number from {least} to {shown}")
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
        return f"{self.place}.{name}" if self.place else name
