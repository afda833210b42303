"""One decision as one line of a store's file: ``"name": {...}``."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from cudnn_autotune.core.json_node import loads
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment

# Says in each line of which environment it is, so that no line gets into the file of another one
# unseen, and so that a line can be rescued from a file that has lost its head.
_TAG = "environment"


_POLICY = " benchmark_limit="
_DETERMINISTIC = " deterministic"


def names(key: str) -> tuple[bytes, bytes]:
    """The two entries that a key (``Decision.key``) may have, as they are named in the file: that
    measured without determinism, that measured with it."""
    problem, _, policy = key.partition(_POLICY)
    return _quoted(key), _quoted(f"{problem}{_DETERMINISTIC}{_POLICY}{policy}")


def name_of(decision: Decision) -> bytes:
    plain, deterministic = names(decision.key)
    return deterministic if decision.problem.deterministic else plain


def key_of(name: bytes) -> str:
    """The key of an entry, by its name in the file."""
    text = name[1:-1].decode(errors="replace")
    if b"\\" in name:
        with suppress(ValueError):
            text = json.loads(name)
    problem, separator, policy = text.partition(_POLICY)
    return problem.removesuffix(_DETERMINISTIC) + separator + policy


def problem_of(key: str) -> str:
    """The problem's text in a key."""
    return key.partition(_POLICY)[0]


def _quoted(text: str) -> bytes:
    return json.dumps(text).encode()


class NoEntryError(ValueError):
    """A line that is not even ``"name": {...}``: the file is damaged."""


def encode(decision: Decision, environment: Environment) -> bytes:
    """The entry, name and all, without a line's end.

    Raises:
        ValueError: a number that JSON has not.
    """
    tree = {_TAG: environment.digest, **decision.to_json()}
    tree["selection"] = _lean(tree["selection"])
    # ASCII, so that no text in it ends a line.
    value = json.dumps(tree, allow_nan=False, separators=(",", ":"))
    return name_of(decision) + b": " + value.encode()


def decode(line: bytes, environment: Environment) -> Decision:
    """The decision of an entry.

    Raises:
        NoEntryError: it is no JSON of this form.
        ValueError: saying what is wrong with it; also where it is of another environment, or where
            its name is not that of its problem.
    """
    name, tree = parse(line, environment)
    decision = Decision.from_json({k: v for k, v in tree.items() if k != _TAG})
    if name_of(decision) != name:
        raise ValueError(f"the entry named {name.decode(errors='replace')} is of another problem")
    return decision


def parse(line: bytes, environment: Environment) -> tuple[bytes, dict[str, Any]]:
    """Name and value of an entry of ``environment``; ValueError saying what is wrong with it."""
    end = line.find(b'"', 1) + 1
    if not line.startswith(b'"') or line[end : end + 3] != b": {":
        raise NoEntryError('a line is not of the form "name": {...}')
    try:
        loads(line[:end])
        tree = loads(line[end + 2 :])
    except ValueError as error:
        raise NoEntryError(f"an entry is no JSON that can be read: {error}") from error
    if not isinstance(tree, dict) or tree.get(_TAG) != environment.digest:
        raise ValueError("the entry is of another environment")
    return line[:end], tree


def _lean(selection: dict[str, Any]) -> dict[str, Any]:
    """Without what a reader takes for granted: a third of the size."""
    ranking = [
        {
            name: value
            for name, value in entry.items()
            if name == "time_ms" or (value is not None and value != "")
        }
        for entry in selection["ranking"]
    ]
    evidence = {
        name: value
        for name, value in selection["evidence"].items()
        if value is not None and value not in ("", [])
    }
    return {**selection, "ranking": ranking, "evidence": evidence}
