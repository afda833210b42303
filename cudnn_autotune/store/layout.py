"""A store's file: JSON with one entry a line, so that it can be read, compared and indexed by line.

    {"format": "cudnn-autotune store", "version": 1,
    "environment": {"gpu": "NVIDIA H200", ...},
    "decisions": {
    "fprop x=64x64x56x56 ... sampling=auto": {...},
    "dgrad x=64x64x56x56 ... sampling=auto": {...}
    }}

It is valid JSON at any time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from cudnn_autotune.store import entry
from cudnn_autotune.store.content import Content, Span, State
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.precedence import prevailing

FORMAT = "cudnn-autotune store"
VERSION = 1

HEAD = f'{{"format": "{FORMAT}", "version": {VERSION},\n"environment": '.encode()
MIDDLE = b',\n"decisions": {\n'
TAIL = b"}}\n"


def encode(environment: Environment, lines: Iterable[bytes]) -> bytes:
    """The file that holds these entries."""
    body = b",\n".join(lines)
    head = HEAD + json.dumps(environment.to_json()).encode() + MIDDLE
    return head + body + (b"\n" if body else b"") + TAIL


def extended(content: Content, lines: Mapping[bytes, bytes]) -> Content:
    """``content``, which has entries, and behind them more, of names that are not in it."""
    end = _end(content)
    # The bulk is copied once.
    parts: list[bytes | memoryview] = [memoryview(content.data)[:end]]
    for line in lines.values():
        parts += [b",\n", line]
    data = b"".join([*parts, b"\n", TAIL])
    spans = dict(content.spans)
    for name, line in lines.items():
        spans[name] = (end + 2, end + 2 + len(line))
        end = spans[name][1]
    return Content(State.SOUND, "", data, spans)


def extension(data: bytes, before: Content, environment: Environment) -> Content | None:
    """The content of ``data``, where it is that of ``before`` with more behind it; else None."""
    end = _end(before)
    if not (before.spans and data.startswith(before.data[:end]) and data.startswith(b",\n", end)):
        return None
    spans = spans_of(data, end + 2, environment, before.spans)
    return None if spans is None else Content(State.SOUND, "", data, spans)


def _end(content: Content) -> int:
    """Where the last of its entries ends."""
    return len(content.data) - len(TAIL) - 1


def spans_of(
    data: bytes, begin: int, environment: Environment, before: Mapping[bytes, Span] | None = None
) -> dict[bytes, Span] | None:
    """Of a body laid out as :func:`encode` does; None of any other. No entry is parsed, but those
    whose name is there twice.

    Args:
        begin, before: where entries begin that are not in ``before``.
    """
    if not data.endswith(TAIL):
        return None
    last = len(data) - len(TAIL)
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
    try:
        for name, places in repeated.items():
            lines = [data[slice(*place)] for place in places]
            spans[name] = places[_best(lines, environment)]
    except entry.NoEntryError:
        return None
    return spans


def _best(lines: Sequence[bytes], environment: Environment) -> int:
    """Which of several entries of one name counts; NoEntryError where one of them is none."""
    decisions: dict[int, Decision] = {}
    for number, line in enumerate(lines):
        try:
            decisions[number] = entry.decode(line, environment)
        except entry.NoEntryError:
            raise  # nobody would ever look at it again
        except ValueError:
            continue
    kept = prevailing(decisions.values())
    return next((n for n, decision in decisions.items() if decision in kept), len(lines) - 1)
