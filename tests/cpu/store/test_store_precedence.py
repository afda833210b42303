"""Which of several decisions are kept does not depend on the order in which they arrive."""

from __future__ import annotations

import dataclasses
import itertools
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import sleep

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.store.decisions import (
    FRONTIER,
    H200,
    at_limit,
    decision,
    measured_otherwise,
    selection,
)

from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.file_store import Layered, Store
from cudnn_autotune.store.merge import prevailing

LOOSE, TIGHT = 1 << 20, 1 << 10


def kept(*decisions: Decision) -> list[Decision]:
    """Returns what is kept, and asserts it for every order, all at once and one by one."""
    answers = []
    for order in itertools.permutations(decisions):
        answers.append(prevailing(order))
        known: list[Decision] = []
        for one in order:
            known = prevailing([*known, one])
        answers.append(known)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def test_the_later_one_stays() -> None:
    early, late = at_limit(None, day=1), at_limit(None, day=2)
    assert kept(early, late, early) == [late]


@pytest.mark.parametrize("looser_is_later", [False, True])
def test_one_of_looser_constraints_stays_whenever_it_was_measured(looser_is_later: bool) -> None:
    """A measurement with a tighter limit lacks the candidates above it."""
    days = {"day": 2} if looser_is_later else {"day": 1}
    other = {"day": 1} if looser_is_later else {"day": 2}
    for looser, tighter in (
        (at_limit(None, **days), at_limit(LOOSE, **other)),
        (at_limit(LOOSE, **days), at_limit(TIGHT, **other)),
        (at_limit(TIGHT, **days), at_limit(0, **other)),
        (at_limit(None, **days), at_limit(None, deterministic=True, **other)),
        (at_limit(LOOSE, **days), at_limit(TIGHT, deterministic=True, **other)),
        (at_limit(LOOSE, **days), at_limit(LOOSE, deterministic=True, **other)),
    ):
        assert kept(looser, tighter) == [looser]


def test_where_neither_is_looser_both_stay() -> None:
    """One is deterministic with any workspace, the other has a limit: each can answer what the
    other cannot."""
    capped, strict = at_limit(TIGHT, day=1), at_limit(None, day=2, deterministic=True)
    assert kept(capped, strict) == [capped, strict]
    assert kept(capped, strict, at_limit(None, day=3)) == [at_limit(None, day=3)]
    assert kept(capped, strict, at_limit(LOOSE, day=3)) == [at_limit(LOOSE, day=3), strict]


def test_a_time_that_is_yet_to_come_tells_nothing() -> None:
    """Otherwise a decision from a machine with a wrong clock would never be replaced."""
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    ahead = dataclasses.replace(
        at_limit(None), provenance=dataclasses.replace(decision().provenance, time=tomorrow)
    )
    sound = at_limit(None, day=2)
    assert kept(ahead, sound) == [sound]
    assert kept(ahead) == [ahead]


@pytest.mark.parametrize("ahead_s", [0.0, 1.0, 3600.0])
def test_what_is_measured_last_replaces_what_has_a_later_time(
    tmp_path: Path, ahead_s: float
) -> None:
    """A clock may have been set back before or after the first decision.

    The result also holds for other processes, and once the clock has reached that time.
    """
    time = (datetime.now(UTC) + timedelta(seconds=ahead_s)).isoformat()
    first = decision(provenance=dataclasses.replace(decision().provenance, time=time))
    Store(tmp_path / "one", H200).add([first])
    Store(tmp_path / "other", H200).add([first])
    one, other = Store(tmp_path / "one", H200), Store(tmp_path / "other", H200)
    one.put(decision().problem, selection(FRONTIER[:1]))
    assert one.get(decision().problem) == selection(FRONTIER[:1])
    sleep(1.1 if ahead_s == 1 else 0)
    assert sum(one.add(other)[:2]) == 0
    assert sum(other.add(one)[:2]) == 1
    for folder in ("one", "other"):
        assert Store(tmp_path / folder, H200).get(decision().problem) == selection(FRONTIER[:1])
    other.put(decision().problem, selection(FRONTIER[:2]))
    assert sum(one.add(other)[:2]) == 1
    assert list(one) == list(other)
    assert one.get(decision().problem) == selection(FRONTIER[:2])


