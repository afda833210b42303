"""The simulated GPU: what its physics, its noise and its host do, against the formulas."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from support import simulation
from support.simulation import (
    STILL,
    SimulatedTimer,
    timer_of,
)

from cudnn_autotune.timers.timer import Batch, Cache


def run_alone(
    timer: SimulatedTimer, text: str, total_ms: float, cache: Cache = "cold"
) -> list[float]:
    """Times of consecutive batches of about 5 ms."""
    engines = {e.candidate.text: e for e in timer.engines}
    calls = max(1, round(5.0 / engines[text].time_ms))
    batches = [Batch(engines[text].candidate, calls, cache)] * round(total_ms / 5)
    return [sample.time_ms for sample in timer.run(batches)]


# Power, clock, time


# The power controller as an H200's: it looks once in a while


def test_an_h200_as_it_was_measured() -> None:
    timer = simulation.preset("h200-capped")
    timer = SimulatedTimer(replace(timer.gpu, noise=STILL), timer.engines)
    pair = [c for c in timer.candidates.all() if c.text in ("eng78:a", "eng67:b")]
    timer.runnable(pair)
    times: dict[str, float] = {}
    clock: float | None = 0.0
    for _ in range(200):
        for c, sample in zip(pair, timer.run([Batch(c, 3) for c in pair]), strict=True):
            times[c.text], clock = sample.time_ms, sample.clock_mhz
    # Between others the one that needs more power leads, at a clock between the two's own.
    assert times["eng67:b"] / times["eng78:a"] == pytest.approx(0.0440 / 0.0409, rel=0.01)
    assert 1449 < (clock or 0.0) < 1647
    clocks = {}
    for c in pair:
        (*_, last) = timer.run([Batch(c, 10)] * 100)
        times[c.text], clocks[c.text] = last.time_ms, last.clock_mhz
    assert clocks["eng78:a"] == pytest.approx(1449, rel=0.005)
    assert clocks["eng67:b"] == pytest.approx(1647, rel=0.005)
    assert times["eng67:b"] < 0.95 * times["eng78:a"]


# Noise


# Presets


@pytest.mark.parametrize("name", simulation.preset_names())
@pytest.mark.parametrize("kind", ["burst", "sustained"])
@pytest.mark.parametrize("cache", ["cold", "hot"])
def test_the_truth_is_what_long_measurement_finds(name: str, kind: str, cache: Cache) -> None:
    preset = simulation.preset(name)
    gpu = replace(preset.gpu, noise=STILL)
    everything = [*preset.candidates.all(), *preset.candidates.beyond()]
    truth = preset.truth(kind, cache)  # type: ignore[arg-type]
    for this in everything:
        if this.text not in truth or truth[this.text] > 100:
            continue
        timer = timer_of(*preset.engines, gpu=gpu)
        timer.run([Batch(this), Batch(this, max(1, round(5 / truth[this.text])))])
        if kind == "burst":
            # In between, something else runs: what it gains alone is lost.
            other = next(c for c in everything if c.text in truth and c != this)
            timer.run([Batch(other)])
            (sample,) = timer.run([Batch(this, 1 if truth[this.text] > 0.1 else 50, cache)])
            assert sample.time_ms == pytest.approx(truth[this.text], rel=0.06)
        else:
            times = run_alone(timer, this.text, 3500, cache)
            assert times[-1] == pytest.approx(truth[this.text], rel=0.004)


def test_the_forums_pair() -> None:
    timer = simulation.preset("forum-l4", 0)
    assert timer.state().power_limit_w == 72.0
    burst, sustained = timer.truth("burst"), timer.truth("sustained")
    assert burst["128x128"] == pytest.approx(3.50, abs=0.005)
    assert burst["128x64"] == pytest.approx(3.61, abs=0.005)
    assert sustained["128x128"] == pytest.approx(5.77, abs=0.005)
    assert sustained["128x64"] == pytest.approx(3.62, abs=0.005)
    others = sorted(t for text, t in burst.items() if text not in ("128x128", "128x64"))
    assert len(others) >= 6
    assert others[0] > 1.05 * burst["128x64"]
    assert others[-1] == pytest.approx(300.0, rel=0.01)
    by_text = {c.text: c for c in timer.runnable(timer.candidates.all())}
    hot = timer.run([Batch(by_text["128x128"])] * 80)
    assert [s.time_ms for s in hot[1:4]] == pytest.approx([3.5] * 3, rel=0.06)
    assert statistics.median(s.time_ms for s in hot[50:80]) == pytest.approx(5.77, rel=0.03)


def test_the_presets_pose_their_questions() -> None:
    a_a = simulation.preset("aa").truth("sustained")
    assert (
        a_a["leader"]
        == a_a["leader-twin"]
        < min(time_ms / 1.0299 for text, time_ms in a_a.items() if not text.startswith("leader"))
    )
    capped = simulation.preset("h200-capped")
    burst, sustained = capped.truth("burst"), capped.truth("sustained")
    assert (burst["eng78:a"], burst["eng67:b"]) == pytest.approx((0.336, 0.361))
    assert (sustained["eng78:a"], sustained["eng67:b"]) == pytest.approx((0.459, 0.434), abs=1e-4)
    assert min(burst, key=burst.__getitem__) == "eng78:a"
    assert min(sustained, key=sustained.__getitem__) == "eng67:b"
    depthwise = simulation.preset("depthwise")
    assert not depthwise.candidates.aten_uses_cudnn
    times = depthwise.truth("sustained")
    assert 9 < min(t for text, t in times.items() if text != "aten") / times["aten"] < 11
    small = simulation.preset("small-kernels").truth("burst")
    assert all(0.005 < t < 0.022 for t in small.values())
