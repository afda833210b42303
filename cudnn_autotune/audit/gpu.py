"""The backend of an audit's processes on a GPU, which calls the public functions."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cudnn_autotune
from cudnn_autotune import expert, online, sampling
from cudnn_autotune.audit.judged_turns import OracleSettings
from cudnn_autotune.audit.layers import Case
from cudnn_autotune.audit.model import PYTORCH_MODES, Oracle, Pick, PytorchRow
from cudnn_autotune.audit.oracle import against_pytorch, candidate_of, measure
from cudnn_autotune.expert import OWN_PATH, Candidate, ConvProblem, GpuTimer
from cudnn_autotune.tools import LARGEST_NUMBER, Poisoned, decode

_STEADY_CALLS = 3
# Limits for a mode that decides in later calls; most layers take some hundred calls.
_MOST_CALLS = 20_000
_MOST_S = 30.0
# Calls between two waits for the GPU, as in a training loop that reads its loss.
_CALLS_AT_ONCE = 16
# Meanwhile a model would compute other layers, while engines of this one are compiled.
_OTHER_LAYERS_S = 0.02

Call = Callable[[], Tensor]


def open_backend(request: dict[str, Any]) -> GpuBackend:
    return GpuBackend(request)


class GpuBackend:
    """Does the work in a worker process; the cases are ``layers.Case`` objects."""

    def __init__(self, request: dict[str, Any]) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA GPU is available")
        self._settings = decode(OracleSettings, request["oracle"], "oracle")
        self._mode = request["mode"]
        self._budget_ms = request["budget_ms"]
        cudnn_autotune.set_store(mode="off")  # choices of earlier processes must not be served
        torch.backends.cudnn.allow_tf32 = True
        if self._mode in PYTORCH_MODES:
            benchmark, limit = PYTORCH_MODES[self._mode]
            torch.backends.cudnn.benchmark = benchmark
            torch.backends.cudnn.benchmark_limit = limit
        self._prepare()

    def work(
        self, task: str, case: dict[str, Any], request: dict[str, Any]
    ) -> Pick | PytorchRow | Oracle:
        """Does a ``task`` (``pick``, ``pytorch`` or ``oracle``) for a case. Raises Poisoned if the
        process cannot do any further work."""
        problem = Case(**case).problem()
        try:
            if task == "pick":
                return self._pick(problem)
            if task == "pytorch":
                return self._pytorch(problem, request["reference"])
            return self._oracle(problem, request["picked"])
        except RuntimeError as error:
            self._raise_if_lost(error)
            raise
        finally:
            self._tidy()

    def _tidy(self) -> None:
        cudnn_autotune.forget()
        gc.collect()
        with contextlib.suppress(RuntimeError):  # the device may be lost
            torch.cuda.empty_cache()

    def _raise_if_lost(self, error: RuntimeError) -> None:
        """Raises Poisoned if a CUDA error stays, which spoils every later call of the process."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise Poisoned(f"{type(error).__name__}: {error}") from error

    def _prepare(self) -> None:
        """Initialises what a process's first call would otherwise pay for: context, cuDNN handle,
        libraries."""
        for op in ("fprop", "dgrad", "wgrad"):
            tiny = ConvProblem(
                op,
                (2, 16, 9, 9),
                (16, 16, 3, 3),
                padding=1,
                dtype=torch.float16,
                memory_format=torch.channels_last,
            )
            data = expert.operands(tiny)
            _pytorch_call(tiny, data)()
            _our_call(tiny, data, "heuristic")()
        torch.cuda.synchronize()
        cudnn_autotune.forget()

    def _pick(self, problem: ConvProblem) -> Pick:
        cudnn_autotune.forget()
        data = expert.operands(problem)
        call = _our_call(problem, data, self._mode)
        with cudnn_autotune.flags(budget_ms=self._budget_ms):
            first_ms = _wall_ms(call)
            steady_ms = min(_wall_ms(call) for _ in range(_STEADY_CALLS))
            if sampling.traits(self._mode).decides_later and not _decide(call):
                return Pick(error=f"not decided after {_MOST_CALLS} calls or {_MOST_S:g} s")
        made = [c for c in cudnn_autotune.choices() if c.problem == problem]
        if not made:
            others = [c.problem.text for c in cudnn_autotune.choices()]
            reasons = [*cudnn_autotune.fallbacks(), *(f"tuned as {text}" for text in others)]
            return Pick(error="no choice was made: " + ", ".join(reasons))
        return _pick_of(made[-1], max(0.0, first_ms - steady_ms))

    def _pytorch(self, problem: ConvProblem, reference: str) -> PytorchRow:
        call = _pytorch_call(problem, expert.operands(problem))
        first_ms = _wall_ms(call)
        steady_ms = min(_wall_ms(call) for _ in range(_STEADY_CALLS))
        del call
        torch.cuda.empty_cache()
        timer, known = _opened(problem)
        try:
            candidate = candidate_of(reference, known)
            if len(timer.runnable([OWN_PATH, candidate])) < 2:
                return PytorchRow(error=f"{reference} does not build in PyTorch's process")
            ratios = against_pytorch(timer, candidate, self._settings)
        finally:
            timer.close()
        tuning_ms = max(0.0, first_ms - steady_ms)
        return PytorchRow(reference, ratios, tuning_ms, self._settings.solo)

    def _oracle(self, problem: ConvProblem, picked: list[str]) -> Oracle:
        timer, known = _opened(problem)
        texts = {c.text for c in known}
        try:
            known += [candidate_of(text, known) for text in picked if text not in texts]
            return measure(timer, known, picked, self._settings)
        finally:
            timer.close()


def _opened(problem: ConvProblem) -> tuple[GpuTimer, list[Candidate]]:
    timer, offered = expert.open_timer(problem)
    return timer, [*offered.all(), *offered.beyond()]


def _our_call(problem: ConvProblem, data: tuple[Tensor, ...], mode: str) -> Call:
    """Returns a call of the package's operator, which tunes the problem the first time."""
    return lambda: expert.run_operator(problem, data, mode)


def _pytorch_call(problem: ConvProblem, data: tuple[Tensor, ...]) -> Call:
    own_path = expert.build_plan(problem, OWN_PATH.text, data[0].device)
    return lambda: expert.execute_plan(own_path, *data)


def _decide(call: Call) -> bool:
    """Calls until the mode has decided; returns False if that takes too long."""
    deadline = time.monotonic() + _MOST_S
    for calls in range(1, _MOST_CALLS + 1):
        if not online.undecided():
            return True
        call()
        if calls % _CALLS_AT_ONCE == 0:
            torch.cuda.synchronize()
            if online.preparing():
                time.sleep(_OTHER_LAYERS_S)
            if time.monotonic() > deadline:
                break
    return not online.undecided()


def _wall_ms(call: Call) -> float:
    """Returns the wall time of a call, from an idle GPU until the GPU is idle again."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def _pick_of(choice: cudnn_autotune.Choice, tuning_ms: float) -> Pick:
    # The error is infinite if the output had a NaN, or if the engine failed.
    rejected = {
        text: error if 0 <= error <= LARGEST_NUMBER else None for text, error in choice.rejected
    }
    pick = dataclasses.replace(Pick.of(choice.selection, tuning_ms), rejected=rejected)
    if pick.text == choice.text:
        return pick
    # The mode's choice was wrong, so that its claims refer to another candidate.
    return dataclasses.replace(
        pick, text=choice.text, time_ms=choice.time_ms, regret_bound=None, rule="the next best"
    )
