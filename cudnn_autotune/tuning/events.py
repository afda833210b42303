"""Announcements of decisions: for each choice a line in the log and the callbacks of
:func:`on_decision`; for each process one warning with the reason for slow first calls."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from torch import nn
from torch.utils.hooks import RemovableHandle

from cudnn_autotune.tuning.choice import Choice

_log = logging.getLogger("cudnn_autotune")

Callback = Callable[[Choice], object]

_callbacks: OrderedDict[int, Callback] = OrderedDict()


def on_decision(callback: Callback) -> RemovableHandle:
    """Calls ``callback(choice)`` whenever a problem's engine has been decided, on any thread.

    ``choice.origin`` is its source. A provisional choice is announced again once it is final. The
    call that tunes runs the callback before it returns, after it has released other threads. So the
    callback may take locks that they hold, and run convolutions itself. An exception of the
    callback is logged and ignored.

    Returns:
        A handle whose ``remove()`` ends the calls; it is a context manager as well.

    Raises:
        TypeError: ``callback`` is not callable.
    """
    if not callable(callback):
        raise TypeError(f"callback must be callable, got {callback!r}")
    handle = RemovableHandle(_callbacks)
    _callbacks[handle.id] = callback
    return handle


def announce(choice: Choice) -> None:
    """Logs a choice at level INFO of the logger ``cudnn_autotune``, and calls the callbacks."""
    time = "" if choice.time_ms is None else f", {choice.time_ms:.4g} ms"
    _log.info(
        "%s: %s by %s (%s%s) in %.1f ms%s",
        choice.problem.text,
        choice.text,
        choice.sampling,
        choice.origin,
        time,
        choice.tuning_ms,
        f"; provisional: {choice.provisional}" if choice.provisional else "",
    )
    for callback in list(_callbacks.values()):
        try:
            callback(choice)
        except Exception:
            _log.exception("a callback of on_decision failed")


class SlowSearches:
    """The warning, once a process, that first calls take long. It is given as soon as all of them
    together have taken ``after_s`` seconds, while the call still waits. Only one call tunes at a
    time."""

    def __init__(self, after_s: float = 2.0) -> None:
        self._after_s = after_s
        self._took_s = 0.0
        self._done = 0
        self._is_due = True

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Returns a context that lasts as long as one first call chooses its engine."""
        begin_s = time.perf_counter()
        caller = (threading.get_ident(),)
        timer = threading.Timer(self._after_s - self._took_s, self._warn, caller)
        timer.daemon = True
        if self._is_due:
            with suppress(RuntimeError):  # no further thread can be started
                timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self._took_s += time.perf_counter() - begin_s
            self._done += 1

    @contextmanager
    def shown_elsewhere(self) -> Iterator[None]:
        """Returns a context without the warning, for tools that show their own progress."""
        was_due, self._is_due = self._is_due, False
        try:
            yield
        finally:
            self._is_due = was_due

    def _warn(self, caller: int) -> None:
        if not self._is_due:
            return
        self._is_due = False
        each = f", {self._took_s / self._done:.2g} s each" if self._done else ""
        _log.warning(
            "The first calls of convolutions%s have waited %.3g s so far for engines to be "
            "compiled and timed: %d convolutions are ready%s. The first shapes of each layer wait "
            "like this. To wait less: sampling='online', or cudnn_autotune.set_budget_ms(); to "
            "time nothing: sampling='heuristic'; to tune beforehand: "
            "cudnn_autotune.tune(model, ...), or cudnn-autotune tune.",
            _place(sys._current_frames().get(caller)),
            self._after_s,
            self._done,
            each,
        )


def _place(frame: FrameType | None) -> str:
    """Returns the part of a model in which a thread is; empty if unknown, as in a backward."""
    modules = []
    while frame is not None:
        if isinstance(held := frame.f_locals.get("self"), nn.Module):
            modules.append(held)
        frame = frame.f_back
    if not modules:
        return ""
    model = modules[-1]
    name = next((name for name, part in model.named_modules() if part is modules[0]), "")
    return f" (now {'.'.join(filter(None, [type(model).__name__, name]))})"


SEARCHES = SlowSearches()
"""The first calls of this process."""
