"""The engines of a problem on this GPU, and their times."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def opened(problem: Any) -> Iterator[tuple[Any, Any]]:
    """``(timer, candidates)`` of a ``ConvProblem``, on normal random operands."""
    import torch

    from cudnn_autotune.expert import open_timer

    timer, candidates = open_timer(problem)
    try:
        yield timer, candidates
    finally:
        timer.close()
        gc.collect()
        with contextlib.suppress(RuntimeError):  # the device may be lost
            torch.cuda.empty_cache()


def ranked(timer: Any, candidates: Any) -> dict[Any, float]:
    """Candidate -> milliseconds a call in bursts, the fastest first, as ``race`` times them. Raises
    RuntimeError where no candidate runs."""
    from cudnn_autotune import sampling

    selection = sampling.get("race").select(candidates, timer, sampling.Limits())
    if selection is None:
        raise RuntimeError("no candidate runs")
    # PyTorch's own path is left out where it is one of the others.
    timed = [e for e in selection.ranking if e.time_ms is not None and not e.runs]
    return {e.candidate: e.time_ms for e in sorted(timed, key=lambda e: e.time_ms)}
