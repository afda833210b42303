"""The timer of a GPU of this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress

import torch
from torch import Tensor

from cudnn_autotune.core.background import CORES, spare_threads
from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.guard_bands import with_room
from cudnn_autotune.engines.configs import Candidate, Device, cuda_index, open_search
from cudnn_autotune.engines.problem import ConvProblem, Operands
from cudnn_autotune.engines.selection import Evidence, Measurement, Selection
from cudnn_autotune.timers import board_power
from cudnn_autotune.timers.lacking import Lacking, available_bytes, bytes_of, is_passing
from cudnn_autotune.timers.measuring import cold_sets, fills_cache
from cudnn_autotune.timers.measuring import operands as random_operands
from cudnn_autotune.timers.telemetry import Board, PowerWatch
from cudnn_autotune.timers.timer import Batch, GpuState, Sample, in_portions

# NVRTC compiles each config on one thread. More threads than this save little time and use memory.
_MOST_THREADS = 12
# Calls shorter than this are replayed from a CUDA graph: the host could not enqueue them in time.
_GRAPH_BELOW_MS = 0.05
# The host enqueues this many batches before the GPU starts, and stays ahead. It enqueues all
# batches before if a call, or a graph's node, is shorter than its launch
# (docs/findings/layer-in-its-model.md).
_LEAD = 3
_OUTRUN_MS = 0.015
# The most sets of operands over which a cold batch rotates. If these do not fill the cache, it is
# flushed (docs/findings/cold-and-hot.md).
_MOST_SETS = 64
_FLUSH_L2_MULTIPLE = 2

_WATCHED_MS = 1e3 * (board_power.WINDOW_S + board_power.LATE_S)

Built = list[tuple["_C.Plan | None", str]]
"""For each text, a plan and an empty text, or None and the reason why there is no plan."""
Refusal = Callable[[str, "_C.Plan"], str]
"""(text, plan) -> the reason why the candidate must not run, or an empty text. Raises
OutOfMemoryError if memory is short."""
_NO_MEMORY = "out of memory: it could not be checked"


class GpuTimer:
    """The timer of a problem's candidates on the caller's own tensors.

    Args:
        problem: the convolution.
        search: cuDNN's engines for it, on the tensors' device.
        operands: as ``engines.problem.Operands``; the result is overwritten.
        builders: threads for :meth:`prepare`; None: the timer starts its own.
        begun: plans by candidates' texts, whose building has begun elsewhere.
        refusal: called once for each candidate before it runs on ``operands``.
    """

    def __init__(
        self,
        problem: ConvProblem,
        search: _C.EngineList,
        operands: Operands,
        builders: Executor | None = None,
        refusal: Refusal | None = None,
        begun: Mapping[str, Future[Built]] | None = None,
    ) -> None:
        self._builders = builders
        self._ask_refusal = refusal
        self._refusals: dict[str, str] = {}
        self._start = time.perf_counter()
        self._problem = problem
        self.search = search
        self.operands = operands
        self._device = operands[0].device
        self._gpu = Board.of(self._device.index or 0)
        self.plans: dict[str, _C.Plan] = {}
        self._building = [([text], future) for text, future in (begun or {}).items()]
        self._workspace: Tensor | None = None
        self._native: _C.PlanTimer | None = None
        self._numbers: dict[str, int] = {}
        self._last_ms: dict[str, float] = {}
        self._seen: dict[str, Candidate] = {}
        self._errors: dict[str, str] = {}
        # The memory that the candidates left out for lack of it need; None: unknown.
        self._wanted: dict[str, int | None] = {}
        self._not_built: set[str] = set()

    @classmethod
    def open(cls, problem: ConvProblem, device: Device = "cuda") -> GpuTimer:
        """Opens a timer on normal random operands; raises ValueError for another device."""
        index = cuda_index(device)
        if index is None:
            raise ValueError(f"device must be a CUDA device that is here, got {device!r}")
        search = open_search(problem, index)
        return cls(problem, search, random_operands(problem, torch.device("cuda", index)))

    @property
    def build_threads(self) -> int:
        return spare_threads(_MOST_THREADS)

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Starts building in the background, on several threads; :meth:`runnable` waits for it."""
        missing = [c.text for c in self._missing(candidates)]
        if not missing:
            return
        build = self.search.build_many
        if self._builders is not None:
            self._building += [([t], self._builders.submit(build, [t], 1)) for t in missing]
            return
        threads = min(len(missing), self.build_threads)
        executor = ThreadPoolExecutor(1)
        self._building.append((missing, executor.submit(build, missing, threads)))
        executor.shutdown(wait=False)

    def is_building(self) -> bool:
        return not all(future.done() for _, future in self._building)

    def runnable(self, candidates: Sequence[Candidate], limit: int = 0) -> list[Candidate]:
        return in_portions(
            candidates, limit, lambda some: self._that_fit_in_memory(self._built(some))
        )

    def run(self, batches: Sequence[Batch]) -> list[Sample]:
        for batch in batches:
            text = batch.candidate.text
            # PyTorch's own path runs unasked.
            if text not in self.plans and not self.runnable([batch.candidate]):
                raise ValueError(f"engine_text: {text!r} is not runnable")
        refusals = [self._refusal(batch.candidate) for batch in batches]
        admitted = [batch for batch, why in zip(batches, refusals, strict=True) if not why]
        measured = iter(self._run(admitted) if admitted else ())
        return [Sample(math.inf, error=why) if why else next(measured) for why in refusals]

    def _refusal(self, candidate: Candidate) -> str:
        text = candidate.text
        if self._ask_refusal is None:
            return ""
        if text not in self._refusals:
            try:
                why = self._ask_refusal(text, self.plans[text])
            except torch.OutOfMemoryError:
                why = _NO_MEMORY
            self._refusals[text] = why
            if is_passing(why):
                self._wanted[text] = None
            if why:
                self._seen[text], self._errors[text] = candidate, why
        return self._refusals[text]

    def _run(self, batches: Sequence[Batch]) -> list[Sample]:
        native = self._timer()
        lead = self._lead(batches)
        wanted = []
        for batch in batches:
            text = batch.candidate.text
            if text not in self._numbers:
                self._numbers[text] = native.add(self.plans[text])
            as_graph = batch.calls > 1 and self._last_ms.get(text, math.inf) < _GRAPH_BELOW_MS
            wanted.append((self._numbers[text], batch.calls, batch.cache == "cold", as_graph))
        # The power is not read during a run that is shorter than a reading's window.
        is_long = self._expected_ms(batches) > _WATCHED_MS
        watch = PowerWatch(self._gpu)
        with watch if is_long else nullcontext():
            results = native.run(wanted, lead)
            end_s = time.perf_counter()
        durations_s = [batch.calls * r[0] / 1e3 for batch, r in zip(batches, results, strict=True)]
        powers_w = board_power.of_batches(durations_s, end_s, watch.readings)
        samples = []
        for batch, result, power_w in zip(batches, results, powers_w, strict=True):
            time_ms, clock, loading_ms, error = result
            self._seen[batch.candidate.text] = batch.candidate
            if error:
                self._errors[batch.candidate.text] = error
                if is_passing(error):
                    self._wanted[batch.candidate.text] = None
                samples.append(Sample(math.inf, error=error))
                continue
            self._last_ms[batch.candidate.text] = time_ms
            samples.append(Sample(time_ms, clock or None, power_w=power_w, loading_ms=loading_ms))
        return samples

    def _expected_ms(self, batches: Sequence[Batch]) -> float:
        return sum(b.calls * self._last_ms.get(b.candidate.text, 0.0) for b in batches)

    def _lead(self, batches: Sequence[Batch]) -> int:
        """Returns the number of batches by which the host must be ahead so that the GPU never waits
        for it."""
        times = [self._last_ms.get(batch.candidate.text) for batch in batches]
        if any(time_ms is None for time_ms in times):
            return 0  # a batch's candidate has never run
        return _LEAD if min(t for t in times if t is not None) >= _OUTRUN_MS else len(batches)

    def state(self) -> GpuState:
        return self._gpu.state()

    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self._start) * 1e3

    def frontend_find(
        self, technique: str, candidates: Sequence[Candidate], limit: int
    ) -> Selection:
        found, samples = _C.frontend_find(
            technique,
            [self.plans[c.text] for c in candidates],
            self.operands,
            self._workspace,
            limit,
        )
        return Selection(
            tuple(Measurement(candidates[index], ms, count) for index, ms, count in found),
            samples,
        )

    def broken_off(self, why: str) -> Selection | None:
        """Returns the partial selection of a failed search, or None if no candidate was timed."""
        known = sorted(self._last_ms.items(), key=lambda item: item[1])
        timed = [
            Measurement(self._seen[t], ms, 1, eliminated=why)
            for t, ms in known
            if t not in self._errors
        ]
        failed = [
            Measurement(self._seen[text], None, 0, eliminated=f"failed: {error}")
            for text, error in self._errors.items()
        ]
        ranking = (*timed, *failed)
        return Selection(ranking, len(timed), Evidence(remarks=(why,))) if ranking else None

    def progress_report(self, problem_text: str) -> str:
        """Returns the measurements so far as a sentence, for the note of an error."""
        known = sorted(self._last_ms.items(), key=lambda item: item[1])
        times = ", ".join(f"{text} {ms:.4g} ms" for text, ms in known) or "nothing yet"
        return f"While a convolution was tuned ({problem_text}); measured until then: {times}."

    def lacks_memory(self) -> None:
        """Records that the search ran out of memory."""
        self._wanted[""] = None

    def lacking(self) -> Lacking:
        """Returns the resources that this search lacked and another may have. It is called after
        the search, with the timer closed."""
        not_built = self._not_built - self.plans.keys()
        wanted = self._wanted.values()
        least = min((size for size in wanted if size is not None), default=0)
        if not least and wanted:
            # More than the operands' bytes once more.
            least = available_bytes(self._device) + bytes_of(self.operands)
        to_build = min(not_built, default="")
        return Lacking(least, sum(map(bool, self._wanted)), len(not_built), to_build=to_build)

    def close(self) -> None:
        """Frees the timer's GPU memory. Plans stay; builds that have not begun are cancelled."""
        for _, future in self._building:
            future.cancel()
        self._collect()
        self._native = None
        self._workspace = None

    def _collect(self) -> None:
        building, self._building = self._building, []
        for texts, future in building:
            if not future.cancelled():
                self._keep(texts, future.result())

    def _keep(self, texts: Sequence[str], built: Built) -> None:
        for text, (plan, why) in zip(texts, built, strict=True):
            if plan is not None:
                self.plans[text] = plan
            elif is_passing(why):
                self._not_built.add(text)

    def _being_built(self) -> set[str]:
        return {text for some, _ in self._building for text in some}

    def _missing(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        begun = self._being_built()
        return [c for c in candidates if c.text not in self.plans and c.text not in begun]

    def _built(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        if not self._being_built().isdisjoint(c.text for c in candidates):
            self._collect()
        missing = self._missing(candidates)
        compiled = [c for c in missing if c.is_compiled]
        # Precompiled plans build in microseconds, and need no threads.
        for some, threads in (
            ([c for c in missing if not c.is_compiled], 1),
            (compiled, min(len(compiled), CORES, _MOST_THREADS)),
        ):
            if some:
                texts = [c.text for c in some]
                self._keep(texts, self.search.build_many(texts, threads))
        return [c for c in candidates if c.text in self.plans]

    def _that_fit_in_memory(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Allocates one workspace for all and returns the candidates for which it is large enough.

        It is the largest needed one for which there is memory, with room to place a candidate's
        workspace on several pages.
        """
        had = self._workspace_bytes()
        room = (_C.PlanTimer.PLACES - 1) * _C.PlanTimer.PLACE_BYTES
        needs = {c.text: self.plans[c.text].workspace_bytes for c in candidates}
        larger = {need + room for need in needs.values() if need > had}
        if larger:
            # The old one is freed first, so that memory need not hold both.
            self._use_workspace(0)
            for size in sorted(larger, reverse=True):
                with suppress(torch.OutOfMemoryError):
                    self._use_workspace(size)
                    break
            else:
                self._use_workspace(had)  # candidates that were runnable before stay runnable
        had = self._workspace_bytes()
        for text, need in needs.items():
            if need <= had:
                self._wanted.pop(text, None)
            elif self._could_ever_fit(need):
                self._wanted[text] = need + room
        return [c for c in candidates if needs[c.text] <= had]

    def _could_ever_fit(self, size: int) -> bool:
        """Returns whether an otherwise empty GPU could hold a workspace beside the operands."""
        total = torch.cuda.get_device_properties(self._device).total_memory
        return size + bytes_of(self.operands) <= total

    def _use_workspace(self, size: int) -> None:
        """Allocates ``size`` bytes, or raises OutOfMemoryError and keeps the old workspace. A
        candidate's write beside its workspace hits no tensor of the caller's."""
        workspace = with_room(size, self._device)
        if self._native is not None:
            self._native.set_workspace(workspace)
        self._workspace = workspace

    def _workspace_bytes(self) -> int:
        return 0 if self._workspace is None else self._workspace.numel()

    def _timer(self) -> _C.PlanTimer:
        if self._native is None:
            sets, flush_bytes = self._cold_operands()
            self._native = _C.PlanTimer(self._problem.native(), sets, flush_bytes)
            self._numbers.clear()
            if self._workspace is not None:
                self._native.set_workspace(self._workspace)
        return self._native

    def _cold_operands(self) -> tuple[list[Operands], int]:
        """Returns cold batches' sets of operands, and the number of bytes to write before one."""
        sets = cold_sets(self._problem, self.operands, _MOST_SETS)
        if fills_cache(self._problem, self.operands):
            return sets, 0
        l2 = torch.cuda.get_device_properties(self._device).L2_cache_size
        return sets, _FLUSH_L2_MULTIPLE * l2
