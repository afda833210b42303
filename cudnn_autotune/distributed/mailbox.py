"""The keys of one call in a torch.distributed store: written, read and removed, never waited for.

``Store.get`` and ``Store.wait`` block the connection for every thread of the process, heartbeats
and NCCL's watchdog included, and a key that is removed in the meantime blocks them for the store's
whole timeout (30 minutes). So nothing here waits for a key; who wants to wait asks again.
"""

from __future__ import annotations

from cudnn_autotune.distributed.store_thread import StoreThread

# Of a key that is not there, `compare_set` gives back what was expected; values start with "=".
_ABSENT = "?"
# A TCPStore of libuv drops the connection of who sends more than 8 MiB.
_MOST_CHARACTERS = 2**20
_WHOLE = "whole:"


class Mailbox:
    """ASCII texts under names, in a part of the store that one call has for itself.

    Every method raises DistributedTuningError where the store cannot be reached or does not answer.
    """

    def __init__(self, store: StoreThread, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def put(self, name: str, text: str) -> None:
        """Replaces what is there; some mebibytes at most (see :meth:`put_long`)."""
        self._store.ask(lambda store: store.set(self._key(name), "=" + text))

    def peek(self, name: str) -> str | None:
        """What is there now; None: nothing."""
        found = self._compare_set(name, _ABSENT, _ABSENT)
        return None if found == _ABSENT else found[1:]

    def put_first(self, name: str, text: str) -> str:
        """Puts ``text`` where nothing is; returns what is there then."""
        return self._compare_set(name, "", "=" + text)[1:]

    def replace(self, name: str, known: str | None, text: str) -> None:
        """Puts ``text`` where ``known`` still is (None: nothing is)."""
        self._compare_set(name, "" if known is None else "=" + known, "=" + text)

    def add(self, name: str, amount: int = 1) -> int:
        """Of a counter that starts at 0: its new value."""
        return self._store.ask(lambda store: store.add(self._key(name), amount))

    def put_long(self, name: str, text: str) -> None:
        """Of any length: in parts where it must be, and then the name itself comes last."""
        if len(text) <= _MOST_CHARACTERS:
            self.put(name, _WHOLE + text)
            return
        starts = range(0, len(text), _MOST_CHARACTERS)
        for i, start in enumerate(starts):
            self.put(f"{name}/{i}", text[start : start + _MOST_CHARACTERS])
        self.put(name, str(len(starts)))

    def peek_long(self, name: str) -> str | None:
        """What :meth:`put_long` has put, once it is there in full; None: not yet, or no more."""
        found = self.peek(name)
        if found is None or found.startswith(_WHOLE):
            return found and found[len(_WHOLE) :]
        parts = [self.peek(f"{name}/{i}") for i in range(int(found))]
        whole = [part for part in parts if part is not None]
        return "".join(whole) if len(whole) == len(parts) else None

    def remove_long(self, name: str) -> None:
        found = self.peek(name)
        if found is not None and not found.startswith(_WHOLE):
            for i in range(int(found)):
                self.remove(f"{name}/{i}")
        self.remove(name)

    def remove(self, name: str) -> None:
        self._store.ask(lambda store: store.delete_key(self._key(name)))

    def _compare_set(self, name: str, expected: str, desired: str) -> str:
        key = self._key(name)
        return self._store.ask(lambda store: store.compare_set(key, expected, desired)).decode()

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"
