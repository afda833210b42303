"""Every candidate of a problem admitted and raced: what race, sustained and auto begin with."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.configs import ATEN, Candidate
from cudnn_autotune.sampling.budget import Budget
from cudnn_autotune.sampling.config_family import config_family
from cudnn_autotune.sampling.racing import RaceRules, race
from cudnn_autotune.sampling.screening import SLOW, screen
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.timers.timer import Timer

# The first of heuristic mode B must come so near to the best of mode A for the rest of it to be
# looked at: further down it lists engines that take hundreds of times as long. Those of the kinds
# that lead in mode A are looked at in any case: they are few, and one was 5 % faster than all of A
# (a downsampling layer of ConvNeXt-B at batch size 8, on an H200).
_FIRST_OF_B = 4
_NEAR = 1.05
_LEADING = 1.1
# How many of the first race meet those that were still being compiled.
_FINALISTS = 6
# Of a limited budget compiling may take all that is left where it often pays, and this share of it
# where it seldom does.
_SELDOM_SHARE = 0.5


@dataclass(frozen=True)
class _Groups:
    """Who takes part, by when they are looked at; in each group the most promising first."""

    similar: list[Candidate]
    """Precompiled ones that won on similar problems."""
    of_a: list[Candidate]
    """Of heuristic mode A, precompiled; with a limited budget PyTorch's own plan in any case."""
    of_b: list[Candidate]
    """Of mode B, precompiled."""
    without_engine: list[Candidate]
    """Not of cuDNN; PyTorch's own path first."""
    last: list[Candidate]
    """Precompiled ones of mode FALLBACK: only where nothing else runs."""
    often: list[Candidate]
    """Compiled at run time, and often the fastest."""
    seldom: list[Candidate]
    """Compiled at run time, and seldom the fastest."""


def search(
    candidates: Candidates,
    timer: Timer,
    limits: Limits,
    rules: RaceRules,
    rng: random.Random,
) -> SearchState | None:
    """Admits and races every candidate; None where none runs.

    Those that are compiled at run time are built in the background meanwhile, and meet the best of
    the others in a second race.
    """
    budget = Budget(timer, limits)
    found = SearchState(budget, aten_is_cudnn=candidates.aten_uses_cudnn)
    groups = _grouped(candidates, timer, limits, found)
    _screen_precompiled(groups, timer, found)
    # Of those that seldom win few get in: the first race is run as if it were the last.
    first = rules.for_finalists() if groups.often else rules
    if found.screening.rough_ms:
        found.races.append(race(found.screening.rough_ms, timer, budget, first, rng))
    race_again(found, timer, first, rng)
    if groups.often or groups.seldom:
        late = timer.runnable([*groups.often, *groups.seldom])
        _join(late, found, timer, rules, rng, is_last=not groups.often)
        race_again(found, timer, rules, rng)
    return found if found.races and found.last.survivors else None


def race_again(found: SearchState, timer: Timer, rules: RaceRules, rng: random.Random) -> None:
    """Where all that were left of a race have failed: those that they had driven out race, as far
    as they are as near to the best of them as screening asks."""
    while found.races and not found.last.survivors:
        times = found.timed()
        near = {c: ms for c, ms in times.items() if ms <= SLOW * min(times.values())}
        if not near:
            return
        found.races.append(race(near, timer, found.budget, rules, rng))
        found.remarks.append("the leaders failed: the others raced again without them")


def _grouped(candidates: Candidates, timer: Timer, limits: Limits, found: SearchState) -> _Groups:
    """Cuts whom the budget does not allow to compile."""
    budget = found.budget
    listed = list(candidates.all())
    beyond = list(candidates.beyond())
    without_engine = [c for c in beyond if c.engine is None]
    # What won on similar problems goes first: with a tight budget it may be all there is time for.
    similar = [] if limits.benchmark_limit else list(candidates.similar())
    # Mode FALLBACK lists what works rather than what is fast: on an H200 what is precompiled takes
    # 1.2 to 900 times as long as the best of the others, and one launch up to a second. Worth
    # their time are those that are compiled at run time: such as have kernels beyond the listed
    # one often win; another one did by 21 %, on a layer of 230 channels, where the others have to
    # copy the input first (docs/findings/fallback-mode.md).
    swept = {c.engine for c in beyond if c.is_compiled}
    last = [c for c in listed if c.heuristic_mode == "FALLBACK" and c.engine not in swept]
    seldom = [c for c in last if c.is_compiled and c not in similar]
    at_once: set[str] = set()
    if budget.is_limited:
        # PyTorch's own plan is looked at whatever it takes.
        at_once = {c.text for c in listed[:1] if found.aten_is_cudnn}
        rest = [c for c in [*similar, *listed, *beyond] if c not in seldom]
        out = _not_compilable(rest, at_once, budget)
        out += _not_compilable_beside([c for c in rest if c not in out], seldom, at_once, budget)
        for candidate in out:
            found.screening.eliminate_for_budget(
                candidate, "the budget does not allow compiling it"
            )
        listed, beyond, similar = (
            [c for c in some if c not in out] for some in (listed, beyond, similar)
        )
    if limits.benchmark_limit:
        listed = timer.runnable(listed, limit=limits.benchmark_limit)
        beyond = without_engine
    often = [c for c in [*similar, *listed, *beyond] if c.is_compiled and c not in seldom]
    return _Groups(
        similar=[c for c in similar if not c.is_compiled],
        of_a=[
            c
            for c in listed
            if c.heuristic_mode == "A" and (not c.is_compiled or c.text in at_once)
        ],
        of_b=[c for c in listed if c.heuristic_mode == "B" and not c.is_compiled],
        without_engine=without_engine,
        last=[c for c in listed if c in last and not c.is_compiled],
        often=[c for c in _without_doubles(often) if c.text not in at_once],
        seldom=[c for c in listed if c in seldom],
    )


