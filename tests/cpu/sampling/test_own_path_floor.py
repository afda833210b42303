"""PyTorch's own path is timed last, and only where it may be the fastest, if it is known how long
it takes at least."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulation import GPU, SimulatedEngine, SimulatedTimer, candidate, engine

from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.sampling.auto import AUTO
from cudnn_autotune.sampling.race import RACE
from cudnn_autotune.sampling.strategy import Limits, Strategy
from cudnn_autotune.store.decision import ranked_again
from cudnn_autotune.sustained.mode import SUSTAINED

MODES = [replace(RACE, seed=0), replace(SUSTAINED, seed=0), replace(AUTO, seed=0)]
OF_CUDNN = engine("first", 1.0)
COMPILED = SimulatedEngine(
    replace(candidate("late", 101, 0, "RUNTIME_COMPILATION"), heuristic_mode="A"),
    1.0,
    100.0,
    build_ms=50.0,
)


def chosen(
    mode: Strategy, limits: Limits, aten_ms: float, *others: SimulatedEngine
) -> tuple[Selection, Measurement]:
    """Returns what the mode selects, and its entry of PyTorch's own path."""
    aten = SimulatedEngine(OWN_PATH, aten_ms, 100.0)
    timer = SimulatedTimer(GPU, [*others, aten], aten_uses_cudnn=False)
    selection = mode.select(timer.candidates, timer, limits)
    assert selection is not None
    (aten,) = (entry for entry in selection.ranking if entry.candidate == OWN_PATH)
    return selection, aten


@pytest.mark.parametrize(
    "mode", [replace(RACE, seed=0), replace(AUTO, seed=0)], ids=lambda mode: mode.name
)
@pytest.mark.parametrize("other", [OF_CUDNN, COMPILED], ids=["precompiled", "compiled"])
def test_it_does_not_run_where_it_cannot_win(other: SimulatedEngine, mode: Strategy) -> None:
    selection, aten = chosen(mode, Limits(own_path_floor_ms=1.2), 1.5, other)
    assert selection.winner.candidate == other.candidate
    assert aten.time_ms is None
    assert aten.samples == 0
    assert "at least 1200.0 us" in aten.eliminated


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("aten_ms", [0.9, 1.5])
@pytest.mark.parametrize("other", [OF_CUDNN, COMPILED], ids=["precompiled", "compiled"])
def test_it_runs_where_it_may_win(other: SimulatedEngine, aten_ms: float, mode: Strategy) -> None:
    selection, aten = chosen(mode, Limits(own_path_floor_ms=0.8), aten_ms, other)
    assert selection.winner.candidate == (OWN_PATH if aten_ms < 1.0 else other.candidate)
    assert aten.time_ms == pytest.approx(aten_ms, rel=0.1)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_it_serves_where_nothing_else_runs(mode: Strategy) -> None:
    broken = replace(OF_CUDNN, fails_at_ms=0.0)
    for others in ((), (broken,)):
        selection, _ = chosen(mode, Limits(own_path_floor_ms=0.8), 0.9, *others)
        assert selection.winner.candidate == OWN_PATH


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_it_serves_where_those_that_were_far_faster_fail(mode: Strategy) -> None:
    others = [replace(engine(name, 0.5), fails_at_ms=5.0) for name in ("first", "second")]
    selection, aten = chosen(mode, Limits(own_path_floor_ms=0.8), 1.3, *others)
    assert selection.winner == aten
    assert aten.time_ms == pytest.approx(1.3, rel=0.1)


def test_sustained_times_it_in_any_case() -> None:
    """The bound is of a time in a race, and the best of a race may fail when it runs alone."""
    failing = replace(OF_CUDNN, fails_at_ms=20.0)
    selection, aten = chosen(
        replace(SUSTAINED, seed=0), Limits(own_path_floor_ms=1.2), 1.3, failing
    )
    assert selection.winner == aten
    assert aten.time_ms == pytest.approx(1.3, rel=0.1)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_budget_has_it_timed_in_any_case(mode: Strategy) -> None:
    selection, aten = chosen(mode, Limits(budget_ms=20.0, own_path_floor_ms=1.2), 1.5, OF_CUDNN)
    assert selection.winner.candidate == OF_CUDNN.candidate
    assert aten.time_ms == pytest.approx(1.5, rel=0.1)


@pytest.mark.parametrize("own_path_floor_ms", [None, 1.2])
def test_the_others_are_not_ranked_again_without_it(own_path_floor_ms: float | None) -> None:
    """Where the fastest is wrong, they may be slower than PyTorch."""
    limits, slow = Limits(own_path_floor_ms=own_path_floor_ms), engine("slow", 4.0)
    selection, aten = chosen(replace(RACE, seed=0), limits, 1.3, OF_CUDNN, slow)
    again = ranked_again(selection, selection.winner, {OF_CUDNN.candidate.text}, False, None)
    if own_path_floor_ms is None:
        assert again is not None
        assert again.winner.candidate == aten.candidate
    else:
        assert again is None
