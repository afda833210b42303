"""Audit: the oracle on simulated GPUs, whose exact times are known."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from support import simulation
from support.simulation import SimulatedTimer

from cudnn_autotune.audit.judged_turns import OracleSettings
from cudnn_autotune.audit.model import BURST, BURST_COLD, BURST_HOT, SUSTAINED, Oracle
from cudnn_autotune.audit.oracle import against_pytorch, candidate_of, measure
from cudnn_autotune.audit.summary import truth_of
from cudnn_autotune.engines.configs import OWN_PATH, Candidate

# Boards on which bursts do not reach the power limit: there turns show the times at full clock.
UNCAPPED = ("aa", "quiet", "co-tenant", "small-kernels", "depthwise")


def candidates(timer: SimulatedTimer) -> list[Candidate]:
    return [*timer.candidates.all(), *timer.candidates.beyond()]


def judged(name: str, seed: int = 0, picked: tuple[str, ...] = (), **settings: Any) -> Oracle:
    timer = simulation.preset(name, seed)
    return measure(timer, candidates(timer), picked, OracleSettings(seed=seed, **settings))


@pytest.mark.parametrize("name", UNCAPPED)
@pytest.mark.parametrize("seed", [0, 3])
def test_bursts_are_what_they_are(name: str, seed: int) -> None:
    timer = simulation.preset(name, seed)
    found = measure(timer, candidates(timer), (), OracleSettings(seed=seed))
    assert set(found.truths) == {BURST_COLD, BURST_HOT}
    for truth, cache in ((found.truths[BURST_COLD], "cold"), (found.truths[BURST_HOT], "hot")):
        exact = timer.truth("burst", "cold" if cache == "cold" else "hot")
        fastest = min(exact.values())
        assert exact[truth.best] / fastest < 1.006, "the best is the best, or tied with it"
        for text, time_ms in truth.times_ms.items():
            ratio = time_ms / truth.times_ms[truth.best]
            error = truth.errors.get(text, 0.0)
            expected = exact[text] / exact[truth.best]
            assert ratio == pytest.approx(expected, abs=4 * error + 0.004), text
    # Nothing within 5 % of the best was left out.
    for text, time_ms in timer.truth("burst", "cold").items():
        if time_ms < 1.05 * min(timer.truth("burst", "cold").values()):
            assert text in found.truths[BURST_COLD].times_ms


def test_errors_hold_in_most_cases() -> None:
    distances = []
    for seed in range(12):
        timer = simulation.preset("aa", seed)
        found = truth_of(measure(timer, candidates(timer), (), OracleSettings(seed=seed)), BURST)
        twins = [text for text in ("leader", "leader-twin") if text != found.best]
        for text in twins:
            distances.append(
                abs(math.log(found.times_ms[text] / found.times_ms[found.best]))
                / found.errors[text]
            )
    assert sum(d < 3 for d in distances) >= 0.9 * len(distances)


def test_what_was_picked_is_measured_however_slow() -> None:
    found = judged("forum-l4", picked=("fft", "direct"))
    exact = simulation.preset("forum-l4").truth("burst", "cold")
    for text in ("fft", "direct"):
        ratio = (
            found.truths[BURST_COLD].times_ms[text] / found.truths[BURST_COLD].times_ms["128x64"]
        )
        assert ratio == pytest.approx(exact[text] / exact["128x64"], rel=0.1)


def test_what_does_not_build_or_run_is_told() -> None:
    picked = ("does-not-build", "does-not-run", "too-large", "engine0", "never-heard-of")
    found = judged("quiet", picked=picked)
    assert set(found.failed) == {*picked} - {"engine0"}
    assert found.failed["does-not-run"] == "CUDNN_STATUS_EXECUTION_FAILED"
    assert found.truths[BURST_COLD].best == "engine0"
    assert not found.error


def test_a_candidate_that_fails_half_way_is_left_out() -> None:
    scene = simulation.preset("quiet")
    engines = [
        dataclasses.replace(e, fails_at_ms=360.0) if e.candidate.text == "engine0" else e
        for e in scene.engines
    ]
    timer = SimulatedTimer(scene.gpu, engines)
    found = measure(timer, candidates(timer))
    assert "engine0" in found.failed
    assert found.truths[BURST_COLD].best == "engine1"


def test_a_lost_device_is_not_hidden() -> None:
    scene = simulation.preset("quiet")
    timer = SimulatedTimer(dataclasses.replace(scene.gpu, lost_at_ms=400.0), scene.engines)
    with pytest.raises(RuntimeError, match="CUDA error"):
        measure(timer, candidates(timer))


@pytest.mark.parametrize("name", ["forum-l4", "h200-capped"])
@pytest.mark.parametrize("seed", [0, 1])
def test_sustained_times_where_the_board_throttles(name: str, seed: int) -> None:
    timer = simulation.preset(name, seed)
    settings = OracleSettings(solo="throttled", seed=seed)
    found = measure(timer, candidates(timer), ("64x64",), settings)
    truth = found.truths[SUSTAINED]
    cold, hot = (timer.truth("sustained", c) for c in ("cold", "hot"))  # type: ignore[arg-type]
    exact = {text: math.sqrt(cold[text] * hot[text]) for text in cold}
    assert truth.best == min(exact, key=exact.__getitem__)
    assert truth.best != truth_of(found, BURST).best  # type: ignore[union-attr]
    for text, time_ms in truth.times_ms.items():
        assert time_ms == pytest.approx(exact[text], rel=0.02), text
    if name == "forum-l4":
        assert "64x64" in truth.times_ms, "it was picked"


@pytest.mark.parametrize("name", ["depthwise", "small-kernels", "quiet"])
def test_against_pytorch(name: str) -> None:
    timer = simulation.preset(name, 5)
    reference = candidate_of("engine0", candidates(timer))
    timer.runnable([OWN_PATH, reference])
    found = against_pytorch(timer, reference, OracleSettings())
    for truth, cache in ((BURST_COLD, "cold"), (BURST_HOT, "hot")):
        exact = timer.truth("burst", "cold" if cache == "cold" else "hot")
        ratio = found[truth]
        assert ratio.median == pytest.approx(exact["aten"] / exact["engine0"], rel=0.02)
        assert ratio.low <= ratio.median <= ratio.high
    assert SUSTAINED not in found
    alone = against_pytorch(timer, reference, OracleSettings(solo="always"))
    exact = timer.truth("sustained", "cold")
    assert alone[SUSTAINED].median == pytest.approx(exact["aten"] / exact["engine0"], rel=0.04)


def test_pytorchs_own_path_equals_itself() -> None:
    timer = simulation.preset("depthwise")
    timer.runnable([OWN_PATH])
    found = against_pytorch(timer, OWN_PATH, OracleSettings())
    assert {ratio.median for ratio in found.values()} == {1.0}


@pytest.mark.search
def test_a_config_that_no_heuristic_lists_is_made_up_from_its_text() -> None:
    made = candidate_of("eng78:KERNEL_CFG=5", [])
    assert (made.engine, dict(made.knobs)) == (78, {"KERNEL_CFG": 5})
    with pytest.raises(ValueError):
        candidate_of("nonsense", [])
