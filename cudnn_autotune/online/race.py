"""The race of ``online``: a decision from the times of candidates' turns in the caller's calls."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from cudnn_autotune.core import json_dataclass
from cudnn_autotune.engines.candidate_id import canonical
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling import ties
from cudnn_autotune.sampling.racing import LeadCriterion, RaceRules, Standings
from cudnn_autotune.sampling.statistics import Floats
from cudnn_autotune.timers.stopping_criterion import Reason

# Turns are compared as ratios, to a hundredth of a percent.
_DIGITS = 5


@dataclass(frozen=True)
class KeptTurns:
    """A candidate of a trial."""

    text: str
    times_ms: tuple[float, ...] = ()
    """The milliseconds of its turn in each round, 0 without a turn; empty if it was eliminated."""
    eliminated: str = ""
    """The reason for its elimination; empty if it takes turns."""
    time_ms: float | None = None
    """Milliseconds of a call, if it was eliminated."""
    samples: int = 0
    """The number of its timed turns if it was eliminated."""

    def log_ms(self) -> Floats:
        """Returns the log times of its turns; infinity in a round without."""
        times_ms = np.array(self.times_ms)
        return np.log(times_ms, out=np.full(len(times_ms), math.inf), where=times_ms > 0)

    def measurement(self, candidate: Candidate) -> Measurement:
        """Returns the measurement of the candidate, which was eliminated."""
        return Measurement(candidate, self.time_ms, self.samples, eliminated=self.eliminated)


@dataclass(frozen=True)
class TrialRecord:
    """The candidates of a trial: first the remaining ones, from the fastest to the slowest."""

    candidates: tuple[KeptTurns, ...] = ()
    regret_bound: float = 0.0
    """Largest possible relative lead of a candidate that gave way over the remaining ones."""

    @cached_property
    def by_text(self) -> dict[str, KeptTurns]:
        return {kept.text: kept for kept in self.candidates}

    @property
    def rounds(self) -> int:
        return max((len(kept.times_ms) for kept in self.candidates), default=0)

    def is_out(self, text: str) -> bool:
        """Returns whether the candidate of this text was eliminated."""
        kept = self.by_text.get(text)
        return kept is not None and bool(kept.eliminated)

    def place(self, candidate: Candidate) -> int:
        """Returns the place at which a candidate joins again; new ones join last."""
        places = list(self.by_text)
        return places.index(candidate.text) if candidate.text in places else len(places)

    def to_json(self) -> object:
        return json_dataclass.encode(self, _DIGITS)

    @classmethod
    def from_json(cls, tree: object) -> TrialRecord:
        """Inverts :meth:`to_json`; raises ValueError for another ``tree``."""
        found = json_dataclass.decode(cls, tree)
        kept = (replace(one, text=canonical(one.text)) for one in found.candidates)
        return replace(found, candidates=tuple(kept))


# The constants are from docs/findings/single-calls.md. A candidate is eliminated after two turns
# with this ratio to the best.
_SLOW = 1.5
_LEAST_ROUNDS = 8
# After this many rounds the better of two candidates is taken, decided or not. If more take turns,
# the worse half gives way after the same number of turns of all together. So the number of a
# trial's turns is bounded (sequential halving: Karnin, Koren and Somekh, ICML 2013).
_MOST_ROUNDS = 48
_HALVING_ROUNDS = 6
# The relative number of further rounds, one at least, before the race is judged again: judging
# costs the callers some time of Python's lock, and all looks share the confidence. By simulation a
# tenth does not decide earlier, and a half takes a tenth more turns.
_LOOK_AFTER = 0.35
# Turns of each candidate for a rough order, before any comparison.
_RECENT = 3


_RULES = RaceRules(least_rounds=_LEAST_ROUNDS, most_rounds=_MOST_ROUNDS)


@dataclass(eq=False)
class OnlineRace:
    """A race whose turns are taken elsewhere. Candidates have numbers, in the order of joining.

    A comparison uses the rounds in which all of its candidates had a turn. So a late candidate is
    not compared with others' earlier times, and the limit of rounds begins again. Until it has had
    two turns, the others are compared without it.
    """

    candidates: list[Candidate]
    rules: RaceRules = _RULES
    earlier: TrialRecord = field(default_factory=TrialRecord)
    """The findings of an earlier process, whose rounds count as this race's first."""
    turns: int = 0
    eliminated: dict[int, str] = field(default_factory=dict)
    """The reason for each elimination or failure, by number."""
    failed: set[int] = field(default_factory=set)
    standings: Standings[int] = field(default_factory=Standings)
    _more_rounds: int = 1
    _log_ms: Floats = field(default_factory=lambda: np.full((32, 16), math.inf))
    """Log milliseconds, rounds by candidates, with spare rows and columns; infinite: no turn."""

    def __post_init__(self) -> None:
        self._criterion = LeadCriterion(self.rules)
        self._recent: dict[int, deque[float]] = {}
        self._settled: int | None = None
        self._settled_bound = self.earlier.regret_bound
        self._make_room(self.earlier.rounds, 0)
        joining, self.candidates = self.candidates, []
        self.join(joining)

    @property
    def active(self) -> set[int]:
        """Numbers of the candidates that take turns."""
        return set(self.standings.survivors)

    def join(self, candidates: Sequence[Candidate]) -> None:
        """Adds candidates, which take turns from now on."""
        for number, candidate in enumerate(candidates, len(self.candidates)):
            self.candidates.append(candidate)
            self.standings.survivors.append(number)
            self._make_room(0, number + 1)
            if kept := self.earlier.by_text.get(candidate.text):
                self._log_ms[: len(kept.times_ms), number] = kept.log_ms()
                self.turns += self._samples(number) + kept.samples
                if kept.eliminated:
                    self._drop(number, kept.eliminated)

    def add(self, samples: Iterable[tuple[int, int, float]]) -> None:
        """Records finished turns: ``(candidate's number, round, milliseconds)`` of each."""
        for number, round_, time_ms in samples:
            self.turns += 1
            if time_ms > 0:
                row = self.earlier.rounds + round_
                if row >= len(self._log_ms):
                    self._make_room(row + 1, 0)
                self._log_ms[row, number] = math.log(time_ms)
                self._recent.setdefault(number, deque(maxlen=_RECENT)).append(time_ms)

    def fail(self, number: int, why: str) -> None:
        """Removes a candidate that failed to run."""
        self.failed.add(number)
        self._drop(number, why)

    def judge(self) -> int | None:
        """Eliminates candidates that cannot be the fastest; returns the decision's number, if
        any."""
        standings = self.standings
        if not standings.survivors:
            return None
        self._more_rounds = 1
        self._drop_slow()
        alive = len(standings.survivors)
        compared, shared = self._comparable()
        if len(compared) < min(alive, 2):
            return None
        standings.rounds = len(shared)
        for number, _, _ in standings.judge(self.rules.compare([shared]), compared):
            self.eliminated[number] = f"out after {self._samples(number)} turns"
        if len(compared) < alive:
            return None
        self._halve()
        self._criterion.add_measurement(standings)
        self._more_rounds = self._next_look() - standings.rounds
        return self._tied()[0][0] if self._criterion.is_finished() else None

    def settle(self, chosen: int) -> None:
        """Eliminates all but the winner so far: later candidates are compared with it only."""
        why = f"gave way to {self.candidates[chosen].text}, before others joined"
        self._give_way(chosen, self.active - {chosen}, why)

    def turns_to_next_look(self) -> int:
        """Returns the number of turns until the race is judged again."""
        return self._more_rounds * len(self.standings.survivors)

    def leader(self) -> int | None:
        """Returns the best so far, by the last comparison; by each one's last turns if some have
        not been compared; None before the first turn."""
        log_time, recent = self.standings.log_time, self._recent
        alive = self.standings.survivors
        if all(i in log_time for i in alive if i in recent):
            known = [i for i in alive if i in log_time]
            return min(known, key=log_time.__getitem__, default=None)
        known = [i for i in alive if i in recent]
        return min(known, key=lambda i: statistics.median(recent[i]), default=None)

    def next_best(self) -> int | None:
        """Returns the best running candidate, eliminated or not, for a race without a decision."""
        left = [i for i in range(len(self.candidates)) if i not in self.failed]
        active = self.active
        return min(left, key=lambda i: (i not in active, self._low(i)), default=None)

    def revive(self) -> None:
        """Reinstates the candidates eliminated by a candidate that has failed since."""
        survivors = [i for i in range(len(self.candidates)) if i not in self.failed]
        self.standings.survivors = survivors
        for number in survivors:
            self.eliminated.pop(number, None)

    def record(self) -> TrialRecord:
        """Returns the record by which a later process continues this race."""
        taking = sorted(self.active, key=lambda i: self.standings.log_time.get(i, math.inf))
        log_ms = self._log_ms[np.isfinite(self._log_ms[:, taking]).any(axis=1)]
        times_ms = np.exp(np.where(np.isfinite(log_ms), log_ms, -math.inf))
        kept = [
            KeptTurns(self.candidates[i].text, tuple(times_ms[-self.rules.most_rounds :, i]))
            for i in taking
        ]
        for number in sorted(self.eliminated.keys() - self.failed):
            out = self._measurement(number)
            kept.append(KeptTurns(out.candidate.text, (), out.eliminated, out.time_ms, out.samples))
        joined = {one.text for one in kept}
        kept += [one for one in self.earlier.candidates if one.text not in joined]
        return TrialRecord(tuple(kept), self._settled_bound)

    def selection(
        self,
        chosen: int,
        wall_ms: float = 0.0,
        remarks: Sequence[str] = (),
        budget_ms: float | None = None,
        left_out: Iterable[Candidate] = (),
    ) -> Selection:
        """Returns the selection.

        Args:
            budget_ms: the budget if it left candidates out, so that no regret bound is claimed;
                else None.
            left_out: candidates that did not join, eliminated by an earlier process.
        """
        standings = self.standings
        order, rule = self._tied()
        rest = sorted(
            range(len(self.candidates)), key=lambda i: standings.log_time.get(i, math.inf)
        )
        ranking = list(dict.fromkeys([chosen, *order, *rest]))
        equal = dict.fromkeys([*ranking[: len(order)], *standings.indistinguishable()])
        if self._criterion.reason is Reason.LIMIT:
            remarks = (*remarks, f"undecided after {standings.rounds} rounds: the best so far")
        earlier = [self.earlier.by_text[c.text].measurement(c) for c in left_out]
        return Selection(
            (*(self._measurement(i) for i in ranking), *earlier),
            self.turns + sum(measurement.samples for measurement in earlier),
            Evidence(
                rule=rule,
                tied=tuple(self.candidates[i].text for i in equal),
                regret_bound=self._regret_bound(chosen) if budget_ms is None else None,
                budget_ms=budget_ms,
                confidence=self.rules.confidence,
                gpu_ms=float(np.exp(self._log_ms[np.isfinite(self._log_ms)]).sum()),
                wall_ms=wall_ms,
                remarks=tuple(remarks),
            ),
        )

    def _measurement(self, number: int) -> Measurement:
        candidate, samples = self.candidates[number], self._samples(number)
        why = self.eliminated.get(number, "")
        if self.earlier.is_out(candidate.text) and not samples:
            return self.earlier.by_text[candidate.text].measurement(candidate)
        if number not in self.standings.log_time:
            rough_ms = math.exp(self._low(number)) if samples else None
            return Measurement(candidate, rough_ms, samples, eliminated=why)
        time_ms = self.standings.ms(number)
        low_ms, high_ms = self.standings.interval(number, time_ms)
        return Measurement(candidate, time_ms, samples, low_ms, high_ms, eliminated=why)

    def _regret_bound(self, chosen: int, over: Collection[int] | None = None) -> float:
        """Returns the bound over survivors (or ``over``), and over candidates that gave way."""
        bound, earlier = self.standings.regret_bound(chosen, over), self._settled_bound
        return max(bound, earlier) if chosen == self._settled else (1 + bound) * (1 + earlier) - 1

    def _most_rounds(self, count: int) -> int:
        """Returns the number of rounds until ``count`` candidates are halved, or two decided."""
        return max(_HALVING_ROUNDS, math.ceil(2 * self.rules.most_rounds / max(count, 2)))

    def _halve(self) -> None:
        """Lets the worse half of the candidates give way once all have had enough turns."""
        order = sorted(self.standings.survivors, key=self.standings.log_time.__getitem__)
        left = list(order)
        while len(left) > 2 and self.standings.rounds >= self._most_rounds(len(left)):
            left = left[: (len(left) + 1) // 2]
        gone = set(order) - set(left)
        if gone:
            self._give_way(left[0], gone, "in the worse half after {} turns")

    def _give_way(self, best: int, gone: set[int], why: str) -> None:
        """Eliminates candidates that may be faster than ``best``, and records the possible lead."""
        over = gone | {i for i in self.active if i == self._settled}
        self._settled_bound, self._settled = self._regret_bound(best, over), best
        for number in gone:
            self._drop(number, why.format(self._samples(number)))

    def _next_look(self) -> int:
        """Returns the round in which the race is judged again."""
        standings, rules = self.standings, self.rules
        half_width = standings.half_width[standings.best]
        lead = max(standings.leads(but=standings.best), default=0.0)
        # The half width falls as the square root of the number of rounds rises.
        too_wide = half_width / (half_width - lead + rules.tie_width)
        enough = max(math.ceil(standings.rounds * too_wide**2), rules.least_rounds)
        soon = int((1 + _LOOK_AFTER) * standings.rounds)
        most = self._most_rounds(len(standings.survivors))
        return max(standings.rounds + 1, min(soon, enough, most))

    def _drop(self, number: int, why: str) -> None:
        if number in self.standings.survivors:
            self.standings.survivors.remove(number)
        self.eliminated[number] = why

    def _comparable(self) -> tuple[list[int], Floats]:
        """Returns survivors with turns in two or more common rounds, and these rounds: all
        survivors if possible, else without the latest ones."""
        has_turn = np.isfinite(self._log_ms)
        found = [i for i in self.standings.survivors if has_turn[:, i].sum() >= 2]
        found.sort(key=lambda i: (int(has_turn[:, i].argmax()), i))
        while found:
            shared = self._log_ms[has_turn[:, found].all(axis=1)][:, found]
            if len(shared) >= 2:
                break
            found.pop()
        return found, shared if found else self._log_ms[:0]

    def _drop_slow(self) -> None:
        alive = list(self.standings.survivors)
        has_turn = np.isfinite(self._log_ms[:, alive])
        # Times from before the last one joined may be of another clock.
        since = has_turn.argmax(axis=0).max(initial=0)
        turns, has_turn = self._log_ms[since:, alive], has_turn[since:]
        lows = np.where(has_turn.sum(axis=0) >= 2, turns.min(axis=0), math.inf)
        best = lows.min()
        for number, low in zip(alive, lows, strict=True):
            if math.isfinite(low) and low - best > math.log(_SLOW):
                self._drop(number, f"{math.exp(low - best):.2f} times the best")

    def _samples(self, number: int) -> int:
        return int(np.isfinite(self._log_ms[:, number]).sum())

    def _low(self, number: int) -> float:
        return float(self._log_ms[:, number].min())

    def _make_room(self, rounds: int, candidates: int) -> None:
        """Enlarges the table for this many rounds and candidates, at least to twice its size."""
        sizes = self._log_ms.shape
        lacking = (rounds - sizes[0], candidates - sizes[1])
        if max(lacking) > 0:
            more = [
                (0, max(n, size) if n > 0 else 0) for n, size in zip(lacking, sizes, strict=True)
            ]
            self._log_ms = np.pad(self._log_ms, more, constant_values=math.inf)

    def _tied(self) -> tuple[list[int], str]:
        """Returns the tied candidates in order of preference, and the rule that decided."""
        numbers = {self.candidates[i]: i for i in self.standings.tied(self.rules.tie_width)}
        order, rule = ties.break_ties({c: self.standings.ms(i) for c, i in numbers.items()})
        return [numbers[c] for c in order], rule
