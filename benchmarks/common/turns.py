"""Candidates against one another: single calls, and short batches that take turns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from . import numbers

# A single call that takes longer is not looked at again: no layer's best is that slow.
TOO_SLOW_MS = 20.0
BATCH_MS, MOST_CALLS = 0.5, 64


def single_calls(timer: Any, candidates: Sequence[Any]) -> dict[str, float]:
    """Milliseconds, by text: the faster of two single calls after a first one that loads the
    kernel; not of those that fail, or take more than ``TOO_SLOW_MS``."""
    from cudnn_autotune.timers.timer import Batch

    alive = list(candidates)
    found: dict[str, float] = {}
    for attempt in range(3):
        if not alive:
            break
        samples = timer.run([Batch(c, 1, "hot") for c in alive])
        pairs = [
            (c, s.time_ms)
            for c, s in zip(alive, samples, strict=True)
            if not s.error and s.time_ms <= TOO_SLOW_MS
        ]
        alive = [c for c, _ in pairs]
        if attempt:
            found = {c.text: min(ms, found.get(c.text, ms)) for c, ms in pairs}
    return found


def take_turns(
    timer: Any,
    candidates: Sequence[Any],
    rough: dict[str, float],
    *,
    rounds: int = 8,
    seed: int = 0,
) -> dict[str, float]:
    """Milliseconds a call by text, the geometric mean of a cold and a hot cache.

    Rounds of short batches, each order followed by its mirror image, cold and hot in turn.

    Args:
        rough: about what each takes, by text.
        rounds: a multiple of 4.
    """
    from cudnn_autotune.timers.timer import Batch

    source = random.Random(seed)
    order: list[Any] = list(candidates)
    times: dict[tuple[str, str], list[float]] = {}
    for index in range(rounds):
        if index % 2:
            order.reverse()
        else:
            source.shuffle(order)
        cache: Any = "hot" if index // 2 % 2 else "cold"
        calls = [int(min(MOST_CALLS, max(1, BATCH_MS / rough[c.text]))) for c in order]
        batches = [Batch(c, n, cache) for c, n in zip(order, calls, strict=True)]
        for c, sample in zip(order, timer.run(batches), strict=True):
            if not sample.error:
                times.setdefault((c.text, cache), []).append(sample.time_ms)
    found = {}
    for c in candidates:
        if (c.text, "cold") in times and (c.text, "hot") in times:
            medians = [numbers.median(times[c.text, cache]) for cache in ("cold", "hot")]
            found[c.text] = float(f"{numbers.geometric_mean(medians):.5g}")
    return found
