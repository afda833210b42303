"""Readings of the board's power: which batches they are of, and what they say of the long run."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from support.simulation import GPU, STILL, candidate, engine, timer_of

from cudnn_autotune.sampling.racing import RaceRules
from cudnn_autotune.sustained.run import SustainedRun, run_sustained
from cudnn_autotune.timers.board_power import (
    EXPONENT,
    LATE_S,
    WINDOW_S,
    at_limit_ms,
    clock_sensitivity,
    of_batches,
)
from cudnn_autotune.timers.telemetry import Board, GpuState, PowerReading, PowerWatch

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
