"""Commands whose output cannot be written, or not as it is, end with a line and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stored import fill
from subprocesses import PACKAGE_PARENT

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("output") / "store.json")


def ended(
    *arguments: str | Path, stdout: int | Path = subprocess.PIPE, **env: str
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "cudnn_autotune_cli", *map(str, arguments)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))}
    more = {"PYTHONPATH": PACKAGE_PARENT, "CUDNN_AUTOTUNE_CACHE": "off", **env}
    out = stdout if isinstance(stdout, int) else os.open(stdout, os.O_WRONLY)
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
            env={**clean, **more},
            timeout=300,
            check=False,
        )
    finally:
        if out is not stdout:
            os.close(out)


@pytest.mark.basic(1)
@pytest.mark.parametrize(
    "arguments",
    [
        ("show",),
        ("show", "--json"),
        ("env",),
        ("--help",),
        ("export", "OUT.json"),
        ("diff", "STORE", "STORE"),
    ],
    ids=" ".join,
)
def test_a_full_device(store: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    given = [a.replace("STORE", str(store)).replace("OUT", str(tmp_path / "o")) for a in arguments]
    if arguments[0] in ("show", "export") and "--help" not in arguments:
        given += ["--store", str(store)]
    done = ended(*given, stdout=Path("/dev/full"))
    said = done.stderr.decode()
    assert said == "Error: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


def test_a_pipe_that_nobody_reads(store: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = ended("show", "--json", "--store", store, stdout=writing)
    finally:
        os.close(writing)
    assert done.returncode == 1
    assert done.stderr == b""


def test_what_cannot_be_encoded_is_written_otherwise(store: Path) -> None:
    done = ended("show", "--store", store, **C_LOCALE)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    text = done.stdout.decode("ascii")
    assert "x28x28" in text  # "x" is for the sign of multiplication
    assert "\ufffd" not in text


@pytest.mark.slow
@pytest.mark.parametrize("command", ["export", "report", "show", "import"])
@pytest.mark.parametrize("locale", [C_LOCALE, {"LC_ALL": "C.UTF-8"}], ids=["C", "UTF-8"])
def test_names_that_cannot_be_encoded(
    store: Path, tmp_path: Path, command: str, locale: dict[str, str]
) -> None:
    name = "\u00e4\u4e2d\udcff"  # the last is a byte that is no UTF-8
    kept = tmp_path / f"{name}.json"
    kept.write_bytes(store.read_bytes())
    arguments: dict[str, list[str | Path]] = {
        "export": ["export", tmp_path / f"{name}2.json", "--store", kept],
        "report": ["report", tmp_path / f"{name}.html", "--store", kept],
        "show": ["show", "--store", kept],
        "import": ["import", kept, "--store", tmp_path / f"{name}3.json"],
    }
    done = ended(*arguments[command], **locale)
    assert done.returncode == 0, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert done.stdout
