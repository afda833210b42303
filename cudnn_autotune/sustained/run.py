"""A sustained run: one candidate alone until the clock is steady.

Candidates that take turns share one clock, so that one pays for another's power. Let a board draw
``P_static + D_i * f^alpha`` and be held at ``P_cap``. In the long run candidate i takes about
``max(t_i(f_max), E_i / P_cap)``, where E_i is the energy of a call. So under a cap energy decides
the order, which only a sustained run shows.

A power controller samples every 50 to 100 ms and oscillates. On an H200 the clock falls in one step
after 60 to 80 ms and swings from there on. So two runs of one candidate of a tenth of a second
differ by some 2 %, and runs of half a second by 0.5 %. If the board's power was read in a run, its
distance from the cap gives the run's error (``timers.board_power``). Corrected runs of a tenth of a
second differ by half a percent. The constants are from docs/findings/power-limit.md.

A run uses the caller's own tensors, with a hot cache: during flushes of the cache the board would
rest. So a run does not see the cost of a cold cache: with calls of some ten microseconds,
candidates differ in that by up to a percent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.sampling.racing import RaceRules
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.timers.board_power import FAR_FROM_LIMIT, arrived, at_limit_ms
from cudnn_autotune.timers.stopping_criterion import Reason, StoppingCriterion
from cudnn_autotune.timers.timer import Batch, Timer

_BATCH_MS = 5.0
# Shorter calls run in the batches of the race, whose CUDA graphs exist already.
_SHORT_MS = 0.05
# A run whose end is this near to its third chunk counts as settled at once.
_AT_ONCE = 0.05
# Standard deviations of log(steady time) between runs: by the end of the run, by one reading of the
# power near the limit, and by one far from it.
RUN_SIGMA = 0.02
_READING_SIGMA = 0.005
FAR_READING_SIGMA = 0.015
# A clock this far below the highest seen is throttled; boards step by some 0.8 %.
_THROTTLED = 0.015
# A run is steady once its last chunk and the one two before it differ by less than the power
# controller's oscillation.
_STEADY = 0.015
_DRIFT = 0.007
_STEADY_AT_ONCE = 0.004
# Before that, it counts as steady, too, if a geometric extrapolation changes less than _STEADY.
_SETTLING = 0.5
# A controller that moves the clock in one step shows about the steady time in the third chunk.
_AT_ONCE_CHUNKS = 3
# The fourth chunk is then this near to the third (16 layers on an H200: 1.6 % at most). If not, the
# clock falls slowly, and extrapolating from a few chunks is not reliable.
_ONE_STEP = 0.02
_CHUNK_MS = 40.0
_MOST_RUN_MS = 1000.0


@dataclass(frozen=True)
class SustainedRun:
    """The samples of one candidate's sustained run."""

    candidate: Candidate
    times_ms: tuple[float, ...]
    """Milliseconds of a call in each batch."""
    clocks_mhz: tuple[float, ...]
    calls: int
    gpu_ms: float
    steady_batches: int
    """The number of steady batches at the end."""
    chunks_ms: tuple[float, ...]
    """Milliseconds of a call in each chunk of 40 ms."""
    at_limit_ms: tuple[float, ...] = ()
    """Milliseconds of a call at the board's power limit, by each reading of its power."""
    is_far: bool = False
    """Whether all these readings are far from the limit: the clock is not the steady one."""

    @property
    def steady_ms(self) -> float:
        """Milliseconds of a call by the readings of the power, or else at the end of the run."""
        return float(np.mean(self.at_limit_ms)) if self.at_limit_ms else self.ended_ms

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm of ``steady_ms`` from run to run."""
        if not self.at_limit_ms:
            return RUN_SIGMA
        of_one = FAR_READING_SIGMA if self.is_far else _READING_SIGMA
        return of_one / math.sqrt(len(self.at_limit_ms))

    @property
    def ended_ms(self) -> float:
        """Milliseconds of a call at the end."""
        return float(np.mean(self.times_ms[-self.steady_batches :]))

    @property
    def settled_at_once(self) -> bool:
        early = self.chunks_ms[:_AT_ONCE_CHUNKS][-1]
        return abs(self.ended_ms / early - 1) < _AT_ONCE

    @property
    def steady_clock_mhz(self) -> float | None:
        last = self.clocks_mhz[-self.steady_batches :]
        return float(np.mean(last)) if last else None

    def is_throttled(self, max_clock_mhz: float | None) -> bool:
        """Returns whether the board slowed down, by its clock or else by the candidate's time."""
        clock = self.steady_clock_mhz
        highest = max([*self.clocks_mhz, max_clock_mhz or 0.0])
        if clock is not None and highest > 0:
            return clock < (1 - _THROTTLED) * highest
        before_ms = float(np.median(self.times_ms[:3]))  # the clock cannot have fallen so soon
        return self.ended_ms > (1 + _THROTTLED) * before_ms


