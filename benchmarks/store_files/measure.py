"""Stores of many decisions, timed on the host; no GPU has a part in it."""

from __future__ import annotations

import multiprocessing
import random
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from cudnn_autotune import ConvProblem
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.store import Decision, Environment, Provenance, Store, entry, file_format
from cudnn_autotune.store.decision import key_of

ENVIRONMENT = Environment("NVIDIA H200", 132, "9.0", "", "9.19.0", "1.28.0")


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
        workspace = 1 << (4 * rank % 28)
        candidate = Candidate(66, knobs, workspace, *notes, text, "A", rank)
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


def store(path: Path, entries: int, candidates: int, repeat: int) -> dict[str, Any]:
    """Fills the file at ``path``; times in milliseconds."""
    line = entry.encode(decision(1, candidates), ENVIRONMENT)
    value = line.partition(b',"decision":')[2][:-1]
    names = (entry.names(key_of(problem(number + 1)))[0] for number in range(entries))
    lines = [entry.sealed(name, value, ENVIRONMENT) for name in names]
    path.write_bytes(file_format.encode(ENVIRONMENT, lines))
    size = path.stat().st_size

    def open_and_find() -> None:
        assert Store(path, ENVIRONMENT).find(problem(entries // 2)) is not None

    open_ms = [_ms(open_and_find) for _ in range(repeat)]
    own = Store(path, ENVIRONMENT)
    new = [decision(entries + 1 + number, candidates) for number in range(repeat)]
    add_ms = [_ms(lambda d=d: own.add([d])) for d in new]
    target = path.parent / "imported.json"
    command = [sys.executable, "-m", "cudnn_autotune", "import", path, "--store", target]
    import_ms = _ms(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
    if len(Store(target, ENVIRONMENT)) != entries + repeat:
        raise RuntimeError(f"{entries} entries: not all of them were imported")
    target.unlink()
    times = {"open_ms": open_ms, "add_ms": add_ms, "import_ms": [import_ms]}
    return {"entries": entries, "bytes": size, **times}


def _ms(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def writers(
    path: Path, processes: int, decisions: int, candidates: int, limit_s: float
) -> dict[str, Any]:
    """Processes that add decisions to the file at ``path``, one by one.

    Raises:
        RuntimeError: one failed, or they took longer than ``limit_s``; none is left running.
    """
    # Not "fork": this process has a thread that reads the GPU. The server imports torch for all.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    before = len(Store(path, ENVIRONMENT))
    pipes = [context.Pipe() for _ in range(processes)]
    first = 10**8 + processes * 10**6
    workers = [
        context.Process(target=_write, args=(path, pipe, first + 10**4 * i, decisions, candidates))
        for i, (_, pipe) in enumerate(pipes)
    ]
    end = time.monotonic() + limit_s
    add_ms: list[float] = []
    try:
        for worker in workers:
            worker.start()
        for _, pipe in pipes:
            pipe.close()  # the worker has it: where the worker ends, so does the pipe
        for event in ("was ready", "has added"):
            for own, _ in pipes:
                if not own.poll(max(0.0, end - time.monotonic())):
                    raise RuntimeError(f"{processes} writers: one of them never {event}")
                add_ms += own.recv()
            for own, _ in pipes:
                own.send("go")
    except EOFError as error:
        raise RuntimeError(f"{processes} writers: one of them failed") from error
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.kill()
                worker.join()
    lost = before + processes * decisions - len(Store(path, ENVIRONMENT))
    return {"processes": processes, "decisions": decisions, "add_ms": add_ms, "lost": lost}


def _write(path: Path, pipe: Connection, first: int, decisions: int, candidates: int) -> None:
    own = Store(path, ENVIRONMENT)
    new = [decision(first + number, candidates) for number in range(decisions)]
    pipe.send([])
    pipe.recv()
    pipe.send([_ms(lambda d=d: own.add([d])) for d in new])
    pipe.recv()
