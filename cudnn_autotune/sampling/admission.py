"""The first look at every candidate: does it run, and is it worth timing?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cudnn_autotune.engines import Candidate
from cudnn_autotune.sampling.budget import Budget
from cudnn_autotune.sampling.timer import Batch, Timer

# A candidate that takes this many times as long as the best is out. Under a power cap the fastest
# loses at most a third of its clock: what is slower than this cannot catch up.
SLOW = 1.5
# No disturbance explains this: not looked at twice.
HOPELESS = 3.0
# Absurdly slow at its first, untimed run: not run again. The allowance is for loading the kernel.
ABSURD = 5.0
_LOADING_MS = 10.0
# One config of an engine was this much slower than the best: so are its others.
ENGINE_SLOW = 5.0


@dataclass
class Admission:
    """Who is in, with a rough time each, and who is out, and why."""

    rough_ms: dict[Candidate, float] = field(default_factory=dict)
    """In the order of admission; one launch each, in milliseconds."""
    cut: dict[Candidate, tuple[str, float | None]] = field(default_factory=dict)
    """Why, and the rough time where there is one."""
    gpu_ms: float = 0.0
    samples: int = 0

    @property
    def best_ms(self) -> float:
        return min(self.rough_ms.values(), default=math.inf)

    @property
    def admitted(self) -> list[Candidate]:
        return list(self.rough_ms)


def admit(
    candidates: Sequence[Candidate],
    timer: Timer,
    budget: Budget,
    before: Admission | None = None,
) -> Admission:
    """One untimed run (it loads the kernel, and shows whether it runs at all), then one timed.

    Args:
        candidates: runnable ones, the most promising first.
        before: an admission to continue: its candidates count as rivals.
    """
    found = before if before is not None else Admission()
    slowest_of_engine: dict[int, float] = {}
    for candidate in candidates:
        if found.rough_ms and budget.is_spent():
            found.cut[candidate] = ("the budget was spent", None)
            continue
        engine = -1 if candidate.engine is None else candidate.engine
        if slowest_of_engine.get(engine, 0.0) > ENGINE_SLOW * found.best_ms:
            found.cut[candidate] = (
                f"engine {engine} is more than {ENGINE_SLOW:g} times slower",
                None,
            )
            continue
        _look_at(candidate, timer, budget, found)
        rough = found.rough_ms.get(candidate, found.cut.get(candidate, ("", None))[1])
        if candidate.engine is not None and rough is not None:
            slowest_of_engine[engine] = max(slowest_of_engine.get(engine, 0.0), rough)
    for candidate in list(found.rough_ms):
        if _is_slow(candidate, found) and not budget.is_spent():
            _look_again(candidate, timer, found)
        if _is_slow(candidate, found):
            rough = found.rough_ms.pop(candidate)
            found.cut[candidate] = (f"{rough / found.best_ms:.2f} times the best", rough)
    return found


def _is_slow(candidate: Candidate, found: Admission) -> bool:
    return found.rough_ms[candidate] > SLOW * found.best_ms


def _look_again(candidate: Candidate, timer: Timer, found: Admission) -> None:
    """One launch may have been disturbed: out is who was slow in two."""
    rough = found.rough_ms[candidate]
    if rough > HOPELESS * found.best_ms:
        return
    (sample,) = timer.run([Batch(candidate, 1, "hot")])
    if not sample.error:
        found.samples += 1
        found.gpu_ms += sample.time_ms
        found.rough_ms[candidate] = min(rough, sample.time_ms)


def _look_at(candidate: Candidate, timer: Timer, budget: Budget, found: Admission) -> None:
    once = Batch(candidate, 1, "hot")
    (first,) = timer.run([once])
    if first.error:
        found.cut[candidate] = (f"failed: {first.error}", None)
        return
    # PyTorch's own path and cuBLAS set themselves up on the host in their first call, while the
    # GPU waits between the two events: that says nothing of the kernel.
    is_setting_up = candidate.engine is None
    found.gpu_ms += 0.0 if is_setting_up else first.time_ms
    if first.time_ms > ABSURD * found.best_ms + _LOADING_MS and not is_setting_up:
        found.cut[candidate] = ("absurdly slow at its first run", first.time_ms)
        return
    if found.rough_ms and budget.is_spent():
        found.cut[candidate] = ("the budget was spent", None)
        return
    (second,) = timer.run([once])
    found.samples += 1
    if second.error:
        found.cut[candidate] = (f"failed: {second.error}", None)
        return
    found.gpu_ms += second.time_ms
    found.rough_ms[candidate] = second.time_ms
