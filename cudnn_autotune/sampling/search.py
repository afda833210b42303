"""Screens and races every candidate of a problem, as race, sustained and auto all begin."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.configs import ATEN, Candidate
from cudnn_autotune.sampling.budget import Budget
from cudnn_autotune.sampling.race_rules import RaceRules
from cudnn_autotune.sampling.screening import screen
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.timers.timer import Timer

# The first of heuristic mode B must come so near to the best of mode A for the rest of it to be
# looked at: further down it lists engines that take hundreds of times as long. Configs of the
# families that lead in mode A are looked at in any case: they are few, and one was 5 % faster than
# all of A (a downsampling layer of ConvNeXt-B at batch size 8, on an H200).
_FIRST_OF_B = 4
_NEAR = 1.05
_LEADING = 1.1
# So many of the first race meet those that were still being compiled.
_FINALISTS = 6
# Compiling may take all that is left of a limited budget where it often pays, and this share of it
# where it seldom does (docs/findings/fallback-mode.md).
_SELDOM_SHARE = 0.5


@dataclass(frozen=True)
class _Groups:
    """The candidates by when they are looked at; in each group the most promising come first."""

    similar: list[Candidate]
    """Precompiled ones that won on similar problems (docs/findings/neighbours.md)."""
    of_a: list[Candidate]
    """Of heuristic mode A, precompiled; with a limited budget PyTorch's own plan in any case."""
    of_b: list[Candidate]
    """Of mode B, precompiled."""
    without_engine: list[Candidate]
    """Not of cuDNN; PyTorch's own path first."""
    last: list[Candidate]
    """Precompiled ones of mode FALLBACK, which are looked at only where nothing else runs."""
    often: list[Candidate]
    """Compiled at run time, and often the fastest (docs/findings/kernel-portfolio.md)."""
    seldom: list[Candidate]
    """Compiled at run time, and seldom the fastest."""


def search(
    candidates: Candidates,
    timer: Timer,
    limits: Limits,
    rules: RaceRules,
    rng: random.Random,
) -> SearchState | None:
    """Screens and races every candidate.

    Those that are compiled at run time are built in the background meanwhile, and meet the best of
    the others in a second race.

    Returns:
        None where no candidate runs.
    """
    found = SearchState(timer, Budget(timer, limits), rules, rng)
    found.aten_is_cudnn = candidates.aten_uses_cudnn
    groups = _grouped(candidates, limits, found)
    _screen_precompiled(groups, found)
    # Few of those that seldom win pass, so that before them the first race is run as if it were the
    # last one.
    if found.screening.rough_ms:
        found.race(found.screening.rough_ms, rules.for_finalists() if groups.often else rules)
    if groups.often or groups.seldom:
        _race_late(timer.runnable([*groups.often, *groups.seldom]), groups, found)
    return found if found.races and found.last.survivors else None


def _grouped(candidates: Candidates, limits: Limits, found: SearchState) -> _Groups:
    """Groups the candidates and eliminates those that the budget does not allow to compile."""
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
        listed = found.timer.runnable(listed, limit=limits.benchmark_limit)
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


def _screen_precompiled(groups: _Groups, found: SearchState) -> None:
    """Screens what is precompiled, while the others are built in the background."""
    timer, budget, screening = found.timer, found.budget, found.screening
    without_engine = groups.without_engine
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
    screen(ready, timer, budget, screening)
    _screen_b(of_b, found)
    if any(c.engine is not None for c in screening.rough_ms):
        screening.eliminate(groups.last, "of mode FALLBACK, and others run")
    elif groups.last and screening.rough_ms and budget.is_spent():
        for candidate in groups.last:
            screening.eliminate_for_budget(candidate)
    else:
        screen(timer.runnable(groups.last), timer, budget, screening)


def _screen_b(of_b: Sequence[Candidate], found: SearchState) -> None:
    """Screens the first of mode B, those of a family that leads in mode A, and the rest where the
    first are near to the best of A."""
    timer, budget, screening = found.timer, found.budget, found.screening
    rough, best_of_a = screening.rough_ms, screening.best_ms
    leading = {c.config_family for c, ms in rough.items() if ms <= _LEADING * best_of_a}
    first, others = of_b[:_FIRST_OF_B], of_b[_FIRST_OF_B:]
    alike = [c for c in others if c.config_family in leading]
    rest = [c for c in others if c.config_family not in leading]
    screen(first, timer, budget, screening)
    best_of_b = min((rough[c] for c in first if c in rough), default=math.inf)
    screen(alike, timer, budget, screening)
    if best_of_b <= _NEAR * best_of_a or any(c in screening.out_of_budget for c in first):
        screen(rest, timer, budget, screening)
    else:
        screening.eliminate(rest, "the first of heuristic mode B are slower than A's")


def _race_late(late: Sequence[Candidate], groups: _Groups, found: SearchState) -> None:
    """Screens those that were compiled meanwhile and races them with the best of the others."""
    known = set(found.screening.rough_ms)
    screen(late, found.timer, found.budget, found.screening)
    joined = [c for c in found.screening.rough_ms if c not in known]
    finalists: list[Candidate] = []
    if found.races:
        finalists = sorted(found.last.survivors, key=found.last.log_time.__getitem__)
    rough = {c: found.ms(c) or math.inf for c in [*finalists[:_FINALISTS], *joined]}
    is_unfinished = bool(groups.often) and len(rough) > 1
    if joined or is_unfinished:
        found.race(rough, found.rules)


def _not_compilable(
    candidates: Sequence[Candidate], at_once: set[str], budget: Budget
) -> list[Candidate]:
    """Returns which of those that are compiled at run time must be left out; one stays if there is
    nothing else."""
    others = [c for c in candidates if not c.is_compiled or c.text in at_once]
    compiled = _without_doubles([c for c in candidates if c.is_compiled and c.text not in at_once])
    return compiled[max(budget.compilable(len(compiled)), 0 if others else 1) :]


def _not_compilable_beside(
    others: Sequence[Candidate],
    seldom: Sequence[Candidate],
    at_once: set[str],
    budget: Budget,
) -> list[Candidate]:
    """Returns which of ``seldom`` must be left out, since ``others`` are compiled first."""
    before = len({c.text for c in others if c.is_compiled})
    waiting = [c for c in seldom if c.text not in at_once]
    room = budget.compilable(before + len(waiting), _SELDOM_SHARE) if waiting else 0
    return waiting[max(0, room - before) :]


def _without_doubles(candidates: Sequence[Candidate]) -> list[Candidate]:
    return list({c.text: c for c in candidates}.values())
