"""A change that cannot be written stays in memory, is served, causes one warning, is retried."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.processes.subprocesses import evaluate_forked
from support.store.decisions import H200, decision, problem, selection

from cudnn_autotune.store import disk_file
from cudnn_autotune.store.file_store import Store


def in_a_child(body: str, folder: Path) -> Any:
    """Runs ``body`` in a child process and returns its ``told``; ``said()`` lists the warnings."""
    code = f"""
import json, os, resource, sys, warnings
from pathlib import Path
from support.store.decisions import *
from support.store.unprivileged import drop_capabilities
from cudnn_autotune.store.file_store import Store
folder = {str(folder)!r}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    said = lambda: [str(warning.message) for warning in caught]
{"".join(f"    {line}{chr(10)}" for line in body.strip().splitlines())}
print(json.dumps(told))
"""
    return json.loads(evaluate_forked(code))


def test_a_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / "below"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = Store(folder, H200)
        assert store.get(problem()) is None
        assert not store.is_writable
    with pytest.warns(UserWarning, match=r"cannot be written.*memory") as said:
        store.add([decision(1)])
    assert len(said) == 1
    assert str(store.path) in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning was given before
        store.add([decision(2)])
        store.add([decision(3)])
        assert store.get(problem(size=1)) == selection()
        assert [known.key for known in store] == [decision(n).key for n in (1, 2, 3)]
        assert store.discard([decision(2)]) == 1
        assert store.get(problem(size=2)) is None
        assert len(store) == 2
        other = Store(folder, H200)
        other.add([decision(4)])
        assert sum(store.add(other)[:2]) == 1
    # The file in the way is removed, and the next change writes everything.
    (tmp_path / "file").unlink()
    store.add([decision(5)])
    assert store.is_writable
    assert sorted(known.key for known in Store(folder, H200)) == sorted(
        decision(n).key for n in (1, 3, 4, 5)
    )


FULL_DISK = """
store = Store(folder, H200)
store.add([decision(1)])
size = store.path.stat().st_size
before = store.path.read_bytes()
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
store.add([decision(2)])
store.add([decision(3)])
told = {
    "said": said(),
    "is_writable": store.is_writable,
    "served": [known.key for known in store],
    "same": store.path.read_bytes() == before,
    "files": sorted(os.listdir(folder)),
}
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
store.add([decision(4)])
told["written"] = [known.key for known in Store(folder, H200)]
told["is_writable_again"] = store.is_writable
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """The file cannot grow, so that the write fails half way, as on a full disk."""
    told = in_a_child(FULL_DISK, tmp_path)
    assert len(told["said"]) == 1
    assert "cannot be written" in told["said"][0]
    assert not told["is_writable"]
    assert told["served"] == [decision(n).key for n in (1, 2, 3)]
    assert told["same"]
    assert told["files"] == [H200.file_name, f"{H200.file_name}.lock"]
    assert told["written"] == [decision(n).key for n in (1, 2, 3, 4)]
    assert told["is_writable_again"]


DAMAGED_ON_A_FULL_DISK = """
data = Path(folder, H200.file_name).read_bytes()
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
store = Store(folder, H200)
store.add([decision(4)])
told = {
    "said": said(),
    "served": [known.key for known in store],
    "same": store.path.read_bytes() == data,
    "files": sorted(os.listdir(folder)),
}
"""


def test_a_damaged_file_on_a_full_disk(tmp_path: Path) -> None:
    """It is left as it is, because no new file can be written."""
    store = Store(tmp_path, H200)
    store.add([decision(n) for n in (1, 2, 3)])
    store.path.write_bytes(store.path.read_bytes()[:-30])
    told = in_a_child(DAMAGED_ON_A_FULL_DISK, tmp_path)
    assert len(told["said"]) == 1
    assert "damaged" in told["said"][0]
    assert told["served"] == [decision(n).key for n in (1, 2, 4)]
    assert told["same"]
    assert told["files"] == [H200.file_name, f"{H200.file_name}.lock"]


READ_ONLY = """
drop_capabilities()
store = Store(folder, H200)
first = [known.key for known in store], store.is_writable, said()
store.add([decision(2)])
told = [*first, [known.key for known in store], said(), sorted(os.listdir(folder))]
"""


