"""The steady-state final: sustained runs after a race, and the winner in the long run.

More runs reduce the noise better than longer ones (see ``run``): times are averaged, and candidates
near the best are measured again, in mirrored order. Differences below a percent remain uncertain;
there the race, which is more precise, decides. The score of a candidate is
``log(steady time) + burst_weight * log(time in the race)``, and the race's leader has a small
advantage. The constants are from docs/findings/power-limit.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.sampling.race import FinalRules
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.sustained.run import (
    FAR_READING_SIGMA,
    RUN_SIGMA,
    SustainedRun,
    run_alone,
    run_ms,
)
from cudnn_autotune.timers.stopping_criterion import Reason, StoppingCriterion

# If the power was not read, the slowest of three runs or more is left out.
_TRIMMED_FROM = 3
_PRIOR_FREEDOM = 4
# Times at the power limit, from any number of runs, differ by this much from times of long runs
# (docs/findings/power-limit.md).
_POWER_ERROR = 0.0065


class SteadyLog(NamedTuple):
    """The logarithm of the steady time by one sustained run."""

    value: float
    sigma: float = RUN_SIGMA
    """Standard deviation of ``value``."""
    readings: int = 0
    """The number of readings of the board's power behind ``value``."""


@dataclass
class SteadyTimes:
    """The sustained runs of the steady-state final."""

    handicaps: dict[Candidate, float] = field(default_factory=dict)
    """The terms added to the log time of each contender: its weighted loss in the race, and the
    advantage that only the race's leader has."""
    logs: dict[Candidate, list[SteadyLog]] = field(default_factory=dict)
    """The successful runs of each candidate."""
    finalists: list[Candidate] = field(default_factory=list)
    is_out_of_time: bool = False
    """Whether the budget excluded a run of the final."""

    @property
    def readings(self) -> int:
        """The number of readings of the board's power behind the times."""
        return sum(run.readings for runs in self.logs.values() for run in runs)

    def sustained_ms(self) -> dict[Candidate, float]:
        return {c: math.exp(self.mean(c)) for c in self.logs}

    def noise(self, *candidates: Candidate) -> float:
        """Returns the part of :meth:`error` that more runs can reduce."""
        scale = self._scale()
        return math.hypot(*(scale / math.sqrt(_weights(self.logs[c]).sum()) for c in candidates))

    def error(self, *candidates: Candidate) -> float:
        """Returns the standard error of the log of one candidate's time, or of the ratio of two."""
        by_power = (_POWER_ERROR for c in candidates if _is_read(self.logs[c]))
        return math.hypot(self.noise(*candidates), *by_power)

    def score(self, candidate: Candidate) -> float:
        """Returns the log time with its handicap: the lowest score wins."""
        return self.mean(candidate) + self.handicaps.get(candidate, 0.0)

    def doubt(self, candidate: Candidate) -> float:
        """Returns the difference of its score's standard error to the smallest one."""
        return self.noise(candidate) - min(self.noise(c) for c in self.logs)

    def best(self) -> Candidate:
        return min(self.finalists, key=self.score)

    def mean(self, candidate: Candidate) -> float:
        """Returns the weighted mean of the log times.

        If the power was not read, the worst of three runs or more is left out, since the candidate
        before it may have lowered its clock. It counts until all finalists have three runs: the
        best of two against the best two of three would be unfair.
        """
        runs = self.logs[candidate]
        others = [self.logs.get(c, ()) for c in self.finalists]
        is_trimmed = len(runs) >= _TRIMMED_FROM and all(
            len(some) >= _TRIMMED_FROM and not _is_read(some) for some in others
        )
        kept = sorted(runs)[:-1] if is_trimmed else runs
        return float(np.average([run.value for run in kept], weights=_weights(kept)))

    def _scale(self) -> float:
        """Returns the ratio of the scatter of repeated runs to their sigmas. Because a few runs
        estimate it poorly, a ratio of 1 counts as four degrees of freedom."""
        squares, freedom = float(_PRIOR_FREEDOM), _PRIOR_FREEDOM
        for runs in self.logs.values():
            values, weights = np.array([run.value for run in runs]), _weights(runs)
            squares += float(weights @ (values - np.average(values, weights=weights)) ** 2)
            freedom += len(runs) - 1
        return math.sqrt(squares / freedom)


def _is_read(runs: Sequence[SteadyLog]) -> bool:
    """Returns whether the power was read in some of the runs, near its limit or several times."""
    return any(run.sigma < FAR_READING_SIGMA for run in runs)


def _weights(runs: Sequence[SteadyLog]) -> npt.NDArray[np.float64]:
    return np.array([run.sigma**-2 for run in runs])


class FinalCriterion(StoppingCriterion[SteadyTimes]):
    """The criterion that the best finalist leads, or no further pass is allowed.

    Args:
        affords_pass: returns whether the budget affords another pass of the finalists.
    """

    def __init__(self, rules: FinalRules, affords_pass: Callable[[], bool]) -> None:
        self._rules = rules
        self._affords_pass = affords_pass
        self._passes = -1

    def add_measurement(self, measurement: SteadyTimes) -> None:
        """Adds the times so far: once before the first further pass, then after each."""
        self._passes += 1
        is_over = not measurement.finalists
        if is_over or (self._passes > 0 and self._is_decided(measurement)):
            self.reason = Reason.DECIDED
        elif self._passes >= self._rules.passes:
            self.reason = Reason.LIMIT
        elif not self._affords_pass():
            self.reason = Reason.BUDGET

    def _is_decided(self, times: SteadyTimes) -> bool:
        best = times.best()
        noise = {c: times.noise(c, best) for c in times.finalists if c != best}
        return all(
            sigma <= self._rules.precise
            or times.score(c) - times.score(best) > self._rules.confident * sigma
            for c, sigma in noise.items()
        )


