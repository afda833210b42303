"""The miss handler: enumerate -> sample -> check -> remember. On a hit no line of it runs."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cudnn_autotune import choice_log, sampling, settings
from cudnn_autotune._extension import _C
from cudnn_autotune.checking import relative_error, tolerance
from cudnn_autotune.choice_log import ATEN, Choice
from cudnn_autotune.engines import HEURISTIC_MODES, Candidate, query
from cudnn_autotune.online_tuner import TUNER, Prepared, Trial
from cudnn_autotune.problem import ConvProblem
from cudnn_autotune.sampling import online
from cudnn_autotune.sampling.gpu_timer import GpuTimer
from cudnn_autotune.sampling.online import Online
from cudnn_autotune.sampling.selection import Selection, Timed
from cudnn_autotune.sampling.strategy import Limits, Work
from cudnn_autotune.unlisted import MATMUL, other_kernels, without_cudnn

_log = logging.getLogger(__name__)

Tensors = tuple[Tensor, Tensor, Tensor]


class QueriedCandidates:
    """The candidates of one search, asked mode by mode (``sampling.Candidates``).

    Args:
        search, problem: of one another.
        operands: the forward's input, weight and output, on the search's device.
        workspace_limit: bytes; None: no limit.
    """

    def __init__(
        self,
        search: _C.EngineSearch,
        problem: ConvProblem,
        operands: Tensors,
        workspace_limit: int | None = None,
    ) -> None:
        self._problem = problem
        self._operands = operands
        self._ask: Callable[[str], list[Candidate]] = lambda mode: query(
            search, problem, [mode], workspace_limit=workspace_limit
        )
        self._by_mode: dict[str, list[Candidate]] = {}

    def of_mode(self, heuristic_mode: str) -> Sequence[Candidate]:
        if heuristic_mode not in self._by_mode:
            self._by_mode[heuristic_mode] = self._ask(heuristic_mode)
        return self._by_mode[heuristic_mode]

    def all(self) -> Sequence[Candidate]:
        return [c for mode in HEURISTIC_MODES for c in self.of_mode(mode)]

    def beyond(self) -> Sequence[Candidate]:
        return [*without_cudnn(self._problem.native()), *other_kernels(self.all())]

    @property
    def aten_uses_cudnn(self) -> bool:
        problem, n = self._problem, self._problem.spatial_dims
        backend = torch._C._select_conv_backend(
            *self._operands[:2],
            None,
            problem.stride,
            problem.padding[:n],
            problem.dilation,
            False,
            (0,) * n,
            problem.groups,
            None,
        )
        return str(backend).endswith(".Cudnn")

    @property
    def work(self) -> Work:
        problem = self._problem
        x, w, y = problem.input_shape, problem.weight_shape, problem.output_shape
        return Work(
            flops=2.0 * math.prod(w[1:]) * math.prod(y),
            bytes=float(sum(map(math.prod, (x, w, y))) * problem.dtype.itemsize),
            device=str(self._operands[0].device),
            dtype=str(problem.dtype),
        )


@dataclass(frozen=True)
class Outcome:
    """What a search came to; without a choice, PyTorch's own path serves the problem."""

    selection: Selection | None = None
    chosen: Timed | None = None
    plan: _C.Plan | None = None
    relative_error: float | None = None
    struck: tuple[tuple[str, float], ...] = ()


