"""A store's file: a header, and behind it an entry a line. Of two entries of one name the later one
counts, so that a change is a line more.

    {"format": "cudnn-autotune store", "version": 2, "environment": {...}, "lines": 2, ...}
    {"crc32":"5d1f00aa","name":"fprop x=64x64x56x56 ... sampling=auto","decision":{...}}
    {"crc32":"0c9be2f1","name":"dgrad x=64x64x56x56 ... sampling=auto","decision":null}

A last line without an end is one that is being written, or that its writer could not finish: it
counts only if it is whole. Files of version 1 are read.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from cudnn_autotune.store import entry, version1
from cudnn_autotune.store.compact import COLUMNS
from cudnn_autotune.store.environment import Environment

FORMAT = "cudnn-autotune store"
VERSION = 2

# Also of a file whose later lines are in a form yet unknown.
_VERSION = re.compile(
    rb'\s*\{\s*"format"\s*:\s*"%s"\s*,\s*"version"\s*:\s*(\d{1,9})\b' % FORMAT.encode()
)
# What no JSON parser takes is a store's if it says so here.
_MARK = re.compile(rb'"format"\s*:\s*"%s"' % FORMAT.encode())
_BEGINNING = 256
_NO_STORE = f"it is no file of {FORMAT!r}"
# Zeros are what a power failure leaves of blocks that were not written.
_BLANK = b" \t\r\n\0"


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


@dataclass
class Content:
    """The entries of a file, not yet parsed: those that are intact, where it is damaged."""

    state: State
    why: str = ""
    """What is wrong, where it is not sound."""
    entries: dict[bytes, bytes] = field(default_factory=dict)
    """Name -> line, without its end."""
    head: bytes = b""
    """The header's line; empty where lines cannot be appended, as to a file of version 1."""
    end: int = 0
    """Bytes from the file's beginning to the end of its last line that has one."""
    last: bytes = b""
    """That line."""
    tail: bytes = b""
    """What is behind it."""
    is_tail_whole: bool = False
    lines: int = 0
    """Those behind the header: of entries, of earlier ones of their names, and of removals."""

    def apply(self, name: bytes, line: bytes) -> None:
        """Does what a line says that is not damaged."""
        self.lines += 1
        if entry.is_removal(line):
            self.entries.pop(name, None)
        else:
            self.entries[name] = line

    def extend(self, data: bytes, environment: Environment) -> int:
        """Applies what the file has behind ``end``; returns how many lines of it are damaged."""
        *lines, self.tail = data.split(b"\n")
        seed, damaged = entry.seed(environment), 0
        for line in lines:
            whole = line.strip(_BLANK)  # a tool may have changed the lines' ends
            name = entry.name_in(whole, seed)
            if name is not None:
                self.apply(name, whole)
            damaged += (name is None and line.strip() != b"") or line.startswith(b"\0")
        if lines:
            self.last = lines[-1] + b"\n"
            self.end += len(data) - len(self.tail)
        name = entry.name_in(self.tail, seed)
        self.is_tail_whole = name is not None
        if name is not None:
            self.apply(name, self.tail)
        return damaged


def encode(environment: Environment, lines: Iterable[bytes], identity: str = "") -> bytes:
    """The file that holds these entries.

    Args:
        identity: tells it from another file with the same name and beginning; empty: a digest of
            the entries.
    """
    lines = list(lines)
    body = b"".join(line + b"\n" for line in lines)
    header = {
        "format": FORMAT,
        "version": VERSION,
        "environment": environment.to_json(),
        "lines": len(lines),
        "id": identity or f"{zlib.crc32(body):08x}",
        "ranking": COLUMNS,
    }
    return json.dumps(header).encode() + b"\n" + body


