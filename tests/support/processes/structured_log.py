"""Reads what PyTorch writes into the folder ``TORCH_TRACE``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def records(folder: Path) -> list[tuple[dict[str, Any], str]]:
    """Returns the structured log's records, each with its payload."""
    (file,) = folder.iterdir()
    found: list[tuple[dict[str, Any], str]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("\t"):
            record, payload = found[-1]
            found[-1] = (record, payload + line[1:])
        else:
            found.append((json.loads(line[line.index("{") :]), ""))
    return found


def artifacts(folder: Path) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Returns this package's artifacts, each with its place."""
    return [
        (place(record), json.loads(payload))
        for record, payload in records(folder)
        if record.get("artifact") == {"name": "cudnn_autotune", "encoding": "json"}
    ]


def place(record: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the compilation to which tlparse adds a record."""
    return tuple(record.get(name) for name in ("frame_id", "frame_compile_id", "attempt"))
