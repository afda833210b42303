"""Commands whose output cannot be written, or not as it is, end with a line and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.subprocesses import PACKAGE_PARENT, python_forked
from support.store.stored import fill, refused

from cudnn_autotune.core.extension import check_build


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("output") / "store.json")


def ended(
    *arguments: str | Path, stdout: int = subprocess.PIPE, **env: str
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, *map(str, arguments)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))}
    more = {"PYTHONPATH": PACKAGE_PARENT, "CUDNN_AUTOTUNE_CACHE": "off", **env}
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**clean, **more},
        timeout=300,
        check=False,
    )


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
    full = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    done = python_forked(f"{full}; from cudnn_autotune_cli import main; main({given})")
    assert done.stderr == "Error: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("descriptor", [1, 2])
def test_a_closed_stream(descriptor: int, tmp_path: Path) -> None:
    """A shell closes one by ``>&-``."""
    closed = {1: "stdout", 2: "stderr"}[descriptor]
    program = f"import sys; sys.{closed} = None; from cudnn_autotune_cli import main; main"
    done = python_forked(f"{program}(['env', '--store', {str(tmp_path)!r}])")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_warning_of_the_import_is_one_line(store: Path) -> None:
    command = ("-m", "cudnn_autotune_cli", "show", "--store", store)
    done = ended(*command, CUDNN_AUTOTUNE_NEW_SHAPES="x")
    said = (
        "Warning: CUDNN_AUTOTUNE_NEW_SHAPES must be one of 'online', 'neighbour', 'tune', got 'x'"
    )
    assert done.stderr.decode() == f"{said}: it is passed over\n"


def test_a_build_that_does_not_fit_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    built = ("1.0", None, True)

    def import_module(name: str) -> None:
        check_build(built, ("2.0", None, True))

    monkeypatch.setattr("importlib.import_module", import_module)
    said = refused("show", status=1)
    assert said.startswith(
        "Error: cudnn_autotune was built with torch 1.0 (no CUDA), but torch 2.0"
    )
    assert "pip install --force-reinstall" in said


def test_a_pipe_that_nobody_reads(store: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = ("-m", "cudnn_autotune_cli", "show", "--json", "--store", store)
        done = ended(*command, stdout=writing)
    finally:
        os.close(writing)
    assert done.returncode == 1
    assert done.stderr == b""
