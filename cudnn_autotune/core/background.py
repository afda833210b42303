"""Work that nobody waits for, on threads of low priority."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

CORES = len(os.sched_getaffinity(0))
"""Number of cores that the process may use."""
_NICENESS = 10  # least niceness of these threads
# Compiling on more threads than this saves little time and uses memory.
_MOST_COMPILING = 12


def spare_threads(most: int) -> int:
    """Returns how many threads to use, at most, so that a core is left for the caller."""
    return max(1, min(CORES - 1, most))


class BackgroundThreads:
    """Threads that run work in the order in which it was given, and end when there is none. What
    is needed next may come first (:meth:`submit_next`).

    When the process exits, work that has begun is finished and the rest is cancelled. A forked
    process has none of it.

    Args:
        most: the most threads at once.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def submit(self, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Begins ``work(*args, **kwargs)`` once a thread is free.

        Raises:
            RuntimeError: the system gives no thread, or the process exits.
        """
        return self._submit(partial(work, *args, **kwargs), is_next=False)

    def submit_next(
        self, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_T]:
        """Begins work as :meth:`submit` does, before all that was submitted and has not begun."""
        return self._submit(partial(work, *args, **kwargs), is_next=True)

    def _submit(self, work: Callable[[], _T], *, is_next: bool) -> Future[_T]:
        future: Future[_T] = Future()
        with self._lock:
            if self._running < self._most:
                try:
                    threading.Thread(target=self._run, name="cudnn_autotune-background").start()
                except RuntimeError:
                    if not self._running:
                        raise
                else:
                    self._running += 1
            add = self._waiting.appendleft if is_next else self._waiting.append
            add((future, work))
        return future

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # Linux has a niceness for each thread
            niceness = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Runs what comes next; returns False if the thread is to end."""
        with self._lock:
            if not threading.main_thread().is_alive():
                for future, _ in self._waiting:
                    future.cancel()
            if not self._waiting:
                self._running -= 1
                return False
            future, work = self._waiting.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
                del future  # the error keeps this frame
        return True

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running = 0


COMPILING = BackgroundThreads(spare_threads(_MOST_COMPILING))
"""The threads on which engines are compiled before a call or a search asks for them."""
