"""The state of one search: the results of screening, races and sustained runs so far."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field

from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.sampling import ties
from cudnn_autotune.sampling.racing import RaceOutcome, RaceRules, race, rank_by_rough_times
from cudnn_autotune.sampling.screening import SLOW, Screening
from cudnn_autotune.sampling.strategy import Budget
from cudnn_autotune.timers.timer import Timer

# Rough guesses before anything is timed. In the audits cuDNN's first plan was 3 to 11 % slower than
# the best (docs/results/h200.md), and a kernel that is compiled at run time was seldom the best.
_UNTIMED_LOSS = 0.05
_UNSEEN_LOSS = 0.01


@dataclass
class SearchState:
    """The state of one search, from screening to the last sustained run."""

    timer: Timer
    budget: Budget
    rules: RaceRules
    rng: random.Random
    screening: Screening = field(default_factory=Screening)
    races: list[RaceOutcome] = field(default_factory=list)
    sustained_ms: dict[Candidate, float] = field(default_factory=dict)
    sustained_clock_mhz: dict[Candidate, float] = field(default_factory=dict)
    """SM clock at the end of each candidate's last sustained run."""
    failed_sustained: dict[Candidate, str] = field(default_factory=dict)
    """Candidates that failed in a sustained run, with the error."""
    extra_gpu_ms: float = 0.0
    extra_samples: int = 0
    """GPU time and calls of the sustained runs."""
    throttle_reasons: dict[str, None] = field(default_factory=dict)
    """All throttle reasons that the board reported, in the order of their first report."""
    aten_is_cudnn: bool = False
    own_path_plan: Candidate | None = None
    """The candidate that PyTorch would run, if that is one of cuDNN's plans."""
    remarks: list[str] = field(default_factory=list)
    unseen: list[Candidate] = field(default_factory=list)
    """Candidates that are being built, and will be looked at later."""
    waits_for_builds: bool = False
    """Whether the next step of the search waits until they are built."""

    @property
    def is_raced(self) -> bool:
        """Whether a candidate can be chosen."""
        return bool(self.races and self.races[-1].survivors)

    def expected_loss(self) -> float:
        """Returns the leader's expected loss (log) to the fastest."""
        unseen = _UNSEEN_LOSS if self.unseen else 0.0
        if not self.is_raced or not self.last.log_time:
            return _UNTIMED_LOSS + unseen
        return self.last.expected_loss() + unseen

    @property
    def last(self) -> RaceOutcome:
        return self.races[-1]

    @property
    def pytorchs(self) -> str:
        """The text of the candidate that PyTorch would run."""
        return OWN_PATH.text if self.own_path_plan is None else self.own_path_plan.text

    @property
    def leader(self) -> Candidate:
        return self.last.best

    @property
    def choice(self) -> Candidate:
        """The candidate that the last race chooses."""
        return self.equals()[0][0]

    def equals(self) -> tuple[list[Candidate], str]:
        """Returns the survivors of the last race that are as fast as the fastest, the chosen one
        first, and the rule that chose it (``ties.break_ties``)."""
        last = self.last
        tied = last.tied(ties.width(last.error))
        return ties.break_ties({c: last.ms(c) for c in tied}, self.pytorchs)

    @property
    def failed(self) -> dict[Candidate, str]:
        """Candidates that failed after screening, with the error."""
        of_races = {c: why for outcome in self.races for c, why in outcome.failed.items()}
        return of_races | self.failed_sustained

    @property
    def is_judged(self) -> bool:
        """Whether each candidate was screened, and was far slower there or was raced against a
        candidate that still runs. Otherwise no regret bound holds."""
        failed = self.failed
        led = {leader for outcome in self.races for _, leader, _ in outcome.dropped}
        was_held_again = any(not outcome.survivors for outcome in self.races)
        is_raced = self.last.rounds > 0 and not was_held_again
        is_seen = not (self.unseen or self.screening.out_of_budget)
        return is_raced and is_seen and not any(c in failed for c in led)

    def ms(self, candidate: Candidate) -> float | None:
        """Returns a call's time in the candidate's latest race, at the clock of the last race, or
        else its rough time; None if it has neither."""
        for outcome in reversed(self.races):
            if candidate in outcome.log_time:
                return outcome.ms(candidate) * self._slowed_since(outcome)
        return self.screening.known_ms(candidate)

    def half_width(self, candidate: Candidate) -> float:
        """Returns the half width (log) of the differences in its latest race."""
        known = [o.half_width[candidate] for o in self.races if candidate in o.half_width]
        return known[-1] if known else math.inf

    def _slowed_since(self, outcome: RaceOutcome) -> float:
        """Returns the factor by which the candidates of both races were slower in the last one."""
        is_last = outcome is self.last
        return 1.0 if is_last else math.exp(_shift(outcome.log_time, self.last.log_time))

    def raced(self) -> list[Candidate]:
        """Returns all candidates that ran in a race and did not fail, fastest first."""
        failed = self.failed
        known = dict.fromkeys(c for outcome in reversed(self.races) for c in outcome.log_time)
        return sorted((c for c in known if c not in failed), key=lambda c: self.ms(c) or math.inf)

    def timed(self) -> dict[Candidate, float]:
        """Returns the milliseconds of all candidates without a failure, eliminated or not."""
        failed = self.failed
        known = [*self.raced(), *self.screening.rough_ms, *self.screening.eliminated]
        times = {c: self.ms(c) for c in known if c not in failed}
        return {c: ms for c, ms in times.items() if ms is not None}

    def race(
        self, rough_ms: dict[Candidate, float], rules: RaceRules
    ) -> Generator[None, None, None]:
        """Races candidates, given with their rough times, and races again as long as no survivor
        runs. Each step is a round."""
        yield from self._race(rough_ms, rules)
        yield from self.race_again(rules)

    def _race(self, rough_ms: dict[Candidate, float], rules: RaceRules) -> Iterator[None]:
        self.races.append(RaceOutcome(survivors=list(rough_ms), pytorchs=self.pytorchs))
        yield from race(self.last, rough_ms, self.timer, self.budget, rules, self.rng)

    def rank_as_screened(self) -> None:
        """Ranks the candidates by their screening, for a search that ends before a race."""
        rough_ms = self.screening.rough_ms
        if rough_ms and not self.races:
            self.races.append(RaceOutcome(survivors=list(rough_ms)))
            rank_by_rough_times(rough_ms, self.last)
            self.remarks.append("the time allowed one launch of each candidate only")

    def race_again(self, rules: RaceRules) -> Iterator[None]:
        """Races again if all survivors of the last race have failed since. It races the candidates
        that these eliminated and that are near enough to their own best to pass screening."""
        while not self.last.survivors:
            times = self.timed()
            near = {c: ms for c, ms in times.items() if ms <= SLOW * min(times.values())}
            if not near:
                return
            yield from self._race(near, rules)
            self.remarks.append("the leaders failed: the others raced again without them")


def _shift(earlier: Mapping[Candidate, float], later: Mapping[Candidate, float]) -> float:
    """Returns the median increase of the candidates that are in both; 0 if there are none."""
    both = [later[c] - earlier[c] for c in earlier if c in later]
    return statistics.median(both) if both else 0.0
