"""A child process finds every lock free that a thread of its parent held during the fork."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from support.conv.problems import make
from support.processes.subprocesses import forked, python
from support.processes.threads import in_threads

import cudnn_autotune as ca
from cudnn_autotune.core import fork_safe_lock
from cudnn_autotune.core.fork_safe_lock import IMPORTING, ForkSafeLock
from cudnn_autotune.engines import candidates, compiled_kernels, registry
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import kept_plans
from cudnn_autotune.tuning import choice_log, new_sizes, pins, remembering
from cudnn_autotune.tuning.prefetching import clear as clear_prefetched

pytestmark = [
    # Python 3.12 warns at a fork of a process that has threads.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

PROBLEM = make("resnet_fp16_nhwc")
_S = 20


def asked() -> None:
    """Calls something of each module that has a lock."""
    choice_log.generation(PROBLEM)
    assert choice_log.find(PROBLEM, Policy("auto"), 0) is None
    choice_log.choices()
    choice_log.forget_problem(PROBLEM)
    new_sizes.fast_nearby(PROBLEM, 0)
    assert PROBLEM not in ca.pins()
    pins.pinned(PROBLEM)
    remembering.find(PROBLEM, Policy("auto"), 0)
    with remembering.retuned(PROBLEM):
        pass
    registry.registered()
    kept_plans.counts()
    compiled_kernels.clear()
    clear_prefetched()


def ends_in_time(work: Callable[[], None]) -> bool:
    """Whether a child process does the work within some seconds."""

    def in_time() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_S)
        work()

    return os.waitpid(forked(in_time), 0)[1] == 0


@contextmanager
def held_by_a_thread(lock: AbstractContextManager[object]) -> Iterator[None]:
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            is_over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(60)
    try:
        yield
    finally:
        is_over.set()
        thread.join()


LOCKS = {
    module.__name__: module._lock
    for module in (
        *(choice_log, new_sizes, pins, remembering, registry, candidates, kept_plans),
        compiled_kernels,
    )
}


@pytest.mark.basic(3)
@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_that_a_thread_holds(name: str) -> None:
    with held_by_a_thread(LOCKS[name]):
        assert ends_in_time(asked)
    asked()  # in the parent it still works


@pytest.mark.slow
def test_many_forks_while_threads_ask() -> None:
    is_over = threading.Event()
    count = [0]

    def ask() -> None:
        while not is_over.is_set():
            asked()
            count[0] += 1

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        found = []
        for _ in range(60):
            found.append(ends_in_time(asked))
            time.sleep(0.002)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert all(found)
    assert count[0] > 10


# A function of each module that imports others of the package late, and one that it imports.
LATE = {
    "registry": ("engines.registry.registered()", "kernels.hopper.few_filters"),
    "norms": ("norms.measuring.first_form()", "norms.plan"),
    "weights": ("compile.weights.operators.kernel_code(0, None, None)", "kernels.sources"),
}
_FORK_BESIDE_AN_IMPORT = """
import importlib.abc, os, signal, sys, threading, time
import cudnn_autotune
from cudnn_autotune.engines import registry
from cudnn_autotune.compile.weights import operators
from cudnn_autotune.norms import measuring

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "cudnn_autotune.{module}":
            is_importing.set()
            time.sleep(0.5)

def call():
    try:
        cudnn_autotune.{call}
    except Exception as error:
        print(type(error).__name__, flush=True)

is_importing = threading.Event()
sys.meta_path.insert(0, Slow())
assert "cudnn_autotune.{module}" not in sys.modules
thread = threading.Thread(target=call)
thread.start()
assert is_importing.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(20)
    call()
    os._exit(0)
print(os.waitpid(child, 0)[1])
thread.join()
"""


@pytest.mark.parametrize("name", LATE)
def test_a_late_import_in_a_thread(name: str) -> None:
    call, module = LATE[name]
    done = python("-W", "ignore", "-c", _FORK_BESIDE_AN_IMPORT.format(call=call, module=module))
    assert "0" in done.stdout.split(), done.stdout + done.stderr


def test_a_fork_does_not_wait_for_an_import_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(IMPORTING), "_PATIENCE_S", 0.1)

    def enter() -> None:
        with IMPORTING:
            pass

    with held_by_a_thread(IMPORTING):
        assert ends_in_time(enter)
    enter()
    with IMPORTING:
        assert ends_in_time(enter), "a fork within an import"


def late_imports(tree: ast.AST, is_late: bool = False, is_guarded: bool = False) -> Iterator[str]:
    """The modules of the package that are imported within functions, not under ``IMPORTING``."""
    for node in ast.iter_child_nodes(tree):
        names = [ast.unparse(item) for item in node.items] if isinstance(node, ast.With) else []
        module = getattr(node, "module", None) or ""
        if is_late and not is_guarded and module.startswith("cudnn_autotune"):
            yield module
        yield from late_imports(
            node,
            is_late or isinstance(node, ast.FunctionDef),
            is_guarded or "IMPORTING" in names,
        )


def test_late_imports_are_guarded() -> None:
    """Those of the command line and of the audit's workers are the work of their own process."""
    package = Path(ca.__file__).parent
    for path in package.rglob("*.py"):
        if path.parts[len(package.parts)] == "cli" or path == package / "tools" / "worker.py":
            continue
        assert list(late_imports(ast.parse(path.read_text("utf-8")))) == [], path


def modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(ca.__path__, "cudnn_autotune."):
        if not found.name.endswith("__main__"):
            yield found.name


# These begin anew in a child process by hooks of their own.
ALLOWED = {fork_safe_lock.__name__, "cudnn_autotune.implementing.isolated_run"}


def test_no_module_has_another_kind_of_lock() -> None:
    kinds = (type(threading.Lock()), type(threading.RLock()), threading.Condition)
    seen = 0
    for name in modules():
        module = importlib.import_module(name)
        for attribute, value in vars(module).items():
            seen += isinstance(value, ForkSafeLock)
            assert not isinstance(value, kinds) or name in ALLOWED or attribute == "LOCK", name
    assert seen >= len(LOCKS)


def test_a_lock_excludes_threads() -> None:
    lock = ForkSafeLock()
    inside, most = [0], []

    def work(_: int) -> None:
        for _ in range(100):
            with lock:
                inside[0] += 1
                time.sleep(0)
                most.append(inside[0])
                inside[0] -= 1

    in_threads(4, work)
    assert most == [1] * 400
