"""The whole field of a problem's candidates, admitted and raced: what race, sustained and auto
have in common."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cudnn_autotune.engines import ATEN, Candidate
from cudnn_autotune.sampling import ties
from cudnn_autotune.sampling.admission import Admission, admit
from cudnn_autotune.sampling.budget import Budget
from cudnn_autotune.sampling.racing import Outcome, RaceRules, race
from cudnn_autotune.sampling.selection import Evidence, Selection, Timed
from cudnn_autotune.sampling.strategy import Candidates, Limits
from cudnn_autotune.sampling.timer import Timer

# The first of heuristic mode B must come so near to the best of mode A for the rest of it to be
# looked at: further down it lists engines that take hundreds of times as long.
_FIRST_OF_B = 4
_NEAR = 1.05
# A run-time-compiled config takes some 0.3 s of a core; they are built side by side.
_COMPILING_MS = 600.0
# How many of the first race meet those that were still being compiled.
_FINALISTS = 6


@dataclass
class Field:
    """What is known of the candidates after the race."""

    admission: Admission = field(default_factory=Admission)
    races: list[Outcome] = field(default_factory=list)
    sustained_ms: dict[Candidate, float] = field(default_factory=dict)
    extra_gpu_ms: float = 0.0
    extra_samples: int = 0
    throttle_reasons: dict[str, None] = field(default_factory=dict)
    """All that were seen, in their order."""
    aten_is_cudnn: bool = False
    atens_plan: Candidate | None = None
    """What PyTorch would run, where that is one of cuDNN's plans."""
    remarks: list[str] = field(default_factory=list)

    @property
    def last(self) -> Outcome:
        return self.races[-1]

    @property
    def leader(self) -> Candidate:
        return self.last.best

    def ms(self, candidate: Candidate) -> float | None:
        """By the latest race that it ran in, at the clock of the last; else its rough time."""
        for outcome in reversed(self.races):
            if candidate in outcome.mu:
                return outcome.ms(candidate) * self._slowed_since(outcome)
        rough = self.admission.rough_ms.get(candidate)
        return rough if rough is not None else self.admission.cut.get(candidate, ("", None))[1]

    def _slowed_since(self, outcome: Outcome) -> float:
        """By how much those that ran in both were slower in the last race than in ``outcome``."""
        if outcome is self.last:
            return 1.0
        both = [self.last.mu[c] - outcome.mu[c] for c in self.last.mu if c in outcome.mu]
        return math.exp(statistics.median(both)) if both else 1.0

    def raced(self) -> list[Candidate]:
        """All that ran in a race and did not fail, fastest first."""
        failed = {c for outcome in self.races for c in outcome.failed}
        known = dict.fromkeys(c for outcome in reversed(self.races) for c in outcome.mu)
        return sorted((c for c in known if c not in failed), key=lambda c: self.ms(c) or math.inf)


def explore(
    candidates: Candidates,
    timer: Timer,
    limits: Limits,
    rules: RaceRules,
    rng: random.Random,
) -> Field | None:
    """Admits and races every candidate; None where none runs.

    Those that are compiled at run time are built in the background meanwhile, and meet the best of
    the others in a second race.
    """
    budget = Budget(timer, limits)
    found = Field(aten_is_cudnn=candidates.aten_uses_cudnn)
    compiled = _admit_all(candidates, timer, limits, budget, found)
    if found.admission.rough_ms:
        first = rules.for_finalists() if compiled else rules
        found.races.append(race(found.admission.rough_ms, timer, budget, first, rng))
    if compiled:
        _join(timer.runnable(compiled), found, timer, budget, rules, rng)
    return found if found.races and found.last.survivors else None


