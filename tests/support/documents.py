"""The code blocks of README.md and docs/."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from support import checkout

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


PAGES = [
    "README.md",
    *sorted(
        path.relative_to(checkout.ROOT).as_posix()
        for path in (checkout.ROOT / "docs").rglob("*.md")
        if path.parent.name != "results"
    ),
]
# What a snippet leaves to its reader: a model and its inputs, on the reader's device.
YOURS = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
).to(device)
input = images = batch = x = torch.randn(4, 3, 16, 16, device=device)
target = torch.randn(4, 8, 16, 16, device=device)
criterion = torch.nn.functional.mse_loss
def train(model):
    model(images).sum().backward()
def of_yours():
    import cudnn_autotune
    return cudnn_autotune.ConvProblem("fprop", (4, 3, 16, 16), (8, 3, 3, 3), padding=1)
problem = of_yours()
del torch
"""


def programs(tested_elsewhere: Container[str]) -> list[tuple[str, str]]:
    """Returns a name and a program for each Python snippet of README.md and docs/.

    The snippets of README.md make one program: the page is read from its beginning.
    """
    found = []
    for page in PAGES:
        texts = [
            s for s in snippets(page) if s.language == "python" and page not in tested_elsewhere
        ]
        if page == "README.md":
            found.append((page, "\n".join(snippet.text for snippet in texts)))
        else:
            found += [(f"{page}, {i}, {s.heading}", s.text) for i, s in enumerate(texts)]
    return found
