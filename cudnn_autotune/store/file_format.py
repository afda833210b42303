"""The format of a store's file: a header line, followed by one entry in each line (``codec``).

If two entries have the same name, the later one is valid. So a change only appends a line:

    {"format": "cudnn-autotune store", "version": 2, "environment": {...}, "lines": 2, ...}
    {"crc32":"5d1f00aa","name":"fprop x=64x64x56x56 ... sampling=auto","decision":{...}}
    {"crc32":"0c9be2f1","name":"dgrad x=64x64x56x56 ... sampling=auto","decision":null}

A last line without a line feed is still being written, or its writer was killed. It is valid only
if its checksum is right. Blank lines have no meaning.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from cudnn_autotune.store import codec
from cudnn_autotune.store.environment import Environment

FORMAT = "cudnn-autotune store"
VERSION = 2
"""The version of the format. It rises if the package before would read a new line wrongly, or the
package after could not read an old line. An added field with a default does neither
(docs/reference/store.md)."""

# This finds the version also in a file of an otherwise unknown format.
_VERSION = re.compile(
    rb'\s*\{\s*"format"\s*:\s*"%s"\s*,\s*"version"\s*:\s*(\d{1,9})\b' % FORMAT.encode()
)
# A file that is not valid JSON is a damaged store if it has this mark near its beginning.
_MARK = re.compile(rb'"format"\s*:\s*"%s"' % FORMAT.encode())
_BEGINNING = 256
_NO_STORE = f"it is no file of {FORMAT!r}"
# A power failure leaves zero bytes in blocks that were allocated but not written.
_BLANK = b" \t\r\n\0"
_LINE = re.compile(rb"[^ \t\r\n\0][^\n]*")


class State(Enum):
    """The condition of a store's file."""

    ABSENT = "absent"
    SOUND = "sound"
    DAMAGED = "damaged"
    FOREIGN = "foreign"
    """The file belongs to another environment."""
    NO_STORE = "no store"
    OTHER_VERSION = "other version"
    """The file has a version that this package cannot read."""
    UNREADABLE = "unreadable"


@dataclass
class Content:
    """The intact entries of a file, as lines that are not parsed yet."""

    state: State
    why: str = ""
    """The reason why the state is not SOUND; empty if it is."""
    environment: Environment | None = None
    """The environment of the entries; None if it is unknown, and there are none."""
    entries: dict[bytes, bytes] = field(default_factory=dict)
    """Entry name to line, without a line feed."""
    head: bytes = b""
    """The header line. It is empty if no line can be appended, as to a damaged file."""
    end: int = 0
    """The number of bytes up to and including the last line feed."""
    last: bytes = b""
    """The last line that ends in a line feed."""
    tail: bytes = b""
    """The bytes behind ``end``: a line without a line feed, or nothing."""
    is_tail_whole: bool = False
    """Whether ``tail`` is an entry with the right checksum."""
    lines: int = 0
    """The number of intact lines behind the header, including replaced entries and removals."""

    def apply(self, name: bytes, line: bytes) -> None:
        """Applies an intact line, which adds or removes an entry."""
        self.lines += 1
        if codec.is_removal(line):
            self.entries.pop(name, None)
        else:
            self.entries[name] = line

    def extend(self, data: bytes, begin: int = 0) -> int:
        """Applies the bytes behind ``end``, which are ``data`` from ``begin`` on; returns the
        number of damaged lines."""
        assert self.environment is not None
        seed = codec.seed(self.environment)
        end = data.rfind(b"\n", begin) + 1 or begin
        zeros = data.startswith(b"\0", begin, end) + data.count(b"\n\0", begin, end)
        damaged = zeros
        for place, line in _lines(data, begin, end):
            name = codec.name_in(line, seed)
            if name is not None:
                self.apply(name, line)
            elif line.strip() and data[place - 1 : place] != b"\0":
                damaged += 1
        self.tail = data[end:]
        if end > begin:
            self.last = data[max(data.rfind(b"\n", begin, end - 1) + 1, begin) : end]
            self.end += end - begin
        name = codec.name_in(self.tail, seed)
        self.is_tail_whole = name is not None
        if name is not None:
            self.apply(name, self.tail)
        return damaged


