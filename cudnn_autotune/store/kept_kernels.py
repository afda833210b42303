"""The compiled kernels of this process: found in the user's private folder, or kept there.

What a kernel depends on is in its digest (``engines.compiled_kernels``), so that any GPU of its
architecture, with any driver, finds it. The functions are called on any thread.
"""

from __future__ import annotations

import logging

from cudnn_autotune.store import kept_plans
from cudnn_autotune.store.plan_files import KERNEL

_log = logging.getLogger(__name__)


def find(function: str, digest: str) -> bytes | None:
    """Returns the cubin of a kernel; None if none is kept."""
    try:
        files = kept_plans.files_for(None, KERNEL)
        return files.find(function, digest) if files else None
    except Exception:
        _log.warning("the kernel %s is compiled", function, exc_info=True)
        return None


def keep(function: str, digest: str, cubin: bytes) -> None:
    """Keeps a kernel that was just compiled."""
    try:
        if files := kept_plans.files_for(None, KERNEL):
            files.keep(function, digest, cubin)
    except Exception:
        _log.warning("the kernel %s is not kept", function, exc_info=True)
