"""Processes that keep and find the same plans at once, and are killed."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from cudnn_autotune.store.kept_plans import PlanFiles

_ENGINES = 4
_SIZE = 1 << 20


def plan(engine: int) -> bytes:
    return bytes([engine]) * _SIZE


def die_before_it_is_there(event: str, arguments: object) -> None:
    if event == "os.rename":
        os.kill(os.getpid(), signal.SIGKILL)


def write(kept: PlanFiles) -> None:
    while True:
        for engine in range(_ENGINES):
            kept.keep("problem", f"eng{engine}", plan(engine))


def killed(folder: Path, kills: int) -> dict[str, int]:
    """Returns what happened."""
    rng = random.Random(1)
    kept = PlanFiles(folder, {"gpu": "x"}, is_read=True, is_written=True)
    told = {"found": 0, "wrong": 0, "left": 0}
    for engine in range(_ENGINES):
        kept.keep("problem", f"eng{engine}", plan(engine))
    for _ in range(kills):
        children = []
        for number in range(3):
            child = os.fork()
            if child == 0:
                if number == 0:
                    sys.addaudithook(die_before_it_is_there)
                write(kept)
            children.append(child)
        os.waitpid(children.pop(0), 0)
        time.sleep(rng.uniform(0.0, 0.02))
        for engine in range(_ENGINES):
            found = kept.find("problem", f"eng{engine}")
            told["found"] += found is not None
            told["wrong"] += found not in (None, plan(engine))
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    told["left"] = len(list(folder.glob("plans-*/.*.part")))
    return told
