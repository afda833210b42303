"""What a user must hear of, and once only."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Hashable

_log = logging.getLogger("cudnn_autotune.store")
_lock = threading.Lock()
_said: set[Hashable] = set()


def say_once(about: Hashable, message: str) -> None:
    """A UserWarning and a line in the log, the first time in this process that it is said.

    Args:
        about: what is the same whenever nothing new is to be said.
    """
    with _lock:
        if about in _said:
            return
        _said.add(about)
    _log.warning(message)
    warnings.warn(message, UserWarning, stacklevel=3)
