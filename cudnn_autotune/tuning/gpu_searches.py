"""The searches of a model's problems that are open side by side on a GPU of this machine."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from cudnn_autotune.core.background import spare_threads
from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.candidates import QueriedCandidates
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.problem import ConvProblem, Operands
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.sampling.heuristic import Heuristic
from cudnn_autotune.sampling.model_race import Entrant, is_final, rules, steps_in_model
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.sampling.strategy import Budget, Limits
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.timers.gpu_timer import GpuTimer
from cudnn_autotune.timers.lacking import available_bytes
from cudnn_autotune.timers.measuring import operands
from cudnn_autotune.tuning import choice_log, miss, remembering, settings, tune_problem
from cudnn_autotune.tuning.checking import refusal
from cudnn_autotune.tuning.choice import untimed

_log = logging.getLogger(__name__)

# The share of initially free memory for the searches that are open together.
_MEMORY_SHARE = 0.5
# A problem needs its operands twice (a copy, or a workspace), and copies for a cold cache.
_COPIES = 2
_L2_MULTIPLE = 6
# More threads than this use memory with little effect.
_MOST_BUILDERS = 32


@dataclass
class _Open:
    """The search of one problem."""

    timer: GpuTimer
    candidates: QueriedCandidates
    data: Operands


@dataclass
class GpuSearches:
    """The ``model_tuning.Searches`` of a CUDA device; a context manager.

    Args:
        device: the device's index.
        mode: the sampling mode under which decisions are kept.
        retune: whether decided problems are searched again.
    """

    device: int
    mode: str
    retune: bool = False
    _opened: dict[ConvProblem, _Open] = field(default_factory=dict)

    def __enter__(self) -> GpuSearches:
        # The threads compile; one core is left to the thread that keeps the GPU busy.
        self._builders = ThreadPoolExecutor(spare_threads(_MOST_BUILDERS))
        self._room_bytes = int(_MEMORY_SHARE * available_bytes(self.device))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._builders.shutdown(cancel_futures=True)
        self._opened.clear()
        if kind in (None, KeyboardInterrupt):  # else the GPU may be lost
            torch.cuda.empty_cache()  # up to half of the memory, which no step needs

    def known(self, problem: ConvProblem) -> Decision | None:
        def suffices(decision: Decision) -> bool:
            selection = decision.selection
            return is_final(selection) and not selection.evidence.provisional

        return self._decided(problem, suffices)

    def earlier(self, problem: ConvProblem) -> Decision | None:
        return self._decided(problem, lambda decision: True)

    def _decided(
        self, problem: ConvProblem, suffices: Callable[[Decision], bool]
    ) -> Decision | None:
        """Returns the decision that serves the problem in this process now or at its next call."""
        policy = settings.policy_of(self.mode)
        made = choice_log.find(problem, policy, self.device)
        found = made or remembering.find(problem, policy, self.device)
        if self.retune or found is None or not suffices(found.decision):
            return None
        # tune() would search for a problem that a neighbour's engine serves.
        return made.decision if made else tune_problem.tune(problem, self.device, self.mode)

    def room_for(self, problem: ConvProblem) -> bool:
        wanted = sum(map(self._bytes, [problem, *self._opened]))
        return not self._opened or wanted <= self._room_bytes

    def open(self, problem: ConvProblem, calls: int) -> Entrant[ConvProblem] | None:
        try:
            one = self._open(problem)
        except (torch.OutOfMemoryError, _C.CudnnError) as error:
            _log.info("%s: its search is not opened: %s", problem.text, str(error).split(". ")[0])
            return None
        # One budget of time bounds the whole race.
        limits = Limits(settings.get_benchmark_limit())
        found = SearchState(one.timer, Budget(one.timer, limits), rules(), random.Random())
        self._opened[problem] = one
        return Entrant(problem, calls, found, self._steps(problem, found, one, limits))

    def untimed(self, problem: ConvProblem) -> Decision:
        try:
            one = self._open(problem)
        except torch.OutOfMemoryError:
            evidence = Evidence(provisional="there was no memory for its operands")
            policy = settings.policy_of(self.mode)
            return untimed(problem, policy, Measurement(OWN_PATH, None, 0), evidence)
        except _C.CudnnError:  # cuDNN has no graph for it, and PyTorch serves it
            return tune_problem.tune(problem, self.device, self.mode)
        selection = Heuristic().select(one.candidates, one.timer, Limits())
        return self._commit(problem, one, selection)

    def commit(self, entrant: Entrant[ConvProblem], selection: Selection | None) -> Decision:
        made = self._commit(entrant.problem, self._opened[entrant.problem], selection)
        del self._opened[entrant.problem]  # an interrupted commit is made again
        return made

    def close(self, entrant: Entrant[ConvProblem]) -> None:
        if (one := self._opened.pop(entrant.problem, None)) is not None:  # else an interruption
            one.timer.close()

    def _open(self, problem: ConvProblem) -> _Open:
        tune_problem.check_tunable(problem)
        data = operands(problem, torch.device("cuda", self.device))
        search = _C.EngineList.on_device(problem.native(), self.device)
        nearby = remembering.similar(problem, self.device)
        limit = settings.get_workspace_limit()
        candidates = QueriedCandidates(search, problem, data, limit, nearby)
        timer = GpuTimer(problem, search, data, self._builders, refusal(problem, data))
        return _Open(timer, candidates, data)

    def _steps(
        self, problem: ConvProblem, found: SearchState, one: _Open, limits: Limits
    ) -> Generator[None, None, None]:
        """Takes the steps of a search, each under PyTorch's flags of the problem."""
        steps = steps_in_model(found, one.candidates, limits)
        over = object()
        try:
            while True:
                with tune_problem.flags_of(problem, "cuda"):
                    if next(steps, over) is over:
                        return
                yield
        except torch.OutOfMemoryError as error:
            message = f"out of memory: {error}"
            found.remarks.append(message)
            one.timer.lacks_memory()
            _log.warning("%s: the search ran %s", problem.text, message)
        finally:
            steps.close()

    def _commit(self, problem: ConvProblem, one: _Open, selection: Selection | None) -> Decision:
        one.timer.close()
        with miss.searched(problem, selection, one.timer):
            return tune_problem.tune(problem, self.device, self.mode, retune=True, data=one.data)

    def _bytes(self, problem: ConvProblem) -> int:
        shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
        numbers = sum(torch.Size(shape).numel() for shape in shapes)
        l2: int = torch.cuda.get_device_properties(self.device).L2_cache_size
        return _COPIES * numbers * problem.dtype.itemsize + _L2_MULTIPLE * l2
