"""The simulated GPU: what its physics, its noise and its host do, against the formulas."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
import simulation
from simulation import (
    GPU,
    STILL,
    Noise,
    SimulatedGpu,
    SimulatedTimer,
    candidate,
    engine,
    timer_of,
)

from cudnn_autotune.timers.timer import Batch, Cache

ROOM_W = GPU.power_limit_w - GPU.static_w
# Its controller follows the power all the time.
FOLLOWING = replace(GPU, control_every_ms=0.0)


def run_alone(
    timer: SimulatedTimer, text: str, total_ms: float, cache: Cache = "cold"
) -> list[float]:
    """Times of consecutive batches of about 5 ms."""
    engines = {e.candidate.text: e for e in timer.engines}
    calls = max(1, round(5.0 / engines[text].time_ms))
    batches = [Batch(engines[text].candidate, calls, cache)] * round(total_ms / 5)
    return [sample.time_ms for sample in timer.run(batches)]


# Power, clock, time


@pytest.mark.parametrize("gpu", [GPU, FOLLOWING], ids=["sampled", "following"])
@pytest.mark.parametrize("sensitivity", [1.0, 0.4])
@pytest.mark.parametrize("demand", [1.2, 2.0, 3.0])
def test_alone_under_a_cap_the_board_settles_where_its_power_is_the_cap(
    demand: float, sensitivity: float, gpu: SimulatedGpu
) -> None:
    timer = timer_of(engine("a", 1.0, demand * ROOM_W, clock_sensitivity=sensitivity), gpu=gpu)
    times = run_alone(timer, "a", 3000)
    state = timer.state()
    assert state.power_w == pytest.approx(GPU.power_limit_w, rel=0.005)
    assert state.throttle_reasons == ("sw_power_cap",)
    assert times[-1] == pytest.approx(timer.truth("sustained")["a"], rel=0.005)
    # The gap between calls is 0.1 % of them, and draws static power only.
    clock = demand ** (-1 / GPU.power_exponent)
    expected = 1 - sensitivity + sensitivity / clock
    assert times[-1] == pytest.approx(expected, rel=0.01)
    assert state.clock_mhz == pytest.approx(clock * GPU.max_clock_mhz, rel=0.01)


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


def log_times(timer: SimulatedTimer, text: str, calls: int, count: int) -> list[float]:
    timer.run([Batch(candidate(text), 50)])
    return [math.log(s.time_ms) for s in timer.run([Batch(candidate(text), calls)] * count)]


@pytest.mark.parametrize("calls", [1, 16])
def test_jitter_has_a_part_for_each_call_and_one_for_the_batch(calls: int) -> None:
    noise = Noise(call_sd=0.02, batch_sd=0.005)
    timer = timer_of(engine("a", 1.0), gpu=replace(GPU, noise=noise))
    logs = log_times(timer, "a", calls, 2000)
    expected = math.sqrt(0.02**2 / calls + 0.005**2)
    assert statistics.stdev(logs) == pytest.approx(expected, rel=0.06)
    assert statistics.fmean(logs) == pytest.approx(math.log(1.001), abs=0.002)


def test_drift_is_slow_and_common() -> None:
    noise = Noise(call_sd=0.0, batch_sd=0.0, drift_sd=0.02, drift_ms=300.0)
    timer = timer_of(engine("a", 1.0), engine("b", 2.0), gpu=replace(GPU, noise=noise))
    run_alone(timer, "a", 50)
    samples = timer.run([Batch(candidate("a"), 1), Batch(candidate("b"), 1)] * 3000)
    a, b = ([math.log(s.time_ms) for s in samples[i::2]] for i in range(2))
    assert statistics.stdev(a) == pytest.approx(0.02, rel=0.3)
    assert statistics.correlation(a, b) > 0.98
    assert statistics.stdev([y - x for x, y in pairwise(a)]) < 0.2 * statistics.stdev(a)


def test_a_co_tenant_takes_its_share_for_a_while() -> None:
    noise = replace(STILL, tenant_share=0.5, tenant_every_ms=300.0, tenant_for_ms=100.0)
    timer = timer_of(engine("a", 1.0), gpu=replace(GPU, noise=noise))
    run_alone(timer, "a", 50)
    times = [s.time_ms for s in timer.run([Batch(candidate("a"), 1)] * 20000)]
    slow = [t for t in times if t > 1.9]
    assert max(times) == pytest.approx(2.002, abs=1e-3)
    assert sum(slow) / sum(times) == pytest.approx(0.25, abs=0.06)
    runs = sum(a <= 1.9 < b for a, b in pairwise(times))
    assert len(slow) / runs > 20  # not scattered


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
