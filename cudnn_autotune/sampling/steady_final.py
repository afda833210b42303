"""The steady-state final: sustained runs after a race, and which candidate wins in the long run.

More runs reduce the noise better than longer ones (see ``sustained_run``): times are averaged, and
candidates near the best are measured again, in mirrored order. Differences below a percent remain
uncertain even so; there the race, which is more precise, decides. The score of a candidate is
``log(steady time) + burst_weight * log(time in the race)``, and the race's leader has a small
advantage. The constants are from docs/findings/power-limit.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.sampling.final_rules import FinalCriterion, FinalRules
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.sampling.steady_times import SteadyLog, SteadyTimes
from cudnn_autotune.sampling.sustained_run import SustainedRun, run_ms

# Chunks of 40 ms in a first run: nine of ten runs of 160 ms include a power reading of an H200.
_FIRST_CHUNKS = 4
# A first run favours the leader, whose clock still falls, by this much over contenders, whose
# clocks still rise. Only a candidate that is further behind is eliminated after it.
_FIRST_RUN_BIAS = 0.02
# On a board whose clock settles slowly a first run is less reliable, because the run before it
# still affects the clock. There only a candidate that is this far behind is eliminated.
_SLOW_BOARD_MARGIN = 0.2


class SteadyFinal:
    """The steady-state final of one search.

    Args:
        found: the search, whose last race is over.
        probe: the run of the race's leader, which ended just before.
        contenders: as :func:`contenders.could_win` returns them.
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
        # A run is planned to take this many times as long as by the times of the race, where the
        # clock is higher.
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
        # Bounds of the scores, where some runs are less certain than others.
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
            """Returns the best contenders, and the leader, which stays whatever its first run
            says."""
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
            # A candidate that beats the leader shows that the sustained order differs: others may
            # be still faster.
            to_beat = logs[self._leader][0].value - self._rules.equal
            more = any(first.value < to_beat for (first, *_) in logs.values())
            if len(logs) >= most + more or not self._affords([candidate], _FIRST_CHUNKS):
                break
            self._run(candidate, _FIRST_CHUNKS)

    def _run(self, candidate: Candidate, chunks: int) -> None:
        run = self._found.run_alone(candidate, chunks, self._is_patient)
        if run is None:
            self._times.logs.pop(candidate, None)
        else:
            self._keep(run)

    def _keep(self, run: SustainedRun) -> None:
        log = SteadyLog(math.log(run.steady_ms), run.sigma, len(run.at_limit_ms))
        self._times.logs.setdefault(run.candidate, []).append(log)

    def _forget_probe(self) -> None:
        """Drops the leader's first run, during which the clock still fell, once it has another
        run."""
        of_leader = self._times.logs.get(self._leader, [])
        if len(of_leader) > 1 and not self._is_patient and not self._probe.at_limit_ms:
            del of_leader[0]

    def _affords(self, candidates: Sequence[Candidate], chunks: int) -> bool:
        found = self._found
        wanted = sum(self._slower * run_ms(chunks, found.ms(c) or 1.0) for c in candidates)
        affords = found.budget.affords(wanted)
        self._times.is_out_of_time |= not affords
        return affords
