"""What a store's file holds: lines that are not parsed before they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

Span = tuple[int, int]
Changes = Mapping[bytes, bytes | None]
"""Name of an entry -> its new line; None: it goes."""


class State(Enum):
    """What a file turned out to be."""

    ABSENT = "absent"
    SOUND = "sound"
    DAMAGED = "damaged"
    FOREIGN = "foreign"
    """Of another environment."""
    NO_STORE = "no store"
    NEWER = "newer"
    """Of a version that this package cannot read."""
    UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Content:
    """The entries of a file, not yet parsed: those that are intact, where it is damaged."""

    state: State
    why: str = ""
    """What is wrong, where it is not sound."""
    data: bytes = b""
    spans: Mapping[bytes, Span] = field(default_factory=dict)
    """Name of an entry -> where its line begins and ends in ``data``."""

    def line(self, name: bytes) -> bytes | None:
        """The entry of this name."""
        span = self.spans.get(name)
        return None if span is None else self.data[span[0] : span[1]]

    def lines(self) -> list[bytes]:
        """The entries, in the order of the file."""
        return [self.data[begin:end] for begin, end in self.spans.values()]
