"""Repeated searches of a problem choose the same candidate."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from support.simulation import candidate

from cudnn_autotune import sampling
from cudnn_autotune.audit import recordings
from cudnn_autotune.audit.offline.replay import ReplayTimer
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.sampling import ties
from cudnn_autotune.sampling.racing import RaceOutcome
from cudnn_autotune.sampling.strategy import Limits

SEARCHES = 40


def repeated(name: str, mode: str, count: int = SEARCHES) -> list[Selection]:
    """Searches on a recording of an H200, each with other samples and another order of turns."""
    recording, strategy, found = recordings.load(name), sampling.get(mode), []
    for seed in range(count):
        timer = ReplayTimer(recording, seed)
        one: Any = replace(strategy, seed=seed)  # type: ignore[type-var]
        selection = one.select(timer.candidates, timer, Limits())
        assert selection is not None
        found.append(selection)
    return found


def agreement(selections: list[Selection]) -> float:
    """The share of pairs of searches with the same choice."""
    counts = Counter(one.winner.candidate.text for one in selections)
    pairs = len(selections) * (len(selections) - 1)
    return sum(n * (n - 1) for n in counts.values()) / pairs


@pytest.mark.parametrize(
    ("name", "mode", "least"),
    [
        ("h200_forum", "auto", 1.0),
        ("h200_forum", "race", 1.0),
        # PyTorch's choice is 2 % slower, which is near the widest tie.
        ("h200_resnet50_fprop", "auto", 0.9),
        ("h200_resnet50_fprop", "race", 0.9),
        # Four candidates within 0.5 %.
        ("h200_vgg_dgrad", "auto", 0.9),
        ("h200_vgg_dgrad", "race", 0.95),
    ],
)
def test_searches_on_a_recording_agree(name: str, mode: str, least: float) -> None:
    assert agreement(repeated(name, mode)) >= least


@pytest.mark.parametrize("name", ["h200_resnet50_fprop", "h200_vgg_dgrad"])
def test_sustained_runs_are_of_the_same_candidate(name: str) -> None:
    """The race's choice runs alone, not the one that happened to be the fastest of a tie."""
    assert agreement(repeated(name, "sustained", 12)) >= 0.95


def test_what_agrees_is_still_fast() -> None:
    """On average within 0.3 % of the fastest in the recorded rounds."""
    for name in recordings.names():
        timer = ReplayTimer(recordings.load(name))
        cold, hot = (timer.truth("burst", cache) for cache in ("cold", "hot"))  # type: ignore[arg-type]
        both = {text: math.sqrt(ms * hot[text]) for text, ms in cold.items() if text in hot}
        found = [both[one.winner.candidate.text] for one in repeated(name, "auto")]
        assert sum(found) / len(found) <= 1.003 * min(both.values())


# When a choice is clear


def outcome(error: float, pytorchs: str = "", **behind: float) -> RaceOutcome:
    """The standings of candidates in cuDNN's order, by name, with their log distances."""
    order: list[Candidate] = [candidate(name, rank) for rank, name in enumerate(behind)]
    log_time = dict(zip(order, behind.values(), strict=True))
    return RaceOutcome(order, log_time, dict.fromkeys(order, 0.0), error=error, pytorchs=pytorchs)


def test_more_rounds_are_needed_where_they_may_change_the_choice() -> None:
    near, edge, far = 0.001, ties.width(0.001), 0.05
    assert outcome(0.001, a=near, b=0.0).is_clear()
    assert outcome(0.001, a=far, b=0.0).is_clear()
    assert not outcome(0.001, a=edge, b=0.0).is_clear()
    assert outcome(0.0001, a=edge - 0.002, b=0.0).is_clear(), "with more samples it is"


def test_what_is_behind_the_choice_in_the_order_needs_no_rounds() -> None:
    edge = ties.width(0.001)
    assert outcome(0.001, a=0.0, b=edge, c=edge).is_clear()
    assert not outcome(0.001, "b", a=0.0, b=edge, c=edge).is_clear(), "PyTorch's comes first"
    assert outcome(0.001, "b", a=edge, b=0.001, c=0.0).is_clear()


def test_a_tie_is_with_the_fastest_and_not_with_a_neighbour_that_ties() -> None:
    """Each of these is within a tie of the next one."""
    chain = {"a": 0.027, "b": 0.018, "c": 0.009, "d": 0.0}
    found = outcome(0.0, **chain)
    tied = found.tied(ties.width(found.error))
    assert {one.text for one in tied} == {"c", "d"}
