"""Keys of a store: nothing waits, texts that are too long are refused, the first verdict stands."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from cudnn_autotune.distributed import DistributedTuningError
from cudnn_autotune.distributed.group import Group
from cudnn_autotune.distributed.heartbeat import Heartbeat
from cudnn_autotune.distributed.mailbox import MOST_CHARACTERS, Mailbox, StoreThread
from cudnn_autotune.distributed.verdict import AGREED, Verdict


@pytest.fixture(params=["tcp", "tcp without libuv", "file", "hash"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreThread]:
    if request.param == "hash":
        asked = dist.HashStore()
    elif request.param == "file":
        asked = dist.FileStore(str(tmp_path / "store"), 1)
    else:
        use_libuv = request.param == "tcp"
        asked = dist.TCPStore("127.0.0.1", 0, is_master=True, use_libuv=use_libuv)
    thread = StoreThread(asked, 60.0)
    yield thread
    thread.stop()


def test_what_is_put_is_there(store: StoreThread) -> None:
    mailbox, other = Mailbox(store, "calls/0"), Mailbox(store, "calls/1")
    start_s = time.monotonic()
    assert mailbox.peek("a") is None
    assert time.monotonic() - start_s < 30.0  # a plain get would wait for twice as long
    for text in ("", "?", "=", "text"):
        mailbox.put("a", text)
        assert mailbox.peek("a") == text
    assert other.peek("a") is None
    assert [mailbox.add("n"), mailbox.add("n"), mailbox.add("n", 0), other.add("n")] == [1, 2, 2, 1]
    assert [mailbox.put_first("b", "one"), mailbox.put_first("b", "two")] == ["one", "one"]
    mailbox.replace("c", "one", "two")
    assert mailbox.peek("c") is None
    for known, text, left in ((None, "", ""), (None, "x", ""), ("", "x", "x"), ("y", "z", "x")):
        mailbox.replace("c", known, text)
        assert mailbox.peek("c") == left
    mailbox.remove("c")
    for name in ("a", "b", "n", "never there"):
        mailbox.remove(name)
    assert [mailbox.peek("a"), mailbox.peek("b"), mailbox.add("n")] == [None, None, 1]


def test_a_text_that_is_too_long_is_refused(store: StoreThread) -> None:
    """A TCPStore hangs up on a client that sends more than 8 MiB at once."""
    mailbox = Mailbox(store, "calls/0")
    longest = "x" * MOST_CHARACTERS
    mailbox.put("a", longest)
    assert mailbox.peek("a") == longest
    with pytest.raises(ValueError, match="b: a message must have at most 4194304 characters"):
        mailbox.put("b", longest + "x")
    assert mailbox.peek("b") is None


def test_a_store_that_is_gone() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    mailbox = Mailbox(StoreThread(client, 60.0), "calls/0")
    mailbox.put("a", "text")
    del server
    with pytest.raises(DistributedTuningError, match="cannot be reached") as raised:
        mailbox.peek("a")
    assert raised.value.rank is None
    assert "\n" not in str(raised.value)


def test_a_store_that_hangs() -> None:
    """What was asked in vain is not done later either: this rank has given up by then."""
    hanging, asked = threading.Event(), []

    class Hanging:
        def add(self, key: str, amount: int) -> int:
            asked.append(key)
            hanging.wait()
            return amount

    thread = StoreThread(Hanging(), 0.2)  # type: ignore[arg-type]
    mailbox = Mailbox(thread, "calls/0")
    for name in ("a", "b"):
        with pytest.raises(DistributedTuningError, match="does not answer for") as raised:
            mailbox.add(name)
        assert raised.value.rank is None
    hanging.set()
    thread.stop()
    assert asked == ["calls/0/a"]


def test_the_first_verdict_stands_for_all(store: StoreThread) -> None:
    groups = [Group(None, rank, (4, 5)) for rank in range(2)]  # type: ignore[arg-type]
    beats = [Heartbeat(Mailbox(store, "calls/0"), group, 10.0) for group in groups]
    died = Verdict(5, "the process dïed\n")
    assert beats[0].look() is None
    assert beats[0].propose(died) == died
    assert beats[1].propose(AGREED) == died
    assert beats[1].look() == died
    assert all(beat.ended.is_set() for beat in beats)


def test_the_error_survives_being_passed_on() -> None:
    error = pickle.loads(pickle.dumps(DistributedTuningError(3, "the GPU is lost")))
    assert (error.rank, error.reason) == (3, "the GPU is lost")
    assert str(error).startswith("rank 3: the GPU is lost (this rank has installed nothing")
