"""Processes that write into one store, for the tests; a script, since forks start at once.

    python store_writers.py together FOLDER PROCESSES DECISIONS
    python store_writers.py killed FOLDER KILLS SEED

Prints what happened as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from decisions import FRONTIER, H200, decision, selection

from cudnn_autotune.store import Store

SMALL = selection(FRONTIER[:1])
_MOST_PUTS = 4  # of a writer that is killed, about


def together(folder: Path, processes: int, decisions: int) -> dict[str, Any]:
    """Each process adds its own, one by one."""
    begin = time.monotonic()
    children = []
    for process in range(processes):
        child = os.fork()
        if child == 0:
            store = Store(folder, H200)
            for number in range(decisions):
                store.add([decision(1 + process * decisions + number, selection=SMALL)])
            os._exit(0 if store.is_writable else 1)
        children.append(child)
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    return {"failed": failed, "seconds": time.monotonic() - begin}


def killed(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Again and again a writer is killed at a random moment, some decisions after its start; after
    each, the store is opened and must hold all that was acknowledged until then."""
    rng = random.Random(seed)
    keys: set[str] = set()
    midway = 0
    store = Store(folder, H200)
    store.add(decision(10**6 + number) for number in range(200))  # so that a write takes a while
    begin = time.perf_counter()
    Store(folder, H200).add([decision(10**6 + 200)])
    one_s = time.perf_counter() - begin  # however slow the disk is
    for kill in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            own = Store(folder, H200)
            for number in range(1000):
                own.add([decision(1 + 1000 * kill + number)])
                os.write(writing, b"%08d" % (1 + 1000 * kill + number))
            os._exit(0)
        os.close(writing)
        time.sleep(rng.uniform(0.0, _MOST_PUTS * one_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with open(reading, "rb") as acknowledgements:
            told = acknowledgements.read()
        fresh = [decision(int(told[i : i + 8])) for i in range(0, len(told), 8)]
        midway += any(folder.glob(".*.part"))
        store = Store(folder, H200)
        keys |= {known.key for known in fresh}
        assert keys <= set(store.keys())
        assert all(store.find(known.problem) == known for known in fresh)
    assert len(store) >= len(keys) + 201
    return {"acknowledged": len(keys), "midway": midway, "entries": len(list(store))}


if __name__ == "__main__":
    warnings.simplefilter("error")
    command = {"together": together, "killed": killed}[sys.argv[1]]
    print(json.dumps(command(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))))
