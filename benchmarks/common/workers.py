"""Fresh processes of a script that measure, and a parent that only waits: the audit's processes,
whose workers tell one record after the other."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cudnn_autotune.tools import processes


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


def start(
    script: str | Path, name: str, environment: Mapping[str, str] | None = None
) -> processes.Process:
    """One worker process, ``script --worker NAME``, started at once.

    Args:
        environment: variables that it has beside those of this process. The driver's folder of
            compiled kernels, ``CUDA_CACHE_PATH``, is an empty one unless it is among them.
    """
    command = [sys.executable, "-u", str(script), "--worker", name]
    return processes.Process(name, command=command, environment=environment)


def records_of(
    worker: processes.Process, request: dict[str, Any], time_limit_s: float, failures: list[str]
) -> Iterator[dict[str, Any]]:
    """Puts a worker to work, and yields its records. If it dies, or passes ``time_limit_s`` and is
    killed, ``failures`` is told; its earlier records are valid."""
    begin, end = time.monotonic(), math.inf
    try:
        worker.answer(processes.START_LIMIT_S)
        worker.send(request)
        end = time.monotonic() + time_limit_s
        while "done" not in (message := worker.answer(end - time.monotonic())):
            yield message["record"]
        worker.leave()  # its CUDA context must be gone before the next worker measures
    except processes.ProcessFailure as error:
        overrun = f"worker {worker.name} ran past its time limit of {time_limit_s:.3g} s"
        failures.append(overrun if time.monotonic() >= end else str(error))
        print(failures[-1], file=sys.stderr)
    print(f"{worker.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
