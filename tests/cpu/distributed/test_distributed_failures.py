"""A rank that raises, dies, hangs or does not come: an error on every rank, and no decision."""

from __future__ import annotations

import random
import signal
import time

import pytest
from support.processes import distributed_cases as cases
from support.processes.gloo_ranks import Ran, Ranks

from cudnn_autotune.distributed import DistributedTuningError
from cudnn_autotune.distributed.heartbeat import BEAT_S, SILENT_S

# Less than the 30 s that a rank waits for one that makes no progress, on busy cores too.
SOON_S = 25.0


def assert_failed(done: list[Ran], rank: int | None, reason: str) -> None:
    """Those that still live all say the same."""
    errors = [ran.error for ran in done if not ran.died]
    assert all(isinstance(error, DistributedTuningError) for error in errors), errors
    assert {(error.rank, error.reason) for error in errors} == {(rank, errors[0].reason)}  # type: ignore[union-attr]
    assert reason in str(errors[0])
    if rank is not None:
        assert str(errors[0]).startswith(f"rank {rank}: ")


def assert_well(four: Ranks) -> None:
    """The next call finds nothing of the one that failed."""
    assert four.stored() == []
    assert four.values(cases.threads) == [[]] * 4
    assert_shared(four)


def assert_shared(ranks: Ranks) -> None:
    lists = [decisions for _, decisions in ranks.values(cases.shared, "race", "aa", 6, 0)]
    assert len(lists[0]) == 6
    assert lists[1:] == lists[:1] * (ranks.size - 1)


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_raises(four: Ranks, culprit: int) -> None:
    done = four.run(cases.shared_where_one, "raise", culprit)
    assert_failed(done, culprit, "RuntimeError: the GPU is lost")
    assert max(ran.seconds for ran in done) < SOON_S
    assert_well(four)


def test_a_rank_that_exits() -> None:
    with Ranks(2) as two:
        done = two.run(cases.shared_where_one, "exit", 1)
        assert done[1].died
        assert_failed(done, 1, "SystemExit: 3")
        assert done[0].seconds < SOON_S
        assert two.stored() == []


def test_its_own_error_is_the_cause(four: Ranks) -> None:
    assert four.values(cases.cause_of, 1) == [
        "None",
        "RuntimeError('the GPU is lost')",
        *["None"] * 2,
    ]


def test_a_rank_that_hangs(four: Ranks) -> None:
    done = four.run(cases.shared_where_one, "hang", 1, 2.0)
    assert_failed(done, 1, "timeout: no progress for 2 s at ")
    assert all(2.0 < ran.seconds < SOON_S for ran in (done[0], *done[2:]))
    assert_well(four)


def test_a_rank_that_does_not_come(four: Ranks) -> None:
    done = four.run(cases.shared_where_one, "late", 3, 1.5)
    assert_failed(done[:3], 3, "timeout: it has not come within 1.5 s")
    # It has come to another call, and the others have not.
    assert_failed(done[3:], 0, "timeout: it has not come within 1.5 s")
    assert_well(four)


def test_a_missed_call_does_not_spoil_the_next_ones(four: Ranks) -> None:
    for rank in (0, 2, 3):
        four.begin(rank, cases.settled_late, -1, 0.0, 1.0)
    assert_failed([four.end(rank) for rank in (0, 2, 3)], 1, "timeout: it has not come within 1 s")
    for _ in range(3):
        assert_well(four)


@pytest.mark.slow
def test_problems_longer_than_the_timeout_together_are_no_hang(four: Ranks) -> None:
    results = four.values(cases.shared_slowly, 16, 0.4, 1.0)
    assert [len(decisions) for decisions in results] == [16] * 4


def test_a_rank_that_decides_on_another_problem(four: Ranks) -> None:
    done = four.run(cases.shared_wrongly)
    assert_failed(done, 1, "ValueError: tune_one must decide on ")
    assert_well(four)


