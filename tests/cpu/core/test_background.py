"""Work on background threads is done in order, and is never in the way of an exit or a fork."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import CancelledError, wait

import pytest
from support.processes.subprocesses import python

from cudnn_autotune.core.background import BackgroundThreads


def test_work_is_done_in_order_and_returns_its_result() -> None:
    threads = BackgroundThreads(1)
    done: list[int] = []

    def work(number: int, *, plus: int) -> int:
        done.append(number)
        return number + plus

    begun = [threads.submit(work, number, plus=10) for number in range(20)]
    assert [one.result(30) for one in begun] == list(range(10, 30))
    assert done == list(range(20))


def test_work_is_done_in_the_order_of_its_places() -> None:
    threads, may_go_on = BackgroundThreads(1), threading.Event()
    first_runs = threading.Event()
    done: list[str] = []

    def hold() -> None:
        first_runs.set()
        may_go_on.wait(30)

    begun = [threads.submit(hold)]
    assert first_runs.wait(30)
    begun.append(threads.submit(done.append, "last"))
    for run in ("second", "first"):
        place = threads.first_place()
        for number in (1, 0):
            name = f"{run} {number}"
            begun.append(threads.submit_at((*place, number), done.append, name))
        begun.append(threads.submit_at((*place, 0), done.append, f"{run} 0 again"))
    may_go_on.set()
    wait(begun, 30)
    runs = [[f"{run} 0", f"{run} 0 again", f"{run} 1"] for run in ("first", "second")]
    assert done == [*runs[0], *runs[1], "last"]


def test_so_many_threads_at_once_and_none_when_there_is_no_work() -> None:
    threads = BackgroundThreads(3)
    together = threading.Barrier(3)
    names: set[int] = set()

    def work() -> None:
        together.wait(30)
        names.add(threading.get_ident())

    for _ in range(2):
        wait([threads.submit(work) for _ in range(3)], 30)
    assert 3 <= len(names) <= 6
    for thread in threading.enumerate():
        if thread.name == "cudnn_autotune-background":
            thread.join(30)
            assert not thread.is_alive()


def test_errors_belong_to_who_asks_for_the_result() -> None:
    threads = BackgroundThreads(1)

    def fail() -> None:
        raise ValueError("this one")

    failed, fine = threads.submit(fail), threads.submit(lambda: 7)
    assert fine.result(30) == 7
    with pytest.raises(ValueError, match="this one"):
        failed.result(30)


def test_what_has_not_begun_can_be_cancelled() -> None:
    threads = BackgroundThreads(1)
    go_on = threading.Event()
    first = threads.submit(go_on.wait, 30)
    second, third = threads.submit(lambda: 2), threads.submit(lambda: 3)
    assert second.cancel()
    go_on.set()
    assert first.result(30)
    assert third.result(30) == 3
    with pytest.raises(CancelledError):
        second.result(30)
    assert wait([second], 30).done


def test_without_threads_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = BackgroundThreads(2)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            threads.submit(lambda: 1)
    assert threads.submit(lambda: 2).result(30) == 2


def test_a_forked_process_begins_without_work() -> None:
    threads = BackgroundThreads(1)
    go_on = threading.Event()
    begun = [threads.submit(go_on.wait, 30) for _ in range(3)]
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(threads.submit(lambda: 5).result(10))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    go_on.set()
    assert all(one.result(30) for one in begun)


EXIT = """
import sys, threading, time
from cudnn_autotune.core.background import BackgroundThreads
def say(one):
    sys.stdout.write("cancelled\\n" if one.cancelled() else "done\\n")
threads = BackgroundThreads(2)
begun = [threads.submit(threading.main_thread().join) for _ in range(10)]
while not begun[0].running():
    time.sleep(0.001)
for one in (begun[0], begun[-1]):
    one.add_done_callback(say)
"""


def test_a_process_that_exits_finishes_what_has_begun() -> None:
    ended = python("-c", EXIT)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(ended.stdout.split()) == ["cancelled", "done"]
