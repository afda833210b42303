"""Undecided trials of ``online``: kept beside the compiled plans, for the process that goes on.

No function raises. What cannot be read or written is not kept.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import torch

from cudnn_autotune.store.kept_plans import Gpu, files_for
from cudnn_autotune.store.plan_files import TRIAL

_log = logging.getLogger(__name__)


def find(problem: str, limits: str, gpu: Gpu) -> Any:
    """Returns the record of a problem's trial, as plain JSON; None if none is kept.

    Args:
        problem: its text.
        limits: what the trial was held to, as a text.
    """
    try:
        files = files_for(gpu, TRIAL)
        found = files and files.find(problem, _run_with(limits))
        return json.loads(found) if found else None
    except Exception:
        _log.warning("%s: its trial begins anew", problem, exc_info=True)
        return None


def keep(problem: str, limits: str, gpu: Gpu, record: Any) -> None:
    """Keeps a record in the place of an earlier one; None removes that."""
    try:
        files = files_for(gpu, TRIAL)
        if files and record is None:
            files.remove(problem, _run_with(limits))
        elif files:
            files.keep(problem, _run_with(limits), json.dumps(record).encode())
    except Exception:
        _log.warning("%s: its trial is not kept", problem, exc_info=True)


def _run_with(limits: str) -> str:
    """Returns the terms beside the problem and cuDNN on which the candidates and their times
    depend: PyTorch's own path is one of them."""
    return f"online {limits} torch={torch.__version__}"
