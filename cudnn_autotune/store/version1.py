"""Entries of the file's first version, which was one JSON object:

    {"format": "cudnn-autotune store", "version": 1,
    "environment": {"gpu": "NVIDIA H200", ...},
    "decisions": {
    "fprop x=64x64x56x56 ... sampling=auto": {"environment": "0123456789ab", "problem": ...},
    ...
    }}

An entry is handled as a line ``"name": {...}``, until the next change writes it anew.
"""

from __future__ import annotations

import json
from typing import Any

from cudnn_autotune.core.json_node import loads
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment

VERSION = 1
FIELDS = {"format", "version", "environment", "decisions"}
_TAG = "environment"


def entries(decisions: dict[str, Any], environment: Environment) -> dict[bytes, bytes]:
    """The lines of what stands under ``"decisions"``, by name; what is of another environment, or
    no object, is left out."""
    return {
        (quoted := json.dumps(name).encode()): quoted + b": " + json.dumps(value).encode()
        for name, value in decisions.items()
        if isinstance(value, dict) and value.get(_TAG) == environment.digest
    }


def name_in(line: bytes, environment: Environment) -> bytes | None:
    """The name in a line of a file that cannot be read whole; None where the line is damaged."""
    if not line.startswith(b'"'):
        return None
    try:
        tree = loads(b"{%s}" % line)
    except ValueError:
        return None
    return next(iter(entries(tree, environment)), None) if len(tree) == 1 else None


def decode(line: bytes) -> Decision:
    """The decision of a line; ValueError saying what is wrong with it."""
    (tree,) = loads(b"{%s}" % line).values()
    return Decision.from_json({k: v for k, v in tree.items() if k != _TAG})
