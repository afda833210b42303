"""Calls the scripts under benchmarks/, in this process or in one of their own."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from support.processes.subprocesses import python

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def path_of(script: str) -> str:
    """The script, or the folder that has its ``__main__.py``."""
    folder = BENCHMARKS / script
    return str(folder if folder.is_dir() else folder.with_suffix(".py"))


def run(script: str, *arguments: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return python(path_of(script), *map(str, arguments), **more)


def main(script: str, *arguments: str | Path) -> int | str:
    """Runs the script in this process, for what ends before anything is measured; returns its exit
    status, or the message that it exits with."""
    path = path_of(script)
    with (
        mock.patch.object(sys, "argv", [path, *map(str, arguments)]),
        mock.patch.object(sys, "path", [str(BENCHMARKS), *sys.path]),
    ):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as ended:
            return 0 if ended.code is None else ended.code
    return 0


def dry_runs_into(folder: Path, arguments: Mapping[str, str], tells: str = "") -> None:
    """Runs every script of ``arguments`` without a GPU, its record in ``folder``; none may fail, or
    print nothing."""

    def dry_run(script: str) -> subprocess.CompletedProcess[str]:
        file: list[str | Path] = ["--json", folder / f"{script}.json"]
        return run(script, "--device", "cpu", *arguments[script].split(), *file, cwd=folder)

    with ThreadPoolExecutor() as pool:
        for done in pool.map(dry_run, arguments):
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip(), "a script prints its table last"
            if tells:
                assert tells in " ".join(done.stdout.split()), "its tables say so"


def publish(folder: Path, scripts: Collection[str], results: Path) -> None:
    """Copies what ``scripts`` wrote into ``folder`` to ``results/gpu``, as if it were of a GPU;
    such records never leave a test."""
    (results / "gpu").mkdir(parents=True)
    for script in scripts:
        data = record(folder, script)
        data["environment"].update(
            device="cuda", gpu="Test GPU", driver="1.0", cuda="13.0", cudnn=91900
        )
        data["environment"].update(cudnn_frontend="1.28.0", commit="0" * 40, dirty=False)
        (results / "gpu" / f"{script}.json").write_text(json.dumps(data))


def assert_rendered(folder: Path, scripts: Collection[str], place: Path) -> None:
    """The records of ``scripts`` in ``folder`` can be published: in ``place``, a page has their
    tables, and their plots are drawn."""
    results, pages = place / "results", place / "pages"
    publish(folder, scripts, results)
    assert main("render_results", "--results", results, "--pages", pages) == 0
    text = (pages / "gpu.md").read_text()
    assert "DRY RUN" not in text
    for script in scripts:
        assert f"results/gpu/{script}.json" in text


def record(folder: Path, script: str) -> dict[str, Any]:
    """What ``script`` wrote into ``folder``."""
    data: dict[str, Any] = json.loads((folder / f"{script}.json").read_text())
    return data


def whole_record(folder: Path, script: str) -> dict[str, Any]:
    """As :func:`record`, of a dry run that came to its end; it names no folder of the machine."""
    data = record(folder, script)
    for place in (folder, BENCHMARKS):
        assert str(place) not in json.dumps(data), "a record must not name the machine's folders"
    assert data["benchmark"] == script
    assert data["complete"] is True
    assert data["environment"]["device"] == "cpu"
    assert data["environment"]["gpu"] is None
    for key in ("torch", "python", "package", "date", "command"):
        assert data["environment"][key], key
    return data