@pytest.mark.parametrize("call", ["share", "tune"])
def test_ranks_that_call_different_functions(four: Ranks, call: str) -> None:
    done = four.run(cases.called_differently, call)
    assert_failed(done, 2, f"call must be {call!r}, as on rank 0, and is 'agree'")
    assert_well(four)


def test_nothing_of_a_failed_call_is_installed(four: Ranks) -> None:
    results = four.values(cases.model_tuned, [9] * 4, 2)
    for result in results:
        assert result["error"].startswith("rank 2: RuntimeError: the GPU is lost")
        assert (result["known"], result["choices"]) == ([None] * 9, [])
    results = four.values(cases.agreed, 4, True)
    for result in results:
        assert "timeout: it has not come within 1 s" in result["error"]
        assert (result["known"], result["choices"]) == ([None] * 4, [])


def test_a_rank_whose_own_choices_make_no_sense(four: Ranks) -> None:
    """The others learn of it at once, and not by its absence."""
    for result in four.values(cases.agreed, 4, False, 2):
        assert result["error"].startswith("rank 2: ValueError: ")
        assert "regret_bound" in result["error"]
        assert (result["known"], result["choices"]) == ([None] * 4, [])
    assert_well(four)


def test_settings_that_differ(four: Ranks) -> None:
    for result in four.values(cases.model_tuned, [3] * 4, None, "auto"):
        assert result["error"].startswith("rank 1: sampling must be 'auto', as on rank 0, and is")
        assert result["known"] == [None] * 3
    for result in four.values(cases.model_tuned, [3] * 4, None, "online"):
        assert result["error"].startswith("rank 0: ValueError: sampling must be a mode that")


def test_pins_that_differ(four: Ranks) -> None:
    """Else what rank 2 has forced upon itself would be served, unmeasured, on all."""
    for result in four.values(cases.model_tuned, [3] * 4, None, "race", [2]):
        assert result["error"].startswith("rank 2: the pin of fprop")
        assert "must be None, as on rank 0, and is 'aten'" in result["error"]
        assert (result["known"], result["choices"]) == ([None] * 3, [])
    # Where it has that problem no more than rank 3 has.
    for result in four.values(cases.model_tuned, [3, 3, 0, 0], None, "race", [2]):
        assert result["error"].startswith("rank 2: the pin of fprop")


@pytest.mark.slow
def test_a_rank_that_was_stopped_and_comes_back(four: Ranks) -> None:
    """It was taken for dead: it gets the error as the others do, not a table of its own."""
    for rank in range(4):
        four.begin(rank, cases.shared_where_one, "stop", 2)
    done = {rank: four.end(rank) for rank in (0, 1, 3)}
    four.send(2, signal.SIGCONT)
    done[2] = four.end(2)
    assert_failed(list(done.values()), 2, "the process died: no sign of life for ")
    assert max(done[rank].seconds for rank in (0, 1, 3)) < SOON_S
    assert_well(four)


def test_a_rank_that_is_killed_while_it_tunes() -> None:
    with Ranks(4) as ranks:
        done = ranks.run(cases.shared_where_one, "die", 2)
        assert [ran.died for ran in done] == [False, False, True, False]
        assert max(ran.seconds for ran in done) < SOON_S
        assert_failed(done, 2, "the process died: no sign of life for ")
        # What the dead has written, and how the call ended; no decision.
        left = {key.split("cudnn_autotune/")[1].split("/", 2)[2] for key in ranks.stored()}
        of_all = {"came", "left", "turns/0", "outcome"}
        assert left == of_all | {"place/2", "here/2", "beat/2", "hello/2", "problems/2"}


def test_a_rank_that_is_killed_while_it_waits() -> None:
    """For rank 0, which has not come."""
    with Ranks(4) as ranks:
        for rank in (1, 2, 3):
            ranks.begin(rank, cases.settled_late, -1, 0.0, 60.0)
        ranks.wait_for_key("/beat/2")
        time.sleep(3 * BEAT_S)  # who watches it has seen that it lives
        ranks.send(2, signal.SIGKILL)
        done = [ranks.end(rank) for rank in (1, 2, 3)]
        assert [ran.died for ran in done] == [False, True, False]
        assert_failed(done, 2, "the process died: no sign of life for ")


