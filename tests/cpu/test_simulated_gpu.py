"""The simulated GPU: what its physics, its noise and its host do, against the formulas."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
import simulation
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from simulation import (
    GPU,
    STILL,
    Noise,
    SimulatedEngine,
    SimulatedGpu,
    SimulatedTimer,
    StaticCandidates,
    candidate,
    engine,
    timer_of,
)

from cudnn_autotune import sampling
from cudnn_autotune.engines.configs import ATEN
from cudnn_autotune.sampling.strategy import Limits
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


def test_the_steady_time_is_the_energy_of_a_call_over_the_cap() -> None:
    timer = timer_of(engine("a", 1.0, 2.5 * ROOM_W))
    run_alone(timer, "a", 3000)
    before = timer.elapsed_ms()
    calls = 500
    timer.run([Batch(candidate("a"), calls)])
    seconds = (timer.elapsed_ms() - before) / 1e3
    energy_of_a_call = timer.state().power_w * seconds / calls  # type: ignore[operator]
    assert timer.truth("sustained")["a"] == pytest.approx(
        energy_of_a_call / GPU.power_limit_w * 1e3, rel=0.005
    )


def test_below_the_cap_nothing_slows_down() -> None:
    timer = timer_of(engine("a", 1.0, 0.95 * ROOM_W))
    times = run_alone(timer, "a", 2000)
    assert timer.truth("sustained")["a"] == timer.truth("burst")["a"] == pytest.approx(1.001)
    assert times[-1] == pytest.approx(1.001, abs=1e-6)
    assert timer.state().throttle_reasons == ()


def test_a_memory_bound_engine_does_not_feel_the_clock() -> None:
    timer = timer_of(engine("a", 1.0, 3 * ROOM_W, clock_sensitivity=0.0))
    times = run_alone(timer, "a", 1000)
    assert timer.state().clock_mhz < 0.7 * GPU.max_clock_mhz  # type: ignore[operator]
    assert times[-1] == pytest.approx(1.001, abs=1e-6)


def test_on_a_cool_board_the_first_calls_take_the_burst_time() -> None:
    timer = timer_of(engine("a", 0.5, 3 * ROOM_W))
    samples = timer.run([Batch(candidate("a"), 1)] * 30)
    assert samples[0].time_ms > 1.5 * samples[20].time_ms  # the clock wakes up
    for sample in samples[12:30]:
        assert sample.time_ms == pytest.approx(timer.truth("burst")["a"], rel=0.03)


@given(
    st.tuples(st.floats(0.5, 2.0), st.floats(0.5, 2.0)),
    st.tuples(st.floats(0.8, 3.0), st.floats(0.8, 3.0)),
)
@settings(max_examples=25, deadline=None)
def test_under_a_cap_the_one_that_needs_less_energy_wins(
    times_ms: tuple[float, float], demands: tuple[float, float]
) -> None:
    a, b = (
        engine(text, time_ms, demand * ROOM_W)
        for text, time_ms, demand in zip("ab", times_ms, demands, strict=True)
    )
    truth = timer_of(a, b).truth("sustained")
    assume(abs(truth["a"] / truth["b"] - 1) > 0.01)
    ends = {text: run_alone(timer_of(a, b), text, 2500)[-1] for text in "ab"}
    assert (ends["a"] < ends["b"]) == (truth["a"] < truth["b"])
    for text, end in ends.items():
        assert end == pytest.approx(truth[text], rel=0.01)


def test_taking_turns_charges_one_engines_power_to_the_other() -> None:
    hungry, frugal = engine("hungry", 1.0, 3 * ROOM_W), engine("frugal", 1.0, 0.9 * ROOM_W)
    timer = timer_of(hungry, frugal)
    turns = [Batch(hungry.candidate, 1), Batch(frugal.candidate, 1)]
    samples = timer.run(turns * 300)
    assert samples[-1].time_ms > 1.2 * timer.truth("sustained")["frugal"]
    assert samples[-1].time_ms == pytest.approx(samples[-2].time_ms, rel=0.01)


def test_hot_and_cold() -> None:
    timer = timer_of(engine("a", 1.0, hot_factor=0.9), engine("b", 0.95, hot_factor=1.0))
    run_alone(timer, "a", 50)
    cold, hot = timer.run([Batch(candidate("a"), 5), Batch(candidate("a"), 5, "hot")])
    assert cold.time_ms == pytest.approx(1.001, abs=1e-6)
    assert hot.time_ms == pytest.approx(0.901, abs=1e-6)
    for kind in ("burst", "sustained"):
        assert min(timer.truth(kind, "cold"), key=timer.truth(kind, "cold").__getitem__) == "b"
        assert min(timer.truth(kind, "hot"), key=timer.truth(kind, "hot").__getitem__) == "a"


# The power controller as an H200's: it looks once in a while


def test_under_load_the_clock_holds_and_then_falls_in_one_step() -> None:
    timer = timer_of(engine("a", 0.5, 2 * ROOM_W))
    timer.run([Batch(candidate("a"), 10)])  # awake
    samples = timer.run([Batch(candidate("a"), 4)] * 100)
    clocks = [s.clock_mhz for s in samples]
    held = sum(clock == GPU.max_clock_mhz for clock in clocks)
    assert 55 < held * 4 * 0.501 + 5 < 80
    steady = GPU.max_clock_mhz * 2 ** (-1 / GPU.power_exponent)
    # One batch may straddle the step. The clock's rise from idle is in the first look.
    assert clocks[held + 1] == pytest.approx(steady, rel=0.03)
    assert all(clock == pytest.approx(steady, rel=0.01) for clock in clocks[held + 80 :])


@pytest.mark.parametrize(("before", "after"), [("hungry", "frugal"), ("frugal", "hungry")])
def test_the_next_engines_steady_clock_is_soon_reached(before: str, after: str) -> None:
    timer = timer_of(engine("hungry", 1.0, 3 * ROOM_W), engine("frugal", 1.0, 1.2 * ROOM_W))
    run_alone(timer, before, 1000)
    times = run_alone(timer, after, 300)
    truth = timer.truth("sustained")
    assert times[0] == pytest.approx(truth[before], rel=0.02), "the clock of the one before"
    # A look that saw both, and one that saw the new one only.
    late = 2 * GPU.control_every_ms
    assert times[round(late / 5) + 2] == pytest.approx(truth[after], rel=0.01)


def test_the_clock_wavers_about_the_one_that_meets_the_cap() -> None:
    gpu = replace(GPU, noise=replace(STILL, hunting_sd=0.012))
    timer = timer_of(engine("a", 1.0, 2 * ROOM_W), gpu=gpu)
    run_alone(timer, "a", 300)
    samples = timer.run([Batch(candidate("a"), 5)] * 3000)
    clocks = [math.log(s.clock_mhz or 0.0) for s in samples]
    assert statistics.stdev(clocks) == pytest.approx(0.012, rel=0.15)
    work = [s.time_ms * (s.clock_mhz or 0.0) for s in samples]
    assert max(work) / min(work) < 1.003, "the time follows the clock, and nothing else"
    mean = statistics.fmean(s.time_ms for s in samples)
    assert mean == pytest.approx(timer.truth("sustained")["a"], rel=0.003)
    # Steps, not noise from batch to batch: it stays where it is between two looks.
    assert sum(abs(b - a) < 1e-9 for a, b in pairwise(clocks)) > 0.7 * len(clocks)


def test_a_rest_does_not_count_as_load() -> None:
    slow_build = SimulatedEngine(candidate("slow"), 1.0, 100.0, build_ms=20.0)
    timer = timer_of(engine("a", 1.0, 3 * ROOM_W), slow_build, built=False)
    timer.runnable([candidate("a")])
    timer.run([Batch(candidate("a"), 40)])
    timer.runnable([candidate("slow")])
    samples = timer.run([Batch(candidate("a"), 5)] * 10)
    assert all(s.clock_mhz == GPU.max_clock_mhz for s in samples)


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


# Host and kernel


def test_the_first_run_loads_the_kernel_once() -> None:
    timer = timer_of(engine("a", 1.0, first_run_ms=20.0), engine("b", 1.0))
    run_alone(timer, "b", 50)
    first, second = timer.run([Batch(candidate("a"), 1)] * 2)
    assert (first.loading_ms, second.loading_ms) == (20.0, 0.0)
    assert first.time_ms == pytest.approx(1.001, abs=1e-3)
    assert second.time_ms == pytest.approx(1.001, abs=1e-3)


def test_small_kernels_carry_gaps() -> None:
    timer = timer_of(engine("a", 0.004, 0.0))
    run_alone(timer, "a", 50)
    (queued,) = timer.run([Batch(candidate("a"), 1000, "hot")])
    alone = timer.frontend_find("sample_once", [candidate("a")], 0).winner.time_ms
    assert queued.time_ms == pytest.approx(0.004 + GPU.launch_gap_us / 1e3)
    assert alone == pytest.approx(0.004 + GPU.lone_launch_us / 1e3)


def test_time_passes_for_the_host_too() -> None:
    timer = timer_of(engine("a", 1.0))
    start = timer.elapsed_ms()
    samples = timer.run([Batch(candidate("a"), 3)] * 4)
    assert timer.elapsed_ms() - start == pytest.approx(
        sum(3 * s.time_ms for s in samples) + GPU.host_sync_ms, abs=0.002
    )


def test_plans_that_are_compiled_at_run_time_take_their_time_side_by_side() -> None:
    compiled = [
        SimulatedEngine(candidate(f"c{i}", i, 0, "RUNTIME_COMPILATION"), 1.0, 1.0, build_ms=300.0)
        for i in range(10)
    ]
    timer = timer_of(*compiled, built=False)
    first = timer.runnable(timer.candidates.all(), limit=2)
    assert [c.text for c in first] == ["c0", "c1"]
    assert timer.elapsed_ms() == pytest.approx(300.0)
    timer.runnable(timer.candidates.all())
    assert timer.elapsed_ms() == pytest.approx(600.0)
    timer.runnable(timer.candidates.all())
    assert timer.elapsed_ms() == pytest.approx(600.0)


def test_what_builds_in_the_background_is_waited_for_when_it_is_asked_for() -> None:
    compiled = [
        SimulatedEngine(candidate(f"c{i}", i, 0, "RUNTIME_COMPILATION"), 1.0, 1.0, build_ms=300.0)
        for i in range(3)
    ]
    timer = timer_of(engine("a", 1.0, build_ms=0.0), *compiled, built=False)
    c0, c1, c2 = (c.candidate for c in compiled)
    timer.prepare([c0, c1])
    assert timer.elapsed_ms() == 0.0
    timer.runnable([candidate("a")])
    timer.run([Batch(candidate("a"), 100)])
    raced_ms = timer.elapsed_ms()
    assert 0 < raced_ms < 200.0
    timer.runnable([c0])
    assert timer.elapsed_ms() == pytest.approx(300.0)
    timer.prepare([c1, c2])
    timer.prepare([])
    assert timer.elapsed_ms() == pytest.approx(600.0)
    assert timer.runnable([c0, c1, c2]) == [c0, c1, c2]
    assert timer.elapsed_ms() == pytest.approx(600.0)


def test_what_does_not_build_or_fit_is_not_runnable() -> None:
    large = SimulatedEngine(candidate("large", 1, 2 * GPU.free_bytes), 0.1, 1.0)
    timer = timer_of(engine("broken", 0.1, builds=False), large, engine("a", 1.0), built=False)
    everything = [*timer.candidates.all(), candidate("unknown"), ATEN]
    assert [c.text for c in timer.runnable(everything)] == ["a"]
    assert [c.text for c in timer.runnable(everything, limit=1)] == ["a"]
    assert set(timer.truth("burst")) == {"a"}


def test_pytorchs_own_path_needs_no_plan() -> None:
    without = timer_of(engine("a", 1.0), built=False)
    (sample,) = without.run([Batch(ATEN)])
    assert sample.time_ms == math.inf
    assert "not part of this simulation" in sample.error
    having = timer_of(engine("a", 1.0), replace(engine("x", 0.5), candidate=ATEN), built=False)
    (sample,) = having.run([Batch(ATEN, 50)])
    assert sample.time_ms == pytest.approx(0.501, rel=0.3)


def test_what_fails_to_run_says_so() -> None:
    timer = timer_of(
        engine("never", 0.1, error="CUDNN_STATUS_BAD_PARAM"), engine("later", 1.0, fails_at_ms=50.0)
    )
    never, later = timer.run([Batch(candidate("never")), Batch(candidate("later"))])
    assert (never.time_ms, never.error) == (math.inf, "CUDNN_STATUS_BAD_PARAM")
    assert math.isfinite(later.time_ms)
    run_alone(timer, "later", 100)
    (failed,) = timer.run([Batch(candidate("later"))])
    assert (failed.time_ms, failed.error) == (math.inf, "CUDNN_STATUS_EXECUTION_FAILED")
    assert timer.frontend_find("sample_once", timer.candidates.all(), 0).ranking == ()


@pytest.mark.parametrize(
    ("field", "error"),
    [("lost_at_ms", RuntimeError), ("out_of_memory_at_ms", torch.OutOfMemoryError)],
)
def test_a_device_that_is_lost_stays_lost(field: str, error: type[Exception]) -> None:
    gpu = replace(GPU, **{field: 30.0})
    timer = timer_of(engine("a", 1.0), gpu=gpu)
    timer.run([Batch(candidate("a"), 5)])
    with pytest.raises(error, match="CUDA"):
        run_alone(timer, "a", 100)
    for call in (
        lambda: timer.run([Batch(candidate("a"))]),
        lambda: timer.runnable([candidate("a")]),
        lambda: timer.frontend_find("sample_once", [candidate("a")], 0),
    ):
        with pytest.raises(error, match="CUDA"):
            call()


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


def test_spikes_are_rare_and_long() -> None:
    noise = replace(STILL, spike_every_ms=100.0, spike_ms=2.0)
    timer = timer_of(engine("a", 1.0), gpu=replace(GPU, noise=noise))
    times = [s.time_ms for s in timer.run([Batch(candidate("a"), 1)] * 5000)]
    disturbed = [t - 1.001 for t in times if t > 1.0015]
    assert len(disturbed) == pytest.approx(50, abs=20)
    assert statistics.fmean(disturbed) == pytest.approx(2.0, rel=0.5)


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


def test_equal_seeds_give_equal_samples() -> None:
    def samples(seed: int) -> list[float]:
        timer = simulation.preset("co-tenant", seed)
        runnable = timer.runnable(timer.candidates.all())
        return [s.time_ms for s in timer.run([Batch(c, 2) for c in runnable] * 20)]

    assert samples(3) == samples(3)
    assert samples(3) != samples(4)


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


def test_till_stable_took_two_samples_of_most_engines() -> None:
    timer = simulation.preset("quiet")
    selection = sampling.get("till_stable").select(timer.candidates, timer, Limits())
    first = timer.candidates.all()[0]  # while the clock still rises, samples do improve
    assert {t.samples for t in selection.ranking if t.candidate != first} == {2}


def test_equal_times_vanish_from_cudnns_search() -> None:
    twins = [engine(f"e{i}", 0.005) for i in range(4)]
    timer = timer_of(*twins)
    timer.run([Batch(t.candidate, 200) for t in twins])
    found = timer.frontend_find("sample_once", timer.candidates.all(), 0)
    assert len(found.ranking) == 1
    assert found.total_samples == 4


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


# Bad input


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch(candidate("a"), 0), "calls must be 1 or more, got 0"),
        (Batch(candidate("a"), 1, "warm"), "cache must be cold or hot, got 'warm'"),  # type: ignore[arg-type]
        (Batch(candidate("b")), "'b' is not runnable, or was not built"),
    ],
)
def test_bad_batches(batch: Batch, message: str) -> None:
    timer = timer_of(engine("a", 1.0))
    with pytest.raises(ValueError, match=message):
        timer.run([batch])


def test_a_batch_of_what_was_not_built() -> None:
    timer = timer_of(engine("a", 1.0), built=False)
    with pytest.raises(ValueError, match="was not built"):
        timer.run([Batch(candidate("a"))])


def test_static_candidates_are_in_the_heuristics_order() -> None:
    modes = ["FALLBACK", "A", "B", "A"]
    given = [replace(candidate(f"e{i}", 9 - i), heuristic_mode=m) for i, m in enumerate(modes)]
    candidates = StaticCandidates([ATEN, *given], aten_uses_cudnn=False)
    assert [c.text for c in candidates.all()] == ["e3", "e1", "e2", "e0"]
    assert [c.text for c in candidates.of_mode("A")] == ["e3", "e1"]
    assert list(candidates.beyond()) == [ATEN]
    assert not candidates.aten_uses_cudnn
    assert StaticCandidates(given).beyond() == []
    unlisted = replace(candidate("e78:KERNEL_CFG=3"), heuristic_mode="")
    assert list(StaticCandidates([unlisted, *given, ATEN]).beyond()) == [ATEN, unlisted]