def test_a_clock_that_was_set_back_while_it_was_measured(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    store.add([decision(day=1)])
    later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    ahead = measured_otherwise(decision(), 0.5, day=1)
    ahead = dataclasses.replace(ahead, provenance=dataclasses.replace(ahead.provenance, time=later))
    store.add([ahead], are_latest=True)
    (known,) = Store(tmp_path, H200)
    assert known.selection == ahead.selection
    assert (known.provenance.time, known.provenance.revision) == (ahead.provenance.time, 1)
    # Every rank does this with the decisions on which the ranks have agreed.
    data = store.path.read_bytes()
    store.add([ahead], are_latest=True)
    assert store.path.read_bytes() == data


def test_what_is_put_under_determinism_is_asked_first_whatever_the_clock(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    capped, strict = at_limit(TIGHT, day=2), at_limit(None, day=1, deterministic=True)
    store.add([capped])
    store.add([strict], are_latest=True)
    assert len(store) == 2
    found = store.find(strict.problem, workspace_limit=TIGHT)
    assert found.provenance == dataclasses.replace(strict.provenance, revision=1)


def test_with_clocks_that_are_right_no_revision_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    for count in (1, 2, 3):
        store.put(decision().problem, selection(FRONTIER[:count]))
        assert store.get(decision().problem) == selection(FRONTIER[:count])
    assert b"revision" not in store.path.read_bytes()


def test_two_of_one_moment_are_settled_alike_everywhere() -> None:
    one = measured_otherwise(decision(), 1.0, day=1)
    assert len(kept(one, measured_otherwise(decision(), 2.0, day=1))) == 1


def within(budget_ms: float | None, known: Decision) -> Decision:
    """Returns ``known`` as if its budget had cut the search short."""
    evidence = dataclasses.replace(known.selection.evidence, budget_ms=budget_ms)
    return dataclasses.replace(
        known, selection=dataclasses.replace(known.selection, evidence=evidence)
    )


measured = st.builds(
    lambda limit, day, deterministic, ms: measured_otherwise(
        at_limit(limit, deterministic=deterministic), ms, day
    ),
    st.sampled_from([None, LOOSE, TIGHT, 0]),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([1.0, 2.0]),
)


@settings(deadline=None)
@given(
    st.lists(
        st.builds(within, st.sampled_from([None, 10.0, 20.0]), measured), min_size=1, max_size=4
    )
)
def test_in_whatever_order_any_come(decisions: list[Decision]) -> None:
    found = kept(*decisions)
    assert 1 <= len(found) <= 2
    # A kept decision answers every question that one of them can answer.
    for one in decisions:
        under = (one.problem.deterministic, one.workspace_limit)
        assert any(known.restricted_to(*under) is not None for known in found)
    # Under equal constraints, a complete search is not replaced by one that was cut short.
    for known in found:
        alike = [d for d in decisions if constraints(d) == constraints(known)]
        if any(d.selection.evidence.budget_ms is None for d in alike):
            assert known.selection.evidence.budget_ms is None


def constraints(known: Decision) -> tuple[bool, int | None]:
    return known.problem.deterministic, known.workspace_limit


def test_a_store_keeps_what_prevails(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    everything = decision()
    capped = at_limit(TIGHT, day=2)
    store.add([everything])
    store.add([capped])
    assert list(store) == [everything]
    store.discard([everything])
    store.add([capped])
    strict = at_limit(None, day=3, deterministic=True)
    store.add([strict])
    assert list(store) == list(Store(tmp_path, H200)) == [capped, strict]
    assert store.find(capped.problem, workspace_limit=TIGHT) == capped
    assert store.find(strict.problem) == strict
    assert store.find(capped.problem) is None
    assert [*store.keys()] == [everything.key]
    store.add([everything])
    assert list(store) == list(Store(tmp_path, H200)) == [everything]


def test_of_two_that_can_answer_the_later_does(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    strict = at_limit(None, day=1, deterministic=True)
    capped = at_limit(TIGHT, day=2)
    store.add([strict, capped])
    assert store.find(strict.problem, workspace_limit=TIGHT).provenance == capped.provenance


def test_a_change_counts_what_it_took(tmp_path: Path) -> None:
    one, other = Store(tmp_path / "one", H200), Store(tmp_path / "other", H200)
    one.add([decision(1, day=1), decision(2, day=2), at_limit(None, day=1, size=3)])
    other.add(
        [
            decision(1, day=2),  # later
            decision(2, day=1),  # earlier
            at_limit(TIGHT, day=9, size=3),  # later, but it lacks candidates
            decision(4),  # new
        ]
    )
    assert sum(one.add(other)[:2]) == 2
    assert sorted(known.key for known in one) == sorted(decision(n).key for n in (1, 2, 3, 4))
    assert one.by_key(decision(1).key) == decision(1, day=2)
    assert one.by_key(decision(2).key) == decision(2, day=2)
    assert sum(one.add(other)[:2]) == 0
    assert sum(one.add(one)[:2]) == 0
    assert sum(other.add(one)[:2]) == 2  # the later one of 2, and the whole frontier of 3
    assert sorted(known.key for known in other) == sorted(known.key for known in one)
    assert {known.key: known for known in other} == {known.key: known for known in one}


def test_what_cannot_serve_makes_way(tmp_path: Path) -> None:
    """The next candidate of the same measurement, or a new measurement, takes its place."""
    one, other = Store(tmp_path, H200), Store(tmp_path, H200)
    everything, capped = decision(), at_limit(TIGHT, day=2)
    one.add([everything])
    texts = []
    for _ in everything.selection.ranking:
        answer = one.find(capped.problem, workspace_limit=TIGHT)
        if answer is None:
            break
        texts.append(answer.selection.winner.candidate.text)
        one.reject(answer)
    assert len(set(texts)) == len(texts) >= 2
    assert answer is None
    assert other.find(capped.problem, workspace_limit=TIGHT) is None
    # The candidates that were not rejected go on serving.
    found = other.find(everything.problem)
    assert found.selection.winner == everything.selection.winner
    assert found.relative_error == everything.relative_error
    # The problem is measured again, under the same constraints.
    one.reject(found)
    again = decision(day=3)
    one.add([again])
    assert Store(tmp_path, H200).find(everything.problem) == again


def test_rejecting_loses_nothing_of_what_was_put_there_meanwhile(tmp_path: Path) -> None:
    one, other = Store(tmp_path, H200), Store(tmp_path, H200)
    one.add([decision(day=1)])
    answer = one.find(decision().problem)
    assert answer is not None
    other.add([decision(day=3)])
    one.reject(answer)
    assert list(Store(tmp_path, H200)) == [decision(day=3)]


def test_what_was_shipped_is_rejected_in_memory(tmp_path: Path) -> None:
    Store(tmp_path / "shipped", H200).add([decision()])
    user = Store(tmp_path / "user", H200)
    layers = Layered(user, [Store(tmp_path / "shipped", H200, read_only=True)])
    tight = at_limit(TIGHT, day=2)
    user.add([tight])
    answer = layers.find(decision().problem)
    assert answer == decision()
    layers.reject(answer)
    assert layers.find(decision().problem).selection.winner != decision().selection.winner
    assert list(user) == [tight]
    assert list(Store(tmp_path / "shipped", H200)) == [decision()]
