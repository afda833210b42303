"""Run Python, or the command line tool, in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import cudnn_autotune as ca
from support.checkout import TESTS

# The package under test, wherever it lies: a process started in another folder must find it too.
PACKAGE_PARENT = str(Path(ca.__file__).resolve().parents[1])
IMPORTS = os.pathsep.join((PACKAGE_PARENT, str(TESTS)))
"""The folders of the package and of ``support``, which a process that tests start imports from."""


def python(
    *arguments: str, env: dict[str, str] | None = None, cwd: str | Path | None = None
) -> subprocess.CompletedProcess[str]:
    """``python *arguments`` with no CUDNN_AUTOTUNE_* variable but those given, and without the
    user's store; does not raise."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CUDNN_AUTOTUNE_")}
    clean["CUDNN_AUTOTUNE_CACHE"] = "off"
    clean["PYTHONPATH"] = os.pathsep.join(p for p in (IMPORTS, clean.get("PYTHONPATH", "")) if p)
    return subprocess.run(
        [sys.executable, *arguments],
        env={**clean, **(env or {})},
        # `python -c` puts its folder first on sys.path: in a checkout, the sources would shadow
        # the installed package.
        cwd=cwd or PACKAGE_PARENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def evaluate(code: str, env: dict[str, str] | None = None) -> str:
    """What ``code`` prints, stripped; raises AssertionError with its stderr if it fails."""
    done = python("-c", code, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def fork_server() -> ForkServerContext:
    """A server that has imported torch and the package once, and is forked from then on: on few
    cores, imports are most of what a fresh process takes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "cudnn_autotune.distributed"])
    return context


def forked(work: Callable[[], object]) -> int:
    """Forks this process, and returns the child's number. The child works, and ends: with status 0,
    or 1 where the work raises or returns False. It must not use CUDA, which this process may have
    initialized."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(work() is False)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def python_forked(code: str, cwd: str | Path | None = None) -> subprocess.CompletedProcess[str]:
    """As ``python("-c", code)``, in a process that has the imports of :func:`fork_server` behind
    it, for code that does not ask in which order, or with which variables, they were made. What
    ``atexit`` knows is not called."""
    context = fork_server()
    (out, to_out), (error, to_error) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(code, cwd or PACKAGE_PARENT, to_out, to_error))
    process.start()
    to_out.close()
    to_error.close()
    ending = threading.Timer(300, process.kill)
    ending.start()
    with ThreadPoolExecutor(2) as threads:
        printed, complaints = threads.map(_read, (out, error))
    process.join()
    ending.cancel()
    assert process.exitcode is not None
    return subprocess.CompletedProcess(["-c", code], process.exitcode, printed, complaints)


def evaluate_forked(code: str) -> str:
    """As :func:`evaluate`, in a process of :func:`python_forked`."""
    done = python_forked(code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _read(pipe: Connection) -> str:
    with open(pipe.fileno(), closefd=False) as stream:
        return stream.read()


def _run(code: str, folder: str | Path, out: Connection, error: Connection) -> None:
    """The streams are pipes and no files, which the code may forbid to grow."""
    for pipe, number in ((out, 1), (error, 2)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    os.chdir(folder)
    sys.path.insert(0, "")
    exec(compile(code, "<code of a test>", "exec"), {"__name__": "__main__"})
