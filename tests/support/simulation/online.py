"""A race of the mode ``online`` on a timer, whose turns stand for a caller's calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from cudnn_autotune.online.mode import Online
from cudnn_autotune.online.race import OnlineRace
from cudnn_autotune.sampling import Batch, Candidates, Limits, Selection, Timer
from cudnn_autotune.sampling.heuristic import Heuristic
from cudnn_autotune.sampling.strategy import Budget, left_unseen


def select(candidates: Candidates, timer: Timer, limits: Limits | None = None) -> Selection | None:
    """Chooses as a trial of ``online`` does, by turns that the timer takes."""
    limits = limits or Limits()
    first = Heuristic().select(candidates, timer, Limits())
    if first is None:
        return None
    served = first.winner.candidate
    some = Online().shortlist(candidates, limits.benchmark_limit)
    wanted = [c for c in some if c.text != served.text]
    budget, remarks = Budget(timer, limits), []
    late = [] if budget.is_limited else [c for c in wanted if c.is_compiled]
    wanted = [c for c in wanted if c not in late]
    timer.prepare(late)
    race, rounds = OnlineRace([served]), itertools.count()
    # Candidates that join together are built side by side.
    for seen, some in enumerate([[c] for c in wanted] if budget.is_limited else [wanted]):
        if budget.is_spent():
            remarks.append(left_unseen(len(wanted) - seen, 1 + len(wanted)))
            break
        race.join(timer.runnable(some))
    chosen = _decide(race, timer, rounds)
    if late:
        if chosen is not None:
            race.settle(chosen)
        known = len(race.candidates)
        race.join(timer.runnable(late))
        chosen = _decide(race, timer, rounds, known)
    if chosen is None:
        return None
    return race.selection(chosen, timer.elapsed_ms(), remarks, budget.cut_short_ms)


def _decide(race: OnlineRace, timer: Timer, rounds: Iterator[int], known: int = 0) -> int | None:
    """Takes turns until the race is decided; returns the choice's number, or None if none runs.

    Args:
        known: how many candidates have run before.
    """
    for i in sorted(race.active):  # the first call loads the kernel and does not count
        if i >= known and (error := timer.run([Batch(race.candidates[i], 1, "hot")])[0].error):
            race.fail(i, f"failed: {error}")
    while race.active:
        round_, order = next(rounds), sorted(race.active)
        samples = timer.run([Batch(race.candidates[i], 1, "hot") for i in order])
        for i, sample in zip(order, samples, strict=True):
            if sample.error:
                race.fail(i, f"failed: {sample.error}")
            else:
                race.add([(i, round_, sample.time_ms)])
        chosen = race.judge()
        if chosen is not None:
            return chosen
        if not race.active:
            race.revive()
    return None
