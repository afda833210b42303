"""Replays: the samples of a recording in a new order, and what of it stays true."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import simulation
from support.simulation import (
    GPU,
    PROBLEM,
    STILL,
    SimulatedEngine,
    SimulatedTimer,
    candidate,
    engine,
    timer_of,
)
from support.tuning.recorder import record, save

from cudnn_autotune import sampling
from cudnn_autotune.audit.offline.recorded_times import smoothed
from cudnn_autotune.audit.offline.recording import Recording, SoloTrace
from cudnn_autotune.audit.offline.replay import ReplayTimer
from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.engines.unlisted import MATMUL
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.timers.timer import Batch, Cache


def recorded(timer: SimulatedTimer, folder: Path, **options: float) -> Recording:
    """Through a file, so that what is played is what a file holds."""
    made = record(timer, timer.candidates, PROBLEM, **options)  # type: ignore[arg-type]
    save(made, folder / "r.json.gz")
    return Recording.load(folder / "r.json.gz")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recording]:
    folder = tmp_path_factory.mktemp("recordings")
    return {n: recorded(simulation.preset(n, 7), folder) for n in simulation.preset_names()}


@pytest.fixture(scope="module")
def forum(recordings: dict[str, Recording]) -> Recording:
    return recordings["forum-l4"]


def built(timer: ReplayTimer) -> dict[str, Candidate]:
    every = [*timer.candidates.all(), *timer.candidates.beyond()]
    return {c.text: c for c in timer.runnable(every)}


def columns(recording: Recording) -> dict[str, int]:
    return {r.candidate.text: i for i, r in enumerate(recording.candidates)}


# Rounds


def test_candidates_that_take_turns_share_a_recorded_round(forum: Recording) -> None:
    timer = ReplayTimer(forum, 3)
    candidates = built(timer)
    turns = [Batch(candidates[text]) for text in ("128x64", "128x128", "64x64")]
    timer.run(turns)  # loads the kernels
    place = columns(forum)
    rows = [tuple(row[place[b.candidate.text]] for b in turns) for row in forum.cold.time_ms]
    played = []
    for _ in range(60):
        samples = timer.run(turns)
        played.append(rows.index(tuple(s.time_ms for s in samples)))
        assert samples[0].clock_mhz == forum.cold.clock_mhz[played[-1]][place["128x64"]]
    followed = sum((b - a) % len(rows) == 1 for a, b in itertools.pairwise(played))
    assert followed >= 0.8 * (len(played) - 1)
    assert len(set(played)) > 20


def test_cold_and_hot_play_their_own_rounds(forum: Recording) -> None:
    place = columns(forum)["128x64"]
    timer = ReplayTimer(forum)
    text = built(timer)["128x64"]
    timer.run([Batch(text)])
    for cache, rounds in (("cold", forum.cold), ("hot", forum.hot)):
        times = {row[place] for row in rounds.time_ms}
        other = built(timer)["64x64"]
        for _ in range(20):
            sample = timer.run([Batch(other), Batch(text, 1, cache)])[1]  # type: ignore[arg-type]
            assert sample.time_ms in times


def test_equal_seeds_play_alike_and_others_do_not(forum: Recording) -> None:
    def times(seed: int) -> list[float]:
        timer = ReplayTimer(forum, seed)
        candidates = [c for t, c in built(timer).items() if t != "direct"]
        samples = timer.run([Batch(c) for c in candidates] * 5)
        samples += timer.run([Batch(candidates[0], 5)] * 30)
        found = timer.frontend_find("median_of_three", candidates, 0)
        return [s.time_ms for s in samples] + [t.time_ms or 0 for t in found.ranking]

    assert times(1) == times(1)
    assert times(1) != times(2)


def test_the_first_run_loads_the_kernel(forum: Recording) -> None:
    timer = ReplayTimer(forum)
    first, second = timer.run([Batch(built(timer)["64x64"])] * 2)
    screened = forum.candidates[columns(forum)["64x64"]]
    assert first.loading_ms == pytest.approx(screened.first_run_ms - screened.warm_ms)
    assert second.loading_ms == 0
    assert first.time_ms == pytest.approx(second.time_ms, rel=0.1)


# Alone


def test_a_long_run_follows_the_solo_trace(forum: Recording) -> None:
    timer = ReplayTimer(forum, 1)
    candidate = built(timer)["128x128"]
    timer.run([Batch(candidate)])
    timer.run([Batch(built(timer)["64x64"])])
    (trace,) = [t for t in forum.solo if t.text == "128x128"]
    samples = timer.run([Batch(candidate, 3)] * 120)
    assert timer.missing == ()
    at_ms = list(itertools.accumulate(3 * s.time_ms for s in samples))
    curve = smoothed(trace.time_ms)
    for at, sample in zip(at_ms, samples, strict=True):
        near = min(range(len(curve)), key=lambda i: abs(trace.at_ms[i] - at))
        assert sample.time_ms == pytest.approx(curve[near], rel=0.08)
    assert samples[-1].time_ms == pytest.approx(5.77, rel=0.05)
    assert samples[-1].clock_mhz == pytest.approx(trace.clock_mhz[-1], rel=0.02)
    assert timer.state().throttle_reasons == ("sw_power_cap",)
    assert timer.state().clock_mhz == samples[-1].clock_mhz


def test_who_was_alone_starts_afresh_after_a_turn_of_another(forum: Recording) -> None:
    timer = ReplayTimer(forum, 1)
    candidates = built(timer)
    a, b = candidates["128x128"], candidates["128x64"]
    timer.run([Batch(b)])
    hot = timer.run([Batch(a, 3)] * 100)[-1]
    cool = timer.run([Batch(b), Batch(a)])[-1]
    assert cool.time_ms < 0.9 * hot.time_ms


def test_the_hot_cache_shows_in_a_trace_of_the_cold_one(tmp_path: Path) -> None:
    still = timer_of(engine("a", 1.0, hot_factor=0.8), engine("b", 0.9))
    timer = ReplayTimer(recorded(still, tmp_path, rounds=4, solo=2, solo_ms=200.0))
    a = built(timer)["a"]
    caches: tuple[Cache, ...] = ("cold", "hot")
    cold, hot = (timer.run([Batch(a, 10, cache)] * 30)[-1].time_ms for cache in caches)
    assert hot / cold == pytest.approx(0.8, abs=0.002)
    assert timer.truth("sustained", "hot")["a"] == pytest.approx(0.801, rel=1e-3)


def test_sustained_decides_by_the_power_as_on_the_gpu(tmp_path: Path) -> None:
    """Its runs of 160 ms go by the readings of the power."""
    live = simulation.preset("h200-capped", 1)
    recording = record(live, live.candidates, PROBLEM)
    mode: Any = replace(sampling.get("sustained"), seed=1)  # type: ignore[type-var]
    for timer in (simulation.preset("h200-capped", 2), ReplayTimer(recording, 2)):
        found = mode.select(timer.candidates, timer, Limits())
        assert "of the board's power" in " ".join(found.evidence.remarks)
        assert timer.state().reports_throttling
    solo = [replace(trace, power_w=(None,) * len(trace.at_ms)) for trace in recording.solo]
    without = ReplayTimer(replace(recording, solo=tuple(solo)), 2)
    found = mode.select(without.candidates, without, Limits())
    assert "of the board's power" not in " ".join(found.evidence.remarks)


def test_the_power_is_that_of_the_trace(forum: Recording) -> None:
    trace = forum.solo[0]
    powers = tuple(100.0 + i for i in range(len(trace.at_ms)))
    recording = replace(forum, solo=(replace(trace, power_w=powers), *forum.solo[1:]))
    timer = ReplayTimer(recording, 1)
    (candidate,) = (c for c in timer.candidates.all() if c.text == trace.text)
    timer.runnable([candidate])
    samples = timer.run([Batch(candidate, trace.calls)] * 20)
    read = [sample.power_w for sample in samples if sample.power_w is not None]
    # Of a batch the trace's at the same time; those at first are as in the rounds.
    assert len(read) >= 15
    assert read == sorted(read)
    assert set(read) <= set(powers)


def test_what_was_not_recorded_alone_slows_down_as_others_do(forum: Recording) -> None:
    timer = ReplayTimer(forum)
    candidate = built(timer)["winograd"]
    timer.run([Batch(candidate)])
    samples = timer.run([Batch(candidate, 2)] * 300)
    burst, sustained = timer.truth("burst"), timer.truth("sustained")
    slowdowns = sorted(sustained[text] / burst[text] for text in sustained)
    played = statistics.median(s.time_ms for s in samples[-100:]) / burst["winograd"]
    assert played == pytest.approx(slowdowns[len(slowdowns) // 2], rel=0.02)
    assert samples[-1].clock_mhz is not None
    assert slowdowns[0] < 1.05 < slowdowns[-1], "or it would show nothing"


# Host


def test_builds_take_the_recorded_time(tmp_path: Path) -> None:
    compiled = [
        SimulatedEngine(candidate(f"c{i}", i, 0, "RUNTIME_COMPILATION"), 1.0, 1.0, build_ms=300.0)
        for i in range(5)
    ]
    live = timer_of(engine("a", 1.0, build_ms=7.0), *compiled, gpu=replace(GPU, build_threads=4))
    recording = recorded(
        timer_of(*live.engines, gpu=live.gpu, built=False), tmp_path, rounds=2, solo=0
    )
    assert recording.build_threads == 4
    timer = ReplayTimer(recording)
    timer.runnable([candidate("a")])
    assert timer.elapsed_ms() == pytest.approx(7.0)
    timer.prepare([c.candidate for c in compiled])
    assert timer.elapsed_ms() == pytest.approx(7.0)
    assert len(timer.runnable(timer.candidates.all())) == 6
    assert timer.elapsed_ms() == pytest.approx(607.0)


def test_the_wall_clock_is_batches_and_overhead(forum: Recording) -> None:
    timer = ReplayTimer(forum)
    candidate = built(timer)["64x64"]
    before = timer.elapsed_ms()
    samples = timer.run([Batch(candidate, 2)] * 3)
    total = sum(2 * s.time_ms + s.loading_ms for s in samples)
    # A round's overhead, by launches: the six that ran here of all in a round.
    launches = statistics.median(
        sum(calls for calls, t in zip(forum.cold.calls, row, strict=True) if t is not None)
        for row in forum.cold.time_ms
    )
    overhead = 6 / launches * forum.run_overhead_ms
    assert timer.elapsed_ms() - before == pytest.approx(total + overhead)


def test_what_did_not_build_or_run_does_not_in_a_replay(recordings: dict[str, Recording]) -> None:
    timer = ReplayTimer(recordings["quiet"])
    candidates = built(timer)
    assert "does-not-build" not in candidates
    assert "too-large" not in candidates
    (sample,) = timer.run([Batch(candidates["does-not-run"])])
    assert (sample.time_ms, sample.error) == (math.inf, "CUDNN_STATUS_EXECUTION_FAILED")
    assert timer.frontend_find("sample_once", [candidates["does-not-run"]], 0).ranking == ()
    assert timer.runnable([candidate("unknown")]) == []


# What no heuristic lists


def test_what_no_heuristic_lists_is_recorded_and_replayed(tmp_path: Path) -> None:
    kernel = Candidate(
        engine=78,
        knobs={"KERNEL_CFG": 9, "SPLIT_K_BUF": -1},
        workspace_bytes=0,
        numerical_notes=(),
        behavior_notes=("RUNTIME_COMPILATION",),
        text="eng78:KERNEL_CFG=9,SPLIT_K_BUF=-1",
        heuristic_mode="",
        rank=1012,
    )
    live = timer_of(
        engine("a", 1.0),
        SimulatedEngine(kernel, 0.9, 100.0, build_ms=300.0),
        SimulatedEngine(MATMUL, 0.95, 100.0),
        SimulatedEngine(OWN_PATH, 1.05, 100.0),
        built=False,
    )
    timer = ReplayTimer(recorded(live, tmp_path, rounds=8, solo=4, solo_ms=300.0))
    assert list(timer.candidates.beyond()) == [OWN_PATH, kernel, MATMUL]
    assert [c.text for c in timer.candidates.all()] == ["a"]
    assert timer.truth("burst") == pytest.approx(live.truth("burst"), rel=1e-3)
    assert timer.truth("sustained") == pytest.approx(live.truth("sustained"), rel=1e-3)
    selection = sampling.get("race").select(timer.candidates, timer, Limits())
    assert selection.winner.candidate == kernel
    assert {MATMUL, OWN_PATH} <= {timed.candidate for timed in selection.ranking}
    assert timer.elapsed_ms() > 300, "it was compiled"
    assert timer.missing == ()


# Truth


@pytest.mark.parametrize("name", ["aa", "quiet", "small-kernels", "depthwise"])
@pytest.mark.parametrize("cache", ["cold", "hot"])
def test_the_truth_of_a_recording_is_near_the_simulations(
    recordings: dict[str, Recording], name: str, cache: Cache
) -> None:
    timer, exact = ReplayTimer(recordings[name]), simulation.preset(name)
    burst = timer.truth("burst", cache)
    assert set(burst) == set(exact.truth("burst", cache))
    for text, time_ms in burst.items():
        # Slow ones took part in three rounds only.
        rel = 0.01 if time_ms < 3 * min(burst.values()) else 0.04
        assert time_ms == pytest.approx(exact.truth("burst", cache)[text], rel=rel), text
    alone = timer.truth("sustained", cache)
    assert set(alone) == {trace.text for trace in recordings[name].solo}
    for text, time_ms in alone.items():
        assert time_ms == pytest.approx(exact.truth("sustained", cache)[text], rel=0.01), text


def test_under_a_cap_the_truth_still_tells_who_wins_alone(forum: Recording) -> None:
    timer = ReplayTimer(forum)
    burst, sustained = timer.truth("burst"), timer.truth("sustained")
    assert min(burst, key=burst.__getitem__) == "128x128"
    assert min(sustained, key=sustained.__getitem__) == "128x64"
    assert sustained["128x128"] == pytest.approx(5.77, rel=0.01)
    assert sustained["128x64"] == pytest.approx(3.62, rel=0.02)


def test_what_a_round_shares_is_not_charged_to_who_sat_others_out(tmp_path: Path) -> None:
    recording = recorded(timer_of(*(engine(t, 1.0) for t in "abc")), tmp_path, rounds=9, solo=0)
    # The first three rounds were twice as slow, and c was in no other.
    rows = tuple((2.0, 4.0, 6.0) if i < 3 else (1.0, 2.0, None) for i in range(9))
    timer = ReplayTimer(replace(recording, cold=replace(recording.cold, time_ms=rows)))
    assert timer.truth("burst") == pytest.approx({"a": 1.0, "b": 2.0, "c": 3.0})


def test_the_end_of_a_trace_is_its_truth(tmp_path: Path) -> None:
    recording = recorded(timer_of(engine("a", 1.0)), tmp_path, rounds=2, solo=0)
    times = (1.0, 1.5, 1.8, 1.9, 2.0, 2.1)
    trace = SoloTrace(
        "a", "cold", 5, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), times, (None,) * 6, (None,) * 6
    )
    timer = ReplayTimer(replace(recording, solo=(trace,)))
    assert timer.truth("sustained") == pytest.approx({"a": 2.05})


def test_one_that_failed_half_way_is_neither_true_nor_taken(tmp_path: Path) -> None:
    failing = timer_of(engine("a", 0.9, fails_at_ms=30.0), engine("b", 1.0), built=False)
    recording = recorded(failing, tmp_path, rounds=8, solo=2, solo_ms=100.0)
    timer = ReplayTimer(recording)
    assert set(timer.truth("burst")) == set(timer.truth("sustained")) == {"b"}
    for mode in ("race", "auto"):
        timer = ReplayTimer(recording, 1)
        selection = sampling.get(mode).select(timer.candidates, timer, Limits())
        assert selection.winner.candidate.text == "b", mode


def test_one_that_failed_alone_keeps_its_samples_and_has_no_truth(tmp_path: Path) -> None:
    recording = recorded(timer_of(engine("a", 0.9), engine("b", 1.0)), tmp_path, solo=2)
    assert {trace.text for trace in recording.solo} == {"a", "b"}
    a, b = recording.candidates
    failed = replace(recording, candidates=(replace(a, error="failed after 40 rounds: lost"), b))
    timer = ReplayTimer(failed)
    assert set(timer.truth("burst")) == set(timer.truth("sustained")) == {"b"}
    (sample,) = timer.run([Batch(built(timer)["a"])])
    assert sample.error == "failed after 40 rounds: lost"


def test_a_still_gpu_replays_as_it_was(tmp_path: Path) -> None:
    assert STILL.call_sd == 0
    timer = ReplayTimer(recorded(timer_of(engine("a", 1.0), engine("b", 2.0)), tmp_path, solo=0))
    a, b = built(timer).values()
    timer.run([Batch(a), Batch(b)])
    samples = timer.run([Batch(a), Batch(b)] * 10)
    assert {s.time_ms for s in samples[::2]} == {1.001}
    assert {s.time_ms for s in samples[1::2]} == {2.001}
