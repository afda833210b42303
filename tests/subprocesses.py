"""Run Python, or the command line tool, in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing.context import ForkServerContext
from pathlib import Path

import cudnn_autotune as ca

# The package under test, wherever it lies: a process started in another folder must find it too.
PACKAGE_PARENT = str(Path(ca.__file__).resolve().parents[1])


def python(
    *arguments: str, env: dict[str, str] | None = None, cwd: str | Path | None = None
) -> subprocess.CompletedProcess[str]:
    """``python *arguments`` with no CUDNN_AUTOTUNE_* variable but those given, and without the
    user's store; does not raise."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CUDNN_AUTOTUNE_")}
    clean["CUDNN_AUTOTUNE_CACHE"] = "off"
    clean["PYTHONPATH"] = os.pathsep.join(
        p for p in (PACKAGE_PARENT, clean.get("PYTHONPATH", "")) if p
    )
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


def evaluate_forked(code: str) -> str:
    """As :func:`evaluate`, in a process that has the imports of :func:`fork_server` behind it, for
    code that does not ask in which order, or with which variables, they were made."""
    with tempfile.TemporaryDirectory() as folder:
        out, error = Path(folder) / "out", Path(folder) / "error"
        process = fork_server().Process(target=_run, args=(code, out, error))
        process.start()
        process.join(300)
        assert process.exitcode == 0, error.read_text() if error.exists() else "it was not begun"
        return out.read_text().strip()


def _run(code: str, out: Path, error: Path) -> None:
    for path, stream in ((out, sys.stdout), (error, sys.stderr)):
        with path.open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    exec(compile(code, "<code of a test>", "exec"), {"__name__": "__main__"})
