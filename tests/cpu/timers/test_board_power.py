"""Readings of the board's power: which batches they are of, and what they say of the long run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import simulation
from simulation import GPU, STILL, candidate, engine, timer_of

from cudnn_autotune import sampling
from cudnn_autotune.audit.model import SUSTAINED
from cudnn_autotune.audit.oracle import OracleSettings, measure, steady_time
from cudnn_autotune.sampling.racing import RaceRules
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.sampling.sustained_run import RUN_SIGMA, SustainedRun, run_sustained
from cudnn_autotune.timers.board_power import (
    EXPONENT,
    LATE_S,
    WINDOW_S,
    at_limit_ms,
    clock_sensitivity,
    of_batches,
)
from cudnn_autotune.timers.telemetry import Board, GpuState, PowerReading, PowerWatch
from cudnn_autotune.timers.timer import Batch, Cache, Sample

BOARD = GpuState(power_limit_w=700.0, max_clock_mhz=1980.0)
HELD_W = 0.99 * 700.0


def read(until_s: float, power_w: float, is_capped: bool = True) -> PowerReading:
    """One whose window ended at ``until_s``."""
    return PowerReading(until_s + LATE_S, power_w, is_capped)


def test_a_reading_is_of_the_batches_in_its_window() -> None:
    # Twenty batches of 5 ms that ended at 10.1: from 10.0 on.
    durations = [0.005] * 20
    powers = of_batches(durations, 10.1, [read(10.05, 650.0), read(10.1, 700.0)])
    per_window = round(WINDOW_S / 0.005)
    expected: list[float | None] = [None] * 20
    expected[10 - per_window : 10] = [650.0] * per_window
    expected[20 - per_window :] = [700.0] * per_window
    assert powers == expected


@pytest.mark.parametrize("until_s", [10.0, 10.0 + WINDOW_S - 0.001, 10.101])
def test_a_window_that_others_share_is_nobodys(until_s: float) -> None:
    assert of_batches([0.005] * 20, 10.1, [read(until_s, 650.0)]) == [None] * 20


def test_what_a_call_takes_at_the_limit() -> None:
    """The correction is exact for a board that follows the law, however far from its limit."""
    powers = [None, 650.0, 650.0, None, 720.0, 720.0, HELD_W]
    clocks = [1400.0 * ((power or 600.0) / HELD_W) ** (1 / EXPONENT) for power in powers]
    times = [0.5 * 1400.0 / clock for clock in clocks]
    assert at_limit_ms(times, clocks, powers, BOARD) == pytest.approx([0.5] * 3)
    assert at_limit_ms(times, [None] * 7, powers, BOARD) == pytest.approx([0.5] * 3)


@pytest.mark.parametrize("sensitivity", [0.0, 0.3, 1.0])
def test_who_waits_for_memory_gains_less_from_the_limit(sensitivity: float) -> None:
    """As much as its times went with the clock."""
    powers = [620.0, 650.0, 650.0, 690.0, 720.0, 740.0] * 4
    clocks = [1400.0 * (power / HELD_W) ** (1 / EXPONENT) for power in powers]
    times = [0.5 * (clock / 1400.0) ** -sensitivity for clock in clocks]
    assert clock_sensitivity(times, clocks) == pytest.approx(sensitivity, abs=0.05)
    near = [power for power in powers if abs(power / HELD_W - 1) <= 0.1]
    values = at_limit_ms(times, clocks, powers, BOARD)
    readings = sum(a != b for a, b in zip([None, *near], near, strict=False))
    assert len(values) == readings
    assert values == pytest.approx([0.5] * readings, rel=0.003)


def test_a_clock_that_stands_still_says_nothing() -> None:
    """Then the time is taken to follow it, as most do."""
    assert clock_sensitivity([0.5, 0.51, 0.49], [1400.0] * 3) == 1.0
    assert clock_sensitivity([0.5, 0.51], [None, None]) == 1.0
    # A time that rises with the clock is noise, one that falls faster than it is, too.
    assert clock_sensitivity([0.5, 0.6], [1300.0, 1500.0]) == 0.0
    assert clock_sensitivity([0.7, 0.5], [1300.0, 1500.0]) == 1.0


def test_readings_that_began_before_do_not_count() -> None:
    powers = [690.0, 690.0, 690.0, None, 700.0]
    values = at_limit_ms([0.5] * 5, [1400.0] * 5, powers, BOARD, since=2)
    assert values == pytest.approx([0.5 * (700.0 / HELD_W) ** (1 / EXPONENT)])


def test_no_limit_allows_more_than_the_highest_clock() -> None:
    """A board that runs at it below its limit takes what it took."""
    assert at_limit_ms([0.5], [1980.0], [660.0], BOARD) == [0.5]
    (found,) = at_limit_ms([0.5], [1960.0], [640.0], BOARD)
    assert found == pytest.approx(0.5 * 1960 / 1980)


class TakenDown:
    """A simulated board whose controller has taken the clock down: to ``share`` of the power."""

    def __init__(self, timer: simulation.SimulatedTimer, share: float) -> None:
        self._timer, self._share = timer, share

    def run(self, batches: Sequence[Batch]) -> list[Sample]:
        slower = self._share ** (-1 / EXPONENT)
        return [
            replace(s, time_ms=s.time_ms * slower, power_w=s.power_w and s.power_w * self._share)
            for s in self._timer.run(batches)
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)


def test_a_block_far_from_the_limit_is_brought_there_but_less_sure() -> None:
    """As it ended it would count 9 % too much."""

    def block(share: float) -> SustainedRun:
        gpu = replace(GPU, power_exponent=2.3, power_reading_every_ms=50.0)
        timer = timer_of(engine("one", 0.5, 1.9 * (gpu.power_limit_w - gpu.static_w)), gpu=gpu)
        down: Any = TakenDown(timer, share)
        for _ in range(2):  # the first begins with a cool board
            found = run_sustained(candidate("one"), 0.5, 4, down, RaceRules(), is_patient=False)
        assert isinstance(found, SustainedRun)
        assert found.at_limit_ms
        return found

    near, far = block(1.0), block(0.85)
    assert far.ended_ms == pytest.approx(0.85 ** (-1 / EXPONENT) * near.ended_ms, rel=1e-3)
    assert far.steady_ms == pytest.approx(near.steady_ms, rel=2e-3)
    one = len(far.at_limit_ms) ** -0.5
    assert near.sigma == pytest.approx(0.005 * len(near.at_limit_ms) ** -0.5)
    assert far.sigma == pytest.approx(0.015 * one)
    assert far.sigma < RUN_SIGMA


def blocks(seed: int, every_ms: float, hunting_sd: float = 0.02) -> list[SustainedRun]:
    """Twelve of one engine under a cap, between those of another one."""
    noise = replace(STILL, hunting_sd=hunting_sd, reading_sd=0.01)
    gpu = replace(
        GPU, power_exponent=2.3, power_reading_every_ms=every_ms, noise=noise
    )  # so that log(power) over log(clock) is 1.8 near the limit
    room_w = gpu.power_limit_w - gpu.static_w
    timer = timer_of(
        engine("one", 0.5, 1.9 * room_w), engine("other", 0.6, 1.6 * room_w), gpu=gpu, seed=seed
    )
    found = []
    for number in count():
        text, call_ms = (("one", 0.5), ("other", 0.6))[number % 2]
        block = run_sustained(candidate(text), call_ms, 4, timer, RaceRules(), is_patient=False)
        assert isinstance(block, SustainedRun)
        if number % 2 == 0 and number > 0:
            found.append(block)
        if len(found) == 12:
            return found
    raise AssertionError


def test_blocks_agree_by_their_power() -> None:
    """Where the controller hunts by less than half of what they differ by without."""
    spread = {
        every_ms: math.sqrt(
            np.mean(
                [
                    np.var([math.log(b.steady_ms) for b in found if b.at_limit_ms or not every_ms])
                    for found in (blocks(seed, every_ms) for seed in range(4))
                ]
            )
        )
        for every_ms in (0.0, 100.0)
    }
    assert spread[100.0] < spread[0.0] / 2
    read_ms = np.mean([b.steady_ms for s in range(4) for b in blocks(s, 100.0) if b.at_limit_ms])
    still_ms = np.mean([b.steady_ms for b in blocks(0, 0.0, hunting_sd=0.0)])
    assert read_ms == pytest.approx(still_ms, rel=0.01)


def test_what_ran_before_does_not_count() -> None:
    """A reading in a block's first moments may still be of another one's clock."""
    gpu = replace(GPU, power_reading_every_ms=50.0)
    timer = timer_of(engine("one", 0.5, 1.9 * (gpu.power_limit_w - gpu.static_w)), gpu=gpu)
    for number in range(4):
        block = run_sustained(candidate("one"), 0.5, 4, timer, RaceRules(), is_patient=False)
        assert isinstance(block, SustainedRun)
        if number > 0:  # in the first the limit does not hold at once
            least = (block.gpu_ms - 30.0 - 1e3 * WINDOW_S) // 50.0
            assert least <= len(block.at_limit_ms) <= least + 1


def test_a_choice_says_that_it_rests_on_readings() -> None:
    for every_ms in (0.0, 100.0):
        scene = simulation.preset("h200-capped", 1)
        gpu = replace(scene.gpu, power_reading_every_ms=every_ms)
        timer = simulation.SimulatedTimer(gpu, scene.engines, 1)
        chosen = sampling.get("sustained").select(timer.candidates, timer, Limits())
        values = [r for r in chosen.evidence.remarks if "of the board's power" in r]
        assert bool(values) == bool(every_ms)


class ReadBoard(Board):
    """NVML's readings, made up: each seen three times before the next is there."""

    def __init__(self, *readings: float | None) -> None:
        super().__init__(0)
        self._seen = 0
        self._readings = readings

    def is_power_capped(self) -> bool:
        return True

    def instant_power_w(self) -> float | None:
        self._seen += 1
        return self._readings[min(self._seen // 3, len(self._readings) - 1)]


def test_each_new_reading_is_noted_once() -> None:
    gpu = ReadBoard(600.0, 650.0, None, 700.0)
    with PowerWatch(gpu, period_s=0.0) as watch:
        while len(watch.readings) < 2:
            pass
    assert [reading.power_w for reading in watch.readings] == [650.0, 700.0]
    assert watch.readings[0].seen_s < watch.readings[1].seen_s


def lone_run(power_w: float) -> list[tuple[Cache, Sample]]:
    """A run whose clock lets a call draw this much power, which was read in some batches."""
    clock = (power_w / HELD_W) ** (1 / EXPONENT)
    times_ms: dict[Cache, float] = {"cold": 0.6, "hot": 0.5}
    return [
        (cache, Sample(ms / clock, 1400.0 * clock, power_w=power_w if i == 5 else None))
        for i in range(10)
        for cache, ms in times_ms.items()
    ]


@pytest.mark.parametrize("power_w", [0.9 * HELD_W, HELD_W, 1.05 * HELD_W])
def test_the_judge_brings_runs_to_the_limit(power_w: float) -> None:
    found = steady_time(lone_run(power_w), BOARD)
    assert found.time_ms == pytest.approx(math.sqrt(0.6 * 0.5), rel=1e-6)


def test_the_judge_is_surer_with_readings() -> None:
    errors, off = {}, {}
    for every_ms in (0.0, 100.0):
        result: list[float] = []
        distances: list[float] = []
        for seed in range(16):
            scene = simulation.preset("h200-capped", seed)
            gpu = replace(scene.gpu, power_reading_every_ms=every_ms)
            timer = simulation.SimulatedTimer(gpu, scene.engines, seed)
            candidates = [*timer.candidates.all(), *timer.candidates.beyond()]
            oracle = measure(timer, candidates, (), OracleSettings(solo="throttled", seed=seed))
            truth, exact = oracle.truths[SUSTAINED], timer.truth("sustained", "hot")
            for text, error in truth.errors.items():
                ratio = truth.times_ms[text] / truth.times_ms[truth.best]
                distances.append(math.log(ratio / (exact[text] / exact[truth.best])))
                result.append(error)
        errors[every_ms] = float(np.median(result))
        off[every_ms] = math.sqrt(float(np.mean(np.square(distances))))
    assert errors[100.0] < 0.7 * errors[0.0]
    assert off[100.0] < 0.8 * off[0.0]
