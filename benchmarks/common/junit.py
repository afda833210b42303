"""Runs of pytest, and its reports of ``--junitxml``."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

_ENDING_S = 60  # of an interrupted pytest, which writes its report
OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed")


class Test(NamedTuple):
    group: str
    """The last part of its class or module."""
    name: str
    seconds: float
    outcome: str
    """One of ``OUTCOMES``."""
    message: str
    """The first line, where it did not pass."""


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--log", type=Path, help="append pytest's output here (default: show it)")
    p.add_argument(
        "--workers", type=int, default=1, help="processes, by pytest-xdist (%(default)s)"
    )
    p.add_argument(
        "--time-limit", type=float, help="seconds, after which the tests left are not run"
    )


def run(
    arguments: Sequence[str], options: argparse.Namespace, **process: Any
) -> tuple[int, list[Test]]:
    """Runs pytest by the options of :func:`add_options`; returns its exit status, and the tests
    that ended. The status is `pytest.ExitCode.INTERRUPTED` if the time limit was over before.

    Raises:
        SystemExit: pytest left no report.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        options.log.open("a") if options.log else nullcontext() as output,
    ):
        report = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        command.append(f"--junitxml={report}")
        if options.workers > 1:
            command += ["-n", str(options.workers), "--dist", "worksteal"]
        code = _status(command, options.time_limit, stdout=output, stderr=output, **process)
        if not report.exists():
            sys.exit(f"pytest ended with {code} and left no report")
        return code, list(read(report))


def _status(command: Sequence[str], time_limit: float | None, **more: Any) -> int:
    """Runs pytest, and returns its exit status. It is interrupted at the limit."""

    def listen() -> None:  # a shell's background processes are deaf to it
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, preexec_fn=listen, **more) as process:
        try:
            return process.wait(time_limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:  # its workers have not ended
            process.kill()
    return pytest.ExitCode.INTERRUPTED


def read(path: Path) -> Iterator[Test]:
    """Yields the tests of a report."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if not case.get("name"):  # that of a test which was interrupted
            continue
        outcome, message = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "failed" if child.tag == "failure" else child.tag
                if child.get("type") == "pytest.xfail":
                    outcome = "xfailed"
                message = (child.get("message") or "").strip().partition("\n")[0]
        group = case.get("classname", "").rpartition(".")[2]
        yield Test(group, case.get("name", ""), float(case.get("time", 0)), outcome, message)
