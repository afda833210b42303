"""Converted models on a GPU: their convolutions run chosen engines, and the layout is measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import assert_close
from support.conv.training_steps import training_step
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import cudnn_autotune as ca

CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last


@pytest.fixture(autouse=True)
def quick(cudnn_flags: Callable[..., None]) -> Iterator[None]:
    ca.set_sampling("heuristic")
    cudnn_flags(allow_tf32=False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Standardized(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


class Upsampling(nn.ConvTranspose2d):
    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        return F.conv_transpose2d(input, self.weight.tanh(), self.bias, self.stride)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A bias before a batch norm would have a gradient of nothing but rounding errors.
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.own = Standardized(16, 16, 3, padding=1)
        self.pointwise = nn.Conv2d(16, 16, 1, bias=False)
        self.up = Upsampling(16, 8, 2, stride=2)
        self.volume = nn.Conv3d(8, 8, 3, padding=1)
        self.line = nn.Conv1d(8, 8, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.pointwise(self.own(self.norm(self.stem(x)).relu())))
        z = self.volume(y.unsqueeze(2)).squeeze(2)
        out: Tensor = self.head(self.line(z.flatten(2)).mean(2))
        return out


CONVOLUTIONS = 6


class Chain(nn.Sequential):
    """Convolutions and what keeps a layout, so that every copy is one of a layout."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(8, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1),
        )


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 3, 24, 20, device="cuda")


def copies(model: nn.Module, x: Tensor) -> int:
    """How often the forward copies a tensor into another layout, after a first call."""
    with torch.no_grad():
        model(x)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            model(x)
    return sum(event.count for event in profiled.key_averages() if event.key == "aten::copy_")


@pytest.mark.parametrize("layout", [CONTIGUOUS, LAST])
def test_every_convolution_runs_a_chosen_engine(x: Tensor, layout: torch.memory_format) -> None:
    theirs = Net().cuda()
    ours = ca.convert(copy.deepcopy(theirs), memory_format=layout)
    expected, found = training_step(theirs, x), training_step(ours, x)
    for actual, right in zip(found, expected, strict=True):
        # A sum of a gradient over all positions, as that of a bias, has 100 times its error.
        assert_close(actual, right, 1e-3)
    made = [choice.problem.op for choice in ca.choices()]
    assert made.count("wgrad") == CONVOLUTIONS
    assert made.count("fprop") == made.count("dgrad") == CONVOLUTIONS
    assert {choice.problem.memory_format for choice in ca.choices()} >= {layout}


def test_compiled_without_a_graph_break(x: Tensor) -> None:
    theirs = Net().cuda().eval()
    ours = ca.convert(copy.deepcopy(theirs))
    compiled = torch.compile(ours, fullgraph=True)
    with torch.no_grad():
        assert_close(compiled(x), theirs(x), 1e-4)
    # The convolution with a forward of its own is among those that were searched.
    assert theirs.own.weight.shape in {choice.problem.weight_shape for choice in ca.choices()}


class Checkpointed(nn.Module):
    """Within, a call of a function is computed again in the backward, when no mode is active."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first = Standardized(3, 8, 3)
        self.kernel = nn.Parameter(torch.randn(8, 8, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.first, x, use_reentrant=self.use_reentrant)
        out: Tensor = checkpoint(
            lambda y: F.conv2d(y, self.kernel).relu(), y, use_reentrant=self.use_reentrant
        )
        return out


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(x: Tensor, use_reentrant: bool) -> None:
    theirs = Checkpointed(use_reentrant).cuda()
    ours = ca.convert(copy.deepcopy(theirs))
    for model in (theirs, ours):
        model(x.clone().requires_grad_()).sin().sum().backward()
    for mine, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(mine.grad, right.grad, 1e-4)
    assert len(ca.choices()) > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("training", [False, True])
def test_the_layout_is_measured_and_nothing_else_changes(
    training: bool, dtype: torch.dtype
) -> None:
    model = Chain().to("cuda", dtype).insert(1, nn.BatchNorm2d(64).to("cuda", dtype))
    model = model.train(training)
    x = torch.randn(16, 8, 56, 56, device="cuda", dtype=dtype)
    state, generator = copy.deepcopy(model.state_dict()), torch.cuda.get_rng_state()
    ca.convert(model, memory_format="auto", example_input=x)
    choice = ca.conversion(model).memory_format
    assert choice.times_ms.keys() == {CONTIGUOUS, LAST}
    assert all(0 < ms < 1000 for ms in choice.times_ms.values())
    assert choice.chosen == min(choice.times_ms, key=choice.times_ms.__getitem__)
    assert next(model.parameters()).is_contiguous(memory_format=choice.chosen)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.cuda.get_rng_state(), generator)
    # All that the model needs in this layout has been searched.
    known = len(ca.choices())
    with torch.set_grad_enabled(training):
        model(x)
    assert len(ca.choices()) == known


def test_a_model_with_cuda_graphs_of_its_own_begins_its_steps_itself() -> None:
    """After it was measured, nothing is recorded again in later calls."""
    model = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))).cuda().half().eval()
    compiled = torch.compile(model, mode="reduce-overhead")
    x = torch.randn(4, 16, 28, 28, device="cuda", dtype=torch.float16)
    ca.convert(compiled, "heuristic", memory_format="auto", example_input=x)
    with torch.no_grad():
        expected = model(x)
        for _ in range(4):
            output = compiled(x).clone()
        torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
        manager = torch._inductor.cudagraph_trees.get_manager(0)
        recorded = manager.new_graph_id()
        for _ in range(5):
            output = compiled(x)
        assert manager.new_graph_id().id == recorded.id + 1


def test_the_layout_that_was_faster_is_kept() -> None:
    """Which one that is depends on what else runs on the GPU: models.py measures it alone."""
    model = nn.Sequential(*(nn.Conv2d(128, 128, 3, padding=1) for _ in range(4))).cuda().half()
    x = torch.randn(32, 128, 56, 56, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        ca.convert(model, memory_format="auto", example_input=x)
    choice = ca.conversion(model).memory_format
    assert choice.times_ms.keys() == {CONTIGUOUS, LAST}
    assert choice.chosen == min(choice.times_ms, key=choice.times_ms.__getitem__), str(choice)
    assert model[0].weight.is_contiguous(memory_format=choice.chosen)


def test_inputs_follow_with_one_copy() -> None:
    """The first convolution copies a contiguous input; nothing is copied after it."""
    model = ca.convert(Chain().cuda().half(), memory_format=LAST)
    x = torch.randn(4, 8, 20, 20, device="cuda", dtype=torch.float16)
    assert model(x).is_contiguous(memory_format=LAST)
    assert copies(model, x) == 1
    assert copies(model, x.contiguous(memory_format=LAST)) == 0
    ca.convert(model, memory_format=CONTIGUOUS)
    assert copies(model, x) == 0


def test_casts_of_the_other_layout_are_not_kept() -> None:
    """Autocast keeps a weight's cast until its context ends."""
    model, x = Chain().cuda(), torch.randn(4, 8, 20, 20, device="cuda")
    with torch.autocast("cuda", torch.float16):
        assert model(x).is_contiguous()
        ca.convert(model, memory_format=LAST)
        assert model(x).is_contiguous(memory_format=LAST)
