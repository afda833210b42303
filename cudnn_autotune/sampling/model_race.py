"""One race over all problems of a model: the problem with the largest possible gain has the next
round.

A problem's search is a sequence of steps (``search.steps``): its screening, then rounds of a race.
The races of all problems take turns. The expected loss of a model's step is a sum over its calls:
the time of a call, times the expected relative loss of its leader. While plans of one problem are
compiled, the GPU measures others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.sampling.auto import Shortlist
from cudnn_autotune.sampling.race import race_selection
from cudnn_autotune.sampling.racing import RaceRules
from cudnn_autotune.sampling.search import race_late, steps
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.sampling.strategy import Candidates, Limits

# The race ends once the step's expected relative loss is no more than this.
STEP_LOSS = 0.002
# Before that, each problem's last race has up to this many rounds to make its choice clear, so that
# repeated races agree on small problems, too.
_CLEARING_ROUNDS = 12
_TOGETHER = "raced together with the model's other problems"
_CUT_SHORT = "the race of the model was cut short"
# Further kernels of an engine are compiled if the first one comes this near to the best: if one
# kernel of an engine wins, its others differ by less (docs/findings/kernel-portfolio.md).
_NEAR = 1.15

ProblemT = TypeVar("ProblemT")


def rules() -> RaceRules:
    """Returns the rules of each problem's race, without a long warm-up: the GPU is busy already."""
    return replace(RaceRules(), batch_ms=0.35, warm_ms=2.0)


def steps_in_model(
    found: SearchState, candidates: Candidates, limits: Limits
) -> Generator[None, None, None]:
    """Takes the steps of ``search.steps`` over the short list of ``auto``, then over further
    kernels. These are of engines compiled at run time whose first kernel was near the best."""
    shortlist = Shortlist(candidates)
    yield from steps(found, shortlist, limits)
    if not found.is_raced or limits.benchmark_limit:
        return
    best_ms = found.ms(found.leader) or 0.0
    compiled = {c: ms for c, ms in found.timed().items() if c.is_compiled}
    near = {c.engine_name for c, ms in compiled.items() if ms <= _NEAR * best_ms}
    found.unseen = shortlist.other_kernels(near)
    if found.unseen:
        found.timer.prepare(found.unseen)
        yield from race_late(found)


@dataclass(eq=False)
class Entrant(Generic[ProblemT]):
    """A problem of the model and its search."""

    problem: ProblemT
    calls: int
    """Number of calls in a step of the model."""
    found: SearchState
    steps: Generator[None, None, None] = field(repr=False)
    is_over: bool = False
    is_cut: bool = False
    """Whether the budget or an interruption ended its search."""
    step_ms: float = 0.0
    """The time of its calls in a step, in milliseconds; 0 before a candidate is timed."""
    loss_ms: float = 0.0
    """Expected milliseconds of a step by which its leader is slower than the fastest candidate."""
    urgency: float = 0.0
    """The expected loss over the GPU time of the next round."""

    @property
    def waits(self) -> bool:
        """Whether its next step would wait for plans."""
        return self.found.waits_for_builds and self.found.timer.is_building()

    @property
    def is_unclear(self) -> bool:
        """Whether a few more rounds may change its choice."""
        found = self.found
        if self.waits or not found.is_raced or not found.last.log_time:
            return False
        return found.last.rounds < _CLEARING_ROUNDS and not found.last.is_clear()

    def advance(self) -> None:
        """Takes the next step of the search."""
        try:
            next(self.steps)
        except StopIteration:
            self.end()
        self._judge()

    def end(self) -> None:
        """Ends the search where it is."""
        self.steps.close()
        self.found.rank_as_screened()
        self.is_over = True

    def _judge(self) -> None:
        found = self.found
        if not found.screening.rough_ms:
            return
        best_ms = found.screening.best_ms
        if found.is_raced and found.last.log_time:
            best_ms = found.ms(found.leader) or best_ms
        self.step_ms = self.calls * best_ms
        self.loss_ms = self.step_ms * found.expected_loss()
        last = found.races[-1] if found.races else None
        round_ms = last.gpu_ms / last.rounds if last and last.rounds else 0.0
        self.urgency = self.loss_ms / max(round_ms, 1.0)

    def selection(self) -> Selection | None:
        """Returns the selection; None if no candidate was raced, or none runs."""
        made = race_selection(self.found)
        if made is None:
            return None
        evidence = made.evidence
        remarks = (*evidence.remarks, _CUT_SHORT if self.is_cut else _TOGETHER)
        evidence = replace(evidence, remarks=remarks)
        if self.is_cut and not self.found.is_judged:
            # Not every candidate was compared in the time that this search had.
            evidence = replace(evidence, budget_ms=evidence.wall_ms)
        return replace(made, evidence=evidence)


