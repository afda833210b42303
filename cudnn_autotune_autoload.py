"""Serves ``CUDNN_AUTOTUNE_ENABLE=1`` and ``cudnn-autotune run``: torch calls it in every process
that imports torch.

It lies beside the package because the package's import loads the extension and registers operators
with torch, which a process that has not asked for it must not get. torch finds :func:`autoload` by
the entry point group ``torch.backends``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

ENTRY_POINT_GROUP, ENTRY_POINT = "torch.backends", "cudnn_autotune"
_RUN_VARIABLE = "_CUDNN_AUTOTUNE_RUN"


def run_environment(sampling: str | None) -> dict[str, str]:
    """Returns the variables by which this process, once it executes another program, is served as
    by ``cudnn-autotune run``. A program keeps the process's number; the processes that it starts
    have others, and are not served."""
    return {_RUN_VARIABLE: f"{os.getpid()}:{sampling or ''}"}


def run_sampling(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the mode that ``cudnn-autotune run`` was given for this process, empty for the
    settings' mode; None if the process was not started by it."""
    process, _, sampling = environ.get(_RUN_VARIABLE, "").partition(":")
    return sampling if process == str(os.getpid()) else None


def is_asked_for(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the environment asks for convolutions to be tuned in this process."""
    is_switched_on = environ.get("CUDNN_AUTOTUNE_ENABLE", "0") not in ("", "0")
    return is_switched_on or run_sampling(environ) is not None


def autoload() -> None:
    """Imports the package if the environment asks for it; the package then enables itself.

    Where the package's own import has imported torch, it goes on when this returns.
    """
    if is_asked_for():
        import cudnn_autotune  # noqa: F401
