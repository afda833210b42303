"""A withdrawn verdict is not believed again: not on a full disk, and not beside other processes."""

from __future__ import annotations

import fcntl
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
from support.processes.subprocesses import evaluate_forked, forked

from cudnn_autotune.store import checked_outputs, private_folder
from cudnn_autotune.store.checked_outputs import CheckedOutputs
from cudnn_autotune.store.private_folder import PrivateFolder

HERE = {"gpu": "NVIDIA H200"}
ENGINE = "eng1"


def opened(folder: Path) -> CheckedOutputs:
    """What another process finds there."""
    return CheckedOutputs(folder, HERE)


def believed(folder: Path, count: int) -> list[int]:
    found = opened(folder)
    return [n for n in range(count) if found.error_of(f"p{n}", ENGINE) is not None]


def file_of(folder: Path) -> Path:
    return folder / f"plans-{os.geteuid()}" / "checked-outputs"


def in_a_child(body: str, folder: Path) -> Any:
    code = f"""
import json, math, os, resource, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_checked_outputs_disk import ENGINE, believed, file_of, opened
from support.store.unprivileged import drop_capabilities
folder = Path({str(folder)!r})
{body}
print(json.dumps(told))
"""
    return json.loads(evaluate_forked(code))


FULL_DISK = """
checked = opened(folder)
for n in range(20):
    checked.add(f"p{n}", ENGINE, 1e-5)
size = file_of(folder).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + ROOM, resource.RLIM_INFINITY))
checked.add("p20", ENGINE, 1e-5)
checked.add("p3", ENGINE, math.inf)
checked.add("p21", ENGINE, 1e-5)
told = {"full": believed(folder, 30), "own": checked.error_of("p3", ENGINE)}
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
checked.add("p22", ENGINE, 1e-5)
told["then"] = believed(folder, 30)
"""


@pytest.mark.basic(1)
@pytest.mark.parametrize("room", [0, 1, 30, 66, 69, 70])
def test_a_full_disk(tmp_path: Path, room: int) -> None:
    """A write that ends half way leaves nothing that can be believed or glued to the next line."""
    told = in_a_child(FULL_DISK.replace("ROOM", str(room)), tmp_path)
    others = [n for n in range(20) if n != 3]
    assert told == {"full": others, "own": None, "then": [*others, 22]}
    for line in file_of(tmp_path).read_bytes().splitlines():
        assert len(line) == len("1e-05") + 65


CANNOT_BE_CHANGED = """
checked = opened(folder)
checked.add("p0", ENGINE, 1e-5)
checked.add("p1", ENGINE, 1e-5)
drop_capabilities()
file_of(folder).chmod(0o400)
file_of(folder).parent.chmod(0o500)
checked.add("p0", ENGINE, math.inf)
told = [checked.error_of("p0", ENGINE), believed(folder, 5)]
file_of(folder).parent.chmod(0o700)
file_of(folder).chmod(0o600)
checked.add("p2", ENGINE, 1e-5)
told += [believed(folder, 5)]
"""


def test_what_cannot_be_withdrawn_is_not_believed_here_and_tried_again(tmp_path: Path) -> None:
    assert in_a_child(CANNOT_BE_CHANGED, tmp_path) == [None, [0, 1], [1, 2]]


def test_without_the_files_lock_nothing_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_folder, "_LOCK_TIMEOUT_S", 0.1)
    checked = opened(tmp_path)
    checked.add("p0", ENGINE, 1e-5)
    checked.add("p1", ENGINE, 1e-5)
    with file_of(tmp_path).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        checked.add("p2", ENGINE, 1e-5)
        checked.withdraw("p0", ENGINE)
    assert believed(tmp_path, 5) == []
    assert checked.error_of("p0", ENGINE) is None
    checked.add("p3", ENGINE, 1e-5)
    assert believed(tmp_path, 5) == [3]


