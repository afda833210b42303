"""One worker a GPU; each takes the next case when it is done with one."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from common.workers import Worker, WorkerError

# After so long without a word a worker counts as hanging.
SILENT_S = 60.0


def serve_cases(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker's side: its request has ``device``, ``gpu``, ``settings`` and ``cases``."""
    from cudnn_autotune.timers.telemetry import nvml_device

    # Before anything touches CUDA: the GPU that is to be used is the only one.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = str(nvml_device(request["gpu"], visible))
    import torch
    from common.sources import GpuSource, failure

    from cudnn_autotune.audit.layers import Case

    from .measure import Settings, measure
    from .simulated import SimulatedFallback

    torch.backends.cudnn.allow_tf32 = True
    settings = Settings(**request["settings"])
    for index, described in request["cases"]:
        case = Case(**described)
        begin = time.monotonic()
        if begin > request["until_s"]:
            return
        is_dry_run = request["device"] == "cpu"
        source: Any = SimulatedFallback(index) if is_dry_run else GpuSource(case.problem())
        timer = None
        try:
            timer, candidates = source.open()
            found = measure(timer, candidates, settings)
        except (RuntimeError, ValueError) as error:
            found = {"error": failure(error)}
        finally:
            if timer is not None:
                source.close(timer)
        yield {"case": case.id, **found, "seconds": round(time.monotonic() - begin, 2)}


def measure_all(
    script: str | Path,
    cases: Sequence[dict[str, Any]],
    gpus: int,
    request: dict[str, Any],
    limit_s: float,
    keep: Callable[[dict[str, Any]], None],
) -> list[str]:
    """Measures ``cases``, every ``gpus``-th on the same GPU.

    Args:
        limit_s: no case is begun after so many seconds.
        keep: given what was found, case by case, one at a time.

    Returns:
        What went wrong with workers.
    """
    until_s = time.monotonic() + limit_s
    told: queue.Queue[dict[str, Any] | None] = queue.Queue()
    failures: list[str] = []

    def ask(gpu: int) -> None:
        mine = list(enumerate(cases))[gpu::gpus]
        worker = Worker(script, str(gpu))
        try:
            for record in worker.run(
                {**request, "gpu": gpu, "cases": mine, "until_s": until_s},
                time_limit_s=limit_s + SILENT_S,
            ):
                told.put(record)
        except WorkerError as error:
            failures.append(str(error))
            print(error, file=sys.stderr)
        finally:
            worker.close()
            told.put(None)

    threads = [threading.Thread(target=ask, args=(gpu,)) for gpu in range(gpus)]
    for thread in threads:
        thread.start()
    for _ in threads:
        for record in iter(told.get, None):
            keep(record)
    for thread in threads:
        thread.join()
    return failures