def _admit_all(
    candidates: Candidates, timer: Timer, limits: Limits, budget: Budget, found: Field
) -> list[Candidate]:
    """Admits what need not be compiled; returns what is being compiled meanwhile."""
    listed = list(candidates.all())
    beyond = list(candidates.beyond())
    without_engine = [c for c in beyond if c.engine is None]
    if limits.benchmark_limit:
        listed = timer.runnable(listed, limit=limits.benchmark_limit)
        beyond = without_engine
    # Mode FALLBACK lists what works rather than what is fast; one launch of its slowest engines
    # may take a second. Worth their time are only those that are compiled at run time and have
    # kernels beyond the listed one (benchmarks/kernel_cfgs.py asks which).
    swept = {c.engine for c in beyond if c.is_compiled}
    last = [c for c in listed if c.heuristic_mode == "FALLBACK" and c.engine not in swept]
    compiled = [c for c in [*listed, *beyond] if c.is_compiled and c not in last]
    first = [c for c in listed if c.heuristic_mode == "A" and not c.is_compiled]
    second = [c for c in listed if c.heuristic_mode == "B" and not c.is_compiled]
    ready = timer.runnable(first)
    if found.aten_is_cudnn and ready:
        # It is there already: PyTorch would run cuDNN's first plan, at the cost of building it.
        found.atens_plan = ready[0]
        without_engine = [c for c in without_engine if c.text != ATEN.text]
    # What won on similar problems goes first: with a tight budget it may be all there is time for.
    similar = [] if limits.benchmark_limit else list(candidates.similar())
    compiled = _without_doubles([*(c for c in similar if c.is_compiled), *compiled])
    likely = timer.runnable([c for c in similar if not c.is_compiled])
    ready = _without_doubles([*likely, *ready, *timer.runnable(without_engine)])
    if compiled and ready and not budget.affords(_COMPILING_MS):
        _cut(compiled, "the budget does not allow compiling it", found)
        compiled = []
    others = [c for c in timer.runnable(second) if c.text not in {r.text for r in ready}]
    timer.prepare(compiled)
    admit(ready, timer, budget, found.admission)
    best_of_a = found.admission.best_ms
    admit(others[:_FIRST_OF_B], timer, budget, found.admission)
    rough = found.admission.rough_ms
    best_of_b = min((rough[c] for c in others[:_FIRST_OF_B] if c in rough), default=math.inf)
    if best_of_b <= _NEAR * best_of_a:
        admit(others[_FIRST_OF_B:], timer, budget, found.admission)
    else:
        _cut(others[_FIRST_OF_B:], "the first of heuristic mode B are slower than A's", found)
    if any(c.engine is not None for c in found.admission.rough_ms):
        _cut(last, "of mode FALLBACK, and others run", found)
    else:
        admit(timer.runnable(last), timer, budget, found.admission)
    return compiled


def _without_doubles(candidates: Sequence[Candidate]) -> list[Candidate]:
    return list({c.text: c for c in candidates}.values())


def _cut(candidates: Sequence[Candidate], why: str, found: Field) -> None:
    for candidate in candidates:
        found.admission.cut[candidate] = (why, None)


def _join(
    late: Sequence[Candidate],
    found: Field,
    timer: Timer,
    budget: Budget,
    rules: RaceRules,
    rng: random.Random,
) -> None:
    known = set(found.admission.rough_ms)
    admit(late, timer, budget, found.admission)
    joined = [c for c in found.admission.rough_ms if c not in known]
    finalists = sorted(found.last.survivors, key=found.last.mu.__getitem__) if found.races else []
    rough = {c: found.ms(c) or math.inf for c in [*finalists[:_FINALISTS], *joined]}
    if joined or len(rough) > 1:
        found.races.append(race(rough, timer, budget, rules, rng))


def selection(
    found: Field, timer: Timer, rules: RaceRules, sustained_clock_mhz: float | None = None
) -> Selection:
    """The choice by the races alone."""
    last = found.last
    best = last.mu[last.best]
    behind_best = {c: last.mu[c] - best for c in last.survivors}
    tied = [c for c, behind in behind_best.items() if behind <= rules.tie_width]
    unsure = [c for c, behind in behind_best.items() if behind <= last.half_width[c]]
    first = ties.order(tied)[0]
    # Against the best by mu, every rival's lead is known; the chosen one may trail it by a tie.
    others = [last.lead[c] for c in last.survivors if c not in (first, last.best)]
    behind = last.mu[first] - best
    bound = behind + max([0.0, *others])
    if first != last.best:
        bound = max(bound, behind + last.half_width[first])
    return told(found, timer, tied, math.expm1(bound), rules, sustained_clock_mhz, unsure=unsure)


