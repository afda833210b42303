"""What a budget leaves of a choice, on simulated GPUs: it is kept, PyTorch's own path is looked at
whatever it takes, and nothing is claimed of what was not seen."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from support import simulation
from support.simulation import (
    GPU,
    SimulatedEngine,
    SimulatedTimer,
    StaticCandidates,
    candidate,
    engine,
    timer_of,
)

from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.sampling.auto import AUTO
from cudnn_autotune.sampling.frontend_modes import FRONTEND_MODES, FrontendMode
from cudnn_autotune.sampling.race import RACE
from cudnn_autotune.sampling.strategy import Limits, Strategy
from cudnn_autotune.sustained.mode import SUSTAINED

OURS = [replace(RACE, seed=0), replace(SUSTAINED, seed=0), replace(AUTO, seed=0)]
ALL = [*OURS, *FRONTEND_MODES]
NO_CONTENDER = "no contender within reach: no need to run the leader alone"


def name(mode: Strategy) -> str:
    return mode.name


def chosen(mode: Strategy, timer: SimulatedTimer, budget_ms: float | None = None) -> Selection:
    selection = mode.select(timer.candidates, timer, Limits(budget_ms=budget_ms))
    assert selection is not None
    return selection


def compiled(
    number: int, time_ms: float, mode: str = "A", build_ms: float = 300.0
) -> SimulatedEngine:
    listed = replace(
        candidate(f"compiled{number}", 100 + number, 0, "RUNTIME_COMPILATION"), heuristic_mode=mode
    )
    return SimulatedEngine(listed, time_ms, 100.0, first_run_ms=1.0, build_ms=build_ms)


# PyTorch's own path


@pytest.mark.parametrize("mode", ALL, ids=name)
@pytest.mark.parametrize("loading_ms", [0.8, 60.0])
@pytest.mark.parametrize("budget_ms", [1.0, 5.0, 10.0, 100.0])
def test_pytorchs_own_kernels_are_looked_at_whatever_the_budget(
    budget_ms: float, loading_ms: float, mode: Strategy
) -> None:
    scene = simulation.preset("depthwise")
    engines = [
        e if e.candidate == OWN_PATH else replace(e, first_run_ms=loading_ms) for e in scene.engines
    ]
    timer = SimulatedTimer(scene.gpu, engines, aten_uses_cudnn=False)
    selection = chosen(mode, timer, budget_ms)
    assert selection.winner.candidate == OWN_PATH
    assert selection.winner.time_ms is not None


@pytest.mark.parametrize("mode", ALL, ids=name)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_so_is_pytorchs_plan_of_cudnn(is_compiled: bool, mode: Strategy) -> None:
    """It is the heuristics' first, and comes before what won on similar problems."""
    first = (
        compiled(-100, 1.0) if is_compiled else SimulatedEngine(candidate("first", 0), 1.0, 100.0)
    )
    similar = replace(candidate("similar", 7), rank=7)
    engines = [first, SimulatedEngine(similar, 1.2, 100.0), engine("slow", 1.3)]
    timer = timer_of(*engines, built=False)
    offered = StaticCandidates([e.candidate for e in engines], similar=[similar])
    selection = mode.select(offered, timer, Limits(budget_ms=0.5))
    assert selection.winner.candidate == first.candidate
    assert selection.winner.time_ms == pytest.approx(1.0, rel=0.2)


# What is claimed


@pytest.mark.parametrize("mode", OURS, ids=name)
@pytest.mark.parametrize("preset", ["forum-l4", "quiet", "depthwise"])
def test_nothing_is_claimed_where_the_budget_left_out_candidates(
    preset: str, mode: Strategy
) -> None:
    selection = chosen(mode, simulation.preset(preset), 5.0)
    evidence = selection.evidence
    unseen = [entry for entry in selection.ranking if "budget" in entry.eliminated]
    assert unseen
    assert evidence.regret_bound is None
    of = len(selection.ranking) - any(entry.runs for entry in selection.ranking)
    assert f"the budget left {len(unseen)} of {of} candidates unseen" in evidence.remarks
    assert NO_CONTENDER not in evidence.remarks


@pytest.mark.parametrize("mode", ALL, ids=name)
def test_a_choice_says_which_budget_cut_it_short(mode: Strategy) -> None:
    assert chosen(mode, simulation.preset("quiet"), 5.0).evidence.budget_ms == 5.0
    assert chosen(mode, simulation.preset("quiet"), 60_000.0).evidence.budget_ms is None
    assert chosen(mode, simulation.preset("quiet"), None).evidence.budget_ms is None


# How long it takes


