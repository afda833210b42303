"""Stores of many decisions, timed on the host; no GPU has a part in it."""

from __future__ import annotations

import dataclasses
import multiprocessing
import random
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

from cudnn_autotune import ConvProblem
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.store import Decision, Environment, Provenance, Store, entry, layout

ENVIRONMENT = Environment("NVIDIA H200", 132, "9.0", "", "9.19.0", "1.28.0")
_PLACE = 987654321  # no other number of a decision looks like it
_START_S = 60.0  # for imports, on a machine that is busy


def problem(number: int) -> ConvProblem:
    return ConvProblem(
        "fprop",
        (1, 1, number, 1),  # within what cuDNN can count, however many there are
        (1, 1, 3, 3),
        padding=1,
        dtype=torch.float16,
        memory_format=torch.channels_last,
    )


def decision(number: int, candidates: int) -> Decision:
    """As an H200 would have it: knobs, notes and intervals of the usual length."""
    rng = random.Random(0)
    ranking = []
    for rank in range(candidates):
        knobs = {"KERNEL_CFG": rank, "SPLIT_K": 1, "TILE_CGA_M": 2, "WORKSPACE": 0}
        text = "eng66:" + ",".join(f"{name}={value}" for name, value in knobs.items())
        notes = (("TENSOR_CORE",), ("RUNTIME_COMPILATION",))
        candidate = Candidate(66, knobs, 1 << rank, *notes, text, "A", rank)
        ms = (1 + rank / 10) * rng.uniform(0.99, 1.01)
        ranking.append(Measurement(candidate, ms, 40, ms * 0.99, ms * 1.01))
    evidence = Evidence(
        rule="fastest",
        tied=(ranking[0].candidate.text,),
        regret_bound=0.004,
        confidence=0.95,
        gpu_ms=61.7,
        wall_ms=240.3,
        clock_mhz=1980.0,
    )
    provenance = Provenance("580.159.04", "2.11.0", "0.1.0", "2026-01-01T12:00:00Z")
    selection = Selection(tuple(ranking), 40 * candidates, evidence)
    return Decision(problem(number), "auto", 0, None, selection, 2e-4, (), provenance)


def filled(path: Path, entries: int, candidates: int) -> int:
    """Writes a store's file; returns its bytes."""
    template = entry.encode(decision(_PLACE, candidates), ENVIRONMENT)
    place = str(_PLACE).encode()
    lines = (template.replace(place, str(n + 1).encode()) for n in range(entries))
    data = layout.encode(ENVIRONMENT, lines)
    path.write_bytes(data)
    return len(data)


def sizes(folder: Path, entries: int, candidates: int, repeat: int) -> dict[str, Any]:
    """Times of one store; in milliseconds, those of lookups in microseconds."""
    path = folder / f"{entries}.json"
    size = filled(path, entries, candidates)
    open_ms = [_ms(lambda: Store(path, ENVIRONMENT)) for _ in range(repeat)]
    store = Store(path, ENVIRONMENT)
    assert len(store) == entries
    numbers = random.Random(0).sample(range(1, entries + 1), min(entries, 200))
    problems = [problem(number) for number in numbers]
    unknown = [problem(entries + 1 + number) for number in range(len(problems))]
    first_us = [1e3 * _ms(lambda p=p: store.find(p)) for p in problems]
    again_us = [1e3 * _ms(lambda p=p: store.find(p)) for p in problems]
    miss_us = [1e3 * _ms(lambda p=p: store.find(p)) for p in unknown]
    new = [decision(entries + 1 + number, candidates) for number in range(repeat)]
    put_ms = [_ms(lambda d=d: store.add([d])) for d in new]
    assert len(Store(path, ENVIRONMENT)) == entries + repeat
    path.unlink()
    return {
        "entries": entries,
        "bytes": size,
        "open_ms": open_ms,
        "first_us": first_us,
        "again_us": again_us,
        "miss_us": miss_us,
        "put_ms": put_ms,
    }


def _ms(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def writers(
    folder: Path, processes: int, decisions: int, candidates: int, limit_s: float
) -> dict[str, Any]:
    """Processes that add decisions to one store, one by one.

    Raises:
        RuntimeError: one failed, or they took longer than ``limit_s``; none is left running.
    """
    path = folder / f"{processes}_writers.json"
    # Not "fork": this process has a thread that reads the GPU. The server imports torch for all.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    start = context.Barrier(processes + 1)
    workers = [
        context.Process(target=_write, args=(path, start, index, decisions, candidates))
        for index in range(processes)
    ]
    try:
        for worker in workers:
            worker.start()
        start.wait(_START_S)
        begin = time.perf_counter()
        for worker in workers:
            worker.join(max(0.0, begin + limit_s - time.perf_counter()))
        seconds = time.perf_counter() - begin
    except threading.BrokenBarrierError:
        raise RuntimeError(f"{processes} writers: not all of them started") from None
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.kill()
                worker.join()
    if any(codes := [worker.exitcode for worker in workers]):
        raise RuntimeError(f"{processes} writers ended with {codes} after {seconds:.0f} s")
    found = len(Store(path, ENVIRONMENT))
    size = path.stat().st_size
    path.unlink()
    return {
        "processes": processes,
        "decisions": decisions,
        "seconds": seconds,
        "bytes": size,
        "lost": processes * decisions - found,
    }


def _write(path: Path, start: Barrier, index: int, decisions: int, candidates: int) -> None:
    try:
        store = Store(path, ENVIRONMENT)
        template = decision(1, candidates)
        own = [
            dataclasses.replace(template, problem=problem(1 + index * decisions + number))
            for number in range(decisions)
        ]
    except BaseException:
        start.abort()  # nobody waits for one that does not come
        raise
    start.wait(_START_S)
    for one in own:
        store.add([one])
