"""Background work, on threads of low priority."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

Place = tuple[float, ...]
"""A place in the queue; places compare as tuples do."""
_LAST: Place = (math.inf,)
_numbers = itertools.count()

CORES = len(os.sched_getaffinity(0))
"""Number of cores that the process may use."""
_NICENESS = 10  # least niceness of these threads
# Compiling on more threads than this saves little time and uses memory.
_MOST_COMPILING = 12


def spare_threads(most: int) -> int:
    """Returns the number of threads, ``most`` at most, that leaves one core to the caller."""
    return max(1, min(CORES - 1, most))


class BackgroundThreads:
    """Threads that run work in the order of submission, or in a given order (:meth:`submit_at`).
    They end when there is no work.

    When the process exits, running work is finished and the rest is cancelled. A forked process has
    no threads and no work.

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
        return self.submit_at(_LAST, work, *args, **kwargs)

    @staticmethod
    def first_place() -> Place:
        """Returns a place before all earlier work, of these threads and of others. ``(*place, 0)``,
        ``(*place, 1)``, ... follow each other in it."""
        return (-next(_numbers),)

    def submit_at(
        self, place: Place, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_T]:
        """Begins work as :meth:`submit` does: after work with a smaller place, and before work with
        a larger place or none."""
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
            # The number makes that works of one place keep their order and are not compared.
            call = partial(work, *args, **kwargs)
            heappush(self._waiting, (place, next(_numbers), future, call))
        return future

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # Linux has a niceness for each thread
            niceness = max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Runs the next work; returns False if the thread is to end."""
        with self._lock:
            if not threading.main_thread().is_alive():
                for *_, future, _ in self._waiting:
                    future.cancel()
            if not self._waiting:
                self._running -= 1
                return False
            *_, future, work = heappop(self._waiting)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
                del future  # the error keeps this frame
        return True

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Place, int, Future[Any], partial[Any]]] = []
        self._running = 0


COMPILING = BackgroundThreads(spare_threads(_MOST_COMPILING))
"""The threads on which engines are compiled before a call or a search asks for them."""
COMPILING_CUDNN = BackgroundThreads(spare_threads(_MOST_COMPILING))
"""Threads for engines of cuDNN where many are compiled at once. cuDNN serialises a part of each
compilation; on shared threads, kernels of the package would wait for it."""
