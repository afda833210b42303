"""``online``: candidates take turns in the caller's own calls, none of which stalls for long.

The heuristics' first plan serves the first call. In each of the next ones a candidate is built and
checked on the call's own tensors, some milliseconds for which the call waits. Then one of every two
calls, drawn at random, runs the candidate whose turn it is, between two events for which the call
does not wait, until one candidate is the fastest or no gap matters any more. The other call runs
the leader so far, and is not timed. Only this mode measures under the model's own cache contents,
power draw and other load on the GPU. Meanwhile consecutive calls may differ in the last bits. Under
deterministic settings the first plan stays, and while a stream is being captured the leader so far
runs.

A budget bounds how long those calls wait in total: once it is spent no further candidate joins, and
the evidence says so. Turns are calls that the caller makes anyway.

``online_race`` judges the turns; ``tuning.online_tuner`` and ``tuning.online_calls`` carry the mode
out.
"""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.configs import ATEN, Candidate
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.sampling.budget import Budget, left_unseen
from cudnn_autotune.sampling.heuristic import Heuristic
from cudnn_autotune.sampling.online_race import OnlineRace
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.timers.timer import Batch, Timer


def offered(candidates: Candidates, limit: int = 0) -> list[Candidate]:
    """Returns the candidates of the trial: those of mode A, and those that no mode lists, that are
    built quickly.

    Plans are built in the caller's calls. Engines that cuDNN compiles at run time would stall one
    for some 0.3 s each, so that they stay out; other modes find a faster one among them. Modes B
    and FALLBACK stay out, too: they list candidates that would stall the caller for a second, and
    hardly ever the fastest.

    Args:
        limit: most of cuDNN's engine configs; 0: all.
    """
    beyond = [c for c in candidates.beyond() if c != ATEN or not candidates.aten_uses_cudnn]
    all_of_them = [*candidates.of_mode("A"), *beyond]
    engines = {c.text: c for c in all_of_them if c.engine is not None and not c.is_compiled}
    others = [c for c in all_of_them if c.engine is None]
    return [*list(engines.values())[: limit or None], *others]


def few(candidates: Candidates) -> list[Candidate]:
    """Returns the candidates of the trial of a new size: what won on similar problems, the first of
    mode A, and those without cuDNN. All of them are built quickly."""
    first = [c for c in candidates.of_mode("A") if not c.is_compiled][:1]
    similar = [c for c in candidates.similar() if not c.is_compiled]
    beyond = [c for c in candidates.beyond() if c != ATEN or not candidates.aten_uses_cudnn]
    others = [c for c in beyond if c.engine is None]
    return list({c.text: c for c in [*similar, *first, *others]}.values())


@dataclass(frozen=True)
class Online:
    """The mode ``online``. Its :meth:`select` is for audits, where the calls are the timer's."""

    name: str = "online"

    def first(self, candidates: Candidates, timer: Timer) -> Selection | None:
        """Returns the candidate that serves the first call."""
        return Heuristic().select(candidates, timer, Limits())

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        first = self.first(candidates, timer)
        if first is None:
            return None
        served = first.winner.candidate
        wanted = [c for c in offered(candidates, limits.benchmark_limit) if c.text != served.text]
        race = OnlineRace([served])
        budget, remarks = Budget(timer, limits), []
        # Candidates that join together are built side by side.
        for seen, some in enumerate([[c] for c in wanted] if budget.is_limited else [wanted]):
            if budget.is_spent():
                remarks.append(left_unseen(len(wanted) - seen, 1 + len(wanted)))
                break
            race.join(timer.runnable(some))
        for i in sorted(race.active):  # the first call loads the kernel and does not count
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
        if chosen is None:
            return None
        return race.selection(chosen, timer.elapsed_ms(), remarks, budget.cut_short_ms)
