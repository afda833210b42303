"""Run Python, or the command line tool, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
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
