"""Property files: the names that are shipped, and every way in which a file can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cudnn_autotune as ca
from cudnn_autotune.engines import configs, devices

NEWER = {"memoryBusWidth"}
"""The fields that files recorded by an older cuDNN lack, and that only a newer one asks for."""


def write(folder: Path, text: str) -> Path:
    path = folder / "gpu.json"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def properties() -> dict[str, Any]:
    return dict(json.loads(devices.load("l4")))


@pytest.mark.parametrize(
    ("name", "compute_capability", "multiprocessors", "bus_bits"),
    [
        ("a100", 800, 108, 5120),
        ("h100", 900, 132, 5120),
        ("h200", 900, 132, 6144),
        ("l4", 890, 58, 192),
        ("t4", 750, 40, 256),
    ],
)
def test_shipped_file(
    name: str, compute_capability: int, multiprocessors: int, bus_bits: int
) -> None:
    shipped = json.loads(devices.load(name))
    assert shipped["deviceVer"] == compute_capability
    assert shipped["multiProcessorCount"] == multiprocessors
    assert shipped["warpSize"] == 32
    assert shipped["memoryBusWidth"] == bus_bits  # without which cuDNN 9.28 takes no file
    assert devices.load(name.upper()) == devices.load(name)


@pytest.mark.parametrize("name", devices.names())
def test_shipped_file_passes_its_own_check(name: str, tmp_path: Path) -> None:
    assert devices.load(write(tmp_path, devices.load(name))) == devices.load(name)


@pytest.mark.parametrize("name", ["h900", "", "cuda:x", "json"])
def test_unknown_name(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"device must be .*'a100', 'h100', 'h200', 'l4', 't4'"
    ) as error:
        devices.load(name)
    assert repr(name) in str(error.value)


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "a folder": Path.mkdir,
    "not UTF-8": lambda path: path.write_bytes(b'{"deviceName": "\xff"}'),
}


@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read(make: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    make(path)
    with pytest.raises(ValueError, match="device: cannot read the property file") as error:
        devices.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "Expecting value"),
        ('{"deviceVer": 890,', "Expecting property name"),
        ("[890]", "expected a JSON object, but got list"),
        ("890", "expected a JSON object, but got int"),
        ("{}", "fields missing: cudaDeviceId, deviceName, deviceVer, "),
    ],
)
def test_malformed(text: str, complaint: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=r"device: .* is not a GPU's property file") as error:
        devices.load(path)
    assert str(path) in str(error.value)
    assert complaint in str(error.value)


@pytest.mark.parametrize("field", sorted(json.loads(devices.load("h200")).keys() - NEWER))
def test_each_field_is_needed(field: str, properties: dict[str, Any], tmp_path: Path) -> None:
    del properties[field]
    with pytest.raises(ValueError, match=f"fields missing: {field}$"):
        devices.load(write(tmp_path, json.dumps(properties)))


WRONG: dict[str, list[Any]] = {
    "deviceName": [4, "", "x" * 256, "é" * 128, "L4\0"],
    "deviceVer": ["890", 8.9, 0, -890],
    "multiProcessorCount": [0, None],
    "isTccDriver": [False],
    "maxGridSize": [65535, [65535, 65535], [65535, 65535, 0]],
    "maxBlockSize": [[1024, 1024, "64"], []],
    "maxCtasPerSM": [3, 0],
    "warpSize": [1],
    "totalGlobalMem": [2**64],
    "memoryBusWidth": [0, "5120"],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, vs in WRONG.items() for v in vs])
def test_wrong_value(field: str, value: Any, properties: dict[str, Any], tmp_path: Path) -> None:
    properties[field] = value
    with pytest.raises(ValueError, match=f"device: .*{field}: expected a .*, but got "):
        devices.load(write(tmp_path, json.dumps(properties)))


@pytest.mark.search
def test_a_file_of_an_older_cudnn(properties: dict[str, Any], tmp_path: Path) -> None:
    """It lists the same candidates, or the error says what a newer cuDNN asks for."""
    for field in NEWER:
        del properties[field]
    path = write(tmp_path, json.dumps(properties))
    assert devices.newer_fields_missing(devices.load(path)) == sorted(NEWER)
    assert devices.newer_fields_missing(devices.load("l4")) == []
    problem = ca.ConvProblem("fprop", (2, 8, 9, 9), (8, 8, 3, 3))
    try:
        found: object = ca.expert.candidates(problem, device=path)
    except ValueError as error:
        found = str(error)
    is_refused = isinstance(found, str) and "lack memoryBusWidth" in found
    assert is_refused or found == ca.expert.candidates(problem, device="l4")


@pytest.mark.search
def test_a_missing_driver_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it cuDNN leaves out engines, silently."""
    monkeypatch.setattr(configs, "_DRIVER", "libno-such-driver.so.1")
    configs._driver_is_found.cache_clear()
    problem = ca.ConvProblem("fprop", (2, 8, 9, 9), (8, 8, 3, 3))
    for device in ("l4", "l4", "t4"):
        assert ca.expert.candidates(problem, device=device)
    (record,) = caplog.records
    assert "libno-such-driver.so.1 is missing" in record.getMessage()
    assert "compiles at run time" in record.getMessage()
    configs._driver_is_found.cache_clear()
