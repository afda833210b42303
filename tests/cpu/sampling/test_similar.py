"""What was chosen for similar problems comes first in the race."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulation import GPU, SimulatedEngine, Watched, candidate, engine

from cudnn_autotune import sampling
from cudnn_autotune.audit.offline.stand_ins import StaticCandidates
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.sampling import Limits, Selection

TIMES_MS = {"first": 1.3, "second": 1.2, "best": 1.0}
ENGINES = [
    replace(engine(name, time_ms), candidate=candidate(name, rank))
    for rank, (name, time_ms) in enumerate(TIMES_MS.items())
]
UNLISTED = replace(candidate("unlisted", 9), heuristic_mode="")
RACING = ("race", "sustained", "auto")


def chosen(
    mode: str, *similar: Candidate, limits: Limits | None = None
) -> tuple[Selection, list[str]]:
    unlisted = SimulatedEngine(UNLISTED, 0.9, 100.0)
    timer = Watched(GPU, [*ENGINES, unlisted])
    offered = StaticCandidates([e.candidate for e in ENGINES], similar=similar)
    selection = sampling.get(mode).select(offered, timer, limits or Limits())
    assert selection is not None
    return selection, timer.ran


@pytest.mark.parametrize("mode", RACING)
def test_a_race_looks_at_the_neighbours_engine_first(mode: str) -> None:
    assert chosen(mode)[1][0] == "first"
    selection, ran = chosen(mode, ENGINES[2].candidate)
    assert ran[0] == "best"
    assert selection.winner.candidate.text == "best"
    # Listed and similar: still one candidate.
    assert len([e for e in selection.ranking if e.candidate.text == "best"]) == 1


@pytest.mark.parametrize("mode", RACING)
def test_an_unlisted_candidate_is_raced(mode: str) -> None:
    assert chosen(mode)[0].winner.candidate.text == "best"
    selection, ran = chosen(mode, UNLISTED)
    assert ran[0] == "unlisted"
    assert selection.winner.candidate == UNLISTED


@pytest.mark.parametrize("mode", RACING)
def test_a_bad_neighbour_does_no_harm(mode: str) -> None:
    assert chosen(mode, ENGINES[0].candidate)[0].winner.candidate.text == "best"


@pytest.mark.parametrize("mode", RACING)
def test_a_tight_budget_goes_to_pytorchs_plan_and_then_to_the_neighbour(mode: str) -> None:
    """Nothing is chosen over what PyTorch would run that was not compared with it."""
    selection, ran = chosen(mode, ENGINES[2].candidate, limits=Limits(budget_ms=1.5))
    assert set(ran) == {"first"}
    assert selection.winner.candidate.text == "first"
    selection, ran = chosen(mode, ENGINES[2].candidate, limits=Limits(budget_ms=7.0))
    assert list(dict.fromkeys(ran))[:2] == ["first", "best"]
    assert selection.winner.candidate.text == "best"


@pytest.mark.parametrize("mode", RACING)
def test_with_a_benchmark_limit_the_heuristics_order_stands(mode: str) -> None:
    """So many of cuDNN's candidates, in its order: that is what the limit means."""
    selection, ran = chosen(mode, ENGINES[2].candidate, limits=Limits(benchmark_limit=2))
    assert "best" not in ran
    assert selection.winner.candidate.text == "second"
