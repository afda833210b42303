"""One measurement answers other constraints without timing."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.store.decisions import (
    EVIDENCE,
    FRONTIER,
    H200,
    NONDETERMINISTIC,
    decision,
    problem,
    selection,
    timed,
)

from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.sampling import ties
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.file_store import Store


def texts(known: Decision | None) -> list[str] | None:
    return None if known is None else [e.candidate.text for e in known.selection.ranking]


@pytest.mark.parametrize(
    ("deterministic", "limit", "ranking"),
    [
        (False, 1 << 20, ["fastest", "small", "strict", "slow"]),
        (False, (1 << 20) - 1, ["small", "strict", "slow"]),
        (False, (1 << 10) - 1, ["slow"]),
        (False, 0, ["slow"]),
        (True, None, ["strict", "slow"]),
        (True, 1 << 15, ["slow"]),
    ],
)
def test_what_fits_is_ranked_again(
    deterministic: bool, limit: int | None, ranking: list[str]
) -> None:
    found = decision().restricted_to(deterministic, limit)
    assert texts(found) == ranking
    assert found.problem == problem(deterministic=deterministic)
    assert found.workspace_limit == limit


def test_another_winner_claims_less() -> None:
    found = decision().restricted_to(True, None)
    evidence = found.selection.evidence
    assert evidence.rule == "re-ranked: fastest"
    assert evidence.tied == ("strict",)
    assert evidence.regret_bound is None
    assert evidence.confidence is None
    assert evidence.clock_mhz == EVIDENCE.clock_mhz
    assert found.relative_error is None  # the output of this candidate was not checked


def test_looser_constraints_than_measured_have_no_answer() -> None:
    strict = decision(deterministic=True, selection=selection(FRONTIER[2:]))
    assert strict.restricted_to(False, None) is None
    assert strict.restricted_to(True, None) is not None
    capped = decision(workspace_limit=1 << 16, selection=selection(FRONTIER[1:]))
    assert capped.restricted_to(False, None) is None
    assert capped.restricted_to(False, (1 << 16) + 1) is None
    assert texts(capped.restricted_to(False, 1 << 16)) == ["small", "strict", "slow"]
    assert texts(capped.restricted_to(True, 1 << 12)) == ["slow"]


def test_what_was_wrong_is_never_chosen() -> None:
    rejected = decision(rejected=(("strict", 0.4),))
    assert texts(rejected.restricted_to(True, None)) == ["slow"]
    assert texts(rejected.restricted_to(False, None)) == ["fastest", "small", "slow"]
    of_all = decision(rejected=tuple((entry.candidate.text, 0.4) for entry in FRONTIER))
    assert of_all.restricted_to(False, None) is None


def test_where_the_first_was_wrong_the_next_of_the_ranking_serves() -> None:
    """Tuning does the same, whatever the times are."""
    known = decision(
        selection=selection([FRONTIER[0], FRONTIER[2], FRONTIER[1]]), rejected=(("fastest", 0.4),)
    )
    assert texts(known.restricted_to(False, None)) == ["strict", "small"]


def test_the_next_is_the_fastest_and_not_the_next_of_the_ranking() -> None:
    ranking = [
        timed("large", 1.0, 100),
        timed("b", 2.0, rank=2),
        timed("a", 1.5, rank=1),
        timed("c", 2.5, rank=3),
    ]
    assert texts(decision(selection=selection(ranking)).restricted_to(False, 0)) == ["a", "b", "c"]


def test_the_steady_time_decides_where_all_that_are_near_have_one() -> None:
    ranking = [
        timed("large", 1.0, 100, sustained_ms=1.1),
        timed("cool", 1.3, rank=2, sustained_ms=1.4),
        timed("hot", 1.25, rank=1, sustained_ms=1.6),
    ]
    assert texts(decision(selection=selection(ranking)).restricted_to(False, 0)) == ["cool", "hot"]
    # An entry that the race left far behind needs no steady time.
    far = timed("far", 5.0, rank=3)
    assert texts(decision(selection=selection([*ranking, far])).restricted_to(False, 0)) == [
        *("cool", "hot", "far")
    ]
    # An entry that is near does: only times of one kind are compared.
    near = timed("near", 1.32, rank=3)
    assert texts(decision(selection=selection([*ranking, near])).restricted_to(False, 0)) == [
        *("hot", "cool", "near")
    ]


@pytest.mark.parametrize(("burst_weight", "first"), [(0.0, "cool"), (0.25, "hot")])
def test_what_counted_in_bursts_when_it_was_measured_counts_now(
    burst_weight: float, first: str
) -> None:
    """Being 2 % faster in sustained runs does not outweigh being 9 % slower in bursts."""
    ranking = [
        timed("large", 1.0, 100, sustained_ms=1.4),
        timed("cool", 1.09, rank=2, sustained_ms=1.40),
        timed("hot", 1.0, rank=1, sustained_ms=1.42),
    ]
    evidence = replace(EVIDENCE, burst_weight=burst_weight)
    found = decision(selection=selection(ranking, evidence)).restricted_to(False, 0)
    assert found.selection.winner.candidate.text == first
    assert found.selection.evidence.burst_weight == burst_weight


@pytest.mark.parametrize(("reach", "first"), [(1.1, "cool"), (1.15, "hot")])
def test_near_is_what_was_near_when_it_was_measured(reach: float, first: str) -> None:
    """``sustained`` gives more contenders a sustained run than ``auto`` does.

    If one that is near has none, the times of turns are compared.
    """
    ranking = [
        timed("large", 0.9, 100, sustained_ms=1.3),
        timed("cool", 1.05, rank=2, sustained_ms=1.3),
        timed("hot", 1.0, rank=1, sustained_ms=1.4),
        timed("unknown", 1.12, rank=3),
    ]
    evidence = replace(EVIDENCE, sustained_reach=reach)
    found = decision(selection=selection(ranking, evidence)).restricted_to(False, 0)
    assert found.selection.winner.candidate.text == first
    assert found.selection.evidence.sustained_reach == reach


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_ties_are_settled_by_the_rule_in_whatever_order(order: tuple[int, ...]) -> None:
    equal = [
        timed("eager", 2.0, 0, NONDETERMINISTIC, rank=1),
        timed("roomy", 2.002, 64, rank=2),
        timed("late", 2.006, 8, rank=4),
        timed("early", 2.009, 8, rank=3),
    ]
    ranking = [timed("large", 1.0, 100), *(equal[number] for number in order)]
    found = decision(selection=selection(ranking)).restricted_to(False, 99)
    assert found.selection.winner.candidate.text == "early"
    assert found.selection.evidence.rule == "re-ranked: tie: earlier in cuDNN's list"
    assert found.selection.evidence.tied == ("early", "late", "roomy", "eager")
    expected = [e.candidate.text for e in ranking[1:] if e.candidate.text != "early"]
    assert texts(found) == ["early", *expected]


def test_beyond_the_tie_width_time_decides() -> None:
    ranking = [
        timed("large", 1.0, 100),
        timed("quick", 2.0, 50, rank=2),
        timed("small", 2.0 * (1 + ties.TIE_WIDTH) + 1e-6, 0, rank=1),
    ]
    assert texts(decision(selection=selection(ranking)).restricted_to(False, 99)) == [
        "quick",
        "small",
    ]


def test_pytorchs_own_path_counts_as_the_plan_that_it_runs() -> None:
    """It was timed once, as that plan; under constraints that exclude the plan it has no time."""
    same = Measurement(OWN_PATH, 1.0, 0, runs="fastest")
    known = decision(selection=selection([*FRONTIER, same]))
    assert texts(known.restricted_to(True, None)) == ["strict", "slow"]
    assert texts(known.restricted_to(False, 1 << 12)) == ["small", "slow"]
    own = Measurement(OWN_PATH, 1.1, 9)
    known = decision(selection=selection([*FRONTIER, own]))
    assert texts(known.restricted_to(True, None)) == ["aten", "strict", "slow"]


entries = st.builds(
    lambda number, ms, alone, workspace, noisy: timed(
        f"eng{number}",
        ms,
        workspace,
        *([NONDETERMINISTIC] if noisy else []),
        rank=number,
        sustained_ms=alone,
    ),
    st.integers(0, 9),
    st.none() | st.floats(0.1, 10),
    st.none() | st.floats(0.1, 10),
    st.integers(0, 100),
    st.booleans(),
)
wrong = st.lists(st.integers(0, 9).map(lambda number: (f"eng{number}", 0.5)), max_size=3)


@given(
    ranking=st.lists(entries, min_size=1, max_size=8),
    rejected=wrong,
    first=st.tuples(st.booleans(), st.none() | st.integers(0, 100)),
    then=st.tuples(st.booleans(), st.none() | st.integers(0, 100)),
    seed=st.integers(),
)
def test_of_any_selection(
    ranking: list[Measurement],
    rejected: list[tuple[str, float]],
    first: tuple[bool, int | None],
    then: tuple[bool, int | None],
    seed: int,
) -> None:
    known = decision(selection=selection(ranking), rejected=tuple(rejected))
    found = known.restricted_to(*first)
    if found is None:
        return
    names = {text for text, _ in rejected}
    deterministic, limit = first
    assert set(found.selection.ranking) <= set(known.selection.ranking)
    for entry in found.selection.ranking:
        assert entry.candidate.text not in names
        assert limit is None or entry.candidate.workspace_bytes <= limit
        assert not (deterministic and NONDETERMINISTIC in entry.candidate.numerical_notes)
    # Restricting again to the same constraints changes nothing.
    assert found.restricted_to(*first) == found
    # The winner does not depend on the order of the entries behind the chosen one.
    rest = list(known.selection.ranking[1:])
    random.Random(seed).shuffle(rest)
    mixed = decision(
        selection=selection([known.selection.ranking[0], *rest]), rejected=tuple(rejected)
    )
    if known.chosen == known.selection.ranking[0]:
        assert mixed.restricted_to(*first).selection.winner == found.selection.winner
    # Restricting the answer again gives what restricting the measurement gives.
    further = found.restricted_to(*then)
    if further is not None:
        assert set(further.selection.ranking) <= set(found.selection.ranking)


def cut_short(budget_ms: float | None, **changes: Any) -> Decision:
    evidence = replace(EVIDENCE, budget_ms=budget_ms)
    return decision(selection=selection(FRONTIER[:2], evidence), **changes)


def test_what_a_budget_cut_short_serves_and_does_not_displace(tmp_path: Path) -> None:
    store = Store(tmp_path, H200)
    store.add([cut_short(50.0)])
    assert store.find(problem()) == cut_short(50.0)
    # A larger budget prevails over a later time.
    store.add([cut_short(30.0, day=9)])
    assert list(store) == [cut_short(50.0)]
    store.add([cut_short(80.0)])
    assert list(store) == [cut_short(80.0)]
    store.add([cut_short(None)])
    store.add([cut_short(90.0, day=9)])
    assert list(store) == [cut_short(None)]
