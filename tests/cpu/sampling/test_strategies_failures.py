"""Candidates that fail once they have been timed, on simulated GPUs: the next one takes their
place, and why they are out is kept."""

from __future__ import annotations

import math

import pytest
from simulation import SimulatedTimer, engine, timer_of

from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.sampling.auto import Auto
from cudnn_autotune.sampling.race import Race
from cudnn_autotune.sampling.strategy import Limits, Strategy
from cudnn_autotune.sampling.sustained import Sustained

OURS = [Race(seed=0), Sustained(seed=0), Auto(seed=0)]
ALONE = OURS[1:2]
WHY = "failed: CUDNN_STATUS_EXECUTION_FAILED"


def name(mode: Strategy) -> str:
    return mode.name


def chosen(mode: Strategy, timer: SimulatedTimer) -> Selection:
    selection = mode.select(timer.candidates, timer, Limits())
    assert selection is not None
    return selection


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
    """Of so many batches of it, at least, in one go."""
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
    for at_ms in range(4, 60):
        timer = timer_of(
            engine("a", 1.0, fails_at_ms=float(at_ms)),
            engine("b", 1.003, fails_at_ms=float(at_ms)),
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


@pytest.mark.parametrize("mode", OURS, ids=name)
def test_those_that_were_too_slow_to_race_take_the_place_of_all_that_did(mode: Strategy) -> None:
    timer = timer_of(
        engine("a", 1.0, fails_at_ms=14.0),
        engine("b", 1.1, fails_at_ms=14.0),
        engine("slow", 2.0),
        engine("slower", 8.0),
        built=False,
    )
    selection = chosen(mode, timer)
    assert selection.winner.candidate.text == "slow"
    assert eliminated(selection)["a"] == eliminated(selection)["b"] == WHY
    assert selection.evidence.regret_bound is None


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
    """As many as before are run alone."""
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


def test_a_race_in_which_all_fail_comes_to_nothing() -> None:
    engines = [engine(f"e{i}", 1 + i / 50, fails_at_ms=25.0) for i in range(4)]
    timer = timer_of(*engines, built=False)
    assert Race(seed=0).select(timer.candidates, timer, Limits()) is None
