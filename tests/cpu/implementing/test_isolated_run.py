"""A user's implementation runs in a process of its own before it may run in this one."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from support import checkout
from support.kernels import user_kernels
from support.kernels.user_implementations import registered
from support.processes.subprocesses import PACKAGE_PARENT

import cudnn_autotune as ca
from cudnn_autotune.core.guard_bands import GuardedMemory, with_room
from cudnn_autotune.engines.registry import ImplementationError
from cudnn_autotune.implementing import isolated_run
from cudnn_autotune.implementing.isolated_process import harm_of
from cudnn_autotune.implementing.isolated_run import (
    NotImportableError,
    Outcome,
    UntriedError,
    check,
    run_elsewhere,
)
from cudnn_autotune.implementing.user_implementation import UserImplementation
from cudnn_autotune.timers.measuring import operands

pytestmark = pytest.mark.search

PROBLEM = ca.ConvProblem("fprop", (2, 3, 5, 6), (4, 3, 3, 3), padding=1)
OTHERS = [ca.ConvProblem("fprop", (n, 3, 5, 6), (4, 3, 3, 3), padding=1) for n in (3, 4, 5, 6)]
PASSED = Outcome()


def implementation(build: Any = user_kernels.build, **changes: Any) -> UserImplementation:
    given = {
        "name": "mine",
        "version": "1",
        "supports": user_kernels.always,
        "build": build,
        "settings": ("right", "hangs"),
        "workspace": user_kernels.workspace,
        **changes,
    }
    return UserImplementation(**given)


def elsewhere(*settings: str, **changes: Any) -> list[Outcome]:
    return list(run_elsewhere(implementation(**changes), settings, PROBLEM, "cpu"))


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    isolated_run.forget("mine")
    yield
    isolated_run.forget("mine")


def here(settings: str) -> str:
    """What the other process would find, but in this one."""
    return harm_of(implementation(), settings, PROBLEM, operands(PROBLEM, "cpu"))


def left_out(settings: str, problem: ca.ConvProblem = PROBLEM) -> str:
    """Why ``check`` refuses settings; empty if it does not."""
    try:
        check(f"mine@1:{settings}", problem, "cpu")
    except ImplementationError as error:
        return str(error).removeprefix(f"mine@1:{settings} is left out: ")
    return ""


class Elsewhere:
    """Stands for ``run_elsewhere``: no process, but an outcome of each setting by its name."""

    def __init__(self, **outcomes: Outcome | Exception) -> None:
        self.outcomes = outcomes
        self.asked: list[list[str]] = []

    def __call__(self, _: Any, settings: Sequence[str], *__: Any) -> Iterator[Outcome]:
        self.asked.append(list(settings))
        for one in settings:
            outcome = self.outcomes.get(one, PASSED)
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome
            if outcome.harm:
                return


def instead(monkeypatch: pytest.MonkeyPatch, **outcomes: Outcome | Exception) -> Elsewhere:
    found = Elsewhere(**outcomes)
    monkeypatch.setattr(isolated_run, "run_elsewhere", found)
    return found


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# What a run finds


def test_settings_that_do_no_harm_pass_in_one_process(tmp_path: Path) -> None:
    found = elsewhere("prints", "right", "raises", "right", supports=lambda problem: 1 / 0)
    failed = Outcome(failure="it raises PlanError: mine@1:raises: ValueError: not today")
    assert found == [PASSED, PASSED, failed, PASSED]


@pytest.mark.slow
def test_a_build_that_raises_has_not_passed_and_does_no_harm() -> None:
    found = elsewhere("right", build=user_kernels.builds_nothing)
    assert found == [Outcome(failure="it raises RuntimeError: no compiler")]


@pytest.mark.basic(1)
@pytest.mark.parametrize(
    ("settings", "harm"),
    [
        ("exits", "in a process of its own it ends with status 3 (I am leaving)"),
        ("crashes", "in a process of its own it dies of signal 11"),
        ("behind", "it writes outside of y"),
    ],
)
def test_harm_is_done_elsewhere_and_ends_the_run(settings: str, harm: str) -> None:
    assert elsewhere(settings, "right") == [Outcome(harm)]


@pytest.mark.basic(2)
@pytest.mark.parametrize(
    ("settings", "harm"),
    [
        ("behind", "it writes outside of y"),
        ("before", "it writes outside of y"),
        ("workspace", "it writes outside of workspace"),
        ("weight", "it writes outside of w"),
        ("input", "it writes to x, which it may only read"),
        ("wrong", "its output is wrong (relative error 2)"),
        ("half", "its output is wrong (relative error inf)"),
    ],
)
def test_what_is_harm(settings: str, harm: str) -> None:
    assert here(settings) == harm


def test_one_that_runs_out_of_memory_has_not_run_to_its_end() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="no room for spectra"):
        here("out_of_memory")


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(failure="it raises OutOfMemoryError: no room for spectra"),
        Outcome(failure="it raises OSError: [Errno 28] No space left on device"),
        UntriedError("no process can be started: [Errno 28] No space left on device"),
    ],
)
def test_what_failed_for_a_reason_that_may_pass_is_tried_again_after_some_time(
    outcome: Outcome | UntriedError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried for other problems meanwhile, for as many as there are."""
    stands_for = instead(monkeypatch, right=outcome)
    now_s = [time.monotonic()]
    monkeypatch.setattr(isolated_run.time, "monotonic", lambda: now_s[0])
    with registered(implementation(settings=("right",))):
        for problem in (PROBLEM, *OTHERS, PROBLEM):
            assert "space left" in left_out("right", problem) or "no room" in left_out("right")
        assert len(stands_for.asked) == 1 + len(OTHERS)
        stands_for.outcomes.clear()
        assert left_out("right")
        now_s[0] += isolated_run.AGAIN_S + 1
        assert left_out("right") == ""
        assert len(stands_for.asked) == 2 + len(OTHERS)