# Chunks of 40 ms in a first run: nine of ten runs of 160 ms include a power reading of an H200.
_FIRST_CHUNKS = 4
# In a first run the leader, whose clock still falls, has this advantage over contenders, whose
# clocks still rise. Only a candidate that is further behind is eliminated after it.
_FIRST_RUN_BIAS = 0.02
# On a board whose clock settles slowly a first run is less reliable, because the run before it
# still affects the clock. There this distance eliminates a candidate.
_SLOW_BOARD_MARGIN = 0.2


class SteadyFinal:
    """The steady-state final of one search.

    Args:
        found: the search, whose last race is over.
        probe: the run of the race's leader, which ended just before.
        contenders: as of :func:`contenders.could_win`.
    """

    def __init__(
        self,
        found: SearchState,
        probe: SustainedRun,
        contenders: Sequence[Candidate],
        rules: FinalRules,
    ) -> None:
        self._found = found
        self._probe = probe
        self._leader = probe.candidate
        self._contenders = contenders
        self._rules = rules
        leader_ms = found.ms(self._leader) or probe.steady_ms
        self._times = SteadyTimes(
            {
                c: rules.burst_weight * math.log((found.ms(c) or leader_ms) / leader_ms)
                + rules.equal
                for c in contenders
            }
        )
        # A planned run's duration over the one by the times of the race, where the clock is higher.
        self._slower = max(1.0, probe.steady_ms / leader_ms)
        # A board on which the leader's clock settled at once does the same for the contenders.
        self._is_patient = not probe.settled_at_once

    def run(self) -> SteadyTimes:
        """Runs all contenders once, then those near the best again until one leads or the budget
        ends.

        A candidate that fails is removed, and the next one takes its place. If all fail there are
        no finalists.
        """
        times, leader = self._times, self._leader
        self._keep(self._probe)
        self._run_first()
        # Bounds of the scores, if some runs are less certain than others.
        high = {c: times.score(c) + times.doubt(c) for c in times.logs}
        low = {c: times.score(c) - times.doubt(c) for c in times.logs}
        order = sorted((c for c in high if c != leader), key=high.__getitem__)
        bias = _SLOW_BOARD_MARGIN if self._is_patient else _FIRST_RUN_BIAS
        if not order or min(low[c] for c in order) - high[leader] > bias:
            times.finalists = [leader]
            return times
        margin = self._rules.rerun_margin
        if self._is_patient:
            margin = max(margin, _SLOW_BOARD_MARGIN)

        def finalists() -> list[Candidate]:
            """Returns the best contenders, and the leader, which stays even if its first run
            was slow."""
            left = [c for c in order if c in times.logs]
            best = [c for c in left if low[c] - high[left[0]] <= margin]
            return [*best[: self._rules.most_again], *(c for c in [leader] if c in times.logs)]

        times.finalists = finalists()
        chunks = self._rules.again_chunks
        criterion = FinalCriterion(self._rules, lambda: self._affords(times.finalists, chunks))
        criterion.add_measurement(times)
        number = 0
        while not criterion.is_finished():
            turn = times.finalists
            for candidate in turn[::-1] if number % 2 == 0 else turn:
                self._run(candidate, chunks)
            if number == 0:
                self._forget_probe()
            times.finalists = finalists()
            criterion.add_measurement(times)
            number += 1
        return times

    def _run_first(self) -> None:
        pytorchs, logs = self._found.pytorchs, self._times.logs
        most = self._rules.most + any(c.text == pytorchs for c in self._contenders)
        for candidate in self._contenders:
            # If a candidate beats the leader, the sustained order differs: others may be still
            # faster.
            to_beat = logs[self._leader][0].value - self._rules.equal
            more = any(first.value < to_beat for (first, *_) in logs.values())
            if len(logs) >= most + more or not self._affords([candidate], _FIRST_CHUNKS):
                break
            self._run(candidate, _FIRST_CHUNKS)

    def _run(self, candidate: Candidate, chunks: int) -> None:
        run = run_alone(self._found, candidate, chunks, self._is_patient)
        if run is None:
            self._times.logs.pop(candidate, None)
        else:
            self._keep(run)

    def _keep(self, run: SustainedRun) -> None:
        log = SteadyLog(math.log(run.steady_ms), run.sigma, len(run.at_limit_ms))
        self._times.logs.setdefault(run.candidate, []).append(log)

    def _forget_probe(self) -> None:
        """Drops the leader's first run, with a falling clock, once it has another run."""
        of_leader = self._times.logs.get(self._leader, [])
        if len(of_leader) > 1 and not self._is_patient and not self._probe.at_limit_ms:
            del of_leader[0]

    def _affords(self, candidates: Sequence[Candidate], chunks: int) -> bool:
        found = self._found
        wanted = sum(self._slower * run_ms(chunks, found.ms(c) or 1.0) for c in candidates)
        affords = found.budget.affords(wanted)
        self._times.is_out_of_time |= not affords
        return affords
