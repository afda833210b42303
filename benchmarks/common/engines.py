"""The engines of a problem on this GPU: which could be the fastest, and what each takes."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator, Sequence
from typing import Any

from . import numbers

# A candidate whose single call takes longer is not run again: no layer's best is that slow.
TOO_SLOW_MS = 20.0
_BATCH_MS, _MOST_CALLS = 0.5, 64


@contextlib.contextmanager
def opened(problem: Any) -> Iterator[tuple[Any, Any]]:
    """``(timer, candidates)`` of a ``ConvProblem``, on normal random operands."""
    import torch

    from cudnn_autotune.engines.configs import open_search
    from cudnn_autotune.engines.queried import QueriedCandidates
    from cudnn_autotune.timers.gpu_timer import GpuTimer
    from cudnn_autotune.timers.measuring import operands

    tensors = operands(problem, "cuda:0")
    search = open_search(problem, 0)
    timer = GpuTimer(problem, search, tensors)
    try:
        yield timer, QueriedCandidates(search, problem, tensors)
    finally:
        timer.close()
        gc.collect()
        with contextlib.suppress(RuntimeError):  # the device may be lost
            torch.cuda.empty_cache()


def hopeful(candidates: Any) -> list[Any]:
    """The candidates that could be the fastest.

    Precompiled configs of heuristic mode FALLBACK are left out where others are listed: none comes
    near the best, and one launch may take a second (docs/findings/fallback-mode.md).
    """
    listed = list(candidates.all())
    known = [c for c in listed if c.heuristic_mode in ("A", "B") or c.is_compiled] or listed
    return list(dict.fromkeys([*known, *candidates.beyond()]))


def single_calls(timer: Any, candidates: Sequence[Any]) -> dict[str, float]:
    """Engine text -> milliseconds: the faster of two single calls after a first one, which loads
    the kernel. Candidates that fail, or take more than ``TOO_SLOW_MS``, are left out."""
    from cudnn_autotune.timers.timer import Batch

    alive = list(candidates)
    found: dict[str, float] = {}
    for attempt in range(3):
        samples = timer.run([Batch(c, 1, "hot") for c in alive])
        timed = [
            (c, sample.time_ms)
            for c, sample in zip(alive, samples, strict=True)
            if not sample.error and sample.time_ms <= TOO_SLOW_MS
        ]
        alive = [c for c, _ in timed]
        if attempt:
            found = {c.text: min(ms, found.get(c.text, ms)) for c, ms in timed}
    return found


def take_turns(
    timer: Any, candidates: Sequence[Any], rough_ms: dict[str, float], *, rounds: int = 8
) -> dict[str, float]:
    """Engine text -> milliseconds a call: the geometric mean of the medians with a cold and a hot
    cache. Short batches take turns; each round's random order is followed by its mirror image.

    Args:
        rough_ms: about what each takes, by engine text.
        rounds: a multiple of 4.
    """
    from cudnn_autotune.timers.timer import Batch

    source = random.Random(0)
    order: list[Any] = list(candidates)
    times: dict[tuple[str, str], list[float]] = {}
    for index in range(rounds):
        if index % 2:
            order.reverse()
        else:
            source.shuffle(order)
        cache: Any = "hot" if index // 2 % 2 else "cold"
        calls = [int(min(_MOST_CALLS, max(1, _BATCH_MS / rough_ms[c.text]))) for c in order]
        samples = timer.run([Batch(c, n, cache) for c, n in zip(order, calls, strict=True)])
        for c, sample in zip(order, samples, strict=True):
            if not sample.error:
                times.setdefault((c.text, cache), []).append(sample.time_ms)
    found = {}
    for c in candidates:
        both = [times[c.text, cache] for cache in ("cold", "hot") if (c.text, cache) in times]
        if len(both) == 2:
            found[c.text] = float(f"{numbers.geometric_mean([*map(numbers.median, both)]):.5g}")
    return found


def ranked(timer: Any, candidates: Any, most: int = 12) -> dict[Any, float]:
    """Candidate -> milliseconds a call in bursts, the fastest first: the ``most`` fastest by single
    calls, in turns.

    Raises:
        RuntimeError: no candidate runs.
    """
    runnable = timer.runnable(hopeful(candidates))
    rough_ms = single_calls(timer, runnable)
    leaders = [c for c in runnable if c.text in rough_ms]
    leaders = sorted(leaders, key=lambda c: rough_ms[c.text])[:most]
    times_ms = take_turns(timer, leaders, rough_ms)
    if not times_ms:
        raise RuntimeError("no candidate runs")
    timed = [c for c in leaders if c.text in times_ms]
    return {c: times_ms[c.text] for c in sorted(timed, key=lambda c: times_ms[c.text])}
