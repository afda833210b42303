"""Messages that cannot be read, versions that differ, and several threads of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.processes import distributed_cases as cases
from support.processes.gloo_ranks import Ran, Ranks

from cudnn_autotune.core import versions
from cudnn_autotune.distributed import DistributedTuningError


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


def errors_of(done: list[Ran]) -> DistributedTuningError:
    """The error that all ranks raise."""
    errors = [ran.error for ran in done]
    assert all(isinstance(error, DistributedTuningError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1, errors
    assert isinstance(errors[0], DistributedTuningError)
    return errors[0]


def assert_well(three: Ranks) -> None:
    assert three.stored() == []
    assert three.values(cases.threads) == [[]] * 3


UNREADABLE = {
    "torn": (cases.torn, "its decision cannot be read: ValueError: it is damaged"),
    "newer": (cases.newer, "its decision cannot be read: ValueError: "),
    "misplaced": (cases.misplaced, "its decision is on "),
    "a number": ([1, 3], "its decision cannot be read: AttributeError"),
    "no line": ([1], "its decision cannot be read: IndexError"),
}


@pytest.mark.basic(2)
@pytest.mark.parametrize(("bad", "why"), UNREADABLE.values(), ids=UNREADABLE.keys())
@pytest.mark.parametrize(("call", "name"), [("share", "tuned/"), ("agree", "won/")])
def test_a_decision_that_cannot_be_read_is_its_senders_fault(
    three: Ranks, call: str, name: str, bad: Any, why: str
) -> None:
    error = errors_of(three.run(cases.sent_badly, call, 1, name, bad))
    assert error.rank == 1
    assert error.reason.startswith(why)
    assert_well(three)


def test_a_decision_without_a_sender_is_nobodys_fault(three: Ranks) -> None:
    error = errors_of(three.run(cases.sent_badly, "agree", 1, "won/", {}))
    assert error.rank is None
    assert error.reason == "the message won/0/0 does not tell its sender: {}"
    assert_well(three)


@pytest.mark.basic(3)
@pytest.mark.parametrize(
    ("call", "name", "bad"),
    [
        ("share", "hello/", [1]),
        ("share", "hello/", {"terms": {}}),
        ("share", "problems/", 3),
        ("share", "problems/", {"problems": [{"op": "fprop"}], "pins": {}}),
        ("share", "problems/", {"problems": [], "pins": [1]}),
        ("agree", "claims/", ["fprop"]),
        ("agree", "claims/", {"fprop": ["many"]}),
    ],
)
def test_another_message_that_cannot_be_read(three: Ranks, call: str, name: str, bad: Any) -> None:
    error = errors_of(three.run(cases.sent_badly, call, 2, name, bad))
    assert error.rank == 2
    assert error.reason.startswith(f"its message {name[:-1]!r} cannot be read: ")
    assert_well(three)


@pytest.mark.parametrize(
    ("name", "bad"), [("hello of all/", [[1, 2]]), ("problems of all/", [{"op": "fprop"}])]
)
def test_what_the_first_rank_sends_to_all(three: Ranks, name: str, bad: Any) -> None:
    error = errors_of(three.run(cases.sent_badly, "share", 0, name, bad))
    assert error.rank == 0
    assert "cannot be read" in error.reason
    assert_well(three)


@pytest.mark.parametrize("rank", [0, 2])
def test_versions_that_differ(three: Ranks, rank: int) -> None:
    error = errors_of(three.run(cases.shared_in_version, rank, "99.1"))
    wanted, found = "99.1", versions.version()
    if rank:
        wanted, found = found, wanted
    said = f"the version of cudnn_autotune must be {wanted!r}, as on rank 0, and is {found!r}"
    assert error.reason == said
    assert error.rank == {0: 1, 2: 2}[rank]
    assert_well(three)


def test_threads_of_a_rank_take_turns(three: Ranks) -> None:
    results = three.values(cases.shared_by_threads, 3)
    lists = [found for of_rank in results for found in of_rank]
    assert [len(found) for found in lists] == [6] * 9
    # Each call of a rank belongs together with one of each other rank.
    texts = [sorted(map(str, of_rank)) for of_rank in results]
    assert texts[0] == texts[1] == texts[2]
    assert_well(three)


def test_a_call_within_a_call(three: Ranks) -> None:
    error = errors_of(three.run(cases.settled_within_another_call, 1))
    assert error.rank == 1
    assert "it makes a call of the group within another one" in error.reason
    assert_well(three)


def test_a_thread_that_waits_too_long_for_another(three: Ranks) -> None:
    for rank, said in enumerate(three.values(cases.settled_beside_another_thread, 0.2)):
        assert said.startswith(
            f"rank {rank}: timeout: another thread of it has been in a call for 0.2 s"
        )
    assert_well(three)
