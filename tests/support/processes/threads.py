"""Threads of a test, which begin together and whose errors are the test's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Runs ``work(0)``, ``work(1)``, ... in a thread each, and raises the first error of any."""
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        barrier.wait(timeout=60)
        work(index)

    with ThreadPoolExecutor(count) as threads:
        for done in [threads.submit(run, index) for index in range(count)]:
            done.result(timeout=180)
