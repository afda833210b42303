"""Reading of entries from files of version 1. Such a file is one JSON object:

    {"format": "cudnn-autotune store", "version": 1,
    "environment": {"gpu": "NVIDIA H200", ...},
    "decisions": {
    "fprop x=64x64x56x56 ... sampling=auto": {"environment": "0123456789ab", "problem": ...},
    ...
    }}

Each entry is kept as a line ``"name": {...}`` until the next change to the file converts it.
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
    """Returns entry name to line for what a file has under ``"decisions"``.

    Values that are not objects, or that belong to another environment, are left out.
    """
    return {
        (quoted := json.dumps(name).encode()): quoted + b": " + json.dumps(value).encode()
        for name, value in decisions.items()
        if isinstance(value, dict) and value.get(_TAG) == environment.digest
    }


def name_in(line: bytes, environment: Environment) -> bytes | None:
    """Returns the name in a line of a damaged file, or None if the line is damaged too."""
    if not line.startswith(b'"'):
        return None
    try:
        tree = loads(b"{%s}" % line)
    except ValueError:
        return None
    return next(iter(entries(tree, environment)), None) if len(tree) == 1 else None


def decode(line: bytes) -> Decision:
    """Returns the decision in a line.

    Raises:
        ValueError: The line holds no decision; the message says why.
    """
    (tree,) = loads(b"{%s}" % line).values()
    return Decision.from_json({k: v for k, v in tree.items() if k != _TAG})