def told(
    found: Field,
    timer: Timer,
    tied: Sequence[Candidate],
    regret_bound: float | None,
    rules: RaceRules,
    sustained_clock_mhz: float | None = None,
    unsure: Sequence[Candidate] = (),
    rule: str | None = None,
) -> Selection:
    """The selection with its evidence: the tied first, then the others as they finished.

    Args:
        tied: those within the tie width of the fastest, from which the tie rule takes one.
        unsure: those that the measurement could not tell from the fastest, for the evidence.
        rule: what decided, where it was not the tie rule.
    """
    state = timer.state()
    chosen = ties.order(tied)
    key = {c: found.sustained_ms.get(c, 0.0) for c in found.raced()}
    measured_alone = [c for c in found.raced() if c in found.sustained_ms and c not in tied]
    rest = sorted(measured_alone, key=key.__getitem__)
    rest += [c for c in found.raced() if c not in tied and c not in rest]
    ranking = [_timed(c, found) for c in [*chosen, *rest]]
    shown = {entry.candidate for entry in ranking}
    cut = [_timed(c, found) for c in found.admission.cut if c not in shown]
    failed = [
        Timed(c, None, 0, cut=f"failed: {reason}")
        for outcome in found.races
        for c, reason in outcome.failed.items()
    ]
    if found.atens_plan is not None:
        same = _timed(found.atens_plan, found)
        text = same.candidate.text
        cut.append(replace(same, candidate=ATEN, cut=f"it is {text}", runs=text))
    cut.sort(key=lambda entry: math.inf if entry.time_ms is None else entry.time_ms)
    samples = sum(n for outcome in found.races for n in outcome.samples.values())
    return Selection(
        tuple([*ranking, *cut, *failed]),
        samples + found.admission.samples + found.extra_samples,
        Evidence(
            rule=rule or ties.rule(tied),
            tied=tuple(dict.fromkeys(c.text for c in [*chosen, *unsure])),
            regret_bound=None if regret_bound is None else max(0.0, regret_bound),
            confidence=rules.confidence,
            gpu_ms=found.admission.gpu_ms
            + sum(outcome.gpu_ms for outcome in found.races)
            + found.extra_gpu_ms,
            wall_ms=timer.elapsed_ms(),
            clock_mhz=found.last.clock_mhz,
            sustained_clock_mhz=sustained_clock_mhz,
            max_clock_mhz=state.max_clock_mhz,
            throttle_reasons=tuple(found.throttle_reasons | dict.fromkeys(state.throttle_reasons)),
            disturbed=sum(outcome.disturbed for outcome in found.races),
            remarks=tuple(
                [*found.remarks, *(r for outcome in found.races for r in outcome.remarks)]
            ),
        ),
    )


def _timed(candidate: Candidate, found: Field) -> Timed:
    time_ms = found.ms(candidate)
    samples = sum(outcome.samples.get(candidate, 0) for outcome in found.races)
    for outcome in reversed(found.races):
        if candidate in outcome.mu:
            # Of one candidate's time; the half width is that of a difference of two.
            spread = math.exp(outcome.half_width[candidate] / math.sqrt(2))
            # Whoever was run alone afterwards was not out.
            alone = candidate in found.sustained_ms
            dropped = candidate not in outcome.survivors and not alone
            return Timed(
                candidate,
                time_ms,
                samples,
                low_ms=None if time_ms is None else time_ms / spread,
                high_ms=None if time_ms is None else time_ms * spread,
                sustained_ms=found.sustained_ms.get(candidate),
                cut=f"out of the race after {samples} calls" if dropped else "",
            )
    why, rough = found.admission.cut.get(candidate, ("", None))
    return Timed(candidate, time_ms, 0 if rough is None else 1, cut=why)
