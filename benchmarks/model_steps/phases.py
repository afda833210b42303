"""The two phases of models.py: processes that compile side by side, and then, one after the other,
processes that measure."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from common.record import Record
from common.telemetry import Telemetry
from common.workers import Worker, WorkerError, started_ahead

from .cases import WAYS, Case

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

    def __init__(
        self,
        script: str,
        record: Record,
        telemetry: Telemetry,
        *,
        end: float,
        process_limit_s: float,
    ) -> None:
        self._script, self._record, self._telemetry = script, record, telemetry
        self._end, self._process_limit_s = end, process_limit_s
        self._begin = time.monotonic()
        self._failures: list[str] = record.results.setdefault("failures", [])

    def _limit_s(self) -> float:
        """How long a process may take from now on; 0 where it had better not begin."""
        left_s = self._end - time.monotonic()
        return min(self._process_limit_s, left_s) if left_s >= _LEAST_S else 0.0

    def _says(self, text: str) -> None:
        print(f"{time.monotonic() - self._begin:6.1f} s  {text}", file=sys.stderr, flush=True)

    def _fails(self, text: str) -> None:
        self._failures.append(text)
        self._says(text)

    def warm_up(self, requests: dict[str, Request], at_once: int) -> None:
        """Lets processes compile, ``at_once`` at a time. A case for which that fails is measured
        all the same: its steps are then compiled there."""
        entries: dict[str, Any] = self._record.results.setdefault("warm_up", {})
        threads = {_THREADS: str(max(2, len(os.sched_getaffinity(0)) // at_once))}
        with ThreadPoolExecutor(at_once) as pool:
            waiting = {
                pool.submit(self._compile, name, request, threads): name
                for name, request in requests.items()
            }
            for done in as_completed(waiting):
                name = waiting[done]
                entry, error = done.result()
                entries[Case(**requests[name]["case"]).id] = entry
                for failed in entry["failed"]:
                    self._fails(f"{name}: {failed['step']}: {failed['error']}")
                if error:
                    self._fails(error)
                self._says(f"{name} has compiled")
                self._save()

    def _compile(
        self, name: str, request: Request, variables: dict[str, str]
    ) -> tuple[dict[str, Any], str | None]:
        entry: dict[str, Any] = {"ways": {}, "failed": []}
        if not self._limit_s():
            return entry, f"time limit: {name} was not run"
        worker = Worker(self._script, name, variables)
        try:
            for part in worker.run(request, time_limit_s=self._limit_s()):
                self._keep(entry, part)
        except WorkerError as error:
            return entry, str(error)
        finally:
            worker.close()
        return entry, None

    def measure(self, requests: dict[str, Request]) -> bool:
        """Measures, and returns whether all ways of all cases took turns."""
        runs: list[dict[str, Any]] = self._record.results.setdefault("runs", [])
        for index, worker in enumerate(started_ahead(self._script, requests)):
            if not self._limit_s():
                rest = len(requests) - index
                self._fails(f"time limit: {rest} of {len(requests)} processes were not run")
                break
            request = requests[worker.name]
            entry: dict[str, Any] = {**request["case"], "pytorch": request["pytorch"]}
            entry |= {"ways": {}, "failed": []}
            runs.append(entry)
            try:
                for part in worker.run(request, time_limit_s=self._limit_s()):
                    self._keep(entry, part)
                    self._save()
            except WorkerError as error:
                self._fails(str(error))
            for failed in entry["failed"]:
                self._fails(f"{worker.name}: {failed['step']}: {failed['error']}")
            self._says(f"{worker.name} is done")
        self._save()
        is_whole = (len(run.get("times_ms", {})) == len(WAYS) for run in runs)
        return len(runs) == len(requests) and all(is_whole)

    def _keep(self, entry: dict[str, Any], part: dict[str, Any]) -> None:
        """Adds a worker's parts to the record."""
        kind = part.pop("part")
        if kind == "way":
            entry["ways"][part.pop("way")] = part
        elif kind == "failed":
            entry["failed"].append(part)
        elif kind == "compared":
            for name, compared in part["ways"].items():
                entry["ways"][name]["errors"] = compared
        else:
            entry |= part

    def _save(self) -> None:
        self._record.save(telemetry=self._telemetry.summary())
