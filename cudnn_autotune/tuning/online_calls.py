"""``online`` in the callers' calls: what they prepare, and what becomes of their decision."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.queried import QueriedCandidates, Tensors
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.engines.unlisted import without_cudnn
from cudnn_autotune.sampling import online
from cudnn_autotune.sampling.budget import left_unseen
from cudnn_autotune.tuning import choice_log, verdict
from cudnn_autotune.tuning.choice_log import Choice
from cudnn_autotune.tuning.online_tuner import Prepared
from cudnn_autotune.tuning.outcome import Outcome

_log = logging.getLogger(__name__)


class OnlinePreparation:
    """What is to be done on the GPU before the calls of a problem can decide: one piece a call.

    First the candidates are asked for; then each is built, checked on the call's own tensors and
    offered, if it is right: some milliseconds, for which the call waits. What serves meanwhile is
    checked before all others. ``_C.OnlineTrial`` alone holds it, and so the callers' thread lets
    go of its plans.

    Args:
        choice: of the first one.
        first, plan: what serves until all is decided.
        prepared: is told what has been done.
        budget_ms: wall time that all pieces together may take, in milliseconds; once it is spent,
            nobody else joins. None: no limit. The piece in hand is never broken off.
    """

    def __init__(
        self,
        choice: Choice,
        first: Candidate,
        plan: _C.Plan | None,
        prepared: Prepared,
        budget_ms: float | None = None,
    ) -> None:
        self._budget_ms = budget_ms
        self._left_ms = math.inf if budget_ms is None else budget_ms
        self._seen = 0
        self._choice = choice
        self._problem = choice.problem
        self._first, self._plan = first, plan
        self._prepared = prepared
        self._search: _C.EngineSearch | None = None
        self._pending: deque[Candidate] = deque()

    def __call__(
        self, x: Tensor, w: Tensor, y: Tensor
    ) -> tuple[tuple[str, _C.Plan | None] | None, bool]:
        """Does the next piece: ``_C.PreparationStep``."""
        start_s = time.perf_counter()
        try:
            joins = self._do((x, w, y))
        except Exception:
            # Whatever it is, the caller keeps being served; the reason must not be lost.
            # As text: who keeps log records would keep the tensors of the error's frames.
            why = traceback.format_exc()
            _log.error("%s: online gave up; its first plan stays\n%s", self._problem.text, why)
            self._end(broken=True)
            return None, False
        except BaseException:
            self._end(broken=True)
            raise
        self._left_ms -= (time.perf_counter() - start_s) * 1e3
        if self._left_ms <= 0:
            self._leave_out()
        if joins is not None:
            self._prepared.joining.append(joins[0])
        is_more = bool(self._pending)
        offered = None if joins is None else (joins[0].text, joins[1])
        if not is_more and joins is None:
            self._end()
        # One more call where the last one joins: it has then joined when all is over.
        return offered, is_more or joins is not None

    def _do(self, tensors: Tensors) -> tuple[Candidate, _C.Plan | None] | None:
        """The next piece; a candidate that joins by it, and its plan."""
        if self._search is None:
            self._ask(tensors)
            return None
        if not self._pending:
            return None
        candidate = self._pending.popleft()
        self._seen += 1
        is_first = candidate is self._first
        try:
            plan = self._plan if is_first else self._build(candidate)
            error = verdict.error_of(self._problem, candidate.text, plan, tensors)
        except (_C.CudnnError, torch.OutOfMemoryError) as failure:
            _log.info("%s: %s is left out: %s", self._problem.text, candidate.text, str(failure))
            self._prepared.first_fails = "failed" if is_first else self._prepared.first_fails
            return None
        self._prepared.errors[candidate.text] = error
        if not verdict.is_right(self._problem, candidate.text, error):
            assert error is not None
            self._prepared.rejected.append((candidate.text, error))
            self._prepared.first_fails = "wrong" if is_first else self._prepared.first_fails
            return None
        return None if is_first else (candidate, plan)

    def _leave_out(self) -> None:
        others = sum(candidate is not self._first for candidate in self._pending)
        if others:
            self._prepared.budget_ms = self._budget_ms
            self._prepared.remarks.append(left_unseen(others, self._seen + len(self._pending)))
        self._pending.clear()

    def _ask(self, tensors: Tensors) -> None:
        native = self._problem.native()
        self._search = _C.EngineSearch.on_device(native, self._choice.device)
        offer = _QuicklyBuilt(self._search, self._problem, tensors, self._choice.workspace_limit)
        others = online.offered(offer, self._choice.benchmark_limit)
        self._pending.append(self._first)
        self._pending += (c for c in others if c.text != self._first.text)

    def _build(self, candidate: Candidate) -> _C.Plan | None:
        assert self._search is not None
        return None if candidate.engine is None else self._search.build(candidate.text)

    def _end(self, broken: bool = False) -> None:
        self._search = self._plan = None
        self._pending.clear()
        self._prepared.is_broken = broken
        self._prepared.is_over = True


class _QuicklyBuilt(QueriedCandidates):
    """Without the unlisted kernels: all are compiled at run time, which ``online`` leaves out, and
    to find them takes cuDNN's answer in every mode."""

    def beyond(self) -> Sequence[Candidate]:
        return without_cudnn(self._problem.native())


class OnlinePolicy:
    """What the calls of one problem decide (``online_tuner.Policy``).

    Args:
        first: what serves until then.
        remember: notes the outcome, unless the problem was forgotten meanwhile.
        prepared: says who was checked.
        since: the problem's ``choice_log.generation`` when it was asked for.
    """

    def __init__(
        self,
        first: Choice,
        remember: Callable[[Outcome], Choice],
        prepared: Prepared,
        since: int,
    ) -> None:
        self._first = first
        self._since = since
        self._remember = remember
        self._prepared = prepared

    @property
    def is_wanted(self) -> bool:
        return choice_log.generation(self._first.problem) == self._since

    @property
    def chosen_elsewhere(self) -> str | None:
        known = choice_log.find(self._first)
        return known.text if known is not None and known.total_samples > 0 else None

    def tell(self, selection: Selection) -> None:
        chosen = selection.winner
        error = self._prepared.errors.get(chosen.candidate.text)
        outcome = Outcome(selection, chosen, None, error, tuple(self._prepared.rejected))
        self._remember(outcome)
