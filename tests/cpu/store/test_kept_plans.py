"""Compiled plans are read back by later processes, and only what this user's process wrote.

No engine is compiled at run time for a GPU that is not here. cuDNN serializes plans of precompiled
engines in the same way, so the tests keep those of all engines.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.conv.problems import make
from support.processes.subprocesses import evaluate_forked

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines.configs import open_search
from cudnn_autotune.store import kept_plans
from cudnn_autotune.store.kept_plans import PlanFiles
from cudnn_autotune.store.private_folder import PrivateFolder

pytestmark = pytest.mark.search

PROBLEM = make("resnet_fp16_nhwc")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """A store's folder; plans of all engines are kept beside it."""
    _C.keep_plans("", kept_plans.find, kept_plans.keep)
    ca.set_store(tmp_path, mode="read_write")
    yield tmp_path
    _C.keep_plans("RUNTIME_COMPILATION", kept_plans.find, kept_plans.keep)


def texts(count: int = 3) -> list[str]:
    return [c.text for c in ca.expert.candidates(PROBLEM, device="h200")[:count]]


def build(text: str, problem: ca.ConvProblem = PROBLEM, device: str = "h200") -> _C.Plan:
    return open_search(problem, device).build(text)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"plans-{os.geteuid()}/*"))


# What is read back


def test_a_plan_is_built_once(folder: Path) -> None:
    for text in texts():
        first, second = build(text), build(text)
        assert (first.is_read_back, second.is_read_back) == (False, True)
        assert second.text == first.text == text
        assert second.workspace_bytes == first.workspace_bytes
    assert len(files(folder)) == len(texts())
    for file in files(folder):
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700


def test_several_are_read_back_on_several_threads() -> None:
    wanted = texts(12)
    for is_read_back in (False, True):
        built = open_search(PROBLEM, "h200").build_many(wanted, 4)
        assert [error for _, error in built] == [""] * len(wanted)
        assert [plan.text for plan, _ in built if plan] == wanted
        assert all(plan and plan.is_read_back is is_read_back for plan, _ in built)


def begin(folder: Path) -> str:
    """The first lines of the code of another process."""
    return f"""
import resource, sys
from support.conv.problems import make
import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines.configs import open_search
from cudnn_autotune.store import kept_plans
ca.set_store({str(folder)!r}, mode="read_write")
_C.keep_plans("", kept_plans.find, kept_plans.keep)
search = open_search(make("resnet_fp16_nhwc"), "h200")
"""


def test_another_process_reads_it_back(folder: Path) -> None:
    code = (
        begin(folder)
        + f"""
plan = search.build({texts()[0]!r})
print(plan.is_read_back, plan.workspace_bytes, kept_plans.counts())
"""
    )
    first, second = evaluate_forked(code), evaluate_forked(code)
    assert first.startswith("False")
    assert first.endswith("{'read': 0, 'compiled': 1}")
    assert second.startswith("True")
    assert second.endswith("{'read': 1, 'compiled': 0}")
    assert first.split()[1] == second.split()[1]


@pytest.mark.parametrize(
    "changes", [{"op": "dgrad"}, {"input_shape": (32, 64, 56, 56)}, {"deterministic": True}]
)
def test_a_plan_is_of_its_problem(changes: dict[str, object]) -> None:
    text = "eng0"  # exists for all of them
    build(text)
    assert not build(text, make("resnet_fp16_nhwc", **changes)).is_read_back  # type: ignore[arg-type]
    assert build(text).is_read_back


def test_a_plan_is_of_its_gpu() -> None:
    build("eng0")
    assert not build("eng0", device="a100").is_read_back


def test_only_compiled_engines_are_kept_by_default(folder: Path) -> None:
    _C.keep_plans("RUNTIME_COMPILATION", kept_plans.find, kept_plans.keep)
    for _ in range(2):
        assert not build(texts()[0]).is_read_back
    assert files(folder) == []


@pytest.mark.parametrize("mode", ["off", "read", "retune"])
def test_modes_of_the_store(folder: Path, mode: str) -> None:
    text, other = texts(2)
    build(text)
    ca.set_store(mode=mode)
    before = files(folder)[0].stat().st_mtime_ns  # a read may move st_atime
    assert build(text).is_read_back is (mode == "read")
    build(other)
    assert len(files(folder)) == (2 if mode == "retune" else 1)
    if mode == "read":
        assert files(folder)[0].stat().st_mtime_ns == before


def test_shipped_folders_are_never_read(tmp_path: Path) -> None:
    build(texts()[0])
    ca.set_store(tmp_path / "own", shipped=[tmp_path])
    assert not build(texts()[0]).is_read_back


# What is not