def test_what_another_process_cannot_import_is_not_run_there() -> None:
    with pytest.raises(NotImportableError, match="it cannot be imported by name"):
        elsewhere("right", build=lambda problem, settings: print)


# The processes


def test_a_process_that_does_not_start_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_run, "START_S", 0.01)
    with pytest.raises(UntriedError, match=r"the other process does not finish within 0\.01 s"):
        elsewhere("right")


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (None, "sys.executable must be the path of Python's program, and is None"),
        ("", "sys.executable must be the path of Python's program, and is ''"),
        ("/no/such/python", "the other process ends with status 127 (sh: "),
        ("/bin/true", "the other process ends with status 0"),
        ("nul\0", "no process can be started: embedded null byte"),
    ],
)
def test_where_no_python_can_be_started_it_does_not_compete(
    program: str | None, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    with registered(implementation()):
        for problem in (PROBLEM, *OTHERS):
            for settings in ("right", "hangs"):
                found = left_out(settings, problem)
                assert found.startswith(f"it could not be tested in a separate process ({why}")
    (said,) = warnings(caplog)
    assert said.startswith("mine@1 does not compete: it could not be tested in a separate process")
    assert why in said


def test_what_cannot_start_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, program = tmp_path / "started", tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho one >> {started}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with registered(implementation()):
        for settings, problem in (("right", PROBLEM), ("hangs", PROBLEM), ("right", OTHERS[0])):
            assert "ends with status 0" in left_out(settings, problem)
    assert started.read_text().splitlines() == ["one"]


@pytest.mark.slow
def test_what_python_says_when_it_starts_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds of what a user's module prints. The standard input is empty."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "print('{}', flush=True)\n"
        "os.write(1, b'[1]\\n' * 1000)\n"
        "os.write(2, b'warning\\n')\n"
        "assert sys.stdin.read() == ''\n"
    )
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{before}")
    assert elsewhere("prints", "right") == [PASSED, PASSED]


