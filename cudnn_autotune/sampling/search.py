"""The search that ``race``, ``sustained`` and ``auto`` share: screening, then races."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import takewhile

from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.engines.unlisted import timed_by_pytorch
from cudnn_autotune.sampling.racing import RaceRules
from cudnn_autotune.sampling.screening import screen
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.sampling.strategy import Budget, Candidates, Limits
from cudnn_autotune.sampling.ties import WIDEST
from cudnn_autotune.timers.timer import Timer


def at_once(steps: Iterator[None]) -> None:
    """Takes all steps, one after the other."""
    for _ in steps:
        pass


# The rest of heuristic mode B is screened only if one of its first candidates comes this near to
# the best of mode A: later ones take hundreds of times as long. Configs of mode A's leading
# families are always screened. They are few, and one was 5 % faster than all of mode A (a
# downsampling layer of ConvNeXt-B at batch size 8, on an H200).
_FIRST_OF_B = 4
_NEAR = 1.05
_LEADING = 1.1
# The number of candidates of the first race in the second, beside those that were being compiled.
_FINALISTS = 6
# The share of a limited budget's rest for compiling candidates that are seldom the fastest. Others
# may take it all (docs/findings/fallback-mode.md).
_SELDOM_SHARE = 0.5


@dataclass(frozen=True)
class _Groups:
    """The candidates grouped by the time of their screening, the most promising first."""

    similar: list[Candidate]
    """Precompiled candidates that won on similar problems (docs/findings/neighbours.md)."""
    of_a: list[Candidate]
    """Precompiled candidates of heuristic mode A, and others that PyTorch would time; with a
    limited budget also PyTorch's own plan."""
    of_b: list[Candidate]
    """Precompiled candidates of mode B."""
    without_engine: list[Candidate]
    """Precompiled candidates that are no engine of cuDNN; PyTorch's own path comes first."""
    last: list[Candidate]
    """Precompiled candidates of mode FALLBACK, which are screened only if no other runs."""
    often: list[Candidate]
    """Candidates compiled at run time and often the fastest (docs/findings/kernel-portfolio.md)."""
    seldom: list[Candidate]
    """Candidates compiled at run time and seldom the fastest."""
    has_unfused: bool
    """Whether cuDNN lists both plans that leave a bias to PyTorch and plans that add it."""
    compiled_first: Candidate | None
    """PyTorch's candidate, if it is cuDNN's first plan and in ``often`` or ``seldom``."""


def search(
    candidates: Candidates,
    timer: Timer,
    limits: Limits,
    rules: RaceRules,
    seed: int | None,
) -> SearchState:
    """Screens and races every candidate, and returns the search's state.

    Args:
        seed: fixes the order of turns; None: it is random.
    """
    found = SearchState(timer, Budget(timer, limits), rules, random.Random(seed))
    at_once(steps(found, candidates, limits))
    return found


def steps(found: SearchState, candidates: Candidates, limits: Limits) -> Iterator[None]:
    """Screens and races every candidate; each step is the screening, or a round.

    Candidates compiled at run time are built in the background; a second race compares them with
    the best of the others. A step ends before the wait for them.
    """
    rules, timer = found.rules, found.timer
    found.aten_is_cudnn = candidates.aten_uses_cudnn
    groups = _grouped(candidates, limits, found)
    floor_ms = None
    if OWN_PATH in groups.without_engine and not found.budget.is_limited:
        floor_ms = limits.own_path_floor_ms
    if floor_ms is not None:
        others = [c for c in groups.without_engine if c != OWN_PATH]
        groups = replace(groups, without_engine=others)
    _screen_precompiled(groups, found)
    found.unseen = [*groups.often, *groups.seldom]
    yield
    # Few candidates that seldom win pass the screening. So if only these are still to come, the
    # first race lasts as long as a last one; else it ends when the others are built.
    rough_ms = found.screening.rough_ms
    if rough_ms and not groups.often:
        yield from found.race(rough_ms, rules)
    elif rough_ms and timer.is_building():
        with closing(found.race(rough_ms, rules.for_finalists())) as rounds:
            yield from takewhile(lambda _: timer.is_building(), rounds)
    if found.unseen:
        yield from race_late(found, is_unfinished=bool(groups.often))
    if floor_ms is not None:
        yield from _race_aten(found, floor_ms)


def _race_aten(found: SearchState, floor_ms: float) -> Iterator[None]:
    """Races PyTorch's own path with the best of the others, if it may be faster than they are."""
    best_ms = found.ms(found.leader) if found.is_raced else None
    # The chosen candidate may be as much slower than the best.
    if best_ms is not None and best_ms * (1 + WIDEST) <= floor_ms:
        why = f"takes at least {1e3 * floor_ms:.1f} us: its convolution alone, then what follows"
        found.screening.eliminate([OWN_PATH], why)
    else:
        found.unseen = [OWN_PATH]
        yield from race_late(found)
        if found.races:  # it was screened in comparison with those that failed
            yield from found.race_again(found.rules)