@pytest.mark.parametrize("mode", ALL, ids=name)
@pytest.mark.parametrize("budget_ms", [300.0, 700.0, 1500.0, 3500.0])
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_compiling_keeps_within_the_budget(threads: int, budget_ms: float, mode: Strategy) -> None:
    """Nine configs of 300 ms: as many as time and threads allow; the evidence names the others."""
    engines = [engine("a", 1.0), engine("b", 1.1), *(compiled(i, 0.8 + i / 50) for i in range(9))]
    gpu = replace(GPU, build_threads=threads)
    timer = timer_of(*engines, gpu=gpu, built=False)
    selection = chosen(mode, timer, budget_ms)
    assert timer.elapsed_ms() <= budget_ms + 2.0
    built = sum(timer._builds.tried(e.candidate) for e in engines[2:])
    assert (built > 0) == (budget_ms > 900 or (budget_ms > 450 and mode in OURS))
    assert built <= threads * budget_ms / 300
    is_whole = built == 9 and selection.winner.candidate.text == "compiled0"
    result = [*selection.evidence.remarks, *(entry.eliminated for entry in selection.ranking)]
    assert any("budget left" in text for text in result) == (not is_whole)


@pytest.mark.parametrize("mode", OURS, ids=name)
@pytest.mark.parametrize("budget_ms", [600.0, 2000.0, None])
def test_what_seldom_pays_is_compiled_behind_what_often_does(
    budget_ms: float | None, mode: Strategy
) -> None:
    """By a single thread: a kernel that no heuristic lists before what mode FALLBACK lists."""
    timer = timer_of(
        engine("a", 1.0),
        compiled(1, 2.5, mode="FALLBACK"),
        compiled(2, 0.6, mode=""),
        gpu=replace(GPU, build_threads=1),
        built=False,
    )
    selection = chosen(mode, timer, budget_ms)
    assert selection.winner.candidate.text == "compiled2"
    (last,) = (e for e in selection.ranking if e.candidate.text == "compiled1")
    assert (last.time_ms is None) == (budget_ms == 600.0)
    assert ("budget" in last.eliminated) == (budget_ms == 600.0)


# cuDNN's own techniques


@pytest.mark.parametrize("mode", FRONTEND_MODES, ids=name)
@pytest.mark.parametrize("budget_ms", [1.0, 10.0, 20.0])
@pytest.mark.parametrize("preset", ["forum-l4", "quiet", "h200-capped"])
def test_cudnns_techniques_stop_at_the_budget(
    preset: str, budget_ms: float, mode: FrontendMode
) -> None:
    """Within one candidate, in the order of the list, the first in any case."""
    timer = simulation.preset(preset)
    selection = chosen(mode, timer, budget_ms)
    whole = simulation.preset(preset)
    everybody = chosen(mode, whole, None)
    seen = {entry.candidate.text for entry in selection.ranking}
    order = [c.text for c in timer.candidates.all() if c.text in by_text(everybody)]
    order = [text for text in order if text != "compiled"]
    assert seen == set(order[: len(seen)])
    assert len(seen) < len(everybody.ranking)
    left = len(timer.candidates.all())
    assert any(f"of {left} candidates unseen" in text for text in selection.evidence.remarks)
    last = max((order.index(text), by_text(selection)[text]) for text in seen)[1]
    # One candidate's samples and its loading: with them began nothing after the budget's end.
    assert timer.elapsed_ms() <= budget_ms + 10 * last + 20


def by_text(selection: Selection) -> dict[str, float]:
    return {e.candidate.text: e.time_ms for e in selection.ranking if e.time_ms is not None}


def candidates(timer: SimulatedTimer) -> list[Candidate]:
    return list(timer.candidates.all())


# Candidates that fail once they have been timed, on simulated GPUs: the next one takes their
# place, and why they are out is kept.

ALONE = OURS[1:2]
WHY = "failed: CUDNN_STATUS_EXECUTION_FAILED"


def eliminated(selection: Selection) -> dict[str, str]:
    values = [entry for entry in selection.ranking if not entry.runs]
    by_text = {entry.candidate.text: entry.eliminated for entry in values}
    assert len(by_text) == len(values), "listed twice"
    return by_text


def ran_alone(selection: Selection) -> int:
    values = [entry for entry in selection.ranking if not entry.runs]
    return sum(entry.sustained_ms is not None for entry in values)


def last_run(text: str, mode: Strategy, *engines: object) -> float:
    """When the mode last begins to run ``text`` while nothing fails."""
    return begins_of_runs(text, mode, *engines)[-1]


def first_block(text: str, mode: Strategy, *engines: object) -> float:
    """When it begins to run ``text`` alone for long."""
    return begins_of_runs(text, mode, *engines, least=10)[0]


