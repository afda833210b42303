"""Keys of a torch.distributed store: written, read and removed, without blocking waits.

``Store.get`` and ``Store.wait`` block the connection for every thread of the process, heartbeats
and NCCL's watchdog included. A key that is removed meanwhile blocks them for the store's whole
timeout (30 minutes). So a reader polls for a key.

If the store's host process is stopped, or its network is gone, every method of a store blocks
without limit. So a separate thread queries the store, and its callers give up in time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from cudnn_autotune.distributed.outcome import DistributedTuningError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_T = TypeVar("_T")

MOST_CHARACTERS = 2**22
"""The longest text. A TCPStore of libuv drops the connection of a client that sends 8 MiB."""
_JOIN_S = 5.0
# `compare_set` returns the expected value where a key is absent; stored values start with "=".
_ABSENT = "?"
_HOST = "the process that hosts it (rank 0, unless the launcher does)"


class StoreThread:
    """A thread that runs a store's operations within ``patience_s`` seconds each, or raises. After
    a longer operation it runs no other one.

    The thread is a daemon, so that the process can end while it is stuck.
    """

    def __init__(self, store: Store, patience_s: float) -> None:
        self._store = store
        self._patience_s = patience_s
        self._questions: SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None]
        self._questions = SimpleQueue()
        self._is_lost = False
        self._thread = threading.Thread(target=self._run, name="cudnn_autotune store", daemon=True)
        self._thread.start()

    def ask(self, operation: Callable[[Store], _T]) -> _T:
        """Returns an operation's result. Raises DistributedTuningError if the store cannot be
        reached or does not answer."""
        answer: Future[_T] = Future()
        if not self._is_lost:
            self._questions.put((operation, answer))
            try:
                return answer.result(self._patience_s)
            except TimeoutError:
                self._is_lost = True
            except RuntimeError as error:  # torch.distributed.DistError among them
                first_line = (str(error).splitlines() or [""])[0]  # a C++ stack follows it
                raise DistributedTuningError(
                    None,
                    f"the store of the process group cannot be reached; {_HOST} has probably "
                    f"ended: {type(error).__name__}: {first_line}",
                ) from error
        raise DistributedTuningError(
            None,
            f"the store of the process group does not answer for {self._patience_s:g} s; "
            f"{_HOST} hangs",
        )

    def stop(self) -> None:
        self._questions.put(None)
        if not self._is_lost:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            operation, answer = question
            if self._is_lost:
                continue  # its caller has given up, so the operation must not run late
            try:
                answer.set_result(operation(self._store))
            except BaseException as error:
                answer.set_exception(error)


class Mailbox:
    """ASCII texts under names, in the part of a store that begins with ``prefix``.

    Every method raises DistributedTuningError if the store cannot be reached or does not answer.
    """

    def __init__(self, store: StoreThread, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def put(self, name: str, text: str) -> None:
        """Writes ``text``. Raises ValueError if it is longer than ``MOST_CHARACTERS``."""
        if len(text) > MOST_CHARACTERS:
            raise ValueError(
                f"{name}: a message must have at most {MOST_CHARACTERS} characters, got "
                f"{len(text)}: tune fewer problems in one call"
            )
        self._store.ask(lambda store: store.set(self._key(name), "=" + text))

    def peek(self, name: str) -> str | None:
        """Returns the current text under ``name``; None if there is none."""
        found = self._compare_set(name, _ABSENT, _ABSENT)
        return None if found == _ABSENT else found[1:]

    def put_first(self, name: str, text: str) -> str:
        """Writes ``text`` unless there is a text already, and returns the resulting text."""
        return self._compare_set(name, "", "=" + text)[1:]

    def replace(self, name: str, known: str | None, text: str) -> None:
        """Writes ``text`` if the current text is ``known`` (None: if there is no text)."""
        self._compare_set(name, "" if known is None else "=" + known, "=" + text)

    def add(self, name: str, amount: int = 1) -> int:
        """Adds to a counter that starts at 0, and returns its new value."""
        return self._store.ask(lambda store: store.add(self._key(name), amount))

    def remove(self, name: str) -> None:
        self._store.ask(lambda store: store.delete_key(self._key(name)))

    def _compare_set(self, name: str, expected: str, desired: str) -> str:
        key = self._key(name)
        return self._store.ask(lambda store: store.compare_set(key, expected, desired)).decode()

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"
