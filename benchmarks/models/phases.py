"""The processes of models: several compile side by side, and one at a time has the GPU."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from common.record import Record
from common.workers import records_of, start

Request = dict[str, Any]
_LEAST_S = 20.0
# How many helpers each process compiles with.
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


class Run:
    """Fills a record.

    Args:
        script: the file that is started with ``--worker``.
        end: a ``time.monotonic()``, after which nothing begins and nothing goes on.
        process_limit_s: seconds after which one process counts as hanging.
    """

    def __init__(self, script: str, record: Record, end: float, process_limit_s: float) -> None:
        self._script, self._record = script, record
        self._end, self._process_limit_s = end, process_limit_s
        self._recording = threading.Lock()
        self._runs, self._failures = record.list_of("runs"), record.list_of("failures")

    def measure(self, requests: dict[str, Request], at_once: int) -> bool:
        """Measures, ``at_once`` processes at a time; returns whether all ways of all cases took
        turns."""
        at_once = min(at_once, len(requests))
        with ThreadPoolExecutor(max(at_once, 1)) as pool:
            counts = [at_once] * len(requests)
            whole = list(pool.map(self._process, requests, requests.values(), counts))
        if left := whole.count(None):
            self._fails(f"time limit: {left} of {len(whole)} processes were not run")
        return all(whole) and not self._failures

    def _process(self, name: str, request: Request, at_once: int) -> bool | None:
        """Whether all ways took turns, in all batches; None if there is no time left for it."""
        limit_s = min(self._process_limit_s, self._end - time.monotonic())
        if limit_s < min(_LEAST_S, self._process_limit_s):
            return None
        threads = max(1, len(os.sched_getaffinity(0)) // at_once - 1)
        entries: dict[int, dict[str, Any]] = {}
        asked = {**request, "limit_s": limit_s}
        with closing(start(self._script, name, {_THREADS: str(threads)})) as worker:
            for part in records_of(worker, asked, limit_s, self._failures):
                with self._recording:
                    self._keep(name, request, entries, part)
                    self._record.save()
        whole = [{*e.get("times_ms", {}), *e.get("left_out", {})} for e in entries.values()]
        return [len(ways) for ways in whole] == [len(request["ways"])] * len(request["batches"])

    def _keep(
        self, name: str, request: Request, entries: dict[int, dict[str, Any]], part: dict[str, Any]
    ) -> None:
        """Adds a worker's part to the record."""
        batch, kind = part.pop("batch"), part.pop("part")
        if batch not in entries:
            case = {**request["case"], "batch": batch, "pytorch": request["pytorch"]}
            entries[batch] = {**case, "ways": {}}
            self._runs.append(entries[batch])
        if kind == "way":
            entries[batch]["ways"][part.pop("way")] = part
        elif kind == "left_out":
            entries[batch].setdefault("left_out", {})[part["way"]] = part["reason"]
        elif kind == "failed":
            self._fails(f"{name}, batch {batch}: {part['step']}: {part['error']}")
        elif kind == "compared":
            for way, compared in part["ways"].items():
                entries[batch]["ways"][way]["errors"] = compared
        else:
            entries[batch] |= part

    def _fails(self, text: str) -> None:
        self._failures.append(text)
        print(text, file=sys.stderr, flush=True)
