"""Screening: one untimed and one timed launch of each candidate, which find those worth a race.

The constants are from docs/findings/loading-kernels.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.sampling.strategy import Budget
from cudnn_autotune.timers.timer import Batch, Timer

# A candidate with this ratio to the best time is eliminated. Under a power cap the fastest loses at
# most a third of its clock, so a slower candidate cannot catch up.
SLOW = 1.5
# No disturbance explains this ratio, so such a candidate is not timed a second time.
_HOPELESS = 3.0
# A candidate with this ratio in its first, untimed run is not run again. A disturbed launch may
# also take some milliseconds more (_DISTURBED_MS). The operating system may delay the host for
# longer: an engine's first config, on which the others depend, gets a second run even then.
_ABSURD = 5.0
_DISTURBED_MS = 10.0
_HELD_UP_MS = 50.0
# If all configs of an engine so far, or two in a row, have this ratio to the best, its others are
# left out.
_ENGINE_SLOW = 5.0


@dataclass
class Screening:
    """The outcome of a screening: the candidates that may race, and those that are eliminated."""

    rough_ms: dict[Candidate, float] = field(default_factory=dict)
    """Milliseconds of one launch of each candidate that passed, in the order of screening."""
    eliminated: dict[Candidate, tuple[str, float | None]] = field(default_factory=dict)
    """Each other candidate's reason for elimination, and its rough time if it has one."""
    out_of_budget: dict[Candidate, None] = field(default_factory=dict)
    """The eliminated candidates that might have passed with more time."""
    gpu_ms: float = 0.0
    samples: int = 0

    @property
    def best_ms(self) -> float:
        return min(self.rough_ms.values(), default=math.inf)

    def known_ms(self, candidate: Candidate) -> float | None:
        """Returns the rough time of a candidate, whether it passed or not."""
        if candidate in self.rough_ms:
            return self.rough_ms[candidate]
        return self.eliminated.get(candidate, ("", None))[1]

    def eliminate(self, candidates: Sequence[Candidate], why: str) -> None:
        for candidate in candidates:
            self.eliminated[candidate] = (why, None)

    def eliminate_for_budget(
        self, candidate: Candidate, why: str = "the budget was spent", rough: float | None = None
    ) -> None:
        self.eliminated[candidate] = (why, rough)
        self.out_of_budget[candidate] = None


def screen(candidates: Sequence[Candidate], timer: Timer, budget: Budget, found: Screening) -> None:
    """Runs each candidate once untimed, which loads its kernel, and once timed.

    Args:
        candidates: runnable candidates, the most promising first.
        found: the screening so far, which is continued.
    """
    of_engine: dict[str, list[float]] = {}
    for candidate in candidates:
        if found.rough_ms and budget.is_spent():
            found.eliminate_for_budget(candidate)
            continue
        engine = candidate.engine_name
        siblings = of_engine.setdefault(engine, [])
        if _are_slow(siblings, found):
            why = f"{engine} is more than {_ENGINE_SLOW:g} times slower"
            found.eliminate([candidate], why)
            continue
        _look_at(candidate, _DISTURBED_MS if siblings else _HELD_UP_MS, timer, budget, found)
        rough = found.known_ms(candidate)
        if rough is not None:
            siblings.append(rough)
    for candidate in list(found.rough_ms):
        is_hopeless = found.rough_ms[candidate] > _HOPELESS * found.best_ms
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


def _are_slow(siblings: Sequence[float], found: Screening) -> bool:
    """Returns whether an engine's configs so far were too slow to try the next one."""
    limit_ms = _ENGINE_SLOW * found.best_ms
    are_slow = [rough > limit_ms for rough in siblings]
    return bool(are_slow) and (all(are_slow) or all(are_slow[-2:]))


def _is_slow(candidate: Candidate, found: Screening) -> bool:
    return found.rough_ms[candidate] > SLOW * found.best_ms


def _look_again(candidate: Candidate, timer: Timer, found: Screening) -> None:
    """Runs a candidate once more, since one launch may have been disturbed; the better counts."""
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
        found.eliminate([candidate], f"failed: {first.error}")
        return
    found.gpu_ms += first.time_ms
    if first.time_ms > _ABSURD * found.best_ms + allowance_ms:
        found.eliminated[candidate] = ("absurdly slow at its first run", first.time_ms)
        return
    if found.rough_ms and budget.is_spent():
        found.eliminate_for_budget(candidate)
        return
    (second,) = timer.run([once])
    found.samples += 1
    if second.error:
        found.eliminate([candidate], f"failed: {second.error}")
        return
    found.gpu_ms += second.time_ms
    found.rough_ms[candidate] = second.time_ms
    limit_ms = _ENGINE_SLOW * found.best_ms
    if limit_ms < second.time_ms <= limit_ms + _DISTURBED_MS:
        # The engine's other configs depend on it.
        _look_again(candidate, timer, found)
