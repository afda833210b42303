"""What a model asks for is found without a trace in the model."""

from __future__ import annotations

import math
import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.conv.problems import make
from support.models import spread_model
from support.processes import distributed_cases as cases
from support.processes.gloo_ranks import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.distributed import problems_of
from cudnn_autotune.nn.untouched import run_once
from cudnn_autotune.timers import measuring
from cudnn_autotune.tuning import miss
from cudnn_autotune.tuning.choice import Choice


@dataclass
class Answer:
    logits: Tensor
    rest: list[dict[str, Tensor]]


class Model(nn.Module):
    """All that could change in a model by running it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = ca.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor
        self.backwards = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Answer:
        random.random()
        self.calls = self.calls + 1  # another tensor
        self.register_buffer("latest", x.detach())
        y = self.drop(self.norm(self.conv(x)))
        if y.requires_grad:
            y.register_hook(self._count)
        return Answer(y * scale, [{"mean": y.mean()}])

    def _count(self, gradient: Tensor) -> None:
        self.backwards += 1


def state(model: nn.Module) -> tuple[Any, ...]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        {name: (id(t), t.detach().clone().tolist()) for name, t in tensors.items()},
        {name: id(p.grad) for name, p in model.named_parameters()},
        {n: None if p.grad is None else p.grad.tolist() for n, p in model.named_parameters()},
        [module.training for module in model.modules()],
        torch.get_rng_state().tolist(),
        random.getstate(),
    )


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_model_changes(training: bool) -> None:
    model = Model().train(training)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    model(x).logits.sum().backward()
    model.conv.bias.grad = None  # type: ignore[union-attr]
    gradient, before, backwards = x.grad, state(model), model.backwards
    run_once(model, (x,), {"scale": 2.0})
    assert state(model) == before
    assert x.grad is gradient
    assert model.backwards == backwards + 1


def test_nothing_changes_where_the_model_fails() -> None:
    model, x = Model(), torch.randn(2, 3, 8, 8)
    before = state(model)
    with pytest.raises(RuntimeError, match="size of tensor"):
        run_once(model, (x,), {"scale": torch.ones(77)})
    assert state(model) == before


def test_no_backward_where_none_is_asked_for() -> None:
    model, x = Model(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        run_once(model, (x,), {})
    with torch.inference_mode():
        run_once(model, (x,), {})
    run_once(model.requires_grad_(False), (x,), {})
    assert model.backwards == 0
    run_once(model, (x.requires_grad_(),), {})
    assert model.backwards == 1


def test_inputs_are_what_they_were() -> None:
    class Box:
        def __init__(self) -> None:
            self.x = torch.randn(2, 3, 8, 8)

    class Takes(nn.Module):
        def forward(self, box: Box, more: dict[str, list[Tensor]]) -> Tensor:
            return box.x.relu_() + more["x"][0].mul_(2)

    box, more = Box(), torch.randn(2, 3, 8, 8)
    before = box.x.clone(), more.clone()
    run_once(Takes(), (box,), {"more": {"x": [more]}})
    assert torch.equal(box.x, before[0])
    assert torch.equal(more, before[1])


@pytest.mark.parametrize("kind", ["nan", "expanded", "inference", "meta"])
def test_inputs_that_are_left_alone_are_not_written(kind: str) -> None:
    """A write would spoil a graph that is yet to be run backward, or be refused."""
    x = torch.randn(2, 3, 8, 8)
    if kind == "nan":
        x[0, 0, 0, 0] = math.nan
    if kind == "expanded":
        x = x[:1].expand(2, -1, -1, -1)
    if kind == "inference":
        with torch.inference_mode():
            x = x.clone()
    layer = nn.Conv2d(3, 4, 3)
    more = {"meta": torch.empty(2, device="meta")} if kind == "meta" else {}
    version = None if x.is_inference() else x._version

    class Takes(nn.Module):
        def forward(self, x: Tensor, **more: Tensor) -> Tensor:
            return layer(x)

    with torch.set_grad_enabled(kind != "inference"):
        run_once(Takes(), (x,), more)
    assert x.is_inference() or x._version == version


def test_a_pending_graph_of_the_users_survives() -> None:
    model = Model().eval()
    loss = model(torch.randn(2, 3, 8, 8)).logits.sum()
    deeper = torch.randn(2, 3, 8, 8, requires_grad=True) ** 2  # an input with a graph of its own
    run_once(model, (deeper,), {})
    (loss + deeper.sum()).backward()
    assert model.conv.weight.grad is not None


def test_parameters_are_not_updated_by_hooks_on_their_gradients() -> None:
    model = Model()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.data.zero_())
    x = torch.randn(2, 3, 8, 8)
    before = state(model)
    run_once(model, (x,), {})
    assert state(model) == before


def test_a_model_whose_gradients_are_averaged_over_ranks(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Sequential(ca.Conv2d(3, 4, 3), cases.Asking(2)))
        x = torch.randn(1, 3, 8, 8)
        assert problems_of(model, x) == cases.problems(2)
        assert all(p.grad is None for p in model.parameters())
        for _ in range(2):  # its bookkeeping of who has a gradient is intact
            model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("wrapping", ["ddp inside", "fsdp1", "fsdp2"])
def test_a_model_that_is_spread_over_ranks_trains_on_as_if_nothing_had_been(
    two: Ranks, wrapping: str
) -> None:
    for masks, plain, after in two.values(spread_model.trained, wrapping):
        # (input, weight, bias) of each backward, from the last layer to the first.
        assert masks == [(True, True, True)] * 2 + [(False, True, True)]
        assert after == plain


def test_what_is_pinned_needs_no_tuning() -> None:
    ca.pin(cases.problems(1)[0], "aten")
    assert problems_of(cases.Asking(3), torch.ones(1)) == cases.problems(3)[1:]
    assert problems_of(cases.Asking(1), torch.ones(1)) == []


@pytest.mark.search
def test_nobody_hears_of_what_was_only_asked_for() -> None:
    class Chooses(nn.Module):
        """As C++ asks for the choice of a problem; a pin is all that needs no GPU."""

        def forward(self, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
            sampling, limit = ca.get_sampling(), _C.benchmark_limit_of_call()
            *_, afterwards = miss.choose(problem.native(), sampling, -1, limit, 0, x, w, y)
            if afterwards is not None:
                afterwards()
            return x

    problem = make("resnet_fp16_nhwc")
    operands = measuring.operands(problem, "cpu")
    ca.pin(problem, "aten")
    heard: list[Choice] = []
    with ca.on_decision(heard.append):
        assert problems_of(Chooses(), *operands) == []
        assert (heard, ca.choices()) == ([], [])
        Chooses()(*operands)
    assert [choice.problem for choice in heard] == [problem]
    assert ca.choices() == heard


def test_layers_and_settings_are_left_alone_meanwhile() -> None:
    seen = []

    class Layer(ca.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            seen.append((self.sampling, ca.get_sampling(), ca.get_benchmark_limit()))
            return super().forward(input)

    layer = Layer(3, 4, 3, sampling="race")
    with pytest.raises(ValueError, match="model must have a convolution"):
        problems_of(layer, torch.randn(1, 3, 8, 8))
    assert seen == [("race", "auto", 0)]


def test_what_other_threads_ask_for_meanwhile_is_theirs() -> None:
    """And chosen as ever: neither by the heuristics nor unheard."""
    other = cases.Asking(7)

    class WhileAnotherRuns(cases.Asking):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=other, args=(x,))
            thread.start()
            thread.join()
            return super().forward(x)

    assert problems_of(WhileAnotherRuns(3), torch.ones(1)) == cases.problems(3)
    made = ca.choices()
    assert [choice.problem for choice in made] == cases.problems(7)
    assert {(choice.sampling, choice.benchmark_limit) for choice in made} == {("auto", 0)}


def test_a_backward_on_a_thread_of_autograds_belongs_to_the_model() -> None:
    """On the CPU autograd goes on in other threads where backwards are nested deeply."""
    asked_by = []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            if ctx.depth:
                with torch.enable_grad():
                    inner = torch.ones(1, requires_grad=True)
                    Nested.apply(inner, ctx.depth - 1).backward()  # type: ignore[no-untyped-call]
            else:
                asked_by.append(threading.get_ident())
                cases.Asking(5)(gradient)
            return gradient, None

    class Deep(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Nested.apply(x, 100)  # type: ignore[no-untyped-call]

    x = torch.ones(1, requires_grad=True)
    assert problems_of(Deep(), x) == cases.problems(5)
    assert asked_by != [threading.get_ident()]
    assert ca.choices() == []


def test_a_backward_that_cannot_be_found_is_complained_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Hides(nn.Sequential):
        def forward(self, x: Tensor) -> list[float]:
            return list(super().forward(x).detach())

    model = Hides(ca.Conv2d(3, 4, 3), cases.Asking(1))  # asks for an fprop only
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        problems_of(model, x)
    assert caplog.messages == []
    problems_of(model, x)
    assert "its backward asked for none" in caplog.text
    caplog.clear()
    problems_of(Hides(*model[:1], cases.Asking(3)), x)
    problems_of(model.requires_grad_(False), x)
    assert caplog.messages == []
