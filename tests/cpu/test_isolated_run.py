"""A user's implementation runs in a process of its own before it may run in this one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import user_kernels
from subprocesses import python
from user_implementations import Fixed, registered

import cudnn_autotune as ca
from cudnn_autotune.core.guard_bands import GuardedMemory
from cudnn_autotune.engines.registry import ImplementationError
from cudnn_autotune.engines.user_implementation import UserImplementation
from cudnn_autotune.timers.measuring import operands
from cudnn_autotune.tuning import isolated_run
from cudnn_autotune.tuning.isolated_process import harm_of
from cudnn_autotune.tuning.isolated_run import Outcome, check, run_elsewhere

pytestmark = pytest.mark.search

PROBLEM = ca.ConvProblem("fprop", (2, 3, 5, 6), (4, 3, 3, 3), padding=1)


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


def elsewhere(settings: str, **changes: Any) -> Outcome:
    return run_elsewhere(implementation(**changes), settings, PROBLEM, "cpu")


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    isolated_run.forget("mine")
    yield
    isolated_run.forget("mine")


def here(settings: str) -> str:
    """What the other process would find, but in this one."""
    return harm_of(implementation(), settings, PROBLEM, operands(PROBLEM, "cpu"))


def test_what_does_no_harm_passes() -> None:
    assert elsewhere("prints", supports=lambda problem: 1 / 0) == Outcome()


def test_what_raises_has_not_passed_and_does_no_harm() -> None:
    why = "it raises PlanError: mine@1:raises: ValueError: not today"
    assert elsewhere("raises") == Outcome(impossible=why)
    found = elsewhere("right", build=user_kernels.builds_nothing)
    assert found == Outcome(impossible="it raises RuntimeError: no compiler")


def test_a_workspace_may_be_written_to() -> None:
    assert here("uses_workspace") == here("right") == ""


@pytest.mark.parametrize(
    ("settings", "harm"),
    [
        ("exits", "in a process of its own it ends with status 3 (I am leaving)"),
        ("crashes", "in a process of its own it dies of signal 11"),
        ("behind", "it writes outside of y"),
    ],
)
def test_harm_is_done_elsewhere(settings: str, harm: str) -> None:
    assert elsewhere(settings) == Outcome(harm)


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


def test_one_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_run, "RUN_S", 1.0)
    harm = "in a process of its own it does not finish within 1 s"
    assert elsewhere("hangs") == Outcome(harm)


def test_what_another_process_cannot_import_is_not_run_there() -> None:
    found = elsewhere("right", build=lambda problem, settings: print)
    assert found.harm == ""
    assert found.impossible.startswith("it cannot be imported by name (")


def test_a_script_cannot_be_imported_by_another_process(tmp_path: Path) -> None:
    """What is defined in ``__main__`` is not found there; the script is not run a second time."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(user_kernels.__file__).parent)!r})\n"
        "import user_kernels, cudnn_autotune as ca\n"
        "from cudnn_autotune.engines.user_implementation import UserImplementation\n"
        "from cudnn_autotune.tuning.isolated_run import run_elsewhere\n"
        "print('imported', __name__)\n"
        "def build(problem, settings):\n"
        "    return user_kernels.build(problem, settings)\n"
        "problem = ca.ConvProblem('fprop', (2, 3, 5, 6), (4, 3, 3, 3), padding=1)\n"
        "own = UserImplementation('mine', '1', user_kernels.always, build, ('right',))\n"
        "print(run_elsewhere(own, 'right', problem, 'cpu').impossible)\n"
    )
    done = python(str(script))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "imported __main__"
    assert "it cannot be imported by name" in second
    assert "build" in second


def test_a_gpu_that_the_other_process_cannot_use_is_no_harm() -> None:
    found = run_elsewhere(implementation(), "right", PROBLEM, 99)
    assert found.harm == ""
    assert found.impossible.startswith("its operands cannot be made (")


def test_a_process_that_does_not_start_is_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert elsewhere("right").impossible.startswith("no process can be started")
    monkeypatch.undo()
    monkeypatch.setattr(isolated_run, "START_S", 0.01)
    found = elsewhere("right")
    assert found.impossible == "the other process does not finish within 0.01 s"


def test_a_version_runs_elsewhere_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[str] = []
    answers = {"right": Outcome(), "hangs": Outcome("it hangs"), "odd": Outcome("", "no reason")}

    def instead(own: UserImplementation, settings: str, *_: Any) -> Outcome:
        ran.append(f"{own.version}:{settings}")
        return answers[settings]

    monkeypatch.setattr(isolated_run, "run_elsewhere", instead)
    caplog.set_level(logging.WARNING)
    with registered(implementation()):
        check("mine@1:right", PROBLEM, "cpu")
        check("mine@1:hangs", PROBLEM, "cpu")
        assert ran == ["1:right"]
    assert not caplog.records
    with registered(implementation(version="2")):
        for settings in ("hangs", "right"):
            with pytest.raises(ImplementationError, match=f"mine@2:{settings} is left out: it han"):
                check(f"mine@2:{settings}", PROBLEM, "cpu")
        assert ran == ["1:right", "2:hangs"]
    assert [r.getMessage() for r in caplog.records] == ["mine@2:hangs is left out: it hangs"]
    with registered(implementation(version="3")):
        check("mine@3:odd", PROBLEM, "cpu")
    assert "mine@3 runs in this process without having been tried" in caplog.text
    assert "no reason" in caplog.text
    with registered(Fixed()):
        check("fixed@1:ROWS=4", PROBLEM, "cpu")
    assert ran == ["1:right", "2:hangs", "3:odd"], "the package's own need no process"


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
