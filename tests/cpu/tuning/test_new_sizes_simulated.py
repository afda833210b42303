"""New sizes on a simulated GPU: how much slower than PyTorch's own path they are served, and how
much of what could be gained is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from support.simulation import candidate

import cudnn_autotune as ca
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.tuning import choice_log, new_sizes
from cudnn_autotune.tuning.choice import Choice
from cudnn_autotune.tuning.new_sizes import fast_nearby

H100 = gpu_of("h100")
LAYERS = [(64, 64, 3), (256, 64, 1), (32, 8, 3), (128, 512, 3)]


@dataclass(frozen=True)
class Engine:
    """A kernel whose blocks run in waves."""

    name: str
    pixels: int
    channels: int
    fixed_ms: float
    """Milliseconds of its launches."""
    speed: float
    """A factor to what the multiprocessors reach."""
    vector: int = 1
    """Elements of a row that it reads at once in the contiguous layout."""

    def time_ms(self, problem: ca.ConvProblem, gpu: Gpu = H100) -> float:
        batch, filters, *sizes = problem.output_shape
        blocks = math.ceil(batch * math.prod(sizes) / self.pixels)
        blocks *= math.ceil(filters / self.channels)
        work = 2.0 * math.prod(problem.weight_shape[1:]) * self.pixels * self.channels
        is_aligned = problem.input_shape[-1] % self.vector == 0
        is_slow = problem.memory_format == torch.contiguous_format and not is_aligned
        wave_ms = work / (3e9 * self.speed) * (2.0 if is_slow else 1.0)
        return self.fixed_ms + math.ceil(blocks / gpu.multiprocessors) * wave_ms


ENGINES = [
    Engine("small", 64, 64, 0.003, 0.7),
    Engine("middle", 128, 128, 0.003, 0.95, vector=2),
    Engine("large", 256, 128, 0.004, 1.05, vector=8),
    Engine("quick", 128, 64, 0.008, 1.5, vector=8),  # two kernels
]


def pytorchs(problem: ca.ConvProblem) -> Engine:
    """The best of those that PyTorch's heuristics know, or the second best."""
    best = sorted(ENGINES[:3], key=lambda engine: engine.time_ms(problem))
    return best[random.Random(problem.text).random() < 0.3]


def search(problem: ca.ConvProblem) -> None:
    """Times all engines, as a search does."""
    own = pytorchs(problem)
    timed = [Measurement(candidate(e.name), e.time_ms(problem), 9) for e in ENGINES]
    timed.append(Measurement(OWN_PATH, own.time_ms(problem), 9, runs=own.name))
    timed.sort(key=lambda entry: entry.time_ms or 0.0)
    selection = Selection(tuple(timed), 9 * len(timed))
    choice_log.record(Choice(Decision(problem, Policy("auto"), selection, 1e-4), 0, "tuned"))


def ratio_of(problem: ca.ConvProblem) -> float | None:
    """What serves a new size over PyTorch's own path; None where it was searched for."""
    nearby = fast_nearby(problem, 0)
    if nearby is None:
        search(problem)
        return None
    served = {e.name: e for e in ENGINES}[nearby.serving[0].text] if nearby.serving else None
    return 1.0 if served is None else served.time_ms(problem) / pytorchs(problem).time_ms(problem)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(new_sizes, "gpu_of", lambda device: H100)
    yield
    ca.forget()


def problem_of(
    layer: tuple[int, int, int], layout: torch.memory_format, *size: int
) -> ca.ConvProblem:
    channels, filters, edge = layer
    return ca.ConvProblem(
        "fprop",
        (size[0], channels, *size[1:]),
        (filters, channels, edge, edge),
        padding=edge // 2,
        dtype=torch.float16,
        memory_format=layout,
    )


def pictures(rng: random.Random) -> tuple[int, ...]:
    return (8, rng.randint(60, 140), rng.randint(60, 140))


def wild(rng: random.Random) -> tuple[int, ...]:
    return (
        round(2 ** rng.uniform(0, 5)),
        round(2 ** rng.uniform(0, 8)),
        round(2 ** rng.uniform(2, 9)),
    )


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("draw", [pictures, wild])
def test_no_size_is_much_slower_than_pytorchs_own_path(
    draw: Callable[[random.Random], tuple[int, ...]], layout: torch.memory_format
) -> None:
    """And where sizes are near to each other, a part of what the best engines gain is gained."""
    rng = random.Random(0)
    gained = possible = 0.0
    for layer in LAYERS:
        ratios = []
        for _ in range(200):
            problem = problem_of(layer, layout, *draw(rng))
            if (ratio := ratio_of(problem)) is not None:
                ratios.append(ratio)
                best_ms = min(engine.time_ms(problem) for engine in ENGINES)
                possible += 1 - best_ms / pytorchs(problem).time_ms(problem)
        assert len(ratios) >= 192, "few are searched for"
        assert max(ratios) <= 1.15
        assert sum(ratios) <= 1.02 * len(ratios)
        gained += len(ratios) - sum(ratios)
    if draw is pictures and layout == torch.channels_last:
        assert gained >= 0.4 * possible
