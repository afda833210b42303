"""A candidate that runs alone until its time and its clock are steady.

It shares no loop with ``sampling``: raw samples must not inherit a strategy's cuts, or its bugs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.timers.offline.recording_parts import SoloTrace
from cudnn_autotune.timers.timer import Batch, Sample, Timer

CHUNK_MS = 250.0
"""A block is made of runs of about this length."""

_BATCH_MS = 10.0
_LEAST_MS = 600.0
_STEADY = 0.003


def trace(
    timer: Timer, candidate: Candidate, time_ms: float, longest_ms: float
) -> tuple[SoloTrace | None, str]:
    """Batches of some 10 ms, until the last quarter is like the second one within 0.3 %.

    Args:
        time_ms: of a call, about.
        longest_ms: the block ends with the first run that takes it here.

    Returns:
        The trace, None where not even one batch ran; and why the candidate failed, if it did.
    """
    calls = math.ceil(_BATCH_MS / time_ms)
    batches = max(1, round(min(CHUNK_MS, longest_ms) / (calls * time_ms)))
    at_ms: list[float] = []
    samples: list[Sample] = []
    error = ""
    start_ms = timer.elapsed_ms()
    while not error:
        now_ms = timer.elapsed_ms() - start_ms
        for sample in timer.run([Batch(candidate, calls)] * batches):
            if not math.isfinite(sample.time_ms):
                error = sample.error or "failed"
                break
            at_ms.append(now_ms + sample.time_ms * calls / 2)
            now_ms += sample.time_ms * calls
            samples.append(sample)
        if now_ms >= longest_ms or _steady(samples, calls):
            break
    if not samples:
        return None, error
    times = tuple(s.time_ms for s in samples)
    clocks = tuple(s.clock_mhz for s in samples)
    powers = tuple(s.power_w for s in samples)
    return SoloTrace(candidate.text, "cold", calls, tuple(at_ms), times, clocks, powers), error


def _steady(samples: Sequence[Sample], calls: int) -> bool:
    if sum(s.time_ms for s in samples) * calls < _LEAST_MS or len(samples) < 8:
        return False
    quarter = len(samples) // 4
    parts = samples[quarter : 2 * quarter], samples[-quarter:]
    times = [statistics.median(s.time_ms for s in part) for part in parts]
    clocks = [statistics.median(s.clock_mhz or 1.0 for s in part) for part in parts]
    return all(abs(b / a - 1) < _STEADY for a, b in (times, clocks))
