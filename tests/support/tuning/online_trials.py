"""Races and trials of ``online`` whose calls are made up: candidates of known times take turns."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.online.race import OnlineRace, TrialRecord
from cudnn_autotune.online.tuner import Prepared, Trial
from support.simulation import candidate
from support.tuning.made_up_plans import plan_of

NOISE = 0.01
MOST_ROUNDS = 450


class Calls:
    """Turns of candidates of known times, in rounds, as csrc/conv/online_trial.cpp gives them."""

    def __init__(self, race: OnlineRace, times_ms: Sequence[float], seed: int = 0) -> None:
        self.race = race
        self.times_ms = list(times_ms)
        self.rounds = 0
        self._random = random.Random(seed)

    def round(self, disturbance: float = 0.0, noise: float = NOISE) -> None:
        order = sorted(self.race.active)
        self._random.shuffle(order)
        self.race.add(
            (i, self.rounds, self.times_ms[i] * math.exp(disturbance + self._noise(noise)))
            for i in order
        )
        self.rounds += 1

    def decide(self, disturbed: Callable[[], float] = lambda: 0.0, noise: float = NOISE) -> int:
        for _ in range(MOST_ROUNDS):
            self.round(disturbed(), noise)
            chosen = self.race.judge()
            if chosen is not None:
                return chosen
        raise AssertionError(f"undecided after {MOST_ROUNDS} rounds")

    def _noise(self, sigma: float) -> float:
        return self._random.gauss(0, sigma)


def race_of(count: int) -> OnlineRace:
    return OnlineRace([candidate(f"c{i}", i) for i in range(count)])


class Committed:
    """Collects what is decided."""

    is_wanted = True
    chosen_elsewhere: str | None = None

    def __init__(self) -> None:
        self.selections: list[Selection] = []
        self.kept: list[TrialRecord | None] = []

    def commit(self, selection: Selection) -> bool:
        self.selections.append(selection)
        return False

    def keep(self, record: TrialRecord | None) -> None:
        self.kept.append(record)


FIRST = candidate("eng0:")


class Undecided:
    """A real trial without calls; tests do to its schedule what calls do."""

    def __init__(self, first: Candidate = FIRST, earlier: TrialRecord | None = None) -> None:
        self.committer, self.prepared = Committed(), Prepared()
        self.native = _C.OnlineTrial(plan_of(first.text), lambda x, w, y: (None, 0))
        self.schedule = self.native.schedule
        self.trial = Trial(
            self.schedule, first, self.committer, self.prepared, earlier or TrialRecord()
        )

    def join(self, *candidates: Candidate) -> None:
        for one in candidates:
            self.prepared.joining.append(one)
            self.native.join(plan_of(one.text))

    def turns(self, count: int, times_ms: Sequence[float]) -> list[int]:
        """Who had one; the calls in between are the leader's."""
        random_ = random.Random(0)
        ran = []
        for _ in range(count):
            (turn,) = filter(None, (self.schedule.take_turn(), self.schedule.take_turn()))
            implementation, round_ = turn
            ran.append(implementation)
            noise = math.exp(random_.gauss(0, 0.004))
            self.schedule.report(implementation, round_, times_ms[implementation] * noise)
        return ran
