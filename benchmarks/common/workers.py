"""Fresh processes that measure, and a parent that only waits.

PyTorch never tunes a shape again that it has seen, and cuDNN loads kernels lazily: every mode runs
in a process of its own. Starting Python and importing torch takes seconds, so the next worker is
started while the current one measures. It imports, says that it is ready, and waits for its request
before it touches the GPU. Workers write a JSON record a line; what they wrote before a timeout is
kept.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

PREFIX = "@bench "  # libraries print to stdout as well
_START_LIMIT_S = 180.0


class WorkerError(RuntimeError):
    """A worker ended badly or ran past its limit; its earlier records are valid."""


def serve(run: Callable[[dict[str, Any]], Iterable[dict[str, Any]]]) -> int:
    """The worker's side: imports torch, waits for one request, writes the records of ``run``."""
    import torch

    import cudnn_autotune  # its import time must not count as tuning time

    cudnn_autotune.set_store(mode="off")  # what earlier processes chose is no answer

    print(PREFIX + json.dumps({"ready": True}), flush=True)
    line = sys.stdin.readline()
    if not line.strip():
        return 0  # the parent went away or had no time left for this worker
    request = json.loads(line)
    if request.get("device") == "cpu":
        torch.set_num_threads(1)  # a dry run shares its machine; tiny layers gain nothing
    for record in run(request):
        print(PREFIX + json.dumps({"record": record}), flush=True)
    print(PREFIX + json.dumps({"done": True}), flush=True)
    return 0


class Worker:
    """One worker process, ``script --worker NAME``: started at once, put to work by ``run``.

    Args:
        environment: variables that it has beside those of this process.
    """

    def __init__(
        self, script: str | Path, name: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(script), "--worker", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _next(self, deadline: float) -> dict[str, Any]:
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.close()
                raise WorkerError(f"worker {self.name} ran past its time limit") from None
            if line is None:
                code = self.process.wait()
                raise WorkerError(f"worker {self.name} ended early with exit code {code}")
            if line.startswith(PREFIX):
                message: dict[str, Any] = json.loads(line[len(PREFIX) :])
                return message
            sys.stderr.write(f"[{self.name}] {line}")

    def run(self, request: dict[str, Any], *, time_limit_s: float) -> Iterator[dict[str, Any]]:
        """Yields the worker's records.

        Raises:
            WorkerError: the worker crashed, or passed ``time_limit_s`` and was killed.
        """
        self._next(time.monotonic() + _START_LIMIT_S)  # ready
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        deadline = time.monotonic() + time_limit_s
        while True:
            message = self._next(deadline)
            if "done" in message:
                break
            yield message["record"]
        # Its CUDA context must be gone before the next worker measures.
        self.close(patience_s=20)

    def close(self, *, patience_s: float = 0.5) -> None:
        """Ends the process: it gets a moment to leave by itself."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        try:
            self.process.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def started_ahead(
    script: str | Path,
    names: Iterable[str],
    *,
    ahead: int = 1,
    environment: Callable[[str], Mapping[str, str]] = lambda name: {},
) -> Iterator[Worker]:
    """Workers in turn, each started ``ahead`` turns before it is needed; all closed at the end.

    Args:
        environment: a worker's name -> variables of its own.
    """
    waiting: collections.deque[Worker] = collections.deque()
    try:
        for name in names:
            waiting.append(Worker(script, name, environment(name)))
            if len(waiting) > ahead:
                yield waiting[0]
                waiting.popleft().close()
        while waiting:
            yield waiting[0]
            waiting.popleft().close()
    finally:
        for worker in waiting:
            worker.close()