def decode(data: bytes, environment: Environment) -> Content:
    """What ``data`` holds of ``environment``; never raises for what is in it. Damaged is what says
    that it is a store's; what does not is somebody else's, be it JSON or not."""
    if not data:
        return Content(State.ABSENT)
    if (match := _VERSION.match(data)) and (newer := _newer(int(match[1]))):
        return newer
    head, _, body = data.partition(b"\n")
    tree = _object(head) or _object(data)
    if tree is None or tree.get("format") != FORMAT:
        if (tree is None and _MARK.search(data, 0, _BEGINNING)) or _begins_with_entry(
            data, environment
        ):
            return _rescued(data, environment, "its beginning is damaged")
        return Content(State.NO_STORE, _NO_STORE)
    version = tree.get("version")
    if newer := _newer(version):
        return newer
    try:
        other = Environment.from_json(tree.get("environment"))
    except ValueError as error:
        return _rescued(data, environment, str(error), tree)
    if other != environment:
        return Content(State.FOREIGN, f"it is of another environment ({other.file_name})")
    if type(version) is int and version == VERSION:
        content = Content(State.SOUND, head=head + b"\n", last=head + b"\n", end=len(head) + 1)
        damaged = content.extend(body, environment)
        if damaged:
            content.state, content.why = State.DAMAGED, f"{damaged} of its lines cannot be read"
        elif content.lines < _count(tree.get("lines")):
            content.state, content.why = State.DAMAGED, "its end is missing"
        return content
    decisions = tree.get("decisions")
    if type(version) is not int or version != version1.VERSION:
        return _rescued(data, environment, f"its version must be {VERSION}", tree)
    if set(tree) != version1.FIELDS or not isinstance(decisions, dict):
        return _rescued(data, environment, "its fields are not those of its version", tree)
    entries = version1.entries(decisions, environment)
    if len(entries) == len(decisions):
        return Content(State.SOUND, entries=entries)
    return Content(State.DAMAGED, "some of its entries are no entries of it", entries)


def environment_of(data: bytes) -> Environment:
    """The environment that a store's file says it is of; ValueError where it says none, and of a
    version that this package cannot read."""
    if (match := _VERSION.match(data)) and (newer := _newer(int(match[1]))):
        raise ValueError(newer.why)
    tree = _object(data.partition(b"\n")[0]) or _object(data)
    if tree is None and not _MARK.search(data, 0, _BEGINNING):
        raise ValueError(_NO_STORE)
    if tree is None:
        raise ValueError("its beginning is damaged")
    if tree.get("format") != FORMAT:
        raise ValueError(_NO_STORE)
    if newer := _newer(tree.get("version")):
        raise ValueError(newer.why)
    return Environment.from_json(tree.get("environment"))


def _object(data: bytes) -> dict[str, Any] | None:
    """The JSON object in ``data``; an empty one for JSON that is none, None for what is no JSON."""
    try:
        tree = json.loads(data)
    except (RecursionError, ValueError):
        return None
    return tree if isinstance(tree, dict) else {}


def _count(value: object) -> int:
    return value if type(value) is int else 0


def _newer(version: object) -> Content | None:
    """The content of a file of a later version than this package reads; None of any other."""
    if type(version) is not int or version <= VERSION:
        return None
    return Content(State.NEWER, f"it is of version {version}, this package reads {VERSION}")


def _begins_with_entry(data: bytes, environment: Environment) -> bool:
    """Whether it is a file that has lost its head."""
    first, _, _ = data.lstrip(_BLANK).partition(b"\n")
    return _name_in_any(first, environment) is not None


def _rescued(
    data: bytes, environment: Environment, why: str, tree: dict[str, Any] | None = None
) -> Content:
    """The content of a damaged file: whatever entries are in it.

    Args:
        tree: what it is as JSON.
    """
    content = Content(State.DAMAGED, why)
    if tree is not None and isinstance(tree.get("decisions"), dict):
        content.entries = version1.entries(tree["decisions"], environment)
        return content
    for line in data.split(b"\n"):
        line = line.strip(_BLANK).removesuffix(b",")
        name = _name_in_any(line, environment)
        if name is not None:
            content.apply(name, line)
    return content


def _name_in_any(line: bytes, environment: Environment) -> bytes | None:
    """The name in a line of this version, or of version 1."""
    line = line.strip(_BLANK).removesuffix(b",")
    name = entry.name_in(line, entry.seed(environment))
    return version1.name_in(line, environment) if name is None else name
