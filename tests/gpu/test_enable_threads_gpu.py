"""The first ``enable()`` of a process while other threads run convolutions."""

from __future__ import annotations

from support.processes import enabling_beside_threads
from support.processes.subprocesses import evaluate


def test_the_first_enable_beside_running_convolutions() -> None:
    assert evaluate(enabling_beside_threads.code("cuda", 8, 2000, 1)) == "[] True"
