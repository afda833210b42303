"""A layer alone: as a plain benchmark reads it, and behind a filled queue with its clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from common import numbers
from common.timing import synchronize

from lone.watched import Watch

_BATCH = 10  # calls whose time and clock are read together
_BATCH_MS = 5.0  # of the steady part


def plain(
    call: Callable[[], Any], iterations: Sequence[int], idle_s: float, device: str
) -> list[dict[str, Any]]:
    """What a short script reads: two events around so many calls, from an idle GPU each time.

    With few calls the host's own time counts: the GPU waits for the first ones.
    """
    watch = Watch(device)
    found = []
    for count in iterations:
        synchronize(device)
        time.sleep(idle_s)
        begin_s = time.monotonic()
        begin = watch.mark()
        for _ in range(count):
            call()
        end = watch.mark()
        synchronize(device)
        found.append(
            {
                "iterations": count,
                "mean_ms": numbers.significant(watch.between_ms(begin, end) / count),
                "begin_monotonic_s": begin_s,
                "end_monotonic_s": time.monotonic(),
            }
        )
    return found


def plan(iterations: Sequence[int], call_ms: float, steady_s: float) -> list[int]:
    """Calls of each batch: boundaries at every one of ``iterations``, then a steady part."""
    sizes: list[int] = []
    done = 0
    for count in sorted(set(iterations)):
        while done < count:
            sizes.append(min(_BATCH, count - done))
            done += sizes[-1]
    spent_ms = done * call_ms
    each = max(_BATCH, min(200, math.ceil(_BATCH_MS / call_ms)))
    rest = math.ceil(max(0.0, steady_s * 1e3 - spent_ms) / (each * call_ms))
    return [*sizes, *([each] * max(4, rest))]


def queued(
    source: Any,
    timer: Any,
    candidate: Any,
    iterations: Sequence[int],
    idle_s: float,
    steady_s: float,
) -> dict[str, Any]:
    """One run of a candidate from an idle GPU, the queue always full: no host in the times.

    ``after`` has the time of a call once so many were made and the SM clock of that moment (None
    for stretches under 0.1 ms), ``steady`` those of the last third.
    """
    from cudnn_autotune.timers.timer import Batch

    # Its kernel is loaded, its graphs are captured and its time is known, outside of what counts.
    known = [s.time_ms for s in timer.run([Batch(candidate, n, "hot") for n in (1, 5, 5)])]
    call_ms = known[-1]
    if not math.isfinite(call_ms):
        raise RuntimeError(f"{candidate.text} does not run")
    sizes = plan(iterations, call_ms, steady_s)
    timer.run([Batch(candidate, n, "hot") for n in sorted(set(sizes))])
    source.rest(timer, idle_s)
    begin_s = time.monotonic()
    samples = timer.run([Batch(candidate, n, "hot") for n in sizes])
    end_s = time.monotonic()
    if any(not math.isfinite(s.time_ms) for s in samples):
        raise RuntimeError(next(s.error for s in samples if s.error) or "fails to run")
    after: dict[str, dict[str, float | None]] = {}
    trace: dict[str, list[float | None]] = {"t_ms": [], "time_ms": [], "clock_mhz": []}
    done, now_ms, clock = 0, 0.0, None
    for size, sample in zip(sizes, samples, strict=True):
        done += size
        now_ms += size * sample.time_ms
        clock = sample.clock_mhz
        if done in iterations:
            after[str(done)] = {
                "time_ms": numbers.significant(sample.time_ms),
                "clock_mhz": numbers.significant(clock, 4),
            }
        trace["t_ms"].append(numbers.significant(now_ms, 4))
        trace["time_ms"].append(numbers.significant(sample.time_ms, 4))
        trace["clock_mhz"].append(numbers.significant(clock, 4))
    last = samples[-max(2, len(samples) // 3) :]
    clocks = [s.clock_mhz for s in last if s.clock_mhz is not None]
    return {
        "after": after,
        "steady": {
            "time_ms": numbers.significant(statistics.fmean(s.time_ms for s in last)),
            "clock_mhz": numbers.significant(statistics.fmean(clocks), 4) if clocks else None,
        },
        "trace": trace,
        "begin_monotonic_s": begin_s,
        "end_monotonic_s": end_s,
    }
