"""The code blocks of README.md and docs/."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import checkout

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One fenced block of a page."""

    page: str
    """Path from the root of the checkout."""
    heading: str
    """The heading that the block is under."""
    language: str
    """What the fence names; empty for none."""
    text: str

    def __str__(self) -> str:
        return f"{Path(self.page).stem}: {self.heading}"


def snippets(page: str) -> list[Snippet]:
    """Returns the blocks of a page, in order."""
    text = (checkout.ROOT / page).read_text(encoding="utf-8")
    headings = [
        (found.start(), found[1])
        for found in re.finditer(r"^#+ (.*)$", _FENCE.sub(_blank, text), re.MULTILINE)
    ]
    return [
        Snippet(
            page,
            [heading for start, heading in headings if start < block.start()][-1],
            block[1],
            block[2],
        )
        for block in _FENCE.finditer(text)
    ]


def _blank(block: re.Match[str]) -> str:
    """A comment of a program is no heading."""
    return " " * len(block[0])
