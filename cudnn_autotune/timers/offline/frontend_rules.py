"""The rules of ``cudnn_frontend::time_sorted_plan``, for timers without a GPU.

They are those of cudnn-frontend 1.28, ``cudnn_frontend_find_plan.h``; ``gpu_timer`` calls the
original.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.selection import Measurement, Selection

_MOST_SAMPLES = 100
_IMPROVEMENT = 0.95

Launch = Callable[[Candidate], tuple[float, bool]]
"""Launches a candidate and waits; returns the milliseconds between its events, and whether it
ran."""


def find(technique: str, candidates: Sequence[Candidate], limit: int, launch: Launch) -> Selection:
    """Times ``candidates`` one after the other and sorts them, as cuDNN's own search does.

    Each has one untimed launch; one that fails there is left out. ``till_stable`` stops at the
    first sample that is not at least 5 % faster than the best before it. The status of a timed
    launch is ignored, and of candidates with equal times only the first is kept (a ``std::set``
    ordered by time).

    Args:
        technique: ``sample_once``, ``median_of_three`` or ``till_stable``.
        limit: ends the search after so many candidates have run; 0: never.
    """
    by_time: dict[float, Measurement] = {}
    total_samples = ran = 0
    for candidate in candidates:
        if not launch(candidate)[1]:
            continue
        ran += 1
        time_ms, samples = _timed(technique, candidate, launch)
        total_samples += samples
        by_time.setdefault(time_ms, Measurement(candidate, time_ms, samples))
        if limit and ran >= limit:
            break
    return Selection(tuple(by_time[t] for t in sorted(by_time)), total_samples)


def _timed(technique: str, candidate: Candidate, launch: Launch) -> tuple[float, int]:
    if technique == "sample_once":
        return launch(candidate)[0], 1
    if technique == "median_of_three":
        return sorted(launch(candidate)[0] for _ in range(3))[1], 3
    best = launch(candidate)[0]
    for samples in range(2, _MOST_SAMPLES + 1):
        time_ms = launch(candidate)[0]
        improved = time_ms < _IMPROVEMENT * best
        best = min(best, time_ms)
        if not improved:
            return best, samples
    return best, _MOST_SAMPLES