def run_sustained(
    candidate: Candidate,
    call_ms: float,
    least_chunks: int,
    timer: Timer,
    rules: RaceRules,
    most_ms: float = math.inf,
    is_patient: bool = True,
) -> SustainedRun | str:
    """Runs ``candidate`` alone until its time is steady.

    Args:
        call_ms: approximate milliseconds of a call.
        least_chunks: least number of chunks of 40 ms.
        rules: the rules of the race before it.
        most_ms: GPU time that no further chunk may exceed.
        is_patient: if False, the time counts as steady after ``least_chunks``.

    Returns:
        The run, or the error if the candidate failed.
    """
    batch_ms = rules.batch_ms if call_ms < _SHORT_MS else _BATCH_MS
    calls = min(max(1, math.ceil(batch_ms / call_ms)), rules.most_calls)
    per_chunk = _batches(calls * call_ms)
    criterion = SteadyCriterion(calls * per_chunk, most_ms, is_patient)
    times: list[float] = []
    clocks: list[float | None] = []
    powers: list[float | None] = []
    gpu_ms = 0.0
    wanted = least_chunks
    while not criterion.is_finished():
        # One run of the timer has them all, because the GPU would be idle between two runs.
        samples = timer.run([Batch(candidate, calls, "hot")] * (per_chunk * wanted))
        for sample in samples:
            if sample.error:
                return sample.error
        new = [s.time_ms for s in samples]
        times += new
        clocks += [s.clock_mhz for s in samples]
        powers += [s.power_w for s in samples]
        gpu_ms += sum(new) * calls
        criterion.add_measurement([float(np.mean(part)) for part in np.array_split(new, wanted)])
        wanted = 1
    chunks = criterion.chunks
    # The last two chunks count, but only the last one if the time was still changing until then.
    counted = 1 if len(chunks) <= _AT_ONCE_CHUNKS or _is_approaching(chunks) else 2
    begun = arrived([calls * time_ms for time_ms in times])
    near: list[float] = []
    far: list[float] = []
    if any(powers[begun:]):
        by_power = partial(at_limit_ms, times, clocks, powers, timer.state(), since=begun)
        near = by_power()
        far = [] if near else by_power(within=FAR_FROM_LIMIT)
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
    )


def run_alone(
    found: SearchState, candidate: Candidate, chunks: int, is_patient: bool = True
) -> SustainedRun | None:
    """Runs a candidate of a search alone, adds the run to the search's totals, and records the
    board's clock and throttle reasons after it.

    Args:
        chunks, is_patient: as ``least_chunks`` and ``is_patient`` of :func:`run_sustained`.

    Returns:
        The run; None if the candidate fails, which removes it from the search.
    """
    run = run_sustained(
        candidate,
        found.ms(candidate) or 1.0,
        chunks,
        found.timer,
        found.rules,
        found.budget.left_ms(),
        is_patient,
    )
    if isinstance(run, str):
        found.failed_sustained[candidate] = run
        found.sustained_ms.pop(candidate, None)
        if candidate in found.last.survivors:
            found.last.survivors.remove(candidate)
        found.remarks.append(f"{candidate.text} failed when it ran alone")
        return None
    # The clock of a run far from the power limit is not the steady one.
    if run.steady_clock_mhz is not None and not run.is_far:
        found.sustained_clock_mhz[candidate] = run.steady_clock_mhz
    found.extra_gpu_ms += run.gpu_ms
    found.extra_samples += run.calls
    found.throttle_reasons |= dict.fromkeys(found.timer.state().throttle_reasons)
    return run


def run_ms(chunks: int, call_ms: float) -> float:
    """Returns the milliseconds of the shortest run of ``chunks``, each of two calls at least."""
    return chunks * max(_CHUNK_MS, _batches(call_ms) * call_ms)


def _batches(batch_ms: float) -> int:
    """Returns the number of batches in a chunk, at least two for a mean."""
    return max(2, round(_CHUNK_MS / batch_ms))


class SteadyCriterion(StoppingCriterion[Sequence[float]]):
    """The criterion that a sustained run's time is steady, or there is no time for another chunk.

    Args:
        calls_per_chunk: calls in a chunk of 40 ms.
        most_ms: GPU time that no further chunk may exceed.
        is_patient: if False, the first measurement counts as steady.
    """

    def __init__(self, calls_per_chunk: int, most_ms: float, is_patient: bool) -> None:
        self.calls_per_chunk = calls_per_chunk
        self.most_ms = most_ms
        self.is_patient = is_patient
        self.chunks: list[float] = []
        """Milliseconds of a call, chunk by chunk."""

    def add_measurement(self, measurement: Sequence[float]) -> None:
        """Adds further chunks: milliseconds of a call in each."""
        self.chunks += measurement
        gpu_ms = sum(self.chunks) * self.calls_per_chunk
        next_ms = self.chunks[-1] * self.calls_per_chunk
        if not self.is_patient or _is_steady(self.chunks):
            self.reason = Reason.DECIDED
        elif gpu_ms + _CHUNK_MS > _MOST_RUN_MS or gpu_ms + next_ms > self.most_ms:
            self.reason = Reason.LIMIT


def _is_approaching(chunks: Sequence[float]) -> bool:
    """Returns whether the time moved in one direction at the end; oscillation would reverse it."""
    one, two = _changes(chunks)
    return one * two > 0 and abs(two) >= _DRIFT


def _is_steady(chunks: Sequence[float]) -> bool:
    if len(chunks) == 2:
        return abs(chunks[1] / chunks[0] - 1) < _STEADY_AT_ONCE
    if len(chunks) < 3:
        return False
    one, two = _changes(chunks)
    is_one_way = one * two > 0  # an oscillation reverses, a recovery does not
    if is_one_way and len(chunks) <= _AT_ONCE_CHUNKS + 1 and two / one < _SETTLING:
        rest = two * two / (one - two)  # the rest of the geometric series
        is_slow = len(chunks) > _AT_ONCE_CHUNKS and abs(two) >= _ONE_STEP
        return abs(rest) < _STEADY and not is_slow
    return abs(one + two) < (_DRIFT if is_one_way else _STEADY)


def _changes(chunks: Sequence[float]) -> tuple[float, float]:
    """Returns the last two relative changes from chunk to chunk."""
    return chunks[-2] / chunks[-3] - 1, chunks[-1] / chunks[-2] - 1
