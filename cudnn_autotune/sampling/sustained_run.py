"""One candidate alone until the clock is steady: what it takes where it is used for long.

Candidates that take turns share one clock, so that the power of one is charged to another. On a
board that draws ``P_static + D_i * f^alpha`` and is held at ``P_cap``, candidate i takes about
``max(t_i(f_max), E_i / P_cap)`` in the long run, with E_i the energy of a call: under a cap the
order is that of energy. Only a candidate that runs alone shows it.

A power controller looks every 50 to 100 ms and then hunts: on an H200 the clock falls in one step
after 60 to 80 ms and swings from there on (docs/findings/power-limit.md), so that two blocks
of a tenth of a second of one candidate differ by some 2 %; those of half a second by 0.5 %. Where
the board's power was read meanwhile, its distance from the cap says how far off a block was
(``board_power``), and blocks of a tenth of a second differ by half a percent.

A block runs on the caller's own tensors, hot: between flushes of the cache the board would rest.
What a cold cache costs one candidate more than another is known from the race, up to a percent in
the mean of both states where calls take some ten microseconds, and is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.sampling.racing import RaceRules
from cudnn_autotune.timers.board_power import FAR, arrived, at_limit_ms
from cudnn_autotune.timers.timer import Batch, Timer

_BATCH_MS = 5.0
# Shorter calls run in the batches of the race, whose CUDA graphs exist already.
_SHORT_MS = 0.05
# A block is steady once its last chunk and that before the one before differ by less than the
# hunting does; early on, if what a geometric approach would still change is less than that.
CHUNK_MS = 40.0
_STEADY = 0.015
_DRIFT = 0.007
_STEADY_AT_ONCE = 0.004
_SETTLING = 0.5
# Of a controller that moves the clock in one step, the third chunk shows about the steady time.
_AT_ONCE_CHUNKS = 3
_AT_ONCE = 0.05
# And the fourth is within this of it (16 layers on an H200: 1.6 % at most); where it is not, the
# clock goes down slowly, and what a few chunks promise of it is not believed.
_ONE_STEP = 0.02
_MOST_BLOCK_MS = 1000.0
# Of the logarithm of a block's steady time: as it ended, by one reading of the power near the
# limit, and by one far from it (docs/findings/power-limit.md).
RUN_SIGMA = 0.02
_READING_SIGMA = 0.005
FAR_READING_SIGMA = 0.015
# A clock this far below the highest seen is throttled; boards step by some 0.8 %.
THROTTLED = 0.015


@dataclass(frozen=True)
class SustainedRun:
    """A candidate alone for some time."""

    candidate: Candidate
    times_ms: tuple[float, ...]
    """A call, batch after batch."""
    clocks_mhz: tuple[float, ...]
    calls: int
    gpu_ms: float
    steady_batches: int
    """So many at the end count as steady."""
    chunks_ms: tuple[float, ...]
    """A call, in each chunk of 40 ms."""
    at_limit_ms: tuple[float, ...] = ()
    """A call at the board's power limit, by each reading of its power."""
    is_far: bool = False
    """Whether those are all far from the limit: its clock is not the steady one."""
    cold_cache_penalty: float = 0.0
    """How much more (log) a cold cache, half of the time, costs it than the race's best."""

    @property
    def steady_ms(self) -> float:
        """By the readings of the power, or else by how it ended, and ``cold_cache_penalty``."""
        hot_ms = float(np.mean(self.at_limit_ms)) if self.at_limit_ms else self.ended_ms
        return hot_ms * math.exp(self.cold_cache_penalty)

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm of ``steady_ms`` from block to block."""
        if not self.at_limit_ms:
            return RUN_SIGMA
        of_one = FAR_READING_SIGMA if self.is_far else _READING_SIGMA
        return of_one / math.sqrt(len(self.at_limit_ms))

    @property
    def ended_ms(self) -> float:
        """A call, at the end."""
        return float(np.mean(self.times_ms[-self.steady_batches :]))

    @property
    def first_ms(self) -> float:
        """Before the clock can have fallen."""
        return float(np.median(self.times_ms[:3]))

    @property
    def settled_at_once(self) -> bool:
        early = self.chunks_ms[:_AT_ONCE_CHUNKS][-1]
        return abs(self.ended_ms / early - 1) < _AT_ONCE

    @property
    def steady_clock_mhz(self) -> float | None:
        last = self.clocks_mhz[-self.steady_batches :]
        return float(np.mean(last)) if last else None


def run_alone(
    candidate: Candidate,
    call_ms: float,
    least_chunks: int,
    timer: Timer,
    rules: RaceRules,
    most_ms: float = math.inf,
    is_patient: bool = True,
    cold_cache_penalty: float = 0.0,
) -> SustainedRun | str:
    """Runs ``candidate`` alone until its time is steady; where it fails to run, says why.

    Args:
        call_ms: about what a call takes.
        least_chunks: of 40 ms, before it may count as steady.
        rules: of the race before it.
        most_ms: after those, no chunk is begun that would take it beyond this.
        is_patient: False takes it as steady after ``least_chunks``.
        cold_cache_penalty: as ``SustainedRun.cold_cache_penalty``, of the race before it.
    """
    batch_ms = rules.batch_ms if call_ms < _SHORT_MS else _BATCH_MS
    calls = min(max(1, math.ceil(batch_ms / call_ms)), rules.most_calls)
    per_chunk = _batches(calls * call_ms)
    times: list[float] = []
    clocks: list[float | None] = []
    powers: list[float | None] = []
    gpu_ms = 0.0
    chunks: list[float] = []
    wanted = least_chunks
    chunk_ms = CHUNK_MS
    while not times or (gpu_ms + CHUNK_MS <= _MOST_BLOCK_MS and gpu_ms + chunk_ms <= most_ms):
        # In one go: between two of them the GPU would rest, and its controller with it.
        samples = timer.run([Batch(candidate, calls, "hot")] * (per_chunk * wanted))
        for sample in samples:
            if sample.error:
                return sample.error
        new = [s.time_ms for s in samples]
        times += new
        clocks += [s.clock_mhz for s in samples]
        powers += [s.power_w for s in samples]
        gpu_ms += sum(new) * calls
        chunks += [float(np.mean(part)) for part in np.array_split(new, wanted)]
        wanted = 1
        chunk_ms = chunks[-1] * calls * per_chunk
        if not is_patient or _is_steady(chunks):
            break
    # The last two chunks; but the last one only where the time was on its way until then.
    counted = 1 if len(chunks) <= _AT_ONCE_CHUNKS or _is_approaching(chunks) else 2
    begun = arrived([calls * time_ms for time_ms in times])
    near: list[float] = []
    far: list[float] = []
    if any(powers[begun:]):
        by_power = partial(at_limit_ms, times, clocks, powers, timer.state(), since=begun)
        near = by_power()
        far = [] if near else by_power(within=FAR)
    return SustainedRun(
        candidate,
        tuple(times),
        tuple(clock for clock in clocks if clock is not None),
        len(times) * calls,
        gpu_ms,
        counted * per_chunk,
        tuple(chunks),
        tuple(near or far),
        bool(far),
        cold_cache_penalty,
    )


def run_ms(chunks: int, call_ms: float) -> float:
    """What the least block of so many chunks takes: of slow calls a chunk is two."""
    return chunks * max(CHUNK_MS, _batches(call_ms) * call_ms)


def _batches(batch_ms: float) -> int:
    """In a chunk; its mean is one of two at least."""
    return max(2, round(CHUNK_MS / batch_ms))


def _is_approaching(chunks: Sequence[float]) -> bool:
    """Whether it went on in one direction; hunting turns back."""
    one, two = chunks[-2] / chunks[-3] - 1, chunks[-1] / chunks[-2] - 1
    return one * two > 0 and abs(two) >= _DRIFT


def _is_steady(chunks: Sequence[float]) -> bool:
    if len(chunks) == 2:
        return abs(chunks[1] / chunks[0] - 1) < _STEADY_AT_ONCE
    if len(chunks) < 3:
        return False
    one, two = chunks[-2] / chunks[-3] - 1, chunks[-1] / chunks[-2] - 1
    is_one_way = one * two > 0  # hunting turns back; a recovery does not
    if is_one_way and len(chunks) <= _AT_ONCE_CHUNKS + 1 and two / one < _SETTLING:
        rest = two * two / (one - two)  # of the geometric series
        is_slow = len(chunks) > _AT_ONCE_CHUNKS and abs(two) >= _ONE_STEP
        return abs(rest) < _STEADY and not is_slow
    return abs(one + two) < (_DRIFT if is_one_way else _STEADY)


def is_throttled(block: SustainedRun, max_clock_mhz: float | None) -> bool:
    """Whether the board slowed down in the block: by its clock, or else by the candidate's time."""
    clock = block.steady_clock_mhz
    highest = max([*block.clocks_mhz, max_clock_mhz or 0.0])
    if clock is not None and highest > 0:
        return clock < (1 - THROTTLED) * highest
    return block.ended_ms > (1 + THROTTLED) * block.first_ms
