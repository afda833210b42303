"""``online``: no long stall; candidates take turns in the caller's own calls.

The heuristics' first plan serves the first call. In each of the next ones a candidate is built and
checked on the call's own tensors, some milliseconds for which the call waits. And every call runs
the candidate whose turn it is, between two events that nobody waits for, until one is the fastest
or until it no longer matters. It alone sees the true cache, power and tenants. Meanwhile
consecutive calls may differ in the last bits; under deterministic settings the first plan stays,
and while a stream is being captured the leader so far runs.

Here is what it believes; ``online_tuner`` and ``online_calls.OnlineChores`` carry it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cudnn_autotune.engines import ATEN, Candidate
from cudnn_autotune.sampling import ties
from cudnn_autotune.sampling.heuristic import Heuristic
from cudnn_autotune.sampling.racing import RaceRules
from cudnn_autotune.sampling.selection import Evidence, Selection, Timed
from cudnn_autotune.sampling.strategy import Candidates, Limits
from cudnn_autotune.sampling.timer import Batch, Timer

# After two turns: one is out that took so much longer than the best in each of them.
_SLOW = 1.5
# Rounds after which the best so far is taken, decided or not.
_MOST_ROUNDS = 200


def offered(candidates: Candidates, limit: int = 0) -> list[Candidate]:
    """Who takes part: what is built quickly, of heuristic mode A and of what no heuristic lists.

    Plans are built in the caller's calls. Engines that cuDNN compiles at run time would stall one
    for some 0.3 s each: they stay out, and other modes find a faster one where it is one of them.
    So do modes B and FALLBACK: they hold candidates that would stall the caller for a second, and
    hardly ever a winner. ``limit`` is the most of cuDNN's that are offered, 0: all.
    """
    beyond = [c for c in candidates.beyond() if c != ATEN or not candidates.aten_uses_cudnn]
    all_of_them = [*candidates.of_mode("A"), *beyond]
    engines = {c.text: c for c in all_of_them if c.engine is not None and not c.is_compiled}
    others = [c for c in all_of_them if c.engine is None]
    return [*list(engines.values())[: limit or None], *others]


@dataclass
class OnlineRace:
    """Turns go in, beliefs come out."""

    candidates: list[Candidate]
    rules: RaceRules = field(default_factory=lambda: RaceRules(least_rounds=8))
    active: set[int] = field(default_factory=set)
    turns: int = 0
    rounds: int = 0
    half_width: float = math.inf
    mu: dict[int, float] = field(default_factory=dict)
    cut: dict[int, str] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    _times: dict[int, dict[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.active = set(range(len(self.candidates)))

    def join(self, candidates: Sequence[Candidate]) -> None:
        known = len(self.candidates)
        self.candidates += candidates
        self.active |= set(range(known, len(self.candidates)))

    def add(self, samples: Iterable[tuple[int, int, float]]) -> None:
        """``(candidate's number, round, milliseconds)`` of turns that are over."""
        for number, round_, time_ms in samples:
            self.turns += 1
            if time_ms > 0:
                self._times.setdefault(number, {})[round_] = math.log(time_ms)

    def fail(self, number: int, why: str) -> None:
        """It cannot serve at all."""
        self.failed.add(number)
        self._drop(number, why)

    def judge(self) -> int | None:
        """Drops who cannot be the fastest; the choice's number once there is one."""
        if not self.active:
            return None
        self._drop_slow()
        alive = sorted(self.active)
        shared = self._shared_rounds(alive)
        if len(shared) < 2:
            return None
        judged = self.rules.standing(
            [np.array([[self._times[i][r] for i in alive] for r in shared])]
        )
        self.rounds, self.half_width = len(shared), judged.half_width
        best = judged.mu[judged.best]
        for i, mu, is_out in zip(alive, judged.mu, judged.is_out, strict=True):
            self.mu[i] = float(mu)
            if is_out:
                self._drop(i, f"out after {len(self._times[i])} turns")
        leads = {i: best - self.mu[i] + judged.half_width for i in self.active}
        leads.pop(alive[judged.best], None)
        is_decided = all(lead < self.rules.tie_width for lead in leads.values())
        if (is_decided and len(shared) >= self.rules.least_rounds) or len(shared) >= _MOST_ROUNDS:
            return self._chosen()
        return None

    def leader(self) -> int | None:
        """The best so far; None while nothing is known."""
        known = [i for i in self.active if i in self.mu]
        return min(known, key=self.mu.__getitem__, default=None)

    def next_best(self) -> int | None:
        """Who serves where nothing can be decided, those that were dropped included."""
        left = [i for i in range(len(self.candidates)) if i not in self.failed]
        lows = {i: min(times.values()) for i, times in self._times.items() if times}
        return min(left, key=lambda i: (i not in self.active, lows.get(i, math.inf)), default=None)

    def revive(self) -> None:
        """The best has failed: those that it drove out are back."""
        self.active = set(range(len(self.candidates))) - self.failed
        for number in self.active:
            self.cut.pop(number, None)

    def selection(
        self, chosen: int, wall_ms: float = 0.0, remarks: Sequence[str] = ()
    ) -> Selection:
        best = min(self.mu[i] for i in self.active)
        tied = [i for i in self.active if self.mu[i] - best <= self.rules.tie_width]
        unsure = [i for i in self.active if self.mu[i] - best <= self.half_width]
        others = [best - self.mu[i] for i in self.active if i != chosen]
        behind = self.mu[chosen] - best
        bound = behind + max([0.0, *(other + self.half_width for other in others)])
        order = ties.order([self.candidates[i] for i in tied])
        by_text = {c.text: i for i, c in enumerate(self.candidates)}
        rest = sorted(
            (i for i in range(len(self.candidates)) if i not in tied),
            key=lambda i: self.mu.get(i, math.inf),
        )
        ranking = [chosen, *(i for c in order if (i := by_text[c.text]) != chosen), *rest]
        ranking = list(dict.fromkeys(ranking))
        texts = [self.candidates[i].text for i in dict.fromkeys([*ranking[: len(tied)], *unsure])]
        return Selection(
            tuple(self._timed(i) for i in ranking),
            self.turns,
            Evidence(
                rule=ties.rule([self.candidates[i] for i in tied]),
                tied=tuple(texts),
                regret_bound=max(0.0, math.expm1(bound)),
                confidence=self.rules.confidence,
                gpu_ms=sum(math.exp(t) for times in self._times.values() for t in times.values()),
                wall_ms=wall_ms,
                remarks=tuple(remarks),
            ),
        )

    def _timed(self, number: int) -> Timed:
        times = self._times.get(number, {})
        if number not in self.mu:
            rough = math.exp(min(times.values())) if times else None
            return Timed(self.candidates[number], rough, len(times), cut=self.cut.get(number, ""))
        time_ms = math.exp(self.mu[number])
        spread = math.exp(self.half_width / math.sqrt(2))
        return Timed(
            self.candidates[number],
            time_ms,
            len(times),
            low_ms=time_ms / spread,
            high_ms=time_ms * spread,
            cut=self.cut.get(number, ""),
        )

    def _drop(self, number: int, why: str) -> None:
        self.active.discard(number)
        self.cut[number] = why

    def _drop_slow(self) -> None:
        lows = {i: min(t.values()) for i in self.active if len(t := self._times.get(i, {})) >= 2}
        if not lows:
            return
        best = min(lows.values())
        for i, low in lows.items():
            if low - best > math.log(_SLOW):
                self._drop(i, f"{math.exp(low - best):.2f} times the best")

    def _shared_rounds(self, alive: Sequence[int]) -> list[int]:
        if any(i not in self._times for i in alive):
            return []
        shared = set(self._times[alive[0]])
        for i in alive[1:]:
            shared &= set(self._times[i])
        return sorted(shared)

    def _chosen(self) -> int:
        best = min(self.mu[i] for i in self.active)
        tied = [i for i in self.active if self.mu[i] - best <= self.rules.tie_width]
        first = ties.order([self.candidates[i] for i in tied])[0]
        return self.candidates.index(first)


@dataclass(frozen=True)
class Online:
    """The mode. Its :meth:`select` is for audits: there the calls are those of the timer."""

    name: str = "online"

    def first(self, candidates: Candidates, timer: Timer) -> Selection | None:
        """What serves the first call."""
        return Heuristic().select(candidates, timer, Limits())

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        first = self.first(candidates, timer)
        if first is None:
            return None
        served = first.winner.candidate
        wanted = [c for c in offered(candidates, limits.benchmark_limit) if c.text != served.text]
        race = OnlineRace([served])
        race.join(timer.runnable(wanted))
        for i in sorted(race.active):  # each one's first call loads its kernel, and does not count
            if error := timer.run([Batch(race.candidates[i], 1, "hot")])[0].error:
                race.fail(i, f"failed: {error}")
        chosen: int | None = None
        round_ = 0
        while chosen is None and race.active:
            order = sorted(race.active)
            samples = timer.run([Batch(race.candidates[i], 1, "hot") for i in order])
            for i, sample in zip(order, samples, strict=True):
                if sample.error:
                    race.fail(i, f"failed: {sample.error}")
                else:
                    race.add([(i, round_, sample.time_ms)])
            round_ += 1
            chosen = race.judge()
            if not race.active:
                race.revive()
        return None if chosen is None else race.selection(chosen, timer.elapsed_ms())
