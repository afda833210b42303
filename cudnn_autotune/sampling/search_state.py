"""What is known of a problem's candidates while they are admitted, raced and run alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from cudnn_autotune.engines.configs import ATEN, Candidate
from cudnn_autotune.sampling.budget import Budget
from cudnn_autotune.sampling.racing import RaceOutcome
from cudnn_autotune.sampling.screening import Screening


@dataclass
class SearchState:
    """Everybody, from the first look to the last sustained run."""

    budget: Budget
    screening: Screening = field(default_factory=Screening)
    races: list[RaceOutcome] = field(default_factory=list)
    sustained_ms: dict[Candidate, float] = field(default_factory=dict)
    sustained_clock_mhz: dict[Candidate, float] = field(default_factory=dict)
    """At the end of each one's last sustained run."""
    failed_alone: dict[Candidate, str] = field(default_factory=dict)
    """Why, of those that failed after the races."""
    extra_gpu_ms: float = 0.0
    extra_samples: int = 0
    throttle_reasons: dict[str, None] = field(default_factory=dict)
    """All that were seen, in their order."""
    aten_is_cudnn: bool = False
    atens_plan: Candidate | None = None
    """What PyTorch would run, where that is one of cuDNN's plans."""
    remarks: list[str] = field(default_factory=list)

    @property
    def last(self) -> RaceOutcome:
        return self.races[-1]

    @property
    def pytorchs(self) -> str:
        """The text of what PyTorch would run."""
        return ATEN.text if self.atens_plan is None else self.atens_plan.text

    @property
    def leader(self) -> Candidate:
        return self.last.best

    @property
    def failed(self) -> dict[Candidate, str]:
        """Why, of those that failed after the first look."""
        of_races = {c: why for outcome in self.races for c, why in outcome.failed.items()}
        return of_races | self.failed_alone

    def fail(self, candidate: Candidate, why: str) -> None:
        """It ran in the races and failed alone."""
        self.failed_alone[candidate] = why
        self.sustained_ms.pop(candidate, None)
        if candidate in self.last.survivors:
            self.last.survivors.remove(candidate)
        self.remarks.append(f"{candidate.text} failed when it ran alone")

    @property
    def is_judged(self) -> bool:
        """Whether every candidate was raced against one that still runs, or seen to be far slower:
        else nothing can be said of how far the fastest is."""
        failed = self.failed
        led = {leader for outcome in self.races for _, leader, _ in outcome.dropped}
        was_held_again = any(not outcome.survivors for outcome in self.races)
        is_raced = self.last.rounds > 0 and not was_held_again
        return is_raced and not self.screening.out_of_budget and not any(c in failed for c in led)

    def ms(self, candidate: Candidate) -> float | None:
        """By the latest race that it ran in, at the clock of the last; else its rough time."""
        for outcome in reversed(self.races):
            if candidate in outcome.log_time:
                return outcome.ms(candidate) * self._slowed_since(outcome)
        rough = self.screening.rough_ms.get(candidate)
        return (
            rough if rough is not None else self.screening.eliminated.get(candidate, ("", None))[1]
        )

    def half_width(self, candidate: Candidate) -> float:
        """Of its difference (log) to others, in the latest race that it ran in."""
        known = [o.half_width[candidate] for o in self.races if candidate in o.half_width]
        return known[-1] if known else math.inf

    def cold_cache_penalty(self, candidate: Candidate) -> float:
        """How much more (log) the mean of both cache states takes than a hot one, beyond what it
        does of the leader, by the latest race that it ran in."""
        for outcome in reversed(self.races):
            own = outcome.cold_cache_penalty
            if candidate in own:
                return own[candidate] + _shift(own, self.last.cold_cache_penalty)
        return 0.0

    def _slowed_since(self, outcome: RaceOutcome) -> float:
        """By how much those that ran in both were slower in the last race than in ``outcome``."""
        return (
            1.0 if outcome is self.last else math.exp(_shift(outcome.log_time, self.last.log_time))
        )

    def raced(self) -> list[Candidate]:
        """All that ran in a race and did not fail, fastest first."""
        failed = self.failed
        known = dict.fromkeys(c for outcome in reversed(self.races) for c in outcome.log_time)
        return sorted((c for c in known if c not in failed), key=lambda c: self.ms(c) or math.inf)

    def timed(self) -> dict[Candidate, float]:
        """Milliseconds of all that ran at all and did not fail, the admitted and the cut alike."""
        failed = self.failed
        known = [*self.raced(), *self.screening.rough_ms, *self.screening.eliminated]
        times = {c: self.ms(c) for c in known if c not in failed}
        return {c: ms for c, ms in times.items() if ms is not None}


def _shift(earlier: Mapping[Candidate, float], later: Mapping[Candidate, float]) -> float:
    """By how much those that are in both grew, in the median; 0 where nobody is."""
    both = [later[c] - earlier[c] for c in earlier if c in later]
    return statistics.median(both) if both else 0.0