def damaged_forms(content: bytes, other: bytes) -> dict[str, bytes]:
    title, digest, data = content.split(b"\n", 2)
    middle = len(content) - len(data) // 2
    forms = {
        "empty": b"",
        "of another engine": other,
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "longer": content + b" ",
        "no title": data,
        "of another format": content.replace(b"compiled plan", b"compiled plan 2", 1),
        "of another cuDNN": content.replace(b'"cudnn": "9.', b'"cudnn": "8.', 1),
        "no digest": title + b"\n" + data,
        "no text": b"\xff\xfe" + content,
    }
    for cut in (1, len(title), len(title) + len(digest) // 2, middle, len(content) - 1):
        forms[f"cut at {cut}"] = content[:cut]
    assert content not in forms.values()
    return forms


def test_a_damaged_file_is_built_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cudnn_autotune")
    text, other = texts(2)
    build(other)
    content_of_another = files(folder)[0].read_bytes()
    files(folder)[0].unlink()
    build(text)
    (file,) = files(folder)
    content = file.read_bytes()
    for name, damage in damaged_forms(content, content_of_another).items():
        caplog.clear()
        file.write_bytes(damage)
        assert not build(text).is_read_back, name
        assert "what is kept is not used" in caplog.text, name
        assert file.read_bytes() == content, name
        assert build(text).is_read_back, name


def test_what_cudnn_does_not_take_is_built_again(folder: Path) -> None:
    text = texts()[0]
    description = (Path(ca.__file__).parent / "engines" / "devices" / "h200.json").read_text()
    assert kept_plans.find(PROBLEM.native().text, text, description) is None
    kept_plans.keep(PROBLEM.native().text, text, description, b'{"cudnnVersion":91900}')
    assert not build(text).is_read_back
    assert build(text).is_read_back


def link_file(file: Path) -> None:
    elsewhere = file.parents[1] / "elsewhere"
    elsewhere.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(elsewhere)


def link_folder(file: Path) -> None:
    elsewhere = file.parents[1] / "elsewhere"
    file.parent.rename(elsewhere)
    file.parent.symlink_to(elsewhere)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a loose file": lambda file: file.chmod(0o660),
    "a loose folder": lambda file: file.parent.chmod(0o777),
    "a linked file": link_file,
    "a linked folder": link_folder,
    "a pipe": pipe,
    "far too large": lambda file: os.truncate(file, 1 << 40),  # sparse
    "another's file": lambda file: os.chown(file, 12345, -1),
    "another's folder": lambda file: os.chown(file.parent, 12345, -1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_others_could_have_written_is_not_read(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    if name.startswith("another") and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    caplog.set_level("INFO", "cudnn_autotune")
    text = texts()[0]
    build(text)
    (file,) = files(folder)
    CHANGES[name](file)
    assert not build(text).is_read_back
    assert "what is kept is not used" in caplog.text


def test_files_of_another_user_are_beside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several users may share a store's folder."""
    build(texts()[0])
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert PrivateFolder(folder, "plans").path == folder / f"plans-{uid + 1}"


def test_without_the_drivers_version_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container without /proc/driver; here there is no GPU at all."""
    monkeypatch.setattr(kept_plans.versions, "_driver", lambda: None)
    found = {**ca.environment(), "gpu": "NVIDIA H200", "driver": None}
    monkeypatch.setattr(kept_plans.versions, "environment", lambda device: found)
    assert kept_plans.environment_of(0) is None
    found["driver"] = "580.82.07"
    known = kept_plans.environment_of(0)
    assert known["driver"] == "580.82.07"
    assert known["gpu"] == "NVIDIA H200"
    assert known["cudnn"] == ca.environment()["cudnn"]
    assert known["cuda"] == torch.version.cuda


# What is bounded, and fails


def test_the_oldest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_plans, "MOST_BYTES", 16_000)
    monkeypatch.setattr(kept_plans, "_PORTION_BYTES", 1_000)
    kept = PlanFiles(tmp_path, {"gpu": "x"}, is_read=True, is_written=True)
    for number in range(40):
        kept.keep("problem", f"eng{number}", bytes(1000))
        for entry in kept.folder.entries():  # the clock of a file system may be coarse
            os.utime(kept.folder.path / entry.name, ns=(entry.mtime_ns - 10**9,) * 2)
        assert kept.find("problem", "eng0") == bytes(1000)
        assert sum(entry.size for entry in kept.folder.entries()) <= 16_000
    left = [number for number in range(40) if kept.find("problem", f"eng{number}")]
    assert left[0] == 0  # used again and again
    assert len(left) > 8
    assert left[1:] == list(range(40 - len(left) + 1, 40))


def test_a_forked_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever another thread was doing, which the child has not."""
    with kept_plans._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            build("eng0")
            os._exit(kept_plans.counts()["compiled"] == 0)
    assert os.waitpid(child, 0)[1] == 0


FULL = """
one, other = [c.text for c in search.query("A")][:2]
search.build(one)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
print(search.build(other).is_read_back, search.build(other).is_read_back)
print(search.build(one).is_read_back)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
print(search.build(other).is_read_back, search.build(other).is_read_back)
"""


def test_a_full_disk(folder: Path) -> None:
    """Writes fail half way. Plans are built all the same, and what is kept stays."""
    assert evaluate_forked(begin(folder) + FULL).split() == [
        "False",
        "False",
        "True",
        "False",
        "True",
    ]
    assert [file.suffix for file in files(folder)] == [".plan"] * 2  # nothing half written is left


@pytest.mark.slow
def test_processes_that_write_the_same_plans_and_are_killed(tmp_path: Path) -> None:
    told = json.loads(
        evaluate_forked(f"""
import json, pathlib, sys
from support.store import plan_writers
print(json.dumps(plan_writers.killed(pathlib.Path({str(tmp_path)!r}), 20)))
""")
    )
    assert told["wrong"] == 0
    assert told["found"] == 20 * 4  # what was there once is there, the old or the new one
    assert told["left"] >= 20
    # What killed writers have left takes no more room than plans that nobody uses.
    left = PrivateFolder(tmp_path, "plans")
    assert any(entry.name.endswith(".part") for entry in left.entries())
    left.trim(0)
    assert left.entries() == []
