"""A torch.distributed store that is asked from a thread of its own: one that hangs holds up nobody.

Where the process that hosts it is stopped, or its network is gone, every method of a store blocks
without limit, those too that have nothing to wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from cudnn_autotune.distributed.errors import DistributedTuningError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_T = TypeVar("_T")

_JOIN_S = 5.0


class StoreThread:
    """Answers within ``patience_s``, or raises; once it has failed to, nothing is asked any more.

    A daemon: the process can end while it is stuck. (Threads of a ThreadPoolExecutor are waited
    for.)
    """

    def __init__(self, store: Store, patience_s: float) -> None:
        self._store = store
        self._patience_s = patience_s
        self._questions: SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None]
        self._questions = SimpleQueue()
        self._is_lost = False
        self._thread = threading.Thread(
            target=self._serve, name="cudnn_autotune store", daemon=True
        )
        self._thread.start()

    def ask(self, operation: Callable[[Store], _T]) -> _T:
        """Raises DistributedTuningError where the store cannot be reached, or does not answer."""
        answer: Future[_T] = Future()
        if not self._is_lost:
            self._questions.put((operation, answer))
            try:
                return answer.result(self._patience_s)
            except TimeoutError:
                self._is_lost = True
            except RuntimeError as error:  # torch.distributed.DistError among them
                # torch adds a C++ stack to it.
                told = (str(error).splitlines() or [""])[0]
                reason = f"cannot be reached; {_HOST} has probably ended"
                raise _failure(f"{reason}: {type(error).__name__}: {told}") from error
        raise _failure(f"does not answer for {self._patience_s:g} s; {_HOST} hangs")

    def stop(self) -> None:
        self._questions.put(None)
        if not self._is_lost:
            self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        while (question := self._questions.get()) is not None:
            operation, answer = question
            if self._is_lost:
                continue  # nobody waits for it, and it must not be done late
            try:
                answer.set_result(operation(self._store))
            except BaseException as error:
                answer.set_exception(error)


_HOST = "the process that hosts it (rank 0, unless the launcher does)"


def _failure(what: str) -> DistributedTuningError:
    return DistributedTuningError(None, f"the store of the process group {what}")
