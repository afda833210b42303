"""Property files: JSON descriptions of GPUs, for machines that do not have them.

cuDNN (9.8 and later) answers heuristic queries and builds execution plans from such a description
(`CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION`, `cudnn_frontend::DeviceProperties`). `h200.json` was
serialised by cuDNN 9.19 on an H200. The others have the same fields, filled in by hand from the
published figures of each GPU. `memoryBusWidth`, in bits, was added to all of them: cuDNN 9.28 does
not take a file without it. `deviceVer` is the compute capability times 100 (8.9 is 890), sizes
are in bytes.
"""

from __future__ import annotations

import json
import os
from importlib import resources
from typing import Any

from cudnn_autotune.core.json_node import cut, shown

__all__ = ["load", "names", "newer_fields_missing"]

_FILES = resources.files(__name__)
_SUFFIX = ".json"
# The fields that cuDNN asks for, each with a generous range of real GPUs' values: cuDNN does not
# check them. 9.19 writes past its 256 bytes for a name, and divides by zero if a number is far too
# small.
_MOST = 2**31 - 1
_RANGES = {
    "cudaDeviceId": (0, _MOST),
    "deviceVer": (500, 9999),
    "driverVer": (0, _MOST),
    "isTccDriver": (0, 1),
    "l2CacheSize": (2**16, 2**30),
    "maxBlockSize": (1, _MOST),
    "maxCtasPerSM": (8, 2**10),
    "maxGridSize": (1, _MOST),
    "maxRegistersPerSM": (2**14, 2**20),
    "maxSharedMemoryPerBlock": (2**14, 2**24),
    "maxSharedMemoryPerBlockOptin": (2**14, 2**24),
    "maxThreadsPerBlock": (2**8, 2**14),
    "maxThreadsPerSM": (2**9, 2**14),
    "memClockRateKHz": (0, 10**9),
    "multiProcessorCount": (1, 2**12),
    "pciDeviceId": (0, _MOST),
    "regsPerBlock": (2**14, 2**20),
    "reservedSharedMemoryPerBlock": (0, 2**16),
    "smClockRateKHz": (0, 10**9),
    "supportCoopLaunch": (0, 1),
    "totalGlobalMem": (2**28, 2**48),
    "warpSize": (32, 32),
}
# The fields that only a newer cuDNN asks for; a file that an older one recorded lacks them.
_ADDED = {"memoryBusWidth": (8, 2**16)}
_TRIPLES = ("maxBlockSize", "maxGridSize")
_NAME = "deviceName"
_NAME_BYTES = 255
_FILE_BYTES = 2**16


def names() -> tuple[str, ...]:
    """Returns the sorted names of the GPUs whose property files the package ships."""
    files = (file.name for file in _FILES.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX)))


def load(device: str | os.PathLike[str]) -> str:
    """Reads and checks a property file.

    Args:
        device: a name in `names()`, in upper or lower case, or the path of a property file (a
            `PathLike`, or a string that ends in `.json` or holds a path separator).

    Returns:
        The JSON text of an object with every field that cuDNN asks for, in the ranges of real GPUs.
        cuDNN itself says only `CUDNN_STATUS_BAD_PARAM` for a missing field, and may end the process
        for one out of range.

    Raises:
        ValueError: the name is unknown, or the file is missing, unreadable or not such an object.
    """
    if isinstance(device, str) and device.lower() in names():
        return (_FILES / f"{device.lower()}{_SUFFIX}").read_text(encoding="utf-8")
    path = os.fspath(device)
    if isinstance(device, str) and not (path.endswith(_SUFFIX) or os.path.basename(path) != path):
        raise ValueError(
            f"device must be a CUDA device, one of {', '.join(map(repr, names()))}, or the path of "
            f"a property file (*{_SUFFIX}), got {device!r}"
        )
    try:
        with open(path, "rb") as file:
            text = file.read(_FILE_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"device: cannot read the property file {path!r}: {error}") from error
    try:
        _check(text)
    except ValueError as error:
        raise ValueError(f"device: {path!r} is not a GPU's property file: {error}") from error
    return text


def newer_fields_missing(text: str) -> list[str]:
    """Returns the fields that only newer versions of cuDNN ask for and that the text lacks."""
    return sorted(_ADDED.keys() - json.loads(text).keys())


def _check(text: str) -> None:
    """Raises ValueError saying what is wrong with the text of a property file."""
    if len(text.encode()) > _FILE_BYTES:
        raise ValueError(f"expected {_FILE_BYTES} bytes or fewer")
    try:
        properties = json.loads(text, object_pairs_hook=_each_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(properties, dict):
        raise ValueError(f"expected a JSON object, but got {type(properties).__name__}")
    missing = sorted({_NAME, *_RANGES} - properties.keys())
    if missing:
        raise ValueError(f"fields missing: {', '.join(missing)}")
    if not _is_name(properties[_NAME]):
        raise ValueError(
            f"{_NAME}: expected a text of 1 to {_NAME_BYTES} bytes, but got "
            f"{shown(properties[_NAME])}"
        )
    for field, (least, most) in (_RANGES | _ADDED).items():
        if field in _ADDED and field not in properties:
            continue
        value = properties[field]
        what, numbers = "a whole number", [value]
        if field in _TRIPLES:
            what = "a list of three whole numbers"
            numbers = value if isinstance(value, list) and len(value) == 3 else []
        if not numbers or not all(_is_int(n) and least <= n <= most for n in numbers):
            raise ValueError(
                f"{field}: expected {what} from {least} to {most}, but got {shown(value)}"
            )


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses a field that comes twice: cuDNN might read the one that is not checked."""
    fields: dict[str, Any] = {}
    for field, value in pairs:
        if field in fields:
            raise ValueError(f"{cut(field)} comes twice")
        fields[field] = value
    return fields


def _is_name(value: object) -> bool:
    if not isinstance(value, str) or "\0" in value:
        return False
    return 1 <= len(value.encode("utf-8", "surrogatepass")) <= _NAME_BYTES


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
