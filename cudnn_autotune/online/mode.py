"""``online``: candidates take turns in the caller's own calls, none of which stalls for long.

The heuristics' first plan serves the first call. In each of the next ones a candidate is built, and
a check of it on the call's own tensors is enqueued. Engines that cuDNN compiles at run time are
compiled on background threads, and checked once they are compiled. Then one of every two calls,
drawn at random, runs the candidate whose turn it is, between two events for which the call does not
wait, until one candidate is the fastest or no gap matters any more. The other call runs the leader
so far, and is not timed. Only this mode measures under the model's own cache contents, power draw
and other load on the GPU. Until then consecutive calls may differ in the last bits. Under
deterministic settings the first plan stays, and while a stream is being captured the leader so far
runs.

The number of turns is bounded: the slower half of the candidates gives way after a number of turns,
and so on, until one is left. If the race is decided before the last engine is compiled, the fastest
so far serves all calls, and those that are compiled later race with it. A trial that the end of the
process interrupts goes on in the next.

A budget bounds how long those calls wait in total: once it is spent no further candidate joins, and
the evidence says so. Turns are calls that the caller makes anyway.

``race`` judges the turns, ``tuner`` and ``preparation`` carry the mode out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from cudnn_autotune.engines.configs import OWN_PATH, Candidate
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.online.race import OnlineRace
from cudnn_autotune.sampling.auto import Shortlist
from cudnn_autotune.sampling.heuristic import Heuristic
from cudnn_autotune.sampling.strategy import Budget, Candidates, Limits, left_unseen
from cudnn_autotune.timers.timer import Batch, Timer


@dataclass(frozen=True)
class Online:
    """The mode ``online``. Its :meth:`select` is for audits, where the calls are the timer's."""

    name: str = "online"
    decides_later = True

    def shortlist(self, candidates: Candidates, limit: int = 0) -> list[Candidate]:
        """Returns the candidates of the trial: the short list of ``auto``, since each further one
        takes turns from the caller, but for what mode FALLBACK lists that is precompiled, one call
        of which may stall the caller (docs/findings/fallback-mode.md).

        Args:
            limit: most of cuDNN's engine configs; 0: those of the short list. With a limit they are
                the first of mode A.
        """
        shortlist = Shortlist(candidates)
        beyond = [c for c in shortlist.beyond() if c != OWN_PATH or not candidates.aten_uses_cudnn]
        engines = list(candidates.of_mode("A"))[:limit]
        if not limit:
            engines = list(shortlist.of_mode("A"))
            engines += [c for c in shortlist.of_mode("FALLBACK") if c.is_compiled]
            engines += [c for c in beyond if c.engine is not None]
        others = [c for c in beyond if c.engine is None]
        return [*{c.text: c for c in engines}.values(), *others]

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        first = Heuristic().select(candidates, timer, Limits())
        if first is None:
            return None
        served = first.winner.candidate
        some = self.shortlist(candidates, limits.benchmark_limit)
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