def is_final(selection: Selection) -> bool:
    """Returns whether a selection is of a model's race that was not cut short. A first call in mode
    ``auto`` looks at fewer candidates."""
    return _TOGETHER in selection.evidence.remarks


class ModelRace(Generic[ProblemT]):
    """The race of all problems of a model.

    Args:
        entrants: the problems, those with probably the largest effect first.
        decided: called with each problem as soon as its search is over.
        is_out_of_time: returns whether the budget is spent.
        report: called before each step of a search.
        target: the relative loss of the step at which the race ends.
    """

    def __init__(
        self,
        entrants: Sequence[Entrant[ProblemT]],
        decided: Callable[[Entrant[ProblemT]], None],
        is_out_of_time: Callable[[], bool] = lambda: False,
        report: Callable[[ModelRace[ProblemT]], None] = lambda race: None,
        target: float = STEP_LOSS,
    ) -> None:
        self.entrants = list(entrants)
        self._undecided = list(entrants)
        self._decided = decided
        self._is_out_of_time = is_out_of_time
        self._report = report
        self._target = target

    def expected_loss(self) -> float:
        """Returns the relative time that the step's convolutions are expected to lose to the
        fastest candidates; infinity as long as some problem was not timed."""
        if any(not e.step_ms and not e.is_over for e in self.entrants):
            return float("inf")
        step_ms = sum(e.step_ms for e in self.entrants)
        return sum(e.loss_ms for e in self.entrants) / step_ms if step_ms else 0.0

    def run(self) -> None:
        """Races until the step's expected loss is small enough and the choices are clear, or the
        time is over.

        On KeyboardInterrupt the searches end as they are, and raced problems are decided.
        """
        try:
            while (entrant := self._next()) is not None:
                self._report(self)
                entrant.advance()
                if entrant.is_over:
                    self._decide(entrant)
            self._end()
        except KeyboardInterrupt:
            self._end()
            raise

    def _next(self) -> Entrant[ProblemT] | None:
        """Returns the problem whose search goes on; None once the race is over."""
        going_on = [e for e in self.entrants if not e.is_over]
        if not going_on or self._is_out_of_time():
            return None
        for entrant in going_on:
            if not entrant.found.races and not entrant.waits:
                return entrant  # each is timed before any is raced for long
        if self.expected_loss() <= self._target:
            unclear = (e for e in going_on if e.is_unclear)
            return max(unclear, key=lambda e: e.urgency, default=None)
        ready = [e for e in going_on if not e.waits]
        return max(ready or going_on, key=lambda e: e.urgency)

    def _end(self) -> None:
        is_cut = self.expected_loss() > self._target
        for entrant in self._undecided:
            entrant.is_cut |= is_cut and not entrant.is_over
            entrant.end()
        for entrant in list(self._undecided):
            self._decide(entrant)

    def _decide(self, entrant: Entrant[ProblemT]) -> None:
        self._decided(entrant)
        self._undecided.remove(entrant)
