"""``SimulatedTimer``: what a strategy would see of a GPU with a clock, a power cap and noise.

It computes; it measures nothing and says nothing of any real GPU, and wherever results of it are
shown they are called a simulation. For its part it knows the exact times of its engines.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from cudnn_autotune.audit.offline.stand_ins import Build, Builds, StaticCandidates, frontend_find
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.selection import Selection
from cudnn_autotune.timers.board_power import of_batches
from cudnn_autotune.timers.timer import Batch, Cache, GpuState, Sample, in_portions
from support.simulation.board import Board
from support.simulation.gpu import SimulatedEngine, SimulatedGpu, burst_ms, sustained_ms
from support.simulation.presets import PRESETS

_FAILING_RUN_MS = 0.005
_STATE_MS = 0.05


class SimulatedTimer:
    """A GPU that is computed (``sampling.Timer``); time is virtual.

    Args:
        gpu: the board, its noise and its host.
        engines: the candidates and what they do to the board.
        seed: of all noise; equal seeds and equal calls give equal samples.
        aten_uses_cudnn: whether PyTorch's own path, where ``engines`` has it, is cuDNN.

    Raises:
        ValueError: no engine, or two with one text.
    """

    def __init__(
        self,
        gpu: SimulatedGpu,
        engines: Sequence[SimulatedEngine],
        seed: int = 0,
        aten_uses_cudnn: bool = True,
    ) -> None:
        if not engines:
            raise ValueError("engines must not be empty")
        self.gpu = gpu
        self.engines = tuple(engines)
        self.candidates = StaticCandidates([e.candidate for e in engines], aten_uses_cudnn)
        self._by_text = {e.candidate.text: e for e in engines}
        self._board = Board(gpu, random.Random(seed))
        self._builds = Builds(gpu.build_threads)
        self._loaded: set[str] = set()

    def runnable(self, candidates: Sequence[Candidate], limit: int = 0) -> list[Candidate]:
        """As ``Timer.runnable``; a candidate that the simulation does not have does not build."""

        def built(some: Sequence[Candidate]) -> list[Candidate]:
            self._board.idle(self._builds.finish(self._known(some), self.elapsed_ms()))
            self._raise_if_lost()
            return [c for c in some if self._can_run(c)]

        return in_portions(candidates, limit, built)

    def is_building(self) -> bool:
        return self._builds.is_pending(self.elapsed_ms())

    @property
    def build_threads(self) -> int:
        return self.gpu.build_threads

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        self._board.idle(self._builds.prepare(self._known(candidates), self.elapsed_ms()))

    def run(self, batches: Sequence[Batch]) -> list[Sample]:
        board = self._board
        board.readings.clear()
        samples = []
        durations_s = []
        for batch in batches:
            start_ms = board.now_ms
            samples.append(self._batch(batch.candidate, batch.calls, batch.cache))
            durations_s.append((board.now_ms - start_ms) / 1e3)
        end_s = board.now_ms / 1e3
        seen = [reading for reading in board.readings if reading.seen_s <= end_s]
        powers_w = of_batches(durations_s, end_s, seen)
        board.idle(self.gpu.host_sync_ms)
        return [replace(s, power_w=power_w) for s, power_w in zip(samples, powers_w, strict=True)]

    def state(self) -> GpuState:
        self._board.idle(_STATE_MS)
        return self._board.state()

    def elapsed_ms(self) -> float:
        return self._board.now_ms

    def frontend_find(
        self, technique: str, candidates: Sequence[Candidate], limit: int
    ) -> Selection:
        return frontend_find(technique, candidates, limit, self._launch)

    @property
    def missing(self) -> tuple[str, ...]:
        """As ``ReplayTimer.missing``: a simulation lacks nothing."""
        return ()

    def truth(
        self, kind: Literal["burst", "sustained"] = "sustained", cache: Cache = "cold"
    ) -> dict[str, float]:
        """Exact milliseconds a call of every candidate that runs, by text.

        Args:
            kind: ``burst``, in short batches at the highest clock; ``sustained``, alone and long.
            cache: ``cold`` or ``hot``.
        """
        if kind not in ("burst", "sustained"):
            raise ValueError(f"kind must be burst or sustained, got {kind!r}")
        _check_cache(cache)
        of_engine = burst_ms if kind == "burst" else sustained_ms
        return {
            text: of_engine(self.gpu, engine, cache)
            for text, engine in self._by_text.items()
            if not engine.error and self._could_build(engine)
        }

    def _launch(self, candidate: Candidate) -> tuple[float, bool]:
        sample = self._batch(candidate, 1, "hot", lone=True)
        self._board.idle(self.gpu.host_sync_ms)
        if sample.error:
            return _FAILING_RUN_MS, False
        return sample.loading_ms + sample.time_ms, True

    def _batch(self, candidate: Candidate, calls: int, cache: Cache, lone: bool = False) -> Sample:
        engine = self._by_text.get(candidate.text)
        if candidate.engine is None:  # it needs no plan
            if engine is None:
                error = f"{candidate.text} is not part of this simulation"
                return Sample(float("inf"), error=error)
        elif engine is None or not self._builds.tried(candidate) or not self._could_build(engine):
            raise ValueError(f"batches: {candidate.text!r} is not runnable, or was not built")
        if calls < 1:
            raise ValueError(f"batches: calls must be 1 or more, got {calls}")
        _check_cache(cache)
        self._raise_if_lost()
        fails_at = engine.fails_at_ms
        error = engine.error
        if not error and fails_at is not None and self._board.now_ms >= fails_at:
            error = "CUDNN_STATUS_EXECUTION_FAILED"
        if error:
            self._board.idle(_FAILING_RUN_MS)
            return Sample(float("inf"), error=error)
        load_ms = 0.0 if candidate.text in self._loaded else engine.first_run_ms
        self._loaded.add(candidate.text)
        ran = self._board.run(engine, calls, cache, load_ms, lone)
        self._raise_if_lost()
        return Sample(ran.elapsed_ms / calls, ran.clock_mhz, loading_ms=load_ms)

    def _known(self, candidates: Sequence[Candidate]) -> list[Build]:
        self._raise_if_lost()
        engines = (self._by_text.get(c.text) for c in candidates)
        return [(e.candidate, e.build_ms) for e in engines if e]

    def _can_run(self, candidate: Candidate) -> bool:
        engine = self._by_text.get(candidate.text)
        return engine is not None and self._could_build(engine)

    def _could_build(self, engine: SimulatedEngine) -> bool:
        return engine.builds and engine.candidate.workspace_bytes <= self.gpu.free_bytes

    def _raise_if_lost(self) -> None:
        now_ms, gpu = self._board.now_ms, self.gpu
        if gpu.lost_at_ms is not None and now_ms >= gpu.lost_at_ms:
            raise RuntimeError("CUDA error: unspecified launch failure")
        if gpu.out_of_memory_at_ms is not None and now_ms >= gpu.out_of_memory_at_ms:
            raise torch.OutOfMemoryError("CUDA out of memory")


class Watched(SimulatedTimer):
    """Records which candidates ran, in what order."""

    def __init__(self, gpu: SimulatedGpu, engines: Sequence[SimulatedEngine]) -> None:
        super().__init__(gpu, engines, 0)
        self.ran: list[str] = []

    def run(self, batches: Sequence[Batch]) -> list[Sample]:
        self.ran += [batch.candidate.text for batch in batches]
        return super().run(batches)


def _check_cache(cache: str) -> None:
    if cache not in ("cold", "hot"):
        raise ValueError(f"cache must be cold or hot, got {cache!r}")


def preset_names() -> tuple[str, ...]:
    return tuple(PRESETS)


def preset(name: str, seed: int = 0) -> SimulatedTimer:
    """A fresh timer on one of :func:`preset_names`; its candidates are ``timer.candidates``.

    Raises:
        ValueError: an unknown name.
    """
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    scene = PRESETS[name]()
    return SimulatedTimer(scene.gpu, scene.engines, seed, scene.aten_uses_cudnn)