@pytest.mark.basic(1)
@pytest.mark.parametrize("settings", ["hangs", "holds_the_gil", "starts_another"])
def test_one_that_hangs_is_ended_with_all_that_it_started(
    settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_MARK", mark := f"{os.getpid()}-{settings}")
    monkeypatch.setattr(isolated_run, "RUN_S", 1.0)
    harm = "in a process of its own it does not finish within 1 s"
    assert elsewhere(settings, "right") == [Outcome(harm)]
    monkeypatch.delenv("TEST_MARK")
    assert_none_left(mark)


@pytest.mark.slow
def test_one_that_cannot_be_ended_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver may not get its kernel off the GPU."""
    monkeypatch.setattr(isolated_run, "RUN_S", 0.5)
    monkeypatch.setattr(isolated_run, "END_S", 0.5)
    monkeypatch.setattr(isolated_run, "_WATCHED", 'exec "$@"')
    survivors: list[int] = []
    with monkeypatch.context() as unkillable:
        unkillable.setattr(os, "killpg", lambda group, _: survivors.append(group))
        assert [outcome.failure for outcome in elsewhere("hangs")] == [""]
    (group,) = survivors
    assert warnings(caplog) == [
        f"process {group}, in which an implementation was tried, has been killed and does not end "
        "within 0.5 s; it may still use the GPU"
    ]
    os.killpg(group, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """The processes with this value of TEST_MARK in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if f"TEST_MARK={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except (OSError, ValueError):
            pass
    return found


def assert_none_left(mark: str) -> None:
    """Waits, since the end of what another process kills may take a moment."""
    wait_for(lambda: not marked(mark))


def wait_for(happens: Any, timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


_PROGRAM = """
import logging, os, sys, time
sys.path[:0] = [{tests!r}, {folder!r}]
with open({imports!r}, "a") as file:
    print(os.getpid(), __name__, file=file)
from support import checkout
from support.kernels import user_kernels
import cudnn_autotune as ca
from cudnn_autotune.engines import registry
from cudnn_autotune.implementing import isolated_run

def search():
    problem = ca.ConvProblem("fprop", (2, 3, 5, 6), (4, 3, 3, 3), padding=1)
    offers = registry.find("mine").offers(problem, None)
    for offer in offers:
        try:
            isolated_run.check(f"mine@1:{{offer.settings}}", problem, "cpu")
            print("passed", offer.settings, flush=True)
        except registry.ImplementationError as error:
            print(error, flush=True)
    print(len(offers), "offers", flush=True)

{code}
"""


class Program:
    """A program that registers an implementation and does with each of its offers what a search
    does. It writes a line for each process that imports it."""

    def __init__(self, folder: Path, code: str, **modules: str) -> None:
        self.mark = f"{os.getpid()}-{folder.name}"
        self.imports, self.began = folder / "imports", folder / "began"
        tests = str(checkout.TESTS)
        given = {"tests": tests, "folder": str(folder), "imports": str(self.imports)}
        for name, text in {"program": code, **modules}.items():
            (folder / f"{name}.py").write_text(_PROGRAM.format(**given, code=text))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CUDNN_AUTOTUNE_")}
        environment |= {
            "PYTHONPATH": os.pathsep.join((PACKAGE_PARENT, environment.get("PYTHONPATH", ""))),
            "CUDNN_AUTOTUNE_CACHE": "off",
            "TEST_MARK": self.mark,
            "TEST_BEGAN": str(self.began),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(folder / "program.py")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def said(self) -> list[str]:
        said, _ = self.process.communicate(timeout=240.0)
        return said.splitlines()

    def imported(self) -> int:
        return len(self.imports.read_text().splitlines())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in marked(self.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


_MODULE = """
@ca.register_implementation(
    "mine", version="1", supports=user_kernels.always, settings=("right",),
    workspace=user_kernels.workspace,
)
def build(problem, settings):
    return user_kernels.build(problem, settings)

search()
"""


@pytest.mark.slow
def test_a_module_that_searches_when_it_is_imported_starts_one_process(tmp_path: Path) -> None:
    """The process that imports it, to try what it defines, searches too."""
    with Program(tmp_path, "import searches", searches=_MODULE) as program:
        assert program.said() == ["passed right", "1 offers"]
        assert program.imported() == 3, "the program, the module in it, and in one other process"
        assert marked(program.mark) == []


_STARTS_AGAIN = """
ca.register_implementation(
    "mine", version="1", supports=user_kernels.always, settings=("right", "uses_workspace"),
    workspace=user_kernels.workspace,
)(user_kernels.build)
sys.executable = {starter!r}
isolated_run.START_S = {start_s}
search()
if os.environ.get("CUDNN_AUTOTUNE_ISOLATED"):
    user_kernels.began()
    time.sleep(3600)
"""


def starts_again(tmp_path: Path, start_s: float) -> str:
    """The code of a program that another one starts as if it were Python."""
    starter = tmp_path / "starter"
    starter.write_text(f"#!/bin/sh\n{sys.executable} {tmp_path}/program.py\n")
    starter.chmod(0o755)
    return _STARTS_AGAIN.format(starter=str(starter), start_s=start_s)


@pytest.mark.slow
@pytest.mark.long
def test_a_program_that_sys_executable_starts_again_runs_twice_at_most(tmp_path: Path) -> None:
    with Program(tmp_path, starts_again(tmp_path, 10.0)) as program:
        *whys, offers = program.said()
        assert [why.partition(":")[0] for why in whys] == ["mine@1"] * 2
        assert all("does not finish within 10 s" in why for why in whys)
        assert offers == "2 offers"
        assert program.imported() == 2
        assert_none_left(program.mark)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "how"),
    [
        ("hangs", signal.SIGTERM),
        ("holds_the_gil", signal.SIGKILL),
        ("starts_another", signal.SIGKILL),
    ],
)
def test_whatever_ends_the_program_ends_all_that_it_tries(
    settings: str, how: signal.Signals, tmp_path: Path
) -> None:
    code = (
        'ca.register_implementation("mine", version="1", supports=user_kernels.always, '
        f"settings=({settings!r},), workspace=user_kernels.workspace)(user_kernels.build)\n"
        "search()\n"
    )
    with Program(tmp_path, code) as program:
        wait_for(program.began.exists)
        assert len(marked(program.mark)) >= 2
        program.process.send_signal(how)
        assert_none_left(program.mark)


# What is tried, and what is remembered


@pytest.mark.slow
@pytest.mark.long
def test_each_setting_is_tried_before_it_runs_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolated_run, "RUN_S", 2.0)
    settings = ("right", "hangs", "exits", "uses_workspace", "wrong")
    with registered(implementation(settings=settings)):
        found = {one: left_out(one) for one in settings}
    assert found == {
        "right": "",
        "hangs": "in a process of its own it does not finish within 2 s",
        "exits": "in a process of its own it ends with status 3 (I am leaving)",
        "uses_workspace": "",
        "wrong": "its output is wrong (relative error 2)",
    }
    assert len(warnings(caplog)) == 3


def test_settings_are_tried_together_and_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    many = tuple(f"s{i}" for i in range(40))
    elsewhere = instead(monkeypatch, s1=Outcome("it hangs"), s30=Outcome(failure="it raises"))
    with registered(implementation(settings=many)):
        for _ in range(2):
            found = {one: left_out(one) for one in many}
    assert found == {
        one: {"s1": "it hangs", "s30": "in a process of its own it raises"}.get(one, "")
        for one in many
    }
    # The first four, as ``auto`` takes them, in two processes since one did harm; then all others.
    assert elsewhere.asked[:2] == [["s0", "s1", "s2", "s3"], ["s2", "s3"]]
    assert [one for some in elsewhere.asked[2:] for one in some] == list(many[4:])
    assert [len(some) for some in elsewhere.asked] == [4, 2, 16, 16, 4]
    assert warnings(caplog) == [
        "mine@1:s1 is left out: it hangs",
        f"mine@1:s30 is left out, first for {PROBLEM.text}: in a process of its own it raises",
    ]


def test_settings_for_another_problem_are_tried_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = instead(monkeypatch, n3=Outcome("it hangs"))
    own = implementation(settings=lambda problem: (f"n{problem.input_shape[0]}",))
    with registered(own):
        assert [left_out(f"n{p.input_shape[0]}", p) for p in (PROBLEM, *OTHERS[:2])] == [
            "",
            "it hangs",
            "",
        ]
    assert elsewhere.asked == [["n2"], ["n3"], ["n4"]]


def test_versions_that_do_harm_again_and_again_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    many = tuple(f"s{i}" for i in range(9))
    elsewhere = instead(monkeypatch, **{f"s{i}": Outcome("it hangs") for i in (1, 2, 3)})
    with registered(implementation(settings=many)):
        found = [left_out(one) for one in many]
    assert found == ["", *["it hangs"] * 3, *["3 other settings of mine@1 do harm"] * 5]
    assert len(elsewhere.asked) == 3
    assert len(warnings(caplog)) == 4


def test_a_passed_setting_stays_so_where_no_other_can_be_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = instead(monkeypatch)
    with registered(implementation(settings=("right",))):
        assert left_out("right") == ""
        elsewhere.outcomes["wrong"] = UntriedError("no memory")
        for _ in range(2):
            assert left_out("wrong") == "it could not be tested in a separate process (no memory)"
        assert left_out("right") == ""
    assert elsewhere.asked == [["right"], ["wrong"]]


# Threads and forks


class Waits(Elsewhere):
    """A run that lasts until the test lets it end."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> Iterator[Outcome]:
        self.has_begun.set()
        assert self.may_end.wait(60.0)
        yield from super().__call__(*args)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    found = Waits()
    monkeypatch.setattr(isolated_run, "run_elsewhere", found)
    with registered(implementation(settings=("right",))):
        yield found
        found.may_end.set()


def test_threads_that_ask_for_a_setting_wait_for_one_run(waits: Waits) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(left_out, "right") for _ in range(4)]
        assert waits.has_begun.wait(60.0)
        assert not any(one.done() for one in found)
        waits.may_end.set()
        assert [one.result(60.0) for one in found] == [""] * 4
    assert waits.asked == [["right"]]


def test_an_interrupted_run_is_left_to_the_next_thread(
    waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Iterator[Outcome]:
        monkeypatch.setattr(isolated_run, "run_elsewhere", waits)
        waits.may_end.set()
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(isolated_run, "run_elsewhere", interrupted)
    with pytest.raises(KeyboardInterrupt):
        left_out("right")
    assert left_out("right") == ""
    assert waits.asked == [["right"]]


def test_a_forked_process_leaves_a_run_to_its_parent(
    waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(left_out, "right")
        assert waits.has_begun.wait(60.0)
        pid = os.fork()
        if pid == 0:
            try:
                monkeypatch.setattr(isolated_run, "run_elsewhere", Elsewhere())
                isolated_run.forget("none")
                os._exit(0 if left_out("right") == "" else 1)
            finally:
                os._exit(2)
        try:
            wait_for(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
        finally:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        waits.may_end.set()
        assert found.result(60.0) == ""


@pytest.mark.slow
def test_a_forked_process_does_not_keep_a_run_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy of the channel would let the watcher believe that the program goes on."""
    code = (
        'ca.register_implementation("mine", version="1", supports=user_kernels.always, '
        'settings=("hangs",), workspace=user_kernels.workspace)(user_kernels.build)\n'
        "import threading\n"
        "threading.Thread(target=search).start()\n"
        "while not os.path.exists(os.environ['TEST_BEGAN']):\n"
        "    time.sleep(0.05)\n"
        "if os.fork() == 0:\n"
        "    open(os.environ['TEST_BEGAN'] + ' and forked', 'w').close()\n"
        "    time.sleep(3600)\n"
    )
    with Program(tmp_path, code) as program:
        wait_for(program.began.with_name("began and forked").exists)
        program.process.kill()
        program.process.wait()
        wait_for(lambda: len(marked(program.mark)) == 1)


# Guard bands


@pytest.mark.parametrize("size", [0, 1, 255, 4096])
@pytest.mark.parametrize("ahead", [0, 2, 254])
def test_guarded_memory_is_where_it_was_asked_for(size: int, ahead: int) -> None:
    guarded = GuardedMemory(size, torch.device("cpu"), ahead)
    assert guarded.memory.numel() == size
    if size:
        assert guarded.memory.data_ptr() % 256 == ahead
    guarded.memory.fill_(0)
    assert not guarded.is_touched()


@pytest.mark.parametrize("place", [-(2**20), -1, 100, 100 + 2**20 - 1])
def test_a_single_byte_outside_is_seen(place: int) -> None:
    guarded = GuardedMemory(100, torch.device("cpu"))
    offset = guarded.memory.storage_offset() + place
    torch.as_strided(guarded.memory, (1,), (1,), offset).fill_(0)
    assert guarded.is_touched()


@pytest.mark.parametrize("size", [0, 1, 4096, 3 << 20])
def test_memory_with_room_is_in_the_middle(size: int) -> None:
    memory = with_room(size, torch.device("cpu"))
    assert (memory.numel(), memory.dtype) == (size, torch.uint8)
    room = 1 << 20 if size else 0
    assert memory.storage_offset() == room
    assert memory.untyped_storage().nbytes() == size + 2 * room


def test_a_tensor_keeps_its_layout_and_its_alignment() -> None:
    room = torch.empty(2 * 3 * 4 * 5 + 1, dtype=torch.float16)
    tensor = room.as_strided((2, 3, 4, 5), (60, 1, 15, 3), 1)
    guarded = GuardedMemory.like(tensor)
    copy = guarded.as_tensor(tensor)
    assert (copy.shape, copy.stride(), copy.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert (copy.data_ptr() - tensor.data_ptr()) % 256 == 0
    copy.fill_(3)
    assert not guarded.is_touched()
    assert bool((guarded.memory.view(torch.float16) == 3).all())
