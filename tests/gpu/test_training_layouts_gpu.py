"""Training by the backend of ``torch.compile`` on a GPU, in another layout than the model's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models.made import Made
from support.models.trained import MODELS
from support.norms.models import check_steps, conv, data
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.compile import training_graph
from cudnn_autotune.compile.comparison import Comparison, _TimedConvolutions
from cudnn_autotune.timers.stopwatch import occupy
from cudnn_autotune.tuning import compiling_ahead

pytestmark = pytest.mark.usefixtures("fresh_compiler")

LAID_OUT = "cudnn_autotune, channels_last"
WIDTH = 8


def compiled(model: nn.Module, **options: Any) -> Any:
    options = {"sampling": "heuristic", **options}
    return torch.compile(model, backend="cudnn_autotune", options=options)


def last() -> ca.Compilation:
    return ca.compilations()[-1]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_under_autocast_trains_in_channels_last(name: str) -> None:
    """By the rule, as near to float64 as PyTorch; parameters and gradients keep their strides."""
    torch.manual_seed(0)
    make, (batch, channels, *size) = MODELS[name]
    model = make(WIDTH).cuda()
    inputs = [x.cuda() for x in data(batch, WIDTH * channels, *size)]
    strides = [parameter.stride() for parameter in model.parameters()]
    check_steps(model, inputs, lambda one: compiled(one, compare=False), autocast=True)
    assert last().chosen == LAID_OUT, last().note
    assert [parameter.stride() for parameter in model.parameters()] == strides
    assert [p.grad.stride() for p in model.parameters() if p.grad is not None] == strides
    formats = {choice.problem.memory_format for choice in ca.choices()}
    assert formats == {torch.channels_last_3d if len(size) == 3 else torch.channels_last}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_auto_measures_both_layouts(layout: torch.memory_format) -> None:
    make, shape = MODELS["grouped"]
    model = make(WIDTH).cuda().to(memory_format=layout)
    inputs = [x.cuda() for x in data(shape[0], WIDTH * shape[1], *shape[2:])]
    options = {"memory_format": "auto", "norms": "never"}
    check_steps(model, inputs, lambda one: compiled(one, **options), autocast=True)
    other = "contiguous" if layout == torch.channels_last else "channels_last"
    assert set(last().gpu_times_ms) == {"cudnn_autotune", f"cudnn_autotune, {other}"}, last().note
    assert last().chosen == min(last().times_ms, key=last().times_ms.__getitem__)


def joined(width: int) -> nn.Module:
    """Two levels of a U-Net, with biases before its norms."""

    def forward(model: Any, x: Tensor) -> Tensor:
        high = model.norm(model.first(x)).relu()
        low = model.norm2(model.down(high.chunk(2, 1)[1])).relu()
        result: Tensor = model.last(torch.cat([model.up(low), high], 1))
        return result

    return Made(
        forward,
        first=nn.Conv2d(width, 2 * width, 3, padding=1),
        norm=nn.BatchNorm2d(2 * width),
        down=nn.Conv2d(width, 2 * width, 3, 2, 1),
        norm2=nn.InstanceNorm2d(2 * width, affine=True),
        up=nn.ConvTranspose2d(2 * width, width, 2, 2),
        last=nn.Conv2d(3 * width, width, 1),
    )


def pyramid(width: int) -> nn.Module:
    """Three levels, each of which adds the one below, of twice its size."""

    def forward(model: Any, x: Tensor) -> Tensor:
        features = [x := down(x).relu() for down in model.downs]
        found = [model.inner[-1](features[-1])]
        for feature, inner in zip(features[-2::-1], model.inner[-2::-1], strict=True):
            up = F.interpolate(found[0], size=feature.shape[-2:])
            found.insert(0, inner(feature) + up)
        found = [layer(one).flatten(1) for layer, one in zip(model.layers, found, strict=True)]
        return torch.cat(found, 1)

    levels = range(3)
    return Made(
        forward,
        downs=nn.ModuleList(nn.Conv2d(width, width, 3, 2, 1) for _ in levels),
        inner=nn.ModuleList(nn.Conv2d(width, width, 1) for _ in levels),
        layers=nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in levels),
    )


@pytest.mark.parametrize("size", [(200, 200), (72, 72), (264, 200)])
def test_gradients_of_a_pyramid(size: tuple[int, int]) -> None:
    """The sizes of its levels are no multiples of 16, for which Inductor would pad strides."""
    torch.manual_seed(0)
    model = pyramid(32).cuda()
    inputs = [x.cuda() for x in data(2, 32, *size)]
    check_steps(model, inputs, lambda one: compiled(one, compare=False), autocast=True)
    assert last().chosen == LAID_OUT, last().note


def test_no_operator_copies_a_slice() -> None:
    """Copies by other kernels than Inductor's are those of what crosses the graph's border."""
    torch.manual_seed(0)
    model = joined(32).cuda()
    inputs = [x.cuda() for x in data(4, 32, 96, 96)]
    check_steps(model, inputs, lambda one: compiled(one, compare=False), autocast=True)
    assert last().chosen == LAID_OUT, last().note
    for bias in (model.first.bias, model.down.bias):
        assert bool((bias.grad == 0).all())
    call = compiled(model, compare=False)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(inputs[0]).float().square().sum()
        loss.backward()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    names = [event.key for event in profile.key_averages()]
    assert any("triton" in name for name in names)
    strided = "elementwise_kernel<128, 4"
    assert not [name for name in names if "direct_copy_kernel" in name and strided in name]


@pytest.mark.parametrize("least_ms", [0.0, math.inf])
def test_a_step_is_measured_against_the_model_s_layout(
    least_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or against PyTorch's, if the convolutions alone take longer in that layout."""
    monkeypatch.setattr(training_graph, "convolutions_ms", lambda *_: least_ms)
    # So small a step waits for the host, and PyTorch's may be the faster one.
    monkeypatch.setattr(Comparison, "fastest", LAID_OUT)
    monkeypatch.setattr(Comparison, "fastest_in_captures", LAID_OUT)
    make, shape = MODELS["volumes"]
    model = make(WIDTH).cuda()
    inputs = [x.cuda() for x in data(shape[0], WIDTH * shape[1], *shape[2:])]
    check_steps(model, inputs, compiled, autocast=True)
    other = "pytorch" if least_ms else "cudnn_autotune"
    assert set(last().gpu_times_ms) == {other, LAID_OUT}, last().note