def choose(
    native: _C.ConvProblem,
    mode: str,
    workspace_limit: int,
    benchmark_limit: int,
    device: int,
    x: Tensor,
    w: Tensor,
    y: Tensor,
) -> tuple[str, _C.Plan | None, _C.OnlineTrial | None]:
    """Chooses an engine for a problem that has none yet; called by C++, one at a time.

    Args:
        native, mode, workspace_limit (bytes, -1: no limit), benchmark_limit (0: all), device: the
            key of the choice.
        x, w, y: the forward's input, weight and output, on the device, in the problem's layout and
            dtype; the one that the operation writes may be overwritten.

    Returns:
        The choice's text, its plan where it is an engine of cuDNN, and the trial that it leads
        where the decision is still to come.
    """
    start = time.perf_counter()
    problem = ConvProblem.from_native(native)
    limit = None if workspace_limit < 0 else workspace_limit
    limits = Limits(benchmark_limit, settings.get_budget_ms())

    def remember(outcome: Outcome, since: int | None = None) -> Choice:
        choice = Choice(
            problem=problem,
            device=device,
            sampling=mode,
            workspace_limit=limit,
            benchmark_limit=benchmark_limit,
            text=outcome.chosen.candidate.text if outcome.chosen else ATEN,
            chosen=outcome.chosen,
            tuning_ms=(time.perf_counter() - start) * 1e3,
            selection=outcome.selection,
            relative_error=outcome.relative_error,
            struck=outcome.struck,
        )
        # What calls have decided is not taken back by another thread's first call.
        known = choice_log.find(choice)
        if choice.total_samples > 0 or known is None or known.total_samples == 0:
            choice_log.record(choice, since)
        _log.debug("%s: %s by %s in %.1f ms", problem.text, choice.text, mode, choice.tuning_ms)
        return choice

    outcome = _search(native, problem, mode, limit, limits, device, (x, w, y))
    choice = remember(outcome)
    trial = None
    if isinstance(sampling.get(mode), Online) and outcome.chosen and not problem.deterministic:
        first, prepared = outcome.chosen.candidate, Prepared()
        chores = OnlineChores(choice, first, outcome.plan, prepared)
        trial = _C.OnlineTrial((choice.text, outcome.plan), chores)
        policy = OnlinePolicy(choice, remember, prepared)
        TUNER.add(Trial(trial.ledger, first, policy, prepared))
    return choice.text, outcome.plan, trial


