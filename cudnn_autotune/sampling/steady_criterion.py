"""Decides when a candidate has reached its steady time in a sustained run."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_autotune.timers.stopping_criterion import Reason, StoppingCriterion

# The constants are from docs/findings/power-limit.md. A run is steady once its last chunk and the
# one two before it differ by less than the power controller's oscillation explains.
_STEADY = 0.015
_DRIFT = 0.007
_STEADY_AT_ONCE = 0.004
# Before that, it counts as steady, too, if a geometric extrapolation changes less than _STEADY.
_SETTLING = 0.5
# A controller that moves the clock in one step shows about the steady time in the third chunk.
AT_ONCE_CHUNKS = 3
# The fourth chunk is then within this of the third (16 layers on an H200: 1.6 % at most). Where it
# is not, the clock falls slowly, and extrapolating from a few chunks is not reliable.
_ONE_STEP = 0.02
CHUNK_MS = 40.0
_MOST_RUN_MS = 1000.0


class SteadyCriterion(StoppingCriterion[Sequence[float]]):
    """Stops a sustained run once its time is steady, or when there is no time for another chunk.

    Args:
        calls_per_chunk: calls in a chunk of :data:`CHUNK_MS`.
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
        """Takes further chunks into account: milliseconds of a call in each."""
        self.chunks += measurement
        gpu_ms = sum(self.chunks) * self.calls_per_chunk
        next_ms = self.chunks[-1] * self.calls_per_chunk
        if not self.is_patient or _is_steady(self.chunks):
            self.reason = Reason.DECIDED
        elif gpu_ms + CHUNK_MS > _MOST_RUN_MS or gpu_ms + next_ms > self.most_ms:
            self.reason = Reason.LIMIT


def is_approaching(chunks: Sequence[float]) -> bool:
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
    if is_one_way and len(chunks) <= AT_ONCE_CHUNKS + 1 and two / one < _SETTLING:
        rest = two * two / (one - two)  # of the geometric series
        is_slow = len(chunks) > AT_ONCE_CHUNKS and abs(two) >= _ONE_STEP
        return abs(rest) < _STEADY and not is_slow
    return abs(one + two) < (_DRIFT if is_one_way else _STEADY)


def _changes(chunks: Sequence[float]) -> tuple[float, float]:
    """Returns the last two relative changes from chunk to chunk."""
    return chunks[-2] / chunks[-3] - 1, chunks[-1] / chunks[-2] - 1
