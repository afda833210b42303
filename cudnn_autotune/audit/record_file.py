"""An audit's record on disk: one JSON file, which every save replaces whole."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from cudnn_autotune.audit.model import Record
from cudnn_autotune.audit.summary import left_out, summarize
from cudnn_autotune.tools import decode, encode, read_json, shown, write

FORMAT = "cudnn-autotune audit"
VERSION = 1
# A thousand cases in twenty modes and runs each take some 50 MB.
_MOST_BYTES = 256 * 2**20

# These are derived from the rest at every save, for readers of the file.
_DERIVED = ("modes", "left_out")
# Records that differ in these are not continued: their figures must not be mixed.
_MACHINE = ("gpu", "driver", "cuda", "cudnn", "cudnn_frontend", "torch", "cudnn_autotune")
_FIXED_SETTINGS = ("budget_ms", "source", "seed")


def to_json(record: Record) -> dict[str, Any]:
    """Returns the tree to write: the record, each mode's summary (``modes``), and ``left_out``."""
    tree = {"format": FORMAT, "version": VERSION, **encode(record)}
    tree["modes"] = {
        mode: {"picked": {}, "regret": None, **encode(summary)}
        for mode, summary in summarize(record).items()
    }
    tree["left_out"] = left_out(record)
    return tree


def from_json(tree: Any) -> Record:
    """Reads a tree that :func:`to_json` made. Raises ValueError for what is missing or
    malformed."""
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise ValueError(f"not a record of {FORMAT!r}")
    if tree.get("version") != VERSION:
        raise ValueError(
            f"version: this package reads {VERSION}, the record has {shown(tree.get('version'))}"
        )
    own = {k: v for k, v in tree.items() if k not in ("format", "version", *_DERIVED)}
    return decode(Record, own, "record")


def save(record: Record, path: Path) -> None:
    """Writes the file in one step, compressed if its name ends in ``.gz``. If this raises OSError,
    an older file is as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = (json_lines(to_json(record)) + "\n").encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    write(path, data)


def load(path: Path) -> Record:
    """Reads a file that :func:`save` wrote. Raises ValueError that says what is wrong with it."""
    try:
        return from_json(read_json(path, _MOST_BYTES))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def resumed(path: Path | None, fresh: Record) -> Record:
    """Returns ``fresh`` with what the file already holds; ``fresh`` itself if there is no file.

    Raises:
        ValueError: a file that is no record, of another kind of audit, of another machine or other
            versions, or of settings with which its figures must not be mixed.
    """
    if path is None or not path.exists():
        return fresh
    earlier = load(path)
    if earlier.kind != fresh.kind:
        raise ValueError(f"{path}: holds an audit of another kind ({earlier.kind})")
    differing = [k for k in _MACHINE if earlier.environment.get(k) != fresh.environment.get(k)]
    differing += [k for k in _FIXED_SETTINGS if earlier.settings.get(k) != fresh.settings.get(k)]
    differing += [
        case
        for case in fresh.cases
        if earlier.cases.get(case, fresh.cases[case]) != fresh.cases[case]
    ]
    if differing:
        raise ValueError(f"{path}: recorded otherwise ({', '.join(differing[:5])} differ)")
    for name in ("modes", "runs"):
        fresh.settings[name] = _union(earlier.settings.get(name), fresh.settings.get(name))
    fresh.cases = earlier.cases | fresh.cases
    fresh.oracle, fresh.picks, fresh.pytorch = earlier.oracle, earlier.picks, earlier.pytorch
    fresh.failures = earlier.failures
    session = {"environment": earlier.environment, "telemetry": earlier.telemetry}
    fresh.sessions = [*earlier.sessions, session]
    return fresh


def _union(earlier: Any, fresh: Any) -> Any:
    """Returns the union of two settings, which are lists or dictionaries."""
    if isinstance(earlier, dict) and isinstance(fresh, dict):
        return {**earlier, **fresh}
    if isinstance(earlier, (list, tuple)) and isinstance(fresh, (list, tuple)):
        return list(dict.fromkeys([*earlier, *fresh]))
    return fresh


def json_lines(value: Any, indent: int = 0) -> str:
    """Returns JSON with one line for each innermost object or list, so that files compare well."""
    inner: list[Any] = []
    if isinstance(value, (dict, list)):
        inner = list(value.values()) if isinstance(value, dict) else value
    is_nested = any(isinstance(item, (dict, list)) and item for item in inner)
    if not is_nested and (indent or not inner):
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    pad = " " * (indent + 1)
    begin, end = "[]"
    names = [""] * len(inner)
    if isinstance(value, dict):
        begin, end = "{}"
        names = [f"{json.dumps(key, ensure_ascii=False)}: " for key in value]
    body = ",\n".join(
        f"{pad}{name}{json_lines(item, indent + 1)}"
        for name, item in zip(names, inner, strict=True)
    )
    return f"{begin}\n{body}\n{' ' * indent}{end}"
