"""Commands whose output cannot be written, or not as it is, end with a line and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from stored import fill
from subprocesses import PACKAGE_PARENT, python_forked

C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


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


def test_what_cannot_be_encoded_is_written_otherwise(store: Path) -> None:
    done = ended("-m", "cudnn_autotune_cli", "show", "--store", store, **C_LOCALE)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    text = done.stdout.decode("ascii")
    assert "x28x28" in text  # "x" is for the sign of multiplication
    assert "\ufffd" not in text


MANY = """
import os, sys
from cudnn_autotune_cli import main
for command in ("export OUT.json", "report OUT.html", "show", "import KEPT"):
    words = command.replace("KEPT", os.environ["KEPT"]).replace("OUT", os.environ["OUT"]).split()
    store = os.environ["OUT"] + "3.json" if "import" in words else os.environ["KEPT"]
    try:
        main([*words, "--store", store])
    except SystemExit as ended:
        assert not ended.code, command
    print("of", command, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("locale", [C_LOCALE, {"LC_ALL": "C.UTF-8"}], ids=["C", "UTF-8"])
def test_names_that_cannot_be_encoded(store: Path, tmp_path: Path, locale: dict[str, str]) -> None:
    name = "\u00e4\u4e2d\udcff"  # the last is a byte that is no UTF-8
    kept = tmp_path / f"{name}.json"
    kept.write_bytes(store.read_bytes())
    done = ended("-c", MANY, KEPT=str(kept), OUT=str(tmp_path / f"{name}2"), **locale)
    assert done.returncode == 0, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    lines = done.stdout.decode().splitlines()
    ends = [i for i, line in enumerate(lines) if line.startswith("of ")]
    assert len(ends) == 4
    assert all(one + 1 < other for one, other in pairwise([-1, *ends])), "each has said something"