class OnlineChores:
    """What is to be done on the GPU before the calls of a problem can decide: one piece a call.

    First the candidates are asked for; then each is built, checked on the call's own tensors and
    offered, if it is right: some milliseconds, for which the call waits. What serves meanwhile is
    checked before all others. ``_C.OnlineTrial`` alone holds it, and so the callers' thread lets
    go of its plans.

    Args:
        choice: of the first one.
        first, plan: what serves until all is decided.
        prepared: is told what has been done.
    """

    def __init__(
        self, choice: Choice, first: Candidate, plan: _C.Plan | None, prepared: Prepared
    ) -> None:
        self._choice = choice
        self._problem = choice.problem
        self._first, self._plan = first, plan
        self._prepared = prepared
        self._search: _C.EngineSearch | None = None
        self._pending: deque[Candidate] = deque()

    def __call__(
        self, x: Tensor, w: Tensor, y: Tensor
    ) -> tuple[tuple[str, _C.Plan | None] | None, bool]:
        """Does the next piece: ``_C.Chore``."""
        try:
            joins = self._do((x, w, y))
        except Exception:
            # Whatever it is, the caller keeps being served; the reason must not be lost.
            _log.exception("%s: online gave up; its first plan stays", self._problem.text)
            self._end(broken=True)
            return None, False
        except BaseException:
            self._end(broken=True)
            raise
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
        is_first = candidate is self._first
        try:
            plan = self._plan if is_first else self._build(candidate)
            error = _error(self._problem, candidate.text, plan, tensors)
        except (_C.CudnnError, torch.OutOfMemoryError) as failure:
            _log.info("%s: %s is left out: %s", self._problem.text, candidate.text, failure)
            self._prepared.first_fails = "failed" if is_first else self._prepared.first_fails
            return None
        self._prepared.errors[candidate.text] = error
        if not _is_right(self._problem, candidate.text, error):
            assert error is not None
            self._prepared.struck.append((candidate.text, error))
            self._prepared.first_fails = "wrong" if is_first else self._prepared.first_fails
            return None
        return None if is_first else (candidate, plan)

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
        remember: notes the outcome, unless all was forgotten since a generation of the log.
        prepared: says who was checked.
    """

    def __init__(
        self, first: Choice, remember: Callable[[Outcome, int], Choice], prepared: Prepared
    ) -> None:
        self._first = first
        self._since = choice_log.generation()
        self._remember = remember
        self._prepared = prepared

    @property
    def is_wanted(self) -> bool:
        return choice_log.generation() == self._since

    @property
    def standing(self) -> str | None:
        known = choice_log.find(self._first)
        return known.text if known is not None and known.total_samples > 0 else None

    def tell(self, selection: Selection) -> None:
        chosen = selection.winner
        error = self._prepared.errors.get(chosen.candidate.text)
        outcome = Outcome(selection, chosen, None, error, tuple(self._prepared.struck))
        self._remember(outcome, self._since)


def _search(
    native: _C.ConvProblem,
    problem: ConvProblem,
    mode: str,
    workspace_limit: int | None,
    limits: Limits,
    device: int,
    tensors: Tensors,
) -> Outcome:
    try:
        search = _C.EngineSearch.on_device(native, device)
    except _C.CudnnError as error:
        # cuDNN has no such graph at all: ATen's case.
        _log.info("%s: %s", problem.text, error)
        return Outcome()
    timer = GpuTimer(problem, search, tensors)
    try:
        candidates = QueriedCandidates(search, problem, tensors, workspace_limit)
        strategy = sampling.get(mode)
        if isinstance(strategy, Online):
            selection = strategy.first(candidates, timer)
        else:
            selection = strategy.select(candidates, timer, limits)
    except torch.OutOfMemoryError as error:
        _log.warning("%s: the search ran out of memory; PyTorch serves it: %s", problem.text, error)
        return Outcome(timer.broken_off(f"out of memory: {error}"))
    except RuntimeError as error:
        # The device may be lost: what was learned so far goes along with the error.
        error.add_note(timer.told(problem.text))
        raise
    finally:
        timer.close()  # the check and the plans take their workspace from here on, one at a time
    if selection is None:
        return Outcome()
    n = problem.spatial_dims
    asymmetric = problem.padding[:n] != problem.padding[n:]
    # Where nothing was searched, cuDNN's first plan is what PyTorch runs too, and as unchecked;
    # but padding that differs before and after is something that PyTorch never hands to cuDNN.
    if selection.total_samples == 0 and not asymmetric:
        chosen = selection.winner
        return Outcome(selection, chosen, timer.plans.get(chosen.candidate.text))
    return _first_right(problem, selection, timer.plans, tensors)


def _first_right(
    problem: ConvProblem,
    selection: Selection,
    plans: Mapping[str, _C.Plan],
    tensors: Tensors,
) -> Outcome:
    """The best of ``selection`` whose output is right; those before it are struck."""
    struck: list[tuple[str, float]] = []
    for timed in selection.ranking:
        text = timed.candidate.text
        plan = plans.get(text)
        if plan is None and timed.candidate.engine is not None:
            continue  # it did not build
        error = _error(problem, text, plan, tensors)
        if _is_right(problem, text, error):
            return Outcome(selection, timed, plan, error, tuple(struck))
        assert error is not None
        struck.append((text, error))
    return Outcome(selection, struck=tuple(struck))


def _error(problem: ConvProblem, text: str, plan: _C.Plan | None, tensors: Tensors) -> float | None:
    """As ``checking.relative_error``; infinity where it fails to run."""
    try:
        return relative_error(problem, _runner(problem, text, plan, tensors), *tensors)
    except _C.CudnnError as failure:
        _log.warning("%s: %s fails: %s", problem.text, text, failure)
        return math.inf


def _is_right(problem: ConvProblem, text: str, error: float | None) -> bool:
    if error is None or error <= tolerance(problem):
        return True
    _log.warning(
        "%s: %s is wrong (relative error %.3g) and was not chosen", problem.text, text, error
    )
    return False


def _runner(
    problem: ConvProblem, text: str, plan: _C.Plan | None, tensors: Tensors
) -> Callable[[], None]:
    """Computes the problem on ``tensors`` in the way that ``text`` names."""
    written = tensors["xwy".index({"fprop": "y", "dgrad": "x", "wgrad": "w"}[problem.op])]
    native = problem.native()
    if plan is not None:
        return lambda: _C.execute(plan, *tensors)
    if text == MATMUL.text:
        return lambda: _C.run_matmul(native, *tensors)

    def aten() -> None:
        written.copy_(_C.run_aten(native, *tensors))

    return aten