def test_a_folder_without_permission(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    store.add([decision(1)])
    store.path.with_name(f"{store.path.name}.lock").unlink()
    tmp_path.chmod(0o555)
    served, is_writable, said, then_served, then_said, files = in_a_child(READ_ONLY, tmp_path)
    assert (served, is_writable, said) == ([decision(1).key], False, [])
    assert then_served == [decision(1).key, decision(2).key]
    assert len(then_said) == 1
    assert "cannot be written" in then_said[0]
    assert files == [H200.file_name]


def test_a_file_without_permission(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    store.add([decision(1)])
    store.path.chmod(0)
    data = store.path.read_bytes() if os.geteuid() == 0 else b""
    told = in_a_child(READ_ONLY, tmp_path)
    assert told[:2] == [[], False]
    assert len(told[2]) == 1
    assert "Permission denied" in told[2][0]
    assert told[3] == [decision(2).key]
    assert told[4] == told[2]  # there is no new warning
    store.path.chmod(0o600)
    assert store.path.read_bytes() == data or os.geteuid() != 0
    assert list(Store(tmp_path, H200)) == [decision(1)]


def test_a_read_only_file_in_a_folder_with_permission(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    store.add([decision(1)])
    data = store.path.read_bytes()
    store.path.chmod(0o444)
    assert not store.is_writable
    with pytest.warns(UserWarning, match=r"cannot be written.*memory.*read-only"):
        store.add([decision(2)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning was given before
        store.add([decision(3)])
        Store(tmp_path, H200).add([decision(4)])
        assert list(store) == [decision(n) for n in (1, 2, 3)]
    assert store.path.read_bytes() == data
    assert store.path.stat().st_mode & 0o777 == 0o444
    # The intact entries of a damaged file are read.
    store.path.chmod(0o644)
    damaged = data + b"what is no entry\n"
    store.path.write_bytes(damaged)
    store.path.chmod(0o444)
    with pytest.warns(UserWarning, match="damaged"):
        assert list(Store(tmp_path, H200)) == [decision(1)]
    assert store.path.read_bytes() == damaged
    assert not list(tmp_path.glob("*.damaged-*"))
    store.path.chmod(0o644)
    store.path.write_bytes(data)
    store.add([decision(5)])
    assert list(Store(tmp_path, H200)) == [decision(n) for n in (1, 2, 3, 5)]


def test_a_store_that_has_grown_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file above the limit could not be read again, so it is not written."""
    store = Store(tmp_path, H200)
    store.add([decision(1)])
    monkeypatch.setattr(disk_file, "MOST_BYTES", store.path.stat().st_size + 100)
    with pytest.warns(UserWarning, match="cannot be written.*at most"):
        store.add([decision(2)])
    assert list(store) == [decision(1), decision(2)]
    assert list(Store(tmp_path, H200)) == [decision(1)]


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / H200.file_name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="left alone") as said:
        store = Store(tmp_path, H200)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.add([decision(1)])
        assert list(store) == [decision(1)]
        assert not store.is_writable
    assert not path.is_file()
    assert not Path(f"{store.path}.lock").exists()


HOLDER = """
import fcntl, sys, time
with open(sys.argv[1], "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    time.sleep(3600)
"""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Has another process hold the lock of the store's file."""
    command = [sys.executable, "-c", HOLDER, f"{path}.lock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            holder.kill()


def test_a_lock_that_is_never_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "LOCK_TIMEOUT_S", 0.2)
    store = Store(tmp_path, H200)
    store.add([decision(1)])
    with held(store.path):
        with pytest.warns(UserWarning, match="cannot be written"):
            store.add([decision(2)])
        # The next change waits less for the same process.
        monkeypatch.setattr(disk_file, "LOCK_TIMEOUT_S", 3600.0)
        store.add([decision(4)])
        assert store.by_key(decision(2).key) == decision(2)
        # Reading does not need the lock.
        assert list(Store(tmp_path, H200)) == [decision(1)]
    store.add([decision(3)])  # the lock of a dead process is released
    assert len(Store(tmp_path, H200)) == 4


def test_lookups_go_on_while_a_change_waits_for_the_lock(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    store.add([decision(1), decision(2)])
    changes = [
        threading.Thread(target=store.add, args=([decision(3)],)),
        threading.Thread(target=store.reject, args=(decision(2),)),
    ]
    with held(store.path):
        for change in changes:
            change.start()
        for _ in range(20):
            assert store.find(problem(size=1)) == decision(1)
            assert store.by_key(decision(4).key) is None  # a miss reads the file again
            assert len(store) == 2
            time.sleep(0.01)
        assert all(change.is_alive() for change in changes)
    for change in changes:
        change.join()
    there = Store(tmp_path, H200)
    assert len(there) == 3
    assert [bool(known.rejected) for known in there] == [False, True, False]


def test_a_damaged_file_is_served_and_set_aside_once_the_lock_is_free(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    store.add([decision(n) for n in (1, 2, 3)])
    store.path.write_bytes(store.path.read_bytes()[:-30])
    with held(store.path), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Store(tmp_path, H200)
        assert [known.key for known in found] == [decision(n).key for n in (1, 2)]
        assert found.find(problem(size=3)) is None
        assert not list(tmp_path.glob("*.damaged-*"))
    with pytest.warns(UserWarning, match="set aside as"):
        found.add([decision(4)])
    assert len(list(tmp_path.glob("*.damaged-*"))) == 1
    assert len(Store(tmp_path, H200)) == 3


def test_a_file_that_can_no_longer_be_read_is_served_from_memory(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    store.add([decision(1)])
    store.path.unlink()
    store.path.mkdir()
    with pytest.warns(UserWarning, match="left alone"):
        assert store.find(problem(size=2)) is None
    assert store.find(problem(size=1)) == decision(1)
    store.path.rmdir()
    assert store.find(problem(size=2)) is None
    store.add([decision(2)])
    assert decision(2) in list(Store(tmp_path, H200))