@pytest.mark.basic(1)
@pytest.mark.parametrize("moment", ["/place/1", "/here/1", "/welcome", "/problems/0", "/turns/0"])
def test_after_a_restart_nothing_of_the_killed_run_counts(moment: str) -> None:
    """torchrun starts new processes on the store of the old ones."""
    with Ranks(2) as killed:
        for rank in range(2):
            killed.begin(rank, cases.shared_slowly, 50, 0.05, 30.0)
        killed.wait_for_key(moment)
        killed.kill()
        with Ranks(2, after=killed) as ranks:
            for _ in range(2):
                assert_shared(ranks)


@pytest.mark.slow
def test_what_a_killed_run_agreed_upon_is_not_taken_for_an_agreement() -> None:
    """Rank 1 never calls in the second run: rank 0 must not find what the dead one has left."""
    with Ranks(2) as killed:
        done = killed.run(cases.shared_but_killed, 1)
        assert [ran.died for ran in done] == [False, True]
        assert len(done[0].value) == 6
        killed.send(0, signal.SIGKILL)
        with Ranks(2, after=killed) as ranks:
            ranks.begin(0, cases.settled_late, -1, 0.0, 1.0)
            assert_failed([ranks.end(0)], 1, "timeout: it has not come within 1 s")
            assert_shared(ranks)


@pytest.mark.slow
def test_after_a_restart_who_is_still_to_come_is_not_taken_for_dead() -> None:
    with Ranks(2) as killed:
        killed.begin(0, cases.settled_late, -1, 0.0, 30.0)
        killed.wait_for_key("/beat/0")
        killed.kill()
        with Ranks(2, after=killed) as ranks:
            for rank in range(2):
                ranks.begin(rank, cases.settled_late, 0, SILENT_S + 2.0, 30.0)
            done = [ranks.end(rank) for rank in range(2)]
            assert [ran.error for ran in done] == [None, None]
            assert len(done[0].value) == 4
            assert done[0].value == done[1].value


@pytest.mark.basic(1)
@pytest.mark.parametrize("trial", range(6))
def test_killed_at_any_moment_the_others_have_all_or_nothing(trial: int) -> None:
    """Above all in the last moments, when some know that all have agreed, and others not yet."""
    moment = random.Random(trial)
    with Ranks(3) as ranks:
        for rank in range(3):
            ranks.begin(rank, cases.shared_while_killed, 1.0)
        ranks.wait_for_key("/beat/0")
        time.sleep(moment.uniform(0.3, 0.6))
        victim = moment.randrange(3)
        ranks.send(victim, signal.SIGKILL)
        done = [ranks.end(rank) for rank in range(3) if rank != victim]
    assert len({str(ran.error) for ran in done}) == 1
    assert done[0].value == done[1].value
    assert (done[0].error is None) == (done[0].value is not None and len(done[0].value) == 15)


def test_the_rank_that_hosts_the_store_is_killed() -> None:
    with Ranks(3, host="rank 0") as ranks:
        start_s = time.monotonic()
        done = ranks.run(cases.shared_where_one, "die", 0)
        assert [ran.died for ran in done] == [True, False, False]
        assert time.monotonic() - start_s < SOON_S
        for ran in done[1:]:
            assert isinstance(ran.error, DistributedTuningError)
            assert "the store of the process group cannot be reached" in str(ran.error)


@pytest.mark.slow
def test_the_rank_that_hosts_the_store_is_stopped() -> None:
    """Every method of the store then blocks; and the rank itself gives up when it goes on."""
    with Ranks(2, host="rank 0") as ranks:
        for rank in range(2):
            ranks.begin(rank, cases.shared_where_one, "stop", 0)
        error = ranks.end(1).error
        assert isinstance(error, DistributedTuningError)
        assert error.rank is None
        assert "the store of the process group does not answer for 12 s" in str(error)
        ranks.send(0, signal.SIGCONT)
        assert isinstance(ranks.end(0).error, DistributedTuningError)
