"""The part of ``online`` in the caller's calls: the preparation of candidates."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress

import torch
from torch import Tensor

from cudnn_autotune.core.background import COMPILING
from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.candidates import QueriedCandidates
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.problem import Operands
from cudnn_autotune.online.race import TrialRecord
from cudnn_autotune.online.tuner import Prepared
from cudnn_autotune.sampling.strategy import Shortlister, left_unseen
from cudnn_autotune.store.decision import admits
from cudnn_autotune.timers.lacking import available_bytes, bytes_of, is_passing
from cudnn_autotune.tuning import checking
from cudnn_autotune.tuning.checking import OutputCheck
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.prefetching import PlanFuture, build_ahead

_log = logging.getLogger(__name__)

# Number of calls between two looks for compiled candidates.
_CALLS_BETWEEN_LOOKS = 8
# A call does not wait for its check; later calls see its result.
_MOST_CHECKED_AT_ONCE = 4


class OnlinePreparation:
    """The preparation of a problem's candidates on the GPU, one step in each of the caller's calls.

    The first step lists the candidates, and begins the background compilation of engines that cuDNN
    compiles at run time. Each later step builds another candidate, or takes a compiled one, and
    enqueues a check of its output on the call's own tensors. No step waits for the GPU: a candidate
    joins the trial in the step that sees a right output. The provisional candidate is checked
    before all others. Only ``_C.OnlineTrial`` holds this object, so that its plans are freed on a
    caller's thread.

    cuDNN captures a stream of its own while it answers a heuristic query. Another thread's
    ``torch.cuda.synchronize()`` fails then ("operation not permitted when stream is capturing"). So
    queries, and all work on the GPU, belong into a call; compiling a plan captures no stream.

    Args:
        choice: the choice that serves until the trial's decision.
        first, plan: the candidate and plan of ``choice``.
        prepared: receives the results, which the tuner's thread reads.
        shortlist: picks the candidates to compare, as of ``strategy.Traits``.
        nearby: fast candidates of similar problems.
        budget_ms: most wall time of all steps together in milliseconds; None: no limit. Once it is
            spent, no other candidate joins. A begun step is always finished.
        earlier: the record of an earlier process. Its eliminated candidates do not join, and the
            others join in its order.
    """

    def __init__(
        self,
        choice: Choice,
        first: Candidate,
        plan: _C.Plan,
        prepared: Prepared,
        shortlist: Shortlister,
        nearby: Sequence[Candidate] = (),
        budget_ms: float | None = None,
        earlier: TrialRecord | None = None,
    ) -> None:
        self._earlier = earlier or TrialRecord()
        self._budget_ms = budget_ms
        self._left_ms = math.inf if budget_ms is None else budget_ms
        self._seen = 0
        self._choice = choice
        self._shortlist, self._nearby = shortlist, nearby
        self._problem = choice.problem
        self._first = first
        self._plan: _C.Plan | None = plan  # None once the preparation has ended
        self._prepared = prepared
        self._search: _C.EngineList | None = None
        self._pending: deque[Candidate] = deque()
        self._compiling: dict[Candidate, PlanFuture] = {}
        self._checking: deque[tuple[Candidate, _C.Plan, OutputCheck]] = deque()

    def __del__(self) -> None:
        self._forget()

    def __call__(self, *tensors: Tensor) -> tuple[_C.Plan | None, int]:
        """Does the next step (a ``_C.PreparationStep``); returns the plan of the joining candidate,
        and the number of calls to the next step (0: none)."""
        start_s = time.perf_counter()
        try:
            joins = self._step(tensors)
        except Exception:
            # An error must not reach the caller, who is served in any case, so it is logged. It is
            # logged as text: a handler that keeps log records would keep the tensors of its frames.
            why = traceback.format_exc()
            _log.error("%s: online gave up; its first plan stays\n%s", self._problem.text, why)
            self._end(broken=True)
            return None, 0
        except BaseException:
            self._end(broken=True)
            raise
        self._left_ms -= (time.perf_counter() - start_s) * 1e3
        if self._left_ms <= 0:
            self._drop_pending()
        if joins is not None:
            self._prepared.joining.append(joins[0])
            # One more step always follows, so that the candidate has joined before the preparation
            # ends.
            return joins[1], 1
        is_built = any(built.done() for built in self._compiling.values())
        if self._pending or self._checking or is_built:
            return None, 1
        if self._compiling:
            return None, _CALLS_BETWEEN_LOOKS
        self._end()
        return None, 0

    def _step(self, tensors: Operands) -> tuple[Candidate, _C.Plan] | None:
        """Does the next step; returns the joining candidate and its plan."""
        if self._search is None:
            self._list(tensors)
            return None
        joins = self._concluded(tensors)
        if len(self._checking) < _MOST_CHECKED_AT_ONCE:
            self._check_next(tensors)
        return joins

    def _check_next(self, tensors: Operands) -> None:
        """Builds the next candidate, or takes a compiled one, and begins to check it."""
        compiled = (c for c, built in self._compiling.items() if built.done())
        candidate = self._pending.popleft() if self._pending else next(compiled, None)
        if candidate is None:
            return
        self._seen += 1
        try:
            plan = self._plan_of(candidate)
            # Its offer may report less.
            if not admits(self._choice.workspace_limit, plan.workspace_bytes):
                raise _C.PlanError(f"it needs {plan.workspace_bytes} bytes of workspace")
            check = checking.begin(self._problem, candidate.text, plan, tensors)
        except (_C.PlanError, torch.OutOfMemoryError, CancelledError) as failure:
            self._note(candidate, failure, tensors)
            _log.info("%s: %s is left out: %s", self._problem.text, candidate.text, str(failure))
            if candidate is self._first:
                self._prepared.first_fails = "failed"
        else:
            self._checking.append((candidate, plan, check))

    def _note(self, candidate: Candidate, failure: BaseException | str, tensors: Operands) -> None:
        """Notes a failure that need not recur in another trial."""
        lacks = self._prepared.lacking
        if isinstance(failure, torch.OutOfMemoryError):
            wanted = available_bytes(self._choice.device) + bytes_of(tensors)
            self._prepared.lacking = lacks.and_memory(wanted)
        elif is_passing(str(failure)):
            self._prepared.lacking = lacks.and_build(candidate.text)

    def _concluded(self, tensors: Operands) -> tuple[Candidate, _C.Plan] | None:
        """Returns the candidate whose check is over next, and its plan, if it is right and is to
        join. If the call's tensors showed nothing, it is checked once more, on random ones."""
        if not self._checking or not self._checking[0][2].is_ready:
            return None
        candidate, plan, check = self._checking.popleft()
        text, checks = candidate.text, self._prepared.checks
        if check.needs_others:
            try:
                again = checking.begin_anew(self._problem, text, plan, tensors)
            except torch.OutOfMemoryError as failure:
                self._note(candidate, failure, tensors)
            else:
                self._checking.appendleft((candidate, plan, again))
                return None
        is_unfit = not checks.conclude(self._problem, text, check)
        if not check.is_compared:
            self._note(candidate, torch.OutOfMemoryError(), tensors)
        elif check.failure:
            self._note(candidate, check.failure, tensors)
        if candidate is self._first:
            if is_unfit:
                self._prepared.first_fails = "failed" if check.failure else "wrong"
            return None
        return None if is_unfit or checks.errors[text] is None else (candidate, plan)

    def _list(self, tensors: Operands) -> None:
        others = [c for c in self._offered(tensors) if c.text != self._first.text]
        self._prepared.left_out += [c for c in others if self._earlier.is_out(c.text)]
        joining = [c for c in others if not self._earlier.is_out(c.text)]
        joining.sort(key=self._earlier.place)
        self._pending += [self._first, *(c for c in joining if not c.is_compiled)]
        with suppress(RuntimeError):  # the system gives no thread
            for candidate in (c for c in joining if c.is_compiled):
                self._compiling[candidate] = self._compile(candidate)

    def _offered(self, tensors: Operands) -> Sequence[Candidate]:
        limit = self._choice.workspace_limit
        self._search = _C.EngineList.on_device(self._problem.native(), self._choice.device)
        every = QueriedCandidates(self._search, self._problem, tensors, limit, self._nearby)
        return self._shortlist(every, self._choice.benchmark_limit)

    def _compile(self, candidate: Candidate) -> PlanFuture:
        """Begins to build a candidate that is compiled at run time."""
        native, device = self._problem.native(), self._choice.device
        return COMPILING.submit(build_ahead, native, device, candidate.text, may_compile=True)

    def _build(self, candidate: Candidate) -> _C.Plan:
        """Builds any other candidate."""
        assert self._search is not None
        return self._search.build(candidate.text)

    def _plan_of(self, candidate: Candidate) -> _C.Plan:
        if candidate is self._first:
            assert self._plan is not None
            return self._plan
        if not candidate.is_compiled:
            return self._build(candidate)
        built = self._compiling.pop(candidate)
        if error := built.exception():
            raise _C.PlanError(str(error))
        plan = built.result()
        assert plan is not None  # None is a plan that is not kept, and this one was compiled
        return plan

    def _drop_pending(self) -> None:
        others = sum(candidate is not self._first for candidate in self._pending)
        others += len(self._compiling)
        if others:
            waiting = len(self._pending) + len(self._compiling)
            self._prepared.budget_ms = self._budget_ms
            self._prepared.remarks.append(left_unseen(others, self._seen + waiting))
        self._forget()

    def _end(self, broken: bool = False) -> None:
        self._search = self._plan = None
        self._checking.clear()
        self._forget()
        self._prepared.is_broken = broken
        self._prepared.is_over = True

    def _forget(self) -> None:
        self._pending.clear()
        for built in self._compiling.values():
            built.cancel()
        self._compiling.clear()


class LazyPreparation:
    """The preparation step of a trial. Its first run begins the trial, if :meth:`start` has not."""

    def __init__(self) -> None:
        self.begin: Callable[[], _C.PreparationStep] | None = None
        """The function, called once, that begins the trial and returns its preparation step."""
        self._step: _C.PreparationStep | None = None

    def start(self) -> bool:
        """Begins the trial; returns False, without a change, if the system gives no thread."""
        assert self.begin is not None
        try:
            self._step, self.begin = self.begin(), None
        except RuntimeError as error:
            _log.info("a trial is not begun: %s", error)
            return False
        return True

    def __call__(self, *tensors: Tensor) -> tuple[_C.Plan | None, int]:
        """Runs as a ``_C.PreparationStep``."""
        if self._step is None and not self.start():
            return None, 0
        assert self._step is not None
        return self._step(*tensors)
