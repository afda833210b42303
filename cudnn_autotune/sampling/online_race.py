"""What ``online`` believes of its candidates' turns: who is out, who leads, when it is decided."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling import ties
from cudnn_autotune.sampling.racing import RaceRules
from cudnn_autotune.sampling.statistics import Floats

# See docs/findings/single-calls.md. After two turns: one is out that took so much longer than the
# best in each of them.
_SLOW = 1.5
# Rounds after which the best so far is taken, decided or not.
_MOST_ROUNDS = 400
_UNDECIDED = f"undecided after {_MOST_ROUNDS} rounds: the best so far"
# Rounds are judged when there are this many more (relative), and one at least: a look costs the
# callers some time of Python's lock, and all looks share the confidence. By simulation a tenth
# decides no earlier, and half takes a tenth more turns.
_LOOK_AFTER = 0.35


@dataclass(eq=False)
class OnlineRace:
    """Turns go in, beliefs come out."""

    candidates: list[Candidate]
    rules: RaceRules = field(default_factory=lambda: RaceRules(least_rounds=8))
    active: set[int] = field(default_factory=set)
    turns: int = 0
    rounds: int = 0
    half_width: float = math.inf
    log_time: dict[int, float] = field(default_factory=dict)
    eliminated: dict[int, str] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    is_undecided: bool = False
    """Whether the rounds are over though nobody is sure to be the fastest."""
    _more_rounds: int = 1
    _log_ms: Floats = field(default_factory=lambda: np.full((32, 16), math.inf))
    """Rounds by candidates, with room for more; infinite where there was no turn."""

    def __post_init__(self) -> None:
        self.active = set(range(len(self.candidates)))
        self._make_room(0, len(self.candidates))

    def join(self, candidates: Sequence[Candidate]) -> None:
        known = len(self.candidates)
        self.candidates += candidates
        self.active |= set(range(known, len(self.candidates)))
        self._make_room(0, len(self.candidates))

    def add(self, samples: Iterable[tuple[int, int, float]]) -> None:
        """``(candidate's number, round, milliseconds)`` of turns that are over."""
        for number, round_, time_ms in samples:
            self.turns += 1
            if time_ms > 0:
                if round_ >= len(self._log_ms):
                    self._make_room(round_ + 1, 0)
                self._log_ms[round_, number] = math.log(time_ms)

    def fail(self, number: int, why: str) -> None:
        """It cannot serve at all."""
        self.failed.add(number)
        self._drop(number, why)

    def judge(self) -> int | None:
        """Drops who cannot be the fastest; the choice's number once there is one."""
        if not self.active:
            return None
        self._more_rounds = 1
        self._drop_slow()
        alive = sorted(self.active)
        turns = self._log_ms[:, alive]
        shared = turns[np.isfinite(turns).all(axis=1)]
        if len(shared) < 2:
            return None
        judged = self.rules.compare([shared])
        self.rounds, self.half_width = len(shared), judged.half_width
        best = judged.log_time[judged.best]
        for i, mu, is_out in zip(alive, judged.log_time, judged.is_out, strict=True):
            self.log_time[i] = float(mu)
            if is_out:
                self._drop(i, f"out after {self._samples(i)} turns")
        leads = {i: best - self.log_time[i] + judged.half_width for i in self.active}
        leads.pop(alive[judged.best], None)
        self._more_rounds = self._next_look(max(leads.values(), default=0.0)) - self.rounds
        is_decided = all(lead < self.rules.tie_width for lead in leads.values())
        self.is_undecided = not is_decided and self.rounds >= _MOST_ROUNDS
        if self.is_undecided or (is_decided and self.rounds >= self.rules.least_rounds):
            return self._chosen()
        return None

    def turns_to_next_look(self) -> int:
        """How many more turns make it worth to judge anew."""
        return self._more_rounds * len(self.active)

    def leader(self) -> int | None:
        """The best so far; None while nothing is known."""
        known = [i for i in self.active if i in self.log_time]
        return min(known, key=self.log_time.__getitem__, default=None)

    def next_best(self) -> int | None:
        """Who serves where nothing can be decided, those that were dropped included."""
        left = [i for i in range(len(self.candidates)) if i not in self.failed]
        return min(left, key=lambda i: (i not in self.active, self._low(i)), default=None)

    def revive(self) -> None:
        """The best has failed: those that it drove out are back."""
        self.active = set(range(len(self.candidates))) - self.failed
        for number in self.active:
            self.eliminated.pop(number, None)

    def selection(
        self,
        chosen: int,
        wall_ms: float = 0.0,
        remarks: Sequence[str] = (),
        budget_ms: float | None = None,
    ) -> Selection:
        """The outcome; ``budget_ms`` where a budget left candidates out, of which nothing is known
        then."""
        best = min(self.log_time[i] for i in self.active)
        order, rule = self._ties_broken()
        unsure = [i for i in self.active if self.log_time[i] - best <= self.half_width]
        others = [best - self.log_time[i] for i in self.active if i != chosen]
        behind = self.log_time[chosen] - best
        bound = behind + max([0.0, *(other + self.half_width for other in others)])
        rest = sorted(range(len(self.candidates)), key=lambda i: self.log_time.get(i, math.inf))
        ranking = list(dict.fromkeys([chosen, *order, *rest]))
        texts = [self.candidates[i].text for i in dict.fromkeys([*ranking[: len(order)], *unsure])]
        return Selection(
            tuple(self._measurement(i) for i in ranking),
            self.turns,
            Evidence(
                rule=rule,
                tied=tuple(texts),
                regret_bound=max(0.0, math.expm1(bound)) if budget_ms is None else None,
                budget_ms=budget_ms,
                confidence=self.rules.confidence,
                gpu_ms=float(np.exp(self._log_ms[np.isfinite(self._log_ms)]).sum()),
                wall_ms=wall_ms,
                remarks=(*remarks, *([_UNDECIDED] if self.is_undecided else [])),
            ),
        )

    def _measurement(self, number: int) -> Measurement:
        samples = self._samples(number)
        if number not in self.log_time:
            rough = math.exp(self._low(number)) if samples else None
            return Measurement(
                self.candidates[number], rough, samples, eliminated=self.eliminated.get(number, "")
            )
        time_ms = math.exp(self.log_time[number])
        spread = math.exp(self.half_width / math.sqrt(2))
        return Measurement(
            self.candidates[number],
            time_ms,
            samples,
            low_ms=time_ms / spread,
            high_ms=time_ms * spread,
            eliminated=self.eliminated.get(number, ""),
        )

    def _next_look(self, lead: float) -> int:
        """The round of it; ``lead``: by how much another may still be faster than the best."""
        # The half width falls as the root of the rounds rises.
        too_wide = self.half_width / (self.half_width - lead + self.rules.tie_width)
        enough = max(math.ceil(self.rounds * too_wide**2), self.rules.least_rounds)
        soon = int((1 + _LOOK_AFTER) * self.rounds)
        return max(self.rounds + 1, min(soon, enough, _MOST_ROUNDS))

    def _drop(self, number: int, why: str) -> None:
        self.active.discard(number)
        self.eliminated[number] = why

    def _drop_slow(self) -> None:
        alive = sorted(self.active)
        turns = self._log_ms[:, alive]
        is_known = np.isfinite(turns).sum(axis=0) >= 2
        lows = np.where(is_known, turns.min(axis=0), math.inf)
        best = lows.min()
        for i, low in zip(alive, lows, strict=True):
            if math.isfinite(low) and low - best > math.log(_SLOW):
                self._drop(i, f"{math.exp(low - best):.2f} times the best")

    def _samples(self, number: int) -> int:
        return int(np.isfinite(self._log_ms[:, number]).sum())

    def _low(self, number: int) -> float:
        return float(self._log_ms[:, number].min())

    def _make_room(self, rounds: int, candidates: int) -> None:
        sizes = self._log_ms.shape
        lacking = (rounds - sizes[0], candidates - sizes[1])
        if max(lacking) > 0:
            more = [
                (0, max(n, size) if n > 0 else 0) for n, size in zip(lacking, sizes, strict=True)
            ]
            self._log_ms = np.pad(self._log_ms, more, constant_values=math.inf)

    def _chosen(self) -> int:
        return self._ties_broken()[0][0]

    def _ties_broken(self) -> tuple[list[int], str]:
        """Those within the tie width of the best, the one to take first, and what decides."""
        best = min(self.log_time[i] for i in self.active)
        tied = [i for i in self.active if self.log_time[i] - best <= self.rules.tie_width]
        numbers = {self.candidates[i]: i for i in tied}
        order, rule = ties.break_ties({c: math.exp(self.log_time[i]) for c, i in numbers.items()})
        return [numbers[c] for c in order], rule
