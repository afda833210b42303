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

from cudnn_autotune.engines.problem_json import problem_from_json
from cudnn_autotune.store import compact
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment

VERSION = 1
FIELDS = {"format", "version", "environment", "decisions"}


def entries(decisions: dict[str, Any], environment: Environment) -> dict[bytes, bytes]:
    """Returns entry name to line for what a file has under ``"decisions"``.

    Values that are not objects, or that belong to another environment, are left out.
    """
    return {
        (quoted := json.dumps(name).encode()): quoted + b": " + json.dumps(value).encode()
        for name, value in decisions.items()
        if isinstance(value, dict) and value.get("environment") == environment.digest
    }


def name_in(line: bytes, environment: Environment) -> bytes | None:
    """Returns the name in a line of a damaged file, or None if the line is damaged too."""
    try:
        tree = json.loads(b"{%s}" % line)
    except (RecursionError, ValueError):
        return None
    return next(iter(entries(tree, environment)), None) if len(tree) == 1 else None


def is_entry(line: bytes) -> bool:
    """Returns whether the line of an entry is of this version; later ones begin with a brace."""
    return line.startswith(b'"')


def decode(line: bytes) -> Decision:
    """Returns the decision in a line of this version. Raises ValueError if it holds none."""
    try:
        (tree,) = json.loads(b"{%s}" % line).values()
        problem = problem_from_json(tree["problem"])
        return compact.decode(_as_now(tree), problem, tree["sampling"], tree["benchmark_limit"])
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"it is not an entry of version 1: {error!r}") from error


def _as_now(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry's object as ``compact`` writes it."""
    selection = tree["selection"]
    evidence = {"tied": [], **selection["evidence"]}
    if "solo_reach" in evidence:
        evidence["sustained_reach"] = evidence.pop("solo_reach")
    ranking = []
    for timed in selection["ranking"]:
        fields = {"eliminated": timed.get("cut", ""), "runs": "", **timed["candidate"], **timed}
        ranking.append([fields.get(name) for name in compact.COLUMNS])
    return {
        **tree,
        "rejected": tree["struck"] if "struck" in tree else tree["rejected"],
        "samples": selection["total_samples"],
        "evidence": evidence,
        "ranking": ranking,
    }
