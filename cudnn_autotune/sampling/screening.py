"""The first look at every candidate: does it run, and is it worth timing?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.sampling.budget import Budget
from cudnn_autotune.timers.timer import Batch, Timer

# See docs/findings/loading-kernels.md. A candidate that takes this many times as long as the best
# is out. Under a power cap the fastest loses at most a third of its clock: what is slower than this
# cannot catch up.
SLOW = 1.5
# No disturbance explains this: not looked at twice.
HOPELESS = 3.0
# Absurdly slow at its first, untimed run: not run again. A launch may take longer than it should by
# so much; of an engine's first config, on which the others depend, the host may have been held up.
ABSURD = 5.0
_DISTURBED_MS = 10.0
_HELD_UP_MS = 50.0
# All configs of an engine so far, or two of them in a row, were this much slower than the best: so
# are its others.
ENGINE_SLOW = 5.0


@dataclass
class Screening:
    """Who is in, with a rough time each, and who is out, and why."""

    rough_ms: dict[Candidate, float] = field(default_factory=dict)
    """In the order of screening; one launch each, in milliseconds."""
    eliminated: dict[Candidate, tuple[str, float | None]] = field(default_factory=dict)
    """Why, and the rough time where there is one."""
    out_of_budget: dict[Candidate, None] = field(default_factory=dict)
    """Of those that were cut: who might have got in with more time."""
    gpu_ms: float = 0.0
    samples: int = 0

    @property
    def best_ms(self) -> float:
        return min(self.rough_ms.values(), default=math.inf)

    def eliminate_for_budget(
        self, candidate: Candidate, why: str = "the budget was spent", rough: float | None = None
    ) -> None:
        self.eliminated[candidate] = (why, rough)
        self.out_of_budget[candidate] = None


def screen(
    candidates: Sequence[Candidate],
    timer: Timer,
    budget: Budget,
    before: Screening | None = None,
) -> Screening:
    """One untimed run (it loads the kernel, and shows whether it runs at all), then one timed.

    Args:
        candidates: runnable ones, the most promising first.
        before: a screening to continue: its candidates count as contenders.
    """
    found = before if before is not None else Screening()
    of_engine: dict[int, list[float]] = {}
    for candidate in candidates:
        if found.rough_ms and budget.is_spent():
            found.eliminate_for_budget(candidate)
            continue
        engine = candidate.engine
        siblings = [] if engine is None else of_engine.setdefault(engine, [])
        if _are_slow(siblings, found):
            found.eliminated[candidate] = (
                f"engine {engine} is more than {ENGINE_SLOW:g} times slower",
                None,
            )
            continue
        _look_at(candidate, _DISTURBED_MS if siblings else _HELD_UP_MS, timer, budget, found)
        rough = found.rough_ms.get(candidate, found.eliminated.get(candidate, ("", None))[1])
        if rough is not None:
            siblings.append(rough)
    for candidate in list(found.rough_ms):
        is_hopeless = found.rough_ms[candidate] > HOPELESS * found.best_ms
        is_doubtful = _is_slow(candidate, found) and not is_hopeless
        if is_doubtful and not budget.is_spent():
            _look_again(candidate, timer, found)
            is_doubtful = False
        if _is_slow(candidate, found):
            rough = found.rough_ms.pop(candidate)
            why = f"{rough / found.best_ms:.2f} times the best"
            if is_doubtful:
                why += " in one launch; the budget was spent"
                found.eliminate_for_budget(candidate, why, rough)
            else:
                found.eliminated[candidate] = (why, rough)
    return found


def _are_slow(siblings: Sequence[float], found: Screening) -> bool:
    """Whether an engine's configs so far leave no hope for the next."""
    limit_ms = ENGINE_SLOW * found.best_ms
    are_slow = [rough > limit_ms for rough in siblings]
    return bool(are_slow) and (all(are_slow) or all(are_slow[-2:]))


def _is_slow(candidate: Candidate, found: Screening) -> bool:
    return found.rough_ms[candidate] > SLOW * found.best_ms


def _look_again(candidate: Candidate, timer: Timer, found: Screening) -> None:
    """One launch may have been disturbed: the better of two counts."""
    (sample,) = timer.run([Batch(candidate, 1, "hot")])
    if not sample.error:
        found.samples += 1
        found.gpu_ms += sample.time_ms
        found.rough_ms[candidate] = min(found.rough_ms[candidate], sample.time_ms)


def _look_at(
    candidate: Candidate, allowance_ms: float, timer: Timer, budget: Budget, found: Screening
) -> None:
    once = Batch(candidate, 1, "hot")
    (first,) = timer.run([once])
    if first.error:
        found.eliminated[candidate] = (f"failed: {first.error}", None)
        return
    found.gpu_ms += first.time_ms
    if first.time_ms > ABSURD * found.best_ms + allowance_ms:
        found.eliminated[candidate] = ("absurdly slow at its first run", first.time_ms)
        return
    if found.rough_ms and budget.is_spent():
        found.eliminate_for_budget(candidate)
        return
    (second,) = timer.run([once])
    found.samples += 1
    if second.error:
        found.eliminated[candidate] = (f"failed: {second.error}", None)
        return
    found.gpu_ms += second.time_ms
    found.rough_ms[candidate] = second.time_ms
    limit_ms = ENGINE_SLOW * found.best_ms
    if limit_ms < second.time_ms <= limit_ms + _DISTURBED_MS:
        # Its engine's other configs depend on it.
        _look_again(candidate, timer, found)
