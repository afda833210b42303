"""The modes that race, and the choice of the winner (:func:`race_selection`).

In ``race`` all candidates take turns until it is clear which ones are as fast as the fastest.
``auto`` races a short list. Both measure short batches under a clock that all candidates share. On
a board that reaches its power limit the order may be another one under sustained load: see
``sustained``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling.racing import UNDECIDED, RaceRules
from cudnn_autotune.sampling.search import search
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.sampling.strategy import Candidates, Limits, everything, left_unseen
from cudnn_autotune.timers.timer import Timer


@dataclass(frozen=True)
class FinalRules:
    """The rules of the steady-state final (``sustained.mode``): the candidates that run alone,
    their durations, and the weights of their times."""

    reach: float = 1.1
    """Largest time in the race of a contender, relative to the leader's."""
    most: int = 3
    """Most candidates in the first pass, the leader included. One more runs if one of them beats
    the leader. One more runs if PyTorch's candidate is among them: no choice over it may have a
    longer steady time."""
    again_chunks: int = 4
    """Chunks of 40 ms of each run in a further pass."""
    rerun_margin: float = 0.02
    """Largest difference (log) to the best contender at which a candidate runs again."""
    most_again: int = 2
    """Most contenders that run again, beside the race's leader."""
    passes: int = 4
    """Most further passes, each in the reverse order of the one before."""
    confident: float = 1.0
    """The best's lead, in standard deviations of the noise, at which the final ends."""
    precise: float = 0.006
    """Relative noise at which the final ends as well, because a smaller gap does not matter."""
    equal: float = 0.005
    """Relative gap by which a candidate must beat the race's leader to take its place. Between
    other candidates with a smaller gap the time in the race decides, and then the rules for
    ties."""
    burst_weight: float = 0.1
    """The weight of log(time in the race) beside log(steady time). Both count, because in a model a
    layer shares the clock with others. With this weight a candidate wins that is 5 % slower in the
    race and 2 % faster in sustained runs."""


def race_selection(found: SearchState) -> Selection | None:
    """Returns the selection by the last race only; None if no candidate was raced, or none runs.

    Survivors tie if their time in that race is within ``ties.width`` of the least. The first one in
    the order of ``ties.break_ties`` wins.
    """
    if not found.is_raced:
        return None
    last, (order, rule) = found.last, found.equals()
    bound = last.regret_bound(order[0])
    return build_selection(found, order, rule, bound, last.indistinguishable())


def build_selection(
    found: SearchState,
    tied: Sequence[Candidate],
    rule: str,
    regret_bound: float | None,
    unsure: Sequence[Candidate],
    final_rules: FinalRules | None = None,
) -> Selection:
    """Ranks the tied first, then the others as they finished.

    The selection claims no regret bound if some candidate was not compared
    (``SearchState.is_judged``).

    Args:
        tied: candidates within the tie width of the fastest, the chosen one first.
        rule: the rule that decided.
        unsure: candidates whose times do not differ significantly from the chosen one's.
        final_rules: the rules of the final that decided; None if the race did.
    """
    burst_weight = 0.0 if final_rules is None else final_rules.burst_weight
    screening = found.screening
    state = found.timer.state()
    # Candidates with a sustained run come first, by score; the sort keeps the others in race order.
    rest = [_measurement(c, found) for c in found.raced() if c not in tied]
    rest.sort(key=lambda entry: entry.score(burst_weight))
    ranking = [*(_measurement(c, found) for c in tied), *rest]
    shown = {entry.candidate for entry in ranking}
    failed = [
        Measurement(c, None, 0, eliminated=f"failed: {why}") for c, why in found.failed.items()
    ]
    shown |= set(found.failed)
    eliminated = [_measurement(c, found) for c in screening.eliminated if c not in shown]
    if found.own_path_plan is not None:
        by_candidate = {entry.candidate: entry for entry in [*ranking, *eliminated, *failed]}
        same = by_candidate.get(found.own_path_plan) or _measurement(found.own_path_plan, found)
        text = same.candidate.text
        eliminated.append(replace(same, candidate=OWN_PATH, eliminated=f"it is {text}", runs=text))
    eliminated.sort(key=lambda entry: math.inf if entry.time_ms is None else entry.time_ms)
    samples = sum(n for outcome in found.races for n in outcome.samples.values())
    gpu_ms = screening.gpu_ms + sum(outcome.gpu_ms for outcome in found.races)
    return Selection(
        tuple([*ranking, *eliminated, *failed]),
        samples + screening.samples + found.extra_samples,
        Evidence(
            rule=rule,
            tied=tuple(dict.fromkeys(c.text for c in [*tied, *unsure])),
            burst_weight=burst_weight,
            sustained_reach=Evidence.sustained_reach if final_rules is None else final_rules.reach,
            regret_bound=regret_bound if found.is_judged else None,
            confidence=found.rules.confidence,
            gpu_ms=gpu_ms + found.extra_gpu_ms,
            wall_ms=found.timer.elapsed_ms(),
            clock_mhz=found.last.clock_mhz,
            sustained_clock_mhz=found.sustained_clock_mhz.get(tied[0]),
            max_clock_mhz=state.max_clock_mhz,
            throttle_reasons=tuple(found.throttle_reasons | dict.fromkeys(state.throttle_reasons)),
            disturbed=sum(outcome.disturbed for outcome in found.races),
            budget_ms=found.budget.cut_short_ms,
            remarks=_remarks(found),
        ),
    )


