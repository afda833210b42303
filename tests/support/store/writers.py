"""Processes that write to one store. Each function returns what happened."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.file_store import Store
from support.store.decisions import FRONTIER, H200, decision, selection

SMALL = selection(FRONTIER[:1])
_MOST_PUTS = 4  # about as many as a writer makes before it is killed


def together(folder: Path, processes: int, decisions: int) -> dict[str, Any]:
    """Each process adds its own decisions, one by one."""
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
    """Kills writers, each at a random time, some decisions after its start, and more of them where
    none of the first was killed between writing and acknowledging.

    After each of them the store must hold all decisions that were acknowledged until then.
    """
    rng = random.Random(seed)
    keys: set[str] = set()
    store = Store(folder, H200)
    store.add([decision(10**6)])
    begin = time.perf_counter()
    Store(folder, H200).add([decision(10**6 + 1)])
    one_s = time.perf_counter() - begin  # this adapts the test to the speed of the disk
    unfinished = 0
    for kill in range(10 * kills):
        if kill >= kills and keys and unfinished:
            break
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
        store = Store(folder, H200)
        keys |= {known.key for known in fresh}
        assert keys <= set(store.keys())
        assert all(store.find(known.problem) == known for known in fresh)
        unfinished = len(list(store)) - len(keys) - 2
    return {"acknowledged": len(keys), "unfinished": unfinished}


def replacing(folder: Path) -> dict[str, Any]:
    """Kills a writer just before the new file that it has written replaces the old one.

    It writes a new file because it has changed one decision until most lines were out of date.
    """

    def kill(event: str, arguments: object) -> None:
        if event == "os.rename":
            os.kill(os.getpid(), signal.SIGKILL)

    store = Store(folder, H200)
    store.add([decision(1), decision(2)])
    child = os.fork()
    if child == 0:
        sys.addaudithook(kill)
        for day in range(1, 1000):
            store.put(decision(1).problem, selection(FRONTIER[: 1 + day % 2]))
        os._exit(0)
    was_killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    left = len(list(folder.glob(".*.part")))
    lines = store.path.read_bytes().count(b"\n")
    store = Store(folder, H200)
    entries = len(list(store))
    store.add([decision(3)])
    return {
        "was_killed": was_killed,
        "left": left,
        "lines": [lines, store.path.read_bytes().count(b"\n")],
        "entries": [entries, len(list(Store(folder, H200)))],
    }


def forked(folder: Path, forks: int) -> dict[str, Any]:
    """Forks a process again and again while its threads add and read; each child adds one."""
    # Python 3.12 warns at any such fork that it may hang.
    warnings.simplefilter("ignore", DeprecationWarning)
    store_settings.set_store(folder)
    store = Store(folder, H200)
    numbers = itertools.count(1)
    added: list[int] = []
    is_over = threading.Event()

    def add() -> None:
        while not is_over.is_set():
            number = next(numbers)
            store.add([decision(number, selection=SMALL)])
            added.append(number)
            time.sleep(0.001)  # otherwise a child would seldom get the lock of the file

    def read() -> None:
        while not is_over.is_set():
            assert store.find(decision(10**9).problem) is None
            store_settings.set_store(folder)
            store_settings.get_store()

    threads = [threading.Thread(target=work) for work in (add, add, read)]
    for thread in threads:
        thread.start()
    ends = []
    for fork in range(forks):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            store.add([decision(10**6 + fork)])
            assert store.find(decision(10**6 + fork).problem) is not None
            store_settings.get_store()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        ends.append(status)
        if os.WIFSIGNALED(status):
            break
    is_over.set()
    for thread in threads:
        thread.join()
    hung = sum(os.WIFSIGNALED(status) for status in ends)
    return {"hung": hung, "failed": sum(map(bool, ends)), "added": len(added)}
