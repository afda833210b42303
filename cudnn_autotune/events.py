"""Who wants to hear of decisions: one event for each choice, and a line in the log."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

from torch.utils.hooks import RemovableHandle

from cudnn_autotune.choice_log import Choice

_log = logging.getLogger("cudnn_autotune")

Callback = Callable[[Choice], object]

_callbacks: OrderedDict[int, Callback] = OrderedDict()


def on_decision(callback: Callback) -> RemovableHandle:
    """Calls ``callback(choice)`` whenever a problem's engine has been decided, on whatever thread.

    ``choice.origin`` says how: tuned, from the store, agreed between ranks, or pinned. It must not
    run convolutions of this package. An exception that it raises is logged and goes no further.

    Returns:
        A handle whose ``remove()`` ends it; it is a context manager as well.
    """
    if not callable(callback):
        raise TypeError(f"callback must be callable, got {callback!r}")
    handle = RemovableHandle(_callbacks)
    _callbacks[handle.id] = callback
    return handle


def tell(choice: Choice) -> None:
    """Logs a decision at level INFO of the logger ``cudnn_autotune`` and calls who asked for it."""
    time = "" if choice.time_ms is None else f", {choice.time_ms:.4g} ms"
    _log.info(
        "%s: %s by %s (%s%s) in %.1f ms",
        choice.problem.text,
        choice.text,
        choice.sampling,
        choice.origin,
        time,
        choice.tuning_ms,
    )
    for callback in list(_callbacks.values()):
        try:
            callback(choice)
        except Exception:
            _log.exception("a callback of on_decision failed")