def _remarks(found: SearchState) -> tuple[str, ...]:
    """Collects the remarks, without those that a later race has settled."""
    remarks = list(found.remarks)
    screening = found.screening
    if screening.out_of_budget:
        looked_at = len(screening.rough_ms | screening.eliminated)
        remarks.append(left_unseen(len(screening.out_of_budget), looked_at))
    if found.unseen:
        remarks.append(f"ended before {len(found.unseen)} compiled candidates were looked at")
    for race in found.races[:-1]:
        remarks += [remark for remark in race.remarks if remark != UNDECIDED]
    return (*remarks, *found.last.remarks)


def _measurement(candidate: Candidate, found: SearchState) -> Measurement:
    time_ms = found.ms(candidate)
    samples = sum(outcome.samples.get(candidate, 0) for outcome in found.races)
    for outcome in reversed(found.races):
        if candidate in outcome.log_time and time_ms is not None:
            low_ms, high_ms = outcome.interval(candidate, time_ms)
            sustained_ms = found.sustained_ms.get(candidate)
            # A candidate that had a sustained run afterwards was not eliminated.
            is_out = candidate not in outcome.survivors and sustained_ms is None
            why = f"out of the race after {samples} calls" if is_out else ""
            return Measurement(candidate, time_ms, samples, low_ms, high_ms, sustained_ms, why)
    why, rough = found.screening.eliminated.get(candidate, ("", None))
    return Measurement(candidate, time_ms, 0 if rough is None else 1, eliminated=why)


class Final(Protocol):
    """The decision after a race, for modes in which the race alone does not decide."""

    def select(self, found: SearchState) -> Selection | None:
        """Returns the selection; None if no candidate runs any more."""


@dataclass(frozen=True)
class Race:
    """A mode that races candidates. ``race``, ``auto`` and ``sustained`` are presets of it.

    Args:
        name: what users pass as ``sampling=``.
        rules: the rules of the race.
        narrowed: picks the candidates of the race; None: all of them.
        final: decides after the race; None: the race does.
        races_models: as of ``strategy.Traits``.
        seed: fixes the order of turns; None: random.
    """

    name: str = "race"
    rules: RaceRules = field(default_factory=RaceRules)
    narrowed: Callable[[Candidates], Candidates] | None = None
    final: Final | None = None
    races_models: bool = False
    seed: int | None = None

    def shortlist(self, candidates: Candidates, limit: int) -> list[Candidate]:
        return everything(self._looked_at(candidates))

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        if self.final is not None:
            # The floor bounds no steady time, and a faster candidate may fail when it runs alone.
            limits = replace(limits, own_path_floor_ms=None)
        found = search(self._looked_at(candidates), timer, limits, self.rules, self.seed)
        if self.final is None or not found.is_raced:
            return race_selection(found)
        return self.final.select(found)

    def _looked_at(self, candidates: Candidates) -> Candidates:
        return candidates if self.narrowed is None else self.narrowed(candidates)


RACE = Race()
