"""The scripts under benchmarks/, as processes of their own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from subprocesses import python

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def run(script: str, *arguments: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return python(str(BENCHMARKS / f"{script}.py"), *map(str, arguments), **more)


def dry_runs_into(
    folder: Path, arguments: Mapping[str, str], plotted: Collection[str], tells: str = ""
) -> None:
    """Runs every script of ``arguments`` without a GPU, its record in ``folder``, and its plot
    where it is among ``plotted``; none may fail, or print nothing."""

    def dry_run(script: str) -> subprocess.CompletedProcess[str]:
        files: list[str | Path] = ["--json", folder / f"{script}.json"]
        if script in plotted:
            files += ["--plot", folder / f"{script}.png"]
        return run(script, "--device", "cpu", *arguments[script].split(), *files, cwd=folder)

    with ThreadPoolExecutor() as pool:
        for done in pool.map(dry_run, arguments):
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip(), "a script prints its table last"
            if tells:
                assert tells in " ".join(done.stdout.split()), "its tables say so"


def record(folder: Path, script: str) -> dict[str, Any]:
    """What ``script`` wrote into ``folder``."""
    data: dict[str, Any] = json.loads((folder / f"{script}.json").read_text())
    return data
