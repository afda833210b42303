"""Property files: JSON descriptions of GPUs that are not here.

cuDNN (9.8 and later) answers heuristic queries and builds execution plans from such a description
(`CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION`, `cudnn_frontend::DeviceProperties`). `h200.json` was
serialised by cuDNN 9.19 on an H200; the others are the same fields, filled in by hand from the
published figures of each GPU. `deviceVer` is the compute capability times 100 (8.9 is 890), sizes
are in bytes.
"""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

__all__ = ["load", "names"]

_FILES = resources.files(__name__)
_SUFFIX = ".json"
# Recorded by cuDNN itself, so its fields are those that cuDNN asks for.
_RECORDED = "h200"


def names() -> tuple[str, ...]:
    """The GPUs whose property files the package ships, sorted: the names that `load` takes."""
    files = (file.name for file in _FILES.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX)))


def load(device: str | os.PathLike[str]) -> str:
    """The text of a property file.

    Args:
        device: a name out of `names()`, in upper or lower case, or the path of a property file (a
            `PathLike`, or a string that ends in `.json` or holds a path separator).

    Returns:
        JSON text, checked to be an object with every field that cuDNN asks for. (cuDNN itself says
        no more than `CUDNN_STATUS_BAD_PARAM` where one is missing.)

    Raises:
        ValueError: the name is unknown, or the file is missing, unreadable or not such an object.
    """
    if isinstance(device, str) and device.lower() in names():
        return _read_shipped(device.lower())
    path = os.fspath(device)
    if isinstance(device, str) and not (path.endswith(_SUFFIX) or os.path.basename(path) != path):
        raise ValueError(
            f"device: expected a CUDA device, one of {', '.join(map(repr, names()))}, or the path "
            f"of a property file (*{_SUFFIX}), but got {device!r}"
        )
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"device: cannot read the property file {path!r}: {error}") from error
    try:
        _check(text)
    except ValueError as error:
        raise ValueError(f"device: {path!r} is not a GPU's property file: {error}") from error
    return text


def _read_shipped(name: str) -> str:
    return (_FILES / f"{name}{_SUFFIX}").read_text(encoding="utf-8")


def _check(text: str) -> None:
    properties = json.loads(text)
    if not isinstance(properties, dict):
        raise ValueError(f"expected a JSON object, but got {type(properties).__name__}")
    recorded = json.loads(_read_shipped(_RECORDED))
    missing = sorted(recorded.keys() - properties.keys())
    if missing:
        raise ValueError(f"fields missing: {', '.join(missing)}")
    for field, like in recorded.items():
        if not _fits(properties[field], like):
            raise ValueError(
                f"{field}: expected a value like {json.dumps(like)} (numbers are whole and not "
                f"negative), but got {json.dumps(properties[field])}"
            )
    for field in ("deviceVer", "multiProcessorCount"):
        if not properties[field]:
            raise ValueError(f"{field}: expected a positive number, but got 0")


def _fits(value: Any, like: Any) -> bool:
    """Whether `value` has the type of `like`: text, a whole number, or as many of them."""
    if isinstance(like, list):
        return isinstance(value, list) and len(value) == len(like) and all(map(_fits, value, like))
    if isinstance(like, str):
        return isinstance(value, str)
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