def test_what_another_process_has_recorded_meanwhile_is_withdrawn(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    assert first.error_of("p0", ENGINE) is second.error_of("p0", ENGINE) is None
    first.add("p0", ENGINE, 1e-5)
    second.add("p0", ENGINE, math.inf)
    assert believed(tmp_path, 1) == []


def test_every_line_of_it_is_withdrawn(tmp_path: Path) -> None:
    """Two processes that check at the same time record it twice."""
    processes = [opened(tmp_path) for _ in range(3)]
    assert [one.error_of("p0", ENGINE) for one in processes] == [None] * 3
    for one in processes:
        one.add("p0", ENGINE, 1e-5)
        one.add("p1", ENGINE, 1e-5)
    assert file_of(tmp_path).read_bytes().count(b"\n") == 6
    opened(tmp_path).withdraw("p0", ENGINE)
    assert believed(tmp_path, 2) == [1]


def test_it_can_be_found_right_again(tmp_path: Path) -> None:
    checked = opened(tmp_path)
    for _ in range(3):
        checked.add("p0", ENGINE, 1e-5)
        assert believed(tmp_path, 1) == [0]
        checked.withdraw("p0", ENGINE)
        assert believed(tmp_path, 1) == []


def test_half_a_line_is_not_believed_and_spoils_no_other(tmp_path: Path) -> None:
    """As a killed writer leaves it, or a file system without room."""
    checked = opened(tmp_path)
    checked.add("p0", ENGINE, 1e-5)
    first = len(file_of(tmp_path).read_bytes())
    checked.add("p1", ENGINE, 1.25e-5)
    data = file_of(tmp_path).read_bytes()
    for size in range(len(data)):
        file_of(tmp_path).write_bytes(data[:size])
        whole = [0] * (size >= first)
        assert believed(tmp_path, 2) == whole, size
        opened(tmp_path).add("p2", ENGINE, 1e-5)
        assert set(whole) | {2} <= set(believed(tmp_path, 3)), size
        opened(tmp_path).withdraw("p0", ENGINE)
        assert 0 not in believed(tmp_path, 3), size
        assert 2 in believed(tmp_path, 3), size


def test_lines_are_appended_whole_however_little_the_system_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, pwrite = os.write, os.pwrite
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: pwrite(file, data[:7], place))
    folder = PrivateFolder(tmp_path, "plans")
    lines = [b"%d %s\n" % (n, b"x" * n) for n in range(30)]
    sizes = [folder.append("lines", line) for line in lines]
    assert folder.read("lines", 10_000) == b"".join(lines)
    assert sizes == [sum(map(len, lines[: n + 1])) for n in range(30)]


def test_withdrawals_beside_processes_that_trim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four processes records, and withdraws some; the file is trimmed every 40 lines."""
    monkeypatch.setattr(checked_outputs, "_MOST_BYTES", 40 * 71)
    rounds, children = 250, []
    for process in range(4):

        def work(process: int = process) -> None:
            rng = random.Random(process)
            checked = opened(tmp_path)
            for n in range(process * rounds, (process + 1) * rounds):
                checked.add(f"p{n}", ENGINE, 1e-5)
                if rng.random() < 0.5:
                    checked.add(f"p{n}", ENGINE, math.inf)

        children.append(forked(work))
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    withdrawn = set()
    for process in range(4):
        rng = random.Random(process)
        span = range(process * rounds, (process + 1) * rounds)
        withdrawn |= {n for n in span if rng.random() < 0.5}
    left = set(believed(tmp_path, 4 * rounds))
    assert not left & withdrawn
    assert 5 < len(left) <= 41
    for line in file_of(tmp_path).read_bytes().splitlines():
        assert len(line) == 70


def test_no_record_is_lost_without_a_trim(tmp_path: Path) -> None:
    children = []
    for process in range(4):

        def work(process: int = process) -> None:
            checked = opened(tmp_path)
            for n in range(process * 100, process * 100 + 100):
                checked.add(f"p{n}", ENGINE, 1e-5)

        children.append(forked(work))
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert believed(tmp_path, 400) == list(range(400))
