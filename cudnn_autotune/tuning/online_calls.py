"""``online`` in the caller's calls: prepares candidates there, and commits the decision."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.queried import QueriedCandidates, Tensors
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.engines.unlisted import without_cudnn
from cudnn_autotune.sampling import online
from cudnn_autotune.sampling.budget import left_unseen
from cudnn_autotune.tuning import choice_log, remembering
from cudnn_autotune.tuning.choice import Choice, with_selection
from cudnn_autotune.tuning.online_tuner import Prepared
from cudnn_autotune.tuning.output_check import OutputChecks

_log = logging.getLogger(__name__)
_OF_A_NEW_SIZE = "a new size of its layer: compared in turns with what won on sizes nearby"


class OnlinePreparation:
    """Prepares the candidates of a problem on the GPU, one step in each of the caller's calls.

    The first step lists the candidates. Each later step builds one, checks its output on the call's
    own tensors and, if it is right, lets it join the trial; the call waits some milliseconds for
    that. The candidate that serves meanwhile is checked before all others. Only ``_C.OnlineTrial``
    holds this object, so that its plans are freed on a caller's thread.

    Args:
        choice: the choice that serves until the trial is decided.
        first, plan: the candidate and plan of ``choice``.
        prepared: receives the results, which the tuner's thread reads.
        budget_ms: wall time that all steps together may take, in milliseconds; once it is spent,
            no other candidate joins. A step that has begun is always finished. None: no limit.
        nearby: if not empty, only these, which won on sizes nearby, and a few others are compared.
    """

    def __init__(
        self,
        choice: Choice,
        first: Candidate,
        plan: _C.Plan | None,
        prepared: Prepared,
        budget_ms: float | None = None,
        nearby: Sequence[Candidate] = (),
    ) -> None:
        self._budget_ms = budget_ms
        self._left_ms = math.inf if budget_ms is None else budget_ms
        self._seen = 0
        self._choice = choice
        self._nearby = nearby
        self._problem = choice.problem
        self._first, self._plan = first, plan
        self._prepared = prepared
        self._search: _C.EngineSearch | None = None
        self._pending: deque[Candidate] = deque()

    def __call__(self, *tensors: Tensor) -> tuple[tuple[str, _C.Plan | None] | None, bool]:
        """Does the next step (a ``_C.PreparationStep``); returns the candidate that joins with its
        plan, and whether more steps follow."""
        start_s = time.perf_counter()
        try:
            joins = self._step(tensors)
        except Exception:
            # An error must not reach the caller, who is served in any case, so it is logged. As
            # text, since a handler that keeps log records would keep the tensors of its frames.
            why = traceback.format_exc()
            _log.error("%s: online gave up; its first plan stays\n%s", self._problem.text, why)
            self._end(broken=True)
            return None, False
        except BaseException:
            self._end(broken=True)
            raise
        self._left_ms -= (time.perf_counter() - start_s) * 1e3
        if self._left_ms <= 0:
            self._drop_pending()
        if joins is not None:
            self._prepared.joining.append(joins[0])
            # One more call follows in any case, so that the candidate has joined before the
            # preparation ends.
            return (joins[0].text, joins[1]), True
        if not self._pending:
            self._end()
        return None, bool(self._pending)

    def _step(self, tensors: Tensors) -> tuple[Candidate, _C.Plan | None] | None:
        """Does the next step; returns the candidate that joins by it, and its plan."""
        if self._search is None:
            self._list(tensors)
            return None
        if not self._pending:
            return None
        candidate = self._pending.popleft()
        self._seen += 1
        is_first = candidate is self._first
        try:
            plan = self._plan if is_first else self._build(candidate)
            is_right = self._prepared.checks.is_right(self._problem, candidate.text, plan, tensors)
        except (_C.CudnnError, torch.OutOfMemoryError) as failure:
            _log.info("%s: %s is left out: %s", self._problem.text, candidate.text, str(failure))
            why = "failed"
        else:
            if is_right:
                return None if is_first else (candidate, plan)
            why = "wrong"
        if is_first:
            self._prepared.first_fails = why
        return None

    def _list(self, tensors: Tensors) -> None:
        native = self._problem.native()
        self._search = _C.EngineSearch.on_device(native, self._choice.device)
        limit = self._choice.workspace_limit
        offer = _QuicklyBuilt(self._search, self._problem, tensors, limit, self._nearby)
        few = self._nearby
        others = online.few(offer) if few else online.offered(offer, self._choice.benchmark_limit)
        self._pending.append(self._first)
        self._pending += (c for c in others if c.text != self._first.text)

    def _build(self, candidate: Candidate) -> _C.Plan | None:
        assert self._search is not None
        return None if candidate.engine is None else self._search.build(candidate.text)

    def _drop_pending(self) -> None:
        others = sum(candidate is not self._first for candidate in self._pending)
        if others:
            self._prepared.budget_ms = self._budget_ms
            self._prepared.remarks.append(left_unseen(others, self._seen + len(self._pending)))
        self._pending.clear()

    def _end(self, broken: bool = False) -> None:
        self._search = self._plan = None
        self._pending.clear()
        self._prepared.is_broken = broken
        self._prepared.is_over = True


class _QuicklyBuilt(QueriedCandidates):
    """Candidates without the unlisted kernels. All of those are compiled at run time, which
    ``online`` leaves out, and to find them takes cuDNN's answer in every mode."""

    def beyond(self) -> Sequence[Candidate]:
        return without_cudnn(self._problem.native())


class OnlineCommitter:
    """Commits the decision of one problem's trial (an ``online_tuner.Committer``).

    Args:
        first: the choice that serves until then.
        checks: the checks of the candidates' outputs.
        since: the problem's ``choice_log.generation`` when ``first`` was begun.
    """

    def __init__(self, first: Choice, checks: OutputChecks, since: int) -> None:
        self._first = first
        self._checks = checks
        self._since = since

    @property
    def is_wanted(self) -> bool:
        return choice_log.generation(self._first.problem) == self._since

    @property
    def chosen_elsewhere(self) -> str | None:
        first = self._first
        known = choice_log.find(first.problem, *first.policy, first.device)
        return known.text if known is not None and known.total_samples > 0 else None

    def commit(self, selection: Selection) -> None:
        first, device = self._first, self._first.device
        if first.origin == "neighbour":
            remarks = (*selection.evidence.remarks, _OF_A_NEW_SIZE)
            selection = replace(selection, evidence=replace(selection.evidence, remarks=remarks))
        decision = with_selection(first.decision, selection, selection.winner, self._checks, device)
        tuning_ms = first.tuning_ms + selection.evidence.wall_ms
        origin = "tuned" if selection.total_samples > 0 else first.origin
        choice = Choice(decision, device, origin, tuning_ms, selection)
        remembering.commit(choice, self._since)