def begins_of_runs(text: str, mode: Strategy, *engines: object, least: int = 1) -> list[float]:
    """Returns when the runs of a candidate began that had ``least`` batches in one go."""
    timer = timer_of(*engines, built=False)  # type: ignore[arg-type]
    begins = []
    run = timer.run

    def noted(batches):  # type: ignore[no-untyped-def]
        if sum(batch.candidate.text == text for batch in batches) >= least:
            begins.append(timer.elapsed_ms())
        return run(batches)

    timer.run = noted  # type: ignore[method-assign]
    chosen(mode, timer)
    return begins


@pytest.mark.parametrize("mode", OURS, ids=name)
def test_where_all_survivors_fail_those_they_drove_out_race_again(mode: Strategy) -> None:
    healthy = engine("c", 1.25), engine("d", 1.3)
    fell_back = 0
    for half_ms in range(8, 120):
        at_ms = half_ms / 2
        timer = timer_of(
            engine("a", 1.0, fails_at_ms=at_ms),
            engine("b", 1.003, fails_at_ms=at_ms),
            *healthy,
            built=False,
        )
        selection = chosen(mode, timer)
        result = eliminated(selection)
        assert set(result) == {"a", "b", "c", "d"}
        failed = {text for text, why in result.items() if why.startswith("failed")}
        assert selection.winner.candidate.text not in failed
        if failed != {"a", "b"}:
            continue
        assert selection.winner.candidate.text == "c"
        assert selection.winner.time_ms == pytest.approx(1.25, rel=0.01)
        assert result["a"] == result["b"] == WHY
        if any("raced again" in remark for remark in selection.evidence.remarks):
            fell_back += 1
            assert selection.evidence.regret_bound is None
    assert fell_back > 5


@pytest.mark.parametrize("mode", ALONE, ids=name)
def test_a_leader_that_fails_alone_is_out(mode: Strategy) -> None:
    """Whenever it does: when it is probed, or in the final."""
    hot = (
        engine("a", 1.0, 800.0),
        engine("b", 1.03, 680.0),
        engine("c", 1.05, 660.0),
        engine("d", 1.3, 200.0),
    )
    end_ms = last_run("a", mode, *hot)
    seen = set()
    for at_ms in range(40, int(end_ms), 60):
        timer = timer_of(engine("a", 1.0, 800.0, fails_at_ms=float(at_ms)), *hot[1:], built=False)
        selection = chosen(mode, timer)
        evidence = selection.evidence
        result = eliminated(selection)
        assert set(result) == {"a", "b", "c", "d"}
        assert result["a"] == WHY, at_ms
        (a,) = (entry for entry in selection.ranking if entry.candidate.text == "a")
        assert a.time_ms is None, "what failed may be ranked again"
        assert a.sustained_ms is None
        assert selection.winner.candidate.text in ("b", "c")
        assert not selection.winner.eliminated
        assert evidence.tied[0] == selection.winner.candidate.text
        assert "a" not in evidence.tied
        assert evidence.regret_bound is None, "who left on its account was not compared since"
        if "a failed when it ran alone" in evidence.remarks:
            seen.add(at_ms)
    assert max(seen) - min(seen) > 100, "in one of its sustained runs only"


@pytest.mark.parametrize("mode", ALONE, ids=name)
def test_a_rival_that_fails_alone_makes_room_for_the_next(mode: Strategy) -> None:
    """The number of candidates that run alone stays the same."""
    hot = [engine("a", 1.0, 900.0), *(engine(f"r{i}", 1.01 + i / 100, 900.0) for i in range(4))]
    frugal = engine("frugal", 1.08, 450.0)
    for text in ("r0", "r1"):
        at_ms = first_block(text, mode, *hot, frugal)
        engines = [
            engine(text, 1.01 + int(text[1]) / 100, 900.0, fails_at_ms=at_ms)
            if e.candidate.text == text
            else e
            for e in hot
        ]
        whole = chosen(mode, timer_of(*hot, frugal, built=False))
        selection = chosen(mode, timer_of(*engines, frugal, built=False))
        assert ran_alone(selection) == min(ran_alone(whole), len(hot))
        assert eliminated(selection)[text] == WHY
        assert f"{text} failed when it ran alone" in selection.evidence.remarks
        assert text != selection.winner.candidate.text


@pytest.mark.parametrize("mode", ALONE, ids=name)
def test_all_failing_alone(mode: Strategy) -> None:
    """Nobody is chosen who does not run any more."""
    for at_ms in range(30, 900, 90):
        engines = [engine(f"e{i}", 1 + i / 50, 850.0, fails_at_ms=float(at_ms)) for i in range(4)]
        timer = timer_of(*engines, built=False)
        selection = mode.select(timer.candidates, timer, Limits())
        if timer.elapsed_ms() < at_ms:
            continue
        if selection is not None:  # it had been decided among those that did not run again
            assert not selection.winner.eliminated
            assert math.isfinite(selection.winner.time_ms or math.inf)