def encode(environment: Environment, lines: Iterable[bytes], identity: str = "") -> bytes:
    """Returns the bytes of a file that holds these entries. Its ``identity`` (by default a checksum
    of the entries) distinguishes it from others that begin with the same entries."""
    lines = list(lines)
    body = b"".join(line + b"\n" for line in lines)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "environment": environment.to_json(),
        "lines": len(lines),
        "id": identity or f"{zlib.crc32(body):08x}",
        "ranking": codec.COLUMNS,
    }
    return json.dumps(header).encode() + b"\n" + body


def decode(data: bytes, environment: Environment | None = None) -> Content:
    """Returns the content of a file. It does not raise for any ``data``.

    An unreadable file is DAMAGED if it is recognisable as a store's, else NO_STORE. With
    ``environment`` None, the header names the decisions' environment.
    """
    if not data:
        return Content(State.ABSENT, _NO_STORE)
    if (match := _VERSION.match(data)) and (other := _of_other_version(int(match[1]))):
        return other
    begin = data.find(b"\n") + 1 or len(data)
    head = data[:begin]
    tree = _object(head)
    if tree is None or tree.get("format") != FORMAT:
        if (tree is None and _MARK.search(data, 0, _BEGINNING)) or _begins_with_entry(
            data, environment
        ):
            return _rescued(data, environment, "its beginning is damaged")
        return Content(State.NO_STORE, _NO_STORE)
    version = tree.get("version")
    if other := _of_other_version(version):
        return other
    try:
        own = Environment.from_json(tree.get("environment"))
    except ValueError as error:
        return _rescued(data, environment, str(error))
    if environment not in (None, own):
        return Content(State.FOREIGN, f"it is of another environment ({own.file_name})", own)
    if version != VERSION or type(version) is not int:
        return _rescued(data, own, f"its version is not {VERSION}")
    content = Content(State.SOUND, "", own, head=head, last=head, end=len(head))
    damaged = content.extend(data, begin)
    if damaged:
        content.state, content.why = State.DAMAGED, f"{damaged} of its lines cannot be read"
    elif content.lines < _count(tree.get("lines")) or not head.endswith(b"\n"):
        content.state, content.why = State.DAMAGED, "its end is missing"
    return content


def _object(data: bytes) -> dict[str, Any] | None:
    """Returns the JSON object in ``data``, {} for other JSON, or None if it is not JSON."""
    try:
        tree = json.loads(data)
    except (RecursionError, ValueError):
        return None
    return tree if isinstance(tree, dict) else {}


def _count(value: object) -> int:
    return value if type(value) is int else 0


def _of_other_version(version: object) -> Content | None:
    """Returns the content of a file of an unreadable version; None for another version."""
    if type(version) is not int or version < 1 or version == VERSION:
        return None
    return Content(State.OTHER_VERSION, f"it is of version {version}, this package reads {VERSION}")


def _lines(data: bytes, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yields each line that is not blank, stripped, with its place."""
    for match in _LINE.finditer(data, begin, end):
        yield match.start(), match[0].rstrip(_BLANK)


def _begins_with_entry(data: bytes, environment: Environment | None) -> bool:
    """Returns whether the first line is an entry, as in a file that lost its header."""
    first, _, _ = data.lstrip(_BLANK).partition(b"\n")
    return bool(_rescued(first, environment, "").lines)


def _rescued(data: bytes, environment: Environment | None, why: str) -> Content:
    """Returns the content of a file that is damaged because of ``why``, with its intact entries."""
    content = Content(State.DAMAGED, why, environment)
    if environment is None:
        return content
    seed = codec.seed(environment)
    for _, line in _lines(data, 0, len(data)):
        name = codec.name_in(line, seed)
        if name is not None:
            content.apply(name, line)
    return content
