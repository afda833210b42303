"""A store's file: JSON with one entry a line, so that it can be read, compared and indexed by line.

    {"format": "cudnn-autotune store", "version": 1,
    "environment": {"gpu": "NVIDIA H200", ...},
    "decisions": {
    "fprop x=64x64x56x56 ... sampling=auto": {...},
    "dgrad x=64x64x56x56 ... sampling=auto": {...}
    }}

Another layout of the same JSON, as tools write it, is read too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from cudnn_autotune.store import entry
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.precedence import prevailing

FORMAT = "cudnn-autotune store"
VERSION = 1

_HEAD = f'{{"format": "{FORMAT}", "version": {VERSION},\n"environment": '.encode()
_MIDDLE = b',\n"decisions": {\n'
_TAIL = b"}}\n"
# Also of a file whose later lines are in a form yet unknown.
_VERSION = re.compile(
    rb'\s*\{\s*"format"\s*:\s*"%s"\s*,\s*"version"\s*:\s*(\d{1,9})\b' % FORMAT.encode()
)
_FIELDS = {"format", "version", "environment", "decisions"}

Span = tuple[int, int]
Changes = Mapping[bytes, bytes | None]
"""Name of an entry -> its new line; None: it goes."""


class State(Enum):
    """What a file turned out to be."""

    ABSENT = "absent"
    SOUND = "sound"
    DAMAGED = "damaged"
    FOREIGN = "foreign"
    """Of another environment, or no store at all."""
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


def encode(environment: Environment, lines: Iterable[bytes]) -> bytes:
    """The file that holds these entries."""
    body = b",\n".join(lines)
    head = _HEAD + json.dumps(environment.to_json()).encode() + _MIDDLE
    return head + body + (b"\n" if body else b"") + _TAIL


def changed(content: Content, changes: Changes, environment: Environment) -> Content:
    """The sound file that holds ``content`` with these changes; entries of new names come last."""
    old = content.spans
    lines = [line for line in changes.values() if line is not None]
    if old and len(lines) == len(changes) and not any(name in old for name in changes):
        end = _end(content)
        data = b",\n".join([content.data[:end], *lines]) + b"\n" + _TAIL
        spans = dict(old)
        for name, line in changes.items():
            spans[name] = (end + 2, end + 2 + len(line or b""))
            end = spans[name][1]
        return Content(State.SOUND, "", data, spans)
    merged = {name: content.line(name) for name in old} | dict(changes)
    data = encode(environment, (line for line in merged.values() if line is not None))
    return decode(data, environment)


def _end(content: Content) -> int:
    """Where the last entry of a file ends that has some."""
    return len(content.data) - len(_TAIL) - 1


def decode(data: bytes, environment: Environment, before: Content | None = None) -> Content:
    """What ``data`` holds of ``environment``; never raises for what is in it.

    Args:
        before: what the file held earlier. Where entries have only been added since then, which is
            the rule, only these are looked at.
    """
    if before is not None and before.state is State.SOUND and before.spans:
        end = _end(before)
        if data.startswith(before.data[:end]) and data.startswith(b",\n", end):
            spans = _spans(data, end + 2, environment, before.spans)
            if spans is not None:
                return Content(State.SOUND, "", data, spans)
    version = _VERSION.match(data)
    if version and int(version[1]) > VERSION:
        return _newer(int(version[1]))
    head_end = data.find(_MIDDLE, len(_HEAD)) if data.startswith(_HEAD) else -1
    if head_end >= 0:
        try:
            other = Environment.from_json(_json(data[len(_HEAD) : head_end]))
        except ValueError as error:
            return _rescued(data.split(b"\n"), environment, str(error))
        if other != environment:
            return _foreign(other)
        spans = _spans(data, head_end + len(_MIDDLE), environment)
        if spans is not None:
            return Content(State.SOUND, "", data, spans)
    try:
        return _of_tree(_json(data), environment)
    except ValueError as error:
        return _rescued(data.split(b"\n"), environment, f"it is no whole JSON: {error}")


def checked(content: Content, environment: Environment) -> Content:
    """With every entry parsed, which opening a file does not: damaged if one of them is no JSON."""
    for line in content.lines():
        try:
            entry.parse(line, environment)
        except entry.NoEntryError as error:
            return _rescued(content.lines(), environment, str(error))
        except ValueError:
            continue
    return content


def environment_of(data: bytes) -> Environment:
    """The environment that a store's file says it is of; ValueError where it says none."""
    if data.startswith(_HEAD):
        end = data.find(_MIDDLE, len(_HEAD))
        return Environment.from_json(_json(data[len(_HEAD) : end]))
    tree = _json(data)
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise ValueError(f"not a file of {FORMAT!r}")
    return Environment.from_json(tree.get("environment"))


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _newer(version: int) -> Content:
    return Content(State.NEWER, f"it is of version {version}, this package reads {VERSION}")