def test_backwards_of_convolutions_are_timed_on_autograd_s_thread() -> None:
    x = torch.randn(2, 8, 9, 9, device="cuda", requires_grad=True)
    layer = nn.Conv2d(8, 8, 3).cuda()
    layer(x).sum().backward()  # chooses PyTorch's algorithms
    torch.cuda.synchronize()
    with _TimedConvolutions() as timed:
        occupy(0.5)  # the host gets ahead of the GPU
        layer(x).sum().backward()
    torch.cuda.synchronize()
    assert len(timed.watches) == 2
    assert all(watch.ms() > 0 for watch in timed.watches)


@pytest.mark.compiles
@pytest.mark.parametrize("name", MODELS)
def test_what_a_first_backward_searches_is_compiled_ahead(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While Inductor compiles, so before the backward runs."""
    begun: set[ca.ConvProblem] = set()
    start, take = compiling_ahead.start, compiling_ahead.take
    late: list[ca.ConvProblem] = []

    def recorded(problem: ca.ConvProblem, *arguments: Any, **options: Any) -> None:
        begun.add(problem)
        start(problem, *arguments, **options)

    def taken(problem: ca.ConvProblem, device: Any) -> Any:
        if problem.op != "fprop" and problem not in begun:
            late.append(problem)
        return take(problem, device)

    monkeypatch.setattr(compiling_ahead, "start", recorded)
    monkeypatch.setattr(compiling_ahead, "take", taken)
    make, (batch, channels, *size) = MODELS[name]
    model = make(WIDTH).cuda()
    inputs = [x.cuda() for x in data(batch, WIDTH * channels, *size)]
    check_steps(model, inputs, lambda one: compiled(one, compare=False, sampling="auto"), True)
    assert {choice.problem.op for choice in ca.choices()} == {"fprop", "dgrad", "wgrad"}
    assert late == []


class Halves(nn.Module):
    """A detector's block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.first = nn.Sequential(conv(channels, channels, 1), nn.BatchNorm2d(channels), nn.SiLU())
        self.second = nn.Sequential(conv(half, half), nn.BatchNorm2d(half), nn.SiLU())
        self.last = nn.Sequential(conv(channels, channels, 1), nn.BatchNorm2d(channels), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.first(x).chunk(2, 1)
        result: Tensor = self.last(torch.cat([one, other + self.second(other)], 1))
        return result


def test_a_step_takes_no_more_memory_than_plain_inductors() -> None:
    x = torch.randn(8, 64, 96, 96, device="cuda")
    peaks = []
    for options in ({}, {"backend": "cudnn_autotune", "options": {"compare": False}}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(Halves(64) for _ in range(4))).cuda()
        call = torch.compile(model, dynamic=False, **options)
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16):
                loss = call(x).float().square().mean()
            loss.backward()
            model.zero_grad(set_to_none=True)
            del loss
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert last().chosen == LAID_OUT, last().note
    assert peaks[1] <= 1.02 * peaks[0], peaks
