"""The sentences of docstrings and comments.

None begins with a fragment, such as "Of a block: ...", whose sentence the reader must complete from
the code around it. No sentence of a docstring is long.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import cudnn_autotune as ca

PACKAGE = Path(ca.__file__).parent
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())
FILES = ("__init__", "__main__")
MOST_WORDS = 30
"""The words of a sentence at most."""
FRAGMENT = re.compile("and|as|but|how|of|than|that|those|what|where|which|whose|with")


def openings(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the first word of each docstring, of a field's too, and of each comment.

    Consecutive lines of comments are one comment.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield node.lineno, first_word(text)
    previous = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            is_alone = token.line.lstrip().startswith("#")
            if not is_alone or line != previous + 1:
                yield line, first_word(token.string)
            previous = line if is_alone else 0


def long_sentences(source: str) -> list[str]:
    """The sentences of docstrings, of fields' too, that have more than ``MOST_WORDS`` words."""
    texts = [
        text
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(text := node.value.value, str)
    ]
    sentences = (s for text in texts for s in re.split(r"(?<=[.:;])\s+|\n\n", text))
    return [" ".join(s.split()) for s in sentences if len(s.split()) > MOST_WORDS]


def first_word(text: str) -> str:
    found = re.search(r"\w+", text)
    return found[0].lower() if found else ""


def fragments(source: str) -> list[int]:
    """The lines in which a text begins as fragments do."""
    return sorted(line for line, word in openings(source) if FRAGMENT.fullmatch(word))


def test_fragments_are_found() -> None:
    source = '''
"""What a module does."""
LIMIT = 3  # of threads
# A comment of two lines,
# of which the second does not count.
class Block:
    """A block."""

    threads: int
    """Of a warp."""

    def run(self) -> None:
        """Runs.

        As it says.
        """
        # With a comment.
'''
    assert fragments(source) == [2, 3, 10, 17]


def test_long_sentences_are_found() -> None:
    words = " ".join(["word"] * MOST_WORDS)
    source = f'"""{words}. {words} more."""\n{words.split()[0]} = "{words} more"\n'
    assert long_sentences(source) == [f"{words} more."]


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_written_in_sentences(file: str) -> None:
    assert fragments((PACKAGE / f"{file}.py").read_text("utf-8")) == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_written_in_sentences(room: str) -> None:
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert files
    sources = {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in files}
    assert {name: found for name, text in sources.items() if (found := fragments(text))} == {}
    assert {name: found for name, text in sources.items() if (found := long_sentences(text))} == {}