def _foreign(other: Environment) -> Content:
    return Content(State.FOREIGN, f"it is of another environment ({other.file_name})")


def _spans(
    data: bytes, begin: int, environment: Environment, before: Mapping[bytes, Span] | None = None
) -> dict[bytes, Span] | None:
    """Of a body laid out as :func:`encode` does; None of any other. No entry is parsed.

    Args:
        begin, before: where entries begin that are not in ``before``.
    """
    if not data.endswith(_TAIL):
        return None
    last = len(data) - len(_TAIL)
    spans = dict(before or {})
    repeated: dict[bytes, list[Span]] = {}
    find, has = data.find, data.startswith
    while begin < last:
        end = find(b"\n", begin, last)
        if end < 0:
            return None
        is_last = end + 1 == last
        close = end if is_last else end - 1
        name_end = find(b'"', begin + 1, close) + 1
        if not (has(b'"', begin) and has(b": {", name_end)):
            return None
        if not has(b"}" if is_last else b"},", close - 1):
            return None
        name = data[begin:name_end]
        if name in spans:  # two files joined by hand
            repeated.setdefault(name, [spans[name]]).append((begin, close))
        spans[name] = (begin, close)
        begin = end + 1
    for name, places in repeated.items():
        lines = [data[slice(*place)] for place in places]
        spans[name] = places[_best(lines, environment)]
    return spans


def _best(lines: Sequence[bytes], environment: Environment) -> int:
    """Which of several entries of one name counts."""
    decisions: dict[int, Decision] = {}
    for number, line in enumerate(lines):
        with suppress(ValueError):
            decisions[number] = entry.decode(line, environment)
    kept = prevailing(decisions.values())
    return next((n for n, decision in decisions.items() if decision in kept), len(lines) - 1)


def _of_tree(tree: Any, environment: Environment) -> Content:
    """Of JSON that is laid out otherwise, or that is no store of this environment."""
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        return Content(State.FOREIGN, f"it is no file of {FORMAT!r}")
    version = tree.get("version")
    if type(version) is int and version > VERSION:
        return _newer(version)
    decisions = tree.get("decisions")
    entries = decisions.items() if isinstance(decisions, dict) else ()
    lines = [b"%s: %s" % (_dumped(name), _dumped(value)) for name, value in entries]
    try:
        other = Environment.from_json(tree.get("environment"))
    except ValueError as error:
        return _rescued(lines, environment, str(error))
    if other != environment:
        return _foreign(other)
    for wrong, why in (
        (type(version) is not int or version != VERSION, f"its version is {version!r}"),
        (set(tree) != _FIELDS, f"its fields must be {', '.join(sorted(_FIELDS))}"),
        (not isinstance(decisions, dict), "its decisions must be an object"),
    ):
        if wrong:
            return _rescued(lines, environment, why)
    content = _rescued(lines, environment, "")
    if len(content.spans) < len(lines):
        return replace(content, why="some of its entries are damaged, or of another environment")
    return replace(content, state=State.SOUND)


def _dumped(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b""


def _rescued(lines: Iterable[bytes], environment: Environment, why: str) -> Content:
    """The content of a damaged file: the entries among ``lines``, as a file of their own."""
    whole = []
    for line in lines:
        # Zeros are what a power failure leaves of blocks that were not written.
        line = line.strip(b" \t\r\0").removesuffix(b",")
        with suppress(ValueError):
            entry.parse(line, environment)
            whole.append(line)
    data = encode(environment, whole)
    begin = data.find(_MIDDLE) + len(_MIDDLE)
    spans = _spans(data, begin, environment) or {}
    return Content(State.DAMAGED, why, data, spans)
