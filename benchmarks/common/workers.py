"""Fresh processes of a script that measure, and a parent that only waits: the audit's processes,
whose workers tell one record after the other."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cudnn_autotune.audit import processes
from cudnn_autotune.audit.processes import ProcessFailure as WorkerError

__all__ = ["Worker", "WorkerError", "records_of", "serve", "started_ahead"]


def serve(run: Callable[[dict[str, Any]], Iterable[dict[str, Any]]]) -> int:
    """The worker's side: imports torch, waits for one request, tells the records of ``run``."""
    # Libraries print to stdout as well: that goes to stderr, and the answers to where stdout went.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import torch

    import cudnn_autotune  # its import time must not count as tuning time

    cudnn_autotune.set_store(mode="off")  # what earlier processes chose is no answer

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    say({"ready": True})
    line = sys.stdin.readline()
    if not line.strip():
        return 0  # the parent went away or had no time left for this worker
    request = json.loads(line)
    if request.get("device") == "cpu":
        torch.set_num_threads(1)  # a dry run shares its machine; tiny layers gain nothing
    for record in run(request):
        say({"record": record})
    say({"done": True})
    return 0


class Worker(processes.Process):
    """One worker process, ``script --worker NAME``, started at once.

    Args:
        environment: variables that it has beside those of this process. The driver's folder of
            compiled kernels, ``CUDA_CACHE_PATH``, is an empty one unless it is among them.
    """

    def __init__(
        self, script: str | Path, name: str, environment: Mapping[str, str] | None = None
    ) -> None:
        command = [sys.executable, "-u", str(script), "--worker", name]
        super().__init__(name, command=command, environment=environment)

    def run(self, request: dict[str, Any], *, time_limit_s: float) -> Iterator[dict[str, Any]]:
        """Puts it to work, and yields its records.

        Raises:
            WorkerError: the worker died, or passed ``time_limit_s`` and was killed. Its earlier
                records are valid.
        """
        self.answer(processes.START_LIMIT_S)
        self.send(request)
        deadline = time.monotonic() + time_limit_s
        while True:
            try:
                message = self.answer(deadline - time.monotonic())
            except WorkerError:
                if time.monotonic() < deadline:
                    raise
                overrun = f"worker {self.name} ran past its time limit of {time_limit_s:.3g} s"
                raise WorkerError(overrun) from None
            if "done" in message:
                break
            yield message["record"]
        self.leave()  # its CUDA context must be gone before the next worker measures


def records_of(
    worker: Worker, request: dict[str, Any], time_limit_s: float, failures: list[str]
) -> Iterator[dict[str, Any]]:
    """What :meth:`Worker.run` yields. An error of the worker is added to ``failures``."""
    begin = time.monotonic()
    try:
        yield from worker.run(request, time_limit_s=time_limit_s)
    except WorkerError as error:
        print(error, file=sys.stderr)
        failures.append(str(error))
    print(f"{worker.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def started_ahead(
    script: str | Path,
    names: Iterable[str],
    *,
    ahead: int = 1,
    environment: Callable[[str], Mapping[str, str]] = lambda name: {},
) -> Generator[Worker, None, None]:
    """Workers in turn, each started ``ahead`` turns before it is needed; all closed at the end.

    Args:
        environment: a worker's name -> variables of its own.
    """
    return processes.started_ahead(
        names, lambda name: Worker(script, name, environment(name)), ahead
    )
