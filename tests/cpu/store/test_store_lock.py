"""The lock of a store's file: errors of it, readers who would hold it, and warnings as errors."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.processes.subprocesses import evaluate_forked
from support.processes.threads import in_threads
from support.store.decisions import H200, decision, problem

from cudnn_autotune.store import disk_file
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.file_store import Store

OTHER = 54321  # a user that has no account

is_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ENOLCK])
def test_an_error_of_unlocking_is_none_of_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """As network file systems report it. The lock is free all the same."""
    flock = fcntl.flock

    def failing(file: int, operation: int) -> None:
        if operation & fcntl.LOCK_UN:
            raise OSError(error, os.strerror(error))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", failing)
    store = Store(tmp_path, H200)
    for number in range(1, 6):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            store.add([decision(number)])
        with disk_file.locked(store.path, 0):  # raises TimeoutError where it is held
            pass
    assert list(Store(tmp_path, H200)) == [decision(n) for n in range(1, 6)]
    assert store.is_writable


def test_errors_of_locking_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be written is in memory, and the next change writes it."""
    flock, rng = fcntl.flock, random.Random(0)

    def failing(file: int, operation: int) -> None:
        if rng.random() < 0.3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flock(file, operation)

    store = Store(tmp_path, H200)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(fcntl, "flock", failing)
        for number in range(1, 60):
            store.add([decision(number)])
            assert len(store) == number
    store.add([decision(60)])
    assert len(Store(tmp_path, H200)) == 60


READER = """
import fcntl, json, os, sys
os.umask(0o022)
os.setgid({other}); os.setuid({other})
told = [len(open({store!r}).read())]
for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
    try:
        fcntl.flock(os.open({store!r} + ".lock", flags), fcntl.LOCK_EX | fcntl.LOCK_NB)
        told.append("held")
    except PermissionError:
        told.append("refused")
print(json.dumps(told))
"""


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that everybody may read, unlike those of the tests."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@is_root
@pytest.mark.parametrize("earlier_mode", [None, 0o644, 0o444])
def test_a_reader_cannot_hold_the_lock(readable: Path, earlier_mode: int | None) -> None:
    if earlier_mode is not None:
        lock = readable / f"{H200.file_name}.lock"
        lock.touch()
        lock.chmod(earlier_mode)
    store = Store(readable, H200)
    store.add([decision(1)])
    code = READER.format(other=OTHER, store=str(store.path))
    # The interpreter itself may lie where another user cannot read it, so it is started before.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    size, *found = json.loads(done.stdout)
    assert size == store.path.stat().st_size
    assert found == ["refused"] * 3
    store.add([decision(2)])
    assert len(Store(readable, H200)) == 2


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    path, inside, most = tmp_path / "store.json", [0], []

    def work(_: int) -> None:
        for _ in range(20):
            with disk_file.locked(path, 30):
                inside[0] += 1
                most.append(inside[0])
                time.sleep(0.0005)
                inside[0] -= 1

    in_threads(4, work)
    assert most == [1] * 80


def test_a_child_process_does_not_keep_the_lock_of_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with disk_file.locked(path, 0):
            is_held.set()
            is_over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(60)
    waiting, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        os.read(waiting, 1)  # until the parent closes its end
        os._exit(0)
    os.close(waiting)
    with pytest.raises(TimeoutError), disk_file.locked(path, 0):
        pass
    is_over.set()
    thread.join()
    with disk_file.locked(path, 0):
        pass
    os.close(told)
    assert os.waitpid(child, 0)[1] == 0


def below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("in the way")
    return folder / "file" / "store.json"


def read_only(folder: Path) -> Path:
    path = folder / "store.json"
    Store(path, H200).add([decision(7)])
    path.chmod(0o444)
    return path


def no_store(folder: Path) -> Path:
    path = folder / "store.json"
    path.write_text("buy milk")
    return path


def a_pipe_for_a_lock(folder: Path) -> Path:
    os.mkfifo(folder / "store.json.lock")
    return folder / "store.json"


@pytest.mark.parametrize("make", [below_a_file, read_only, no_store, a_pipe_for_a_lock])
def test_with_warnings_as_errors_decisions_stay_in_memory(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    """The warning is raised once, when all is done."""
    path = make(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = Store(path, H200)
    told = evaluate_forked(  # this process has been warned, another one has not
        f"""
import json, warnings
from support.store.decisions import *
from cudnn_autotune.store.file_store import Store
warnings.simplefilter("error")
raised, store = [], None
for number in (1, 2, 3):
    try:
        store = store or Store({str(path)!r}, H200)
    except UserWarning as error:
        raised.append(str(error))
        store = Store({str(path)!r}, H200)
    try:
        store.add([decision(number)])
    except UserWarning as error:
        raised.append(str(error))
served = [n for n in range(9) if n and store.find(problem(size=n)) == decision(n)]
print(json.dumps([len(raised), served]))
"""
    )
    count, served = json.loads(told)
    assert count == 1
    assert [n for n in served if n != 7] == [1, 2, 3]
    assert store.find(problem(size=1)) is None  # it is on no disk


def test_with_warnings_as_errors_a_damaged_file_is_set_aside_and_written(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    store.add([decision(n) for n in (1, 2, 3)])
    store.path.write_bytes(store.path.read_bytes()[:-30])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="damaged"):
            store.add([decision(4)])
        assert list(store) == [decision(n) for n in (1, 2, 4)]
        assert list(Store(tmp_path, H200)) == [decision(n) for n in (1, 2, 4)]
        assert len(list(tmp_path.glob("*.damaged-*"))) == 1


def test_with_warnings_as_errors_the_process_has_its_store(tmp_path: Path) -> None:
    """The first use raises what there is to be told, and the next one finds the store."""
    store_settings.set_store(no_store(tmp_path), mode="read_write")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="left alone"):
                store_settings.get_store()
            store_settings.get_store().add([decision(1)])
            store = store_settings.get_store()
    finally:
        store_settings.set_store(None)
    assert len(store) == 1