def _grouped(candidates: Candidates, limits: Limits, found: SearchState) -> _Groups:
    """Groups the candidates and eliminates those that the budget does not allow to compile."""
    listed, beyond = list(candidates.all()), list(candidates.beyond())
    # Winners on similar problems go first: a tight budget may not allow more.
    similar = [] if limits.benchmark_limit else list(candidates.similar())
    # Mode FALLBACK lists plans that work rather than fast ones. On an H200 its precompiled plans
    # take 1.2 to 900 times as long as the best of other modes, and one launch up to a second. Only
    # plans compiled at run time are worth their time. Engines with kernels beyond the listed one
    # often win, and another engine won by 21 % on a layer of 230 channels, where others copy the
    # input first (docs/findings/fallback-mode.md).
    swept = {c.engine_name for c in beyond if c.is_compiled}
    # The part that PyTorch times is raced all the same for problems that were not measured.
    timed = {c.text for c in timed_by_pytorch(candidates.problem, listed)}
    last = [
        c
        for c in listed
        if c.heuristic_mode == "FALLBACK" and c.engine_name not in swept and c.text not in timed
    ]
    seldom = [c for c in last if c.is_compiled and c not in similar]
    # PyTorch runs the first of these that builds. It has no plan that adds a bias.
    has_unfused = any(c.is_unfused for c in listed)
    own = [c for c in listed if c.heuristic_mode == "A" and (c.is_unfused or not has_unfused)]
    # If there is a budget, PyTorch's own plan is built and screened first, at any cost.
    is_first = found.budget.is_limited and found.aten_is_cudnn
    first = {c.text for c in own[:1] if is_first}
    out = _not_compilable([*similar, *listed, *beyond], seldom, first, found.budget)
    for candidate in out.values():
        found.screening.eliminate_for_budget(candidate, "the budget does not allow compiling it")
    listed, beyond, similar = (
        [c for c in some if c.text not in out] for some in (listed, beyond, similar)
    )
    if limits.benchmark_limit:  # it counts cuDNN's engine configs
        listed = found.timer.runnable(listed, limit=limits.benchmark_limit)
        beyond = [c for c in beyond if c.engine is None]
    often = [c for c in [*similar, *listed, *beyond] if c.is_compiled and c not in seldom]
    pytorchs = next((c for c in own if c in listed), None)
    is_built_late = pytorchs is not None and pytorchs.is_compiled and pytorchs.text not in first
    return _Groups(
        similar=[c for c in similar if not c.is_compiled],
        of_a=[
            c
            for c in listed
            if (c.heuristic_mode == "A" or c.text in timed)
            and (not c.is_compiled or c.text in first)
        ],
        of_b=[c for c in listed if c.heuristic_mode == "B" and not c.is_compiled],
        without_engine=[c for c in beyond if c.engine is None and not c.is_compiled],
        last=[c for c in listed if c in last and not c.is_compiled],
        often=[c for c in _without_doubles(often) if c.text not in first],
        seldom=[c for c in listed if c in seldom],
        has_unfused=has_unfused,
        compiled_first=pytorchs if is_built_late else None,
    )


def _not_compilable(
    candidates: Sequence[Candidate], seldom: Sequence[Candidate], first: set[str], budget: Budget
) -> dict[str, Candidate]:
    """Returns the candidates, by text, that the budget does not allow to compile. ``seldom`` comes
    last and gets a share of it only. One stays if there is no other candidate."""
    waiting = [c for c in seldom if c.text not in first]
    others = [c for c in _without_doubles(candidates) if c not in seldom]
    often = [c for c in others if c.is_compiled and c.text not in first]
    room = max(budget.compilable(len(often)), 0 if len(often) < len(others) else 1)
    room_for_all = budget.compilable(room + len(waiting), _SELDOM_SHARE) if waiting else 0
    out = [*often[room:], *waiting[max(0, room_for_all - room) :]]
    return {c.text: c for c in out}


def _screen_precompiled(groups: _Groups, found: SearchState) -> None:
    """Screens precompiled candidates, while the others are built in the background."""
    timer, budget, screening = found.timer, found.budget, found.screening
    without_engine = groups.without_engine
    ready = timer.runnable(groups.of_a)
    atens = [c for c in ready if c.is_unfused or not groups.has_unfused]
    if found.aten_is_cudnn and atens:
        # PyTorch would run cuDNN's first plan, which is among the candidates already, so timing it
        # costs only its build.
        found.own_path_plan = groups.compiled_first or atens[0]
        without_engine = [c for c in without_engine if c.text != OWN_PATH.text]
    similar = timer.runnable(groups.similar)
    ready = _without_doubles([*similar, *ready, *timer.runnable(without_engine)])
    if budget.is_limited:
        # PyTorch's own path is always screened: no candidate is chosen over it unless it was timed.
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
    """Screens the first of mode B and configs of mode A's leading families. The rest of mode B
    follows if the first are near to the best of mode A."""
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


def race_late(found: SearchState, *, is_unfinished: bool = False) -> Iterator[None]:
    """Screens the candidates that have been compiled and races them with the best of the others.

    Args:
        is_unfinished: whether the others race once more in any case.
    """
    found.waits_for_builds = True
    yield
    found.waits_for_builds = False
    known = set(found.screening.rough_ms) if found.races else set()
    late = found.timer.runnable(found.unseen)
    if found.own_path_plan in found.unseen and found.own_path_plan not in late:
        # It does not build, and PyTorch would run another one: its own path is timed itself.
        found.own_path_plan = None
        late += found.timer.runnable([OWN_PATH])
    found.unseen = []
    screen(late, found.timer, found.budget, found.screening)
    joined = [c for c in found.screening.rough_ms if c not in known]
    finalists: list[Candidate] = []
    if found.races:
        finalists = sorted(found.last.survivors, key=found.last.log_time.__getitem__)
    rough = {c: found.ms(c) or math.inf for c in [*finalists[:_FINALISTS], *joined]}
    if joined or (is_unfinished and len(rough) > 1):
        yield from found.race(rough, found.rules)


def _without_doubles(candidates: Sequence[Candidate]) -> list[Candidate]:
    return list({c.text: c for c in candidates}.values())
