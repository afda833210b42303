"""A store's file, as it may be found: sound, damaged, of another environment or a later version.

JSON in another layout than :mod:`layout`'s, as tools write it, is read too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cudnn_autotune.store import entry
from cudnn_autotune.store.content import Changes, Content
from cudnn_autotune.store.content import State as State
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.layout import FORMAT, HEAD, MIDDLE, VERSION, extended, extension, spans_of
from cudnn_autotune.store.layout import encode as encode

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
_FIELDS = {"format", "version", "environment", "decisions"}


def changed(content: Content, changes: Changes, environment: Environment) -> Content:
    """The sound file that holds ``content`` with these changes; entries of new names come last."""
    old = content.spans
    new = {name: line for name, line in changes.items() if line is not None and name not in old}
    if old and len(new) == len(changes):
        return extended(content, new)
    merged = {name: content.line(name) for name in old} | dict(changes)
    data = encode(environment, (line for line in merged.values() if line is not None))
    return decode(data, environment)


def decode(data: bytes, environment: Environment, before: Content | None = None) -> Content:
    """What ``data`` holds of ``environment``; never raises for what is in it. Damaged is what says
    that it is a store's; what does not is somebody else's, be it JSON or not.

    Args:
        before: what the file held earlier. Where entries have only been added since then, which is
            the rule, only these are looked at.
    """
    if before is not None and before.state is State.SOUND:
        known = extension(data, before, environment)
        if known is not None:
            return known
    if not data:
        return Content(State.ABSENT)
    newer = _newer(_head_version(data))
    if newer:
        return newer
    head_end = data.find(MIDDLE, len(HEAD)) if data.startswith(HEAD) else -1
    if head_end >= 0:
        try:
            other = Environment.from_json(_json(data[len(HEAD) : head_end]))
        except ValueError as error:
            return _rescued(data.split(b"\n"), environment, str(error))
        if other != environment:
            return _foreign(other)
        spans = spans_of(data, head_end + len(MIDDLE), environment)
        if spans is not None:
            return Content(State.SOUND, "", data, spans)
    try:
        return _of_tree(_json(data), environment)
    except ValueError as error:
        if not _is_of_a_store(data, environment):
            return Content(State.NO_STORE, _NO_STORE)
        return _rescued(data.split(b"\n"), environment, f"it is no whole JSON: {error}")


def _is_of_a_store(data: bytes, environment: Environment) -> bool:
    """Whether it begins as a store's file does, or with an entry of one that has lost its head."""
    if _MARK.search(data, 0, _BEGINNING):
        return True
    first, _, _ = data.lstrip(_BLANK).partition(b"\n")
    try:
        entry.parse(first.strip(_BLANK).removesuffix(b","), environment)
    except ValueError:
        return False
    return True


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
    """The environment that a store's file says it is of; ValueError where it says none, and of a
    version that this package cannot read."""
    if data.startswith(HEAD):
        end = data.find(MIDDLE, len(HEAD))
        return Environment.from_json(_json(data[len(HEAD) : end]))
    newer = _newer(_head_version(data))
    tree = {} if newer else _json(data)
    if not newer and (not isinstance(tree, dict) or tree.get("format") != FORMAT):
        raise ValueError(_NO_STORE)
    newer = newer or _newer(tree.get("version"))
    if newer:
        raise ValueError(newer.why)
    return Environment.from_json(tree.get("environment"))


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _head_version(data: bytes) -> int | None:
    match = _VERSION.match(data)
    return int(match[1]) if match else None


def _newer(version: object) -> Content | None:
    """The content of a file of a later version than this package reads; None of any other."""
    if type(version) is not int or version <= VERSION:
        return None
    return Content(State.NEWER, f"it is of version {version}, this package reads {VERSION}")


def _foreign(other: Environment) -> Content:
    return Content(State.FOREIGN, f"it is of another environment ({other.file_name})")


def _of_tree(tree: Any, environment: Environment) -> Content:
    """Of JSON that is laid out otherwise, or that is no store of this environment."""
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        return Content(State.NO_STORE, _NO_STORE)
    version = tree.get("version")
    newer = _newer(version)
    if newer:
        return newer
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
        (type(version) is not int or version != VERSION, f"its version must be {VERSION}"),
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
        line = line.strip(_BLANK).removesuffix(b",")
        with suppress(ValueError):
            entry.parse(line, environment)
            whole.append(line)
    data = encode(environment, whole)
    begin = data.find(MIDDLE) + len(MIDDLE)
    spans = spans_of(data, begin, environment) or {}
    return Content(State.DAMAGED, why, data, spans)