def _screen_precompiled(groups: _Groups, timer: Timer, found: SearchState) -> None:
    """The others are built in the background meanwhile."""
    budget, without_engine = found.budget, groups.without_engine
    ready = timer.runnable(groups.of_a)
    if found.aten_is_cudnn and ready:
        # It is there already: PyTorch would run cuDNN's first plan, at the cost of building it.
        found.atens_plan = ready[0]
        without_engine = [c for c in without_engine if c.text != ATEN.text]
    similar = timer.runnable(groups.similar)
    ready = _without_doubles([*similar, *ready, *timer.runnable(without_engine)])
    if budget.is_limited:
        # Nothing is chosen over PyTorch's own path unseen: the first is looked at in any case.
        ready.sort(key=lambda c: c.text != found.pytorchs)
    of_b = [c for c in timer.runnable(groups.of_b) if c.text not in {r.text for r in ready}]
    timer.prepare([*groups.often, *groups.seldom])
    screen(ready, timer, budget, found.screening)
    _screen_b(of_b, timer, found)
    rough = found.screening.rough_ms
    if any(c.engine is not None for c in rough):
        _eliminate(groups.last, "of mode FALLBACK, and others run", found)
    elif groups.last and rough and budget.is_spent():
        for candidate in groups.last:
            found.screening.eliminate_for_budget(candidate)
    else:
        screen(timer.runnable(groups.last), timer, budget, found.screening)


def _screen_b(of_b: Sequence[Candidate], timer: Timer, found: SearchState) -> None:
    """Of mode B its first and those alike to what leads in A; the rest if its first are near."""
    budget, rough = found.budget, found.screening.rough_ms
    best_of_a = found.screening.best_ms
    leading = {config_family(c) for c, ms in rough.items() if ms <= _LEADING * best_of_a}
    first, others = of_b[:_FIRST_OF_B], of_b[_FIRST_OF_B:]
    alike = [c for c in others if config_family(c) in leading]
    rest = [c for c in others if config_family(c) not in leading]
    screen(first, timer, budget, found.screening)
    best_of_b = min((rough[c] for c in first if c in rough), default=math.inf)
    screen(alike, timer, budget, found.screening)
    unseen = found.screening.out_of_budget
    if best_of_b <= _NEAR * best_of_a or any(c in unseen for c in first):
        screen(rest, timer, budget, found.screening)
    else:
        _eliminate(rest, "the first of heuristic mode B are slower than A's", found)


def _not_compilable(
    candidates: Sequence[Candidate], at_once: set[str], budget: Budget
) -> list[Candidate]:
    """Of those that are compiled at run time, who must be left out; one stays if there is nothing
    else."""
    others = [c for c in candidates if not c.is_compiled or c.text in at_once]
    compiled = _without_doubles([c for c in candidates if c.is_compiled and c.text not in at_once])
    return compiled[max(budget.compilable(len(compiled)), 0 if others else 1) :]


def _not_compilable_beside(
    others: Sequence[Candidate],
    seldom: Sequence[Candidate],
    at_once: set[str],
    budget: Budget,
) -> list[Candidate]:
    """Of ``seldom``, who must be left out: ``others`` are compiled first."""
    before = len({c.text for c in others if c.is_compiled})
    waiting = [c for c in seldom if c.text not in at_once]
    room = budget.compilable(before + len(waiting), _SELDOM_SHARE) if waiting else 0
    return waiting[max(0, room - before) :]


def _without_doubles(candidates: Sequence[Candidate]) -> list[Candidate]:
    return list({c.text: c for c in candidates}.values())


def _eliminate(candidates: Sequence[Candidate], why: str, found: SearchState) -> None:
    for candidate in candidates:
        found.screening.eliminated[candidate] = (why, None)


def _join(
    late: Sequence[Candidate],
    found: SearchState,
    timer: Timer,
    rules: RaceRules,
    rng: random.Random,
    is_last: bool,
) -> None:
    """Those that came late race with the best of the others.

    Args:
        is_last: whether the race before it need not be followed by another.
    """
    known = set(found.screening.rough_ms)
    screen(late, timer, found.budget, found.screening)
    joined = [c for c in found.screening.rough_ms if c not in known]
    finalists = (
        sorted(found.last.survivors, key=found.last.log_time.__getitem__) if found.races else []
    )
    rough = {c: found.ms(c) or math.inf for c in [*finalists[:_FINALISTS], *joined]}
    if joined or (len(rough) > 1 and not is_last):
        found.races.append(race(rough, timer, found.budget, rules, rng))
