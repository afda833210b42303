"""Small simulations that a test puts together: without noise unless the test wants some."""

from __future__ import annotations

import torch

from cudnn_autotune import ConvProblem
from cudnn_autotune.engines.configs import Candidate
from support.simulation.gpu import Noise, SimulatedEngine, SimulatedGpu
from support.simulation.timer import SimulatedTimer

PROBLEM = ConvProblem(
    "dgrad",
    (16, 64, 28, 28),
    (64, 64, 3, 3),
    padding=1,
    dtype=torch.float16,
    memory_format=torch.channels_last,
)
STILL = Noise(call_sd=0.0, batch_sd=0.0)
GPU = SimulatedGpu(noise=STILL)


def candidate(text: str, rank: int = 0, workspace_bytes: int = 0, *notes: str) -> Candidate:
    return Candidate(rank, {}, workspace_bytes, (), notes, text, "A", rank)


def engine(
    text: str, time_ms: float, dynamic_w: float = 100.0, **fields: object
) -> SimulatedEngine:
    given = {"first_run_ms": 0.0, **fields}
    return SimulatedEngine(candidate(text), time_ms, dynamic_w, **given)  # type: ignore[arg-type]


def timer_of(
    *engines: SimulatedEngine, gpu: SimulatedGpu = GPU, seed: int = 0, built: bool = True
) -> SimulatedTimer:
    """A timer whose engines, all built, have run already unless ``built`` is False."""
    timer = SimulatedTimer(gpu, engines, seed)
    if built:
        timer.runnable([*timer.candidates.all(), *timer.candidates.beyond()])
    return timer
