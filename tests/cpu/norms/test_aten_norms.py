"""Batch and instance norms under ``enable`` and within converted models, on a CPU that takes the
way of a GPU: PyTorch's functions compute this package's operators there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.served_on_cpu import served_on_cpu
from support.norms.served import norms_on_cpu
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import cudnn_autotune as ca
from cudnn_autotune.norms import (
    choices as norm_choices,
)
from cudnn_autotune.norms import (
    measuring as norm_measuring,
)
from cudnn_autotune.norms import (
    memory as norm_memory,
)
from cudnn_autotune.norms import reference
from cudnn_autotune.norms.reference import BackwardOperands

FORMS = ["kept", "two passes"]


@dataclass
class Operators:
    """The calls of this package's operators, and the program that seems to be the fastest."""

    forwards: list[str]
    backwards: int = 0
    fastest: str = "two passes"
    timed: list[set[str]] = field(default_factory=list)

    def during(self, call: Callable[[], Any]) -> tuple[int, int]:
        """The number of forwards and of backwards that a call runs."""
        before = len(self.forwards), self.backwards
        call()
        return len(self.forwards) - before[0], self.backwards - before[1]

    def in_turns(self, programs: Mapping[str, Any], *_: Any, **__: Any) -> dict[str, float]:
        for program in programs.values():
            program()
        self.timed.append(set(programs))
        return {name: 1.0 + (name != self.fastest) for name in programs}


@pytest.fixture
def operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operators]:
    ca.set_store(tmp_path / "store", mode="read_write")
    ca.forget()
    with norms_on_cpu() as forwards, served_on_cpu():
        found = Operators(forwards)
        backward = reference.backward

        def recorded(given: BackwardOperands) -> Any:
            found.backwards += 1
            return backward(given)

        monkeypatch.setattr(reference, "backward", recorded)
        monkeypatch.setattr(norm_measuring, "_forms", lambda given: FORMS)
        monkeypatch.setattr(norm_measuring, "time_in_turns", found.in_turns)
        yield found
    ca.forget()


def step(norm: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, all gradients, and the running statistics after a step."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    norm.zero_grad()
    output = norm(x)
    weights = torch.linspace(0.5, 2, output.numel(), dtype=x.dtype).view(output.shape)
    (output * weights).sum().backward()
    gradients = [p.grad for p in norm.parameters()]
    buffers = [b.clone() for b in norm.buffers()]
    return [t for t in (output.detach(), x.grad, *gradients, *buffers) if t is not None]


def assert_like_pytorch(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for actual, wanted in zip(found, expected, strict=True):
        assert (actual.dtype, actual.stride()) == (wanted.dtype, wanted.stride())
        tolerance = {torch.bfloat16: 3e-2, torch.float16: 4e-3}.get(wanted.dtype, 1e-4)
        scale = float(wanted.abs().max()) + 1
        torch.testing.assert_close(actual, wanted, atol=tolerance * scale, rtol=tolerance)


def data(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).mul(2).add(0.5).to(dtype)


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(8), (4, 8, 7)),
    "no place": (lambda: nn.BatchNorm1d(8), (5, 8)),
    "2d": (lambda: nn.BatchNorm2d(8), (4, 8, 6, 5)),
    "3d": (lambda: nn.BatchNorm3d(8), (2, 8, 3, 6, 5)),
    "no weight": (lambda: nn.BatchNorm2d(8, affine=False), (4, 8, 6, 5)),
    "no statistics": (lambda: nn.BatchNorm2d(8, track_running_stats=False), (4, 8, 6, 5)),
    "average of all": (lambda: nn.BatchNorm2d(8, momentum=None), (4, 8, 6, 5)),
    "one image": (lambda: nn.BatchNorm2d(8), (1, 8, 6, 5)),
    "instance 1d": (lambda: nn.InstanceNorm1d(8), (4, 8, 7)),
    "instance 2d": (lambda: nn.InstanceNorm2d(8, affine=True), (4, 8, 6, 5)),
    "instance, in evaluation": (lambda: nn.InstanceNorm2d(8).eval(), (4, 8, 6, 5)),
    "instance 3d": (
        lambda: nn.InstanceNorm3d(8, affine=True, track_running_stats=True),
        (2, 8, 3, 6, 5),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_pytorch_are_served(operators: Operators, name: str, dtype: torch.dtype) -> None:
    make, shape = NORMS[name]
    norm, x = make(), data(*shape, dtype=dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0)
    plain = copy.deepcopy(norm)
    for _ in range(3):
        with ca.enable():
            found = step(norm, x)
        assert_like_pytorch(found, step(plain, x))
    with ca.enable():
        assert operators.during(lambda: step(norm, x)) == (1, 1)
    assert operators.during(lambda: step(norm, x)) == (0, 0)
    (choice,) = ca.norm_choices()
    assert (choice.chosen, choice.source) == ("two passes", "tuned")
    assert operators.timed == [{"pytorch", *FORMS}]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_layouts(operators: Operators, layout: torch.memory_format) -> None:
    norm, x = nn.BatchNorm2d(8), data(4, 8, 6, 5).to(memory_format=layout)
    expected = step(copy.deepcopy(norm), x)
    with ca.enable():
        assert_like_pytorch(step(norm, x), expected)
        assert operators.during(lambda: step(norm, x)) == (1, 1)


def test_pytorch_s_kernels_run_where_they_are_faster(operators: Operators) -> None:
    operators.fastest = "pytorch"
    norm, x = nn.BatchNorm2d(8), data(4, 8, 6, 5)
    expected = step(copy.deepcopy(norm), x)
    with ca.enable():
        found = step(norm, x)
        assert all(map(torch.equal, found, expected))
        assert operators.during(lambda: step(norm, x)) == (0, 0)
    assert len(operators.timed) == 1


def test_a_call_that_was_chosen_for_asks_no_more(
    operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm, x = nn.BatchNorm2d(8), data(4, 8, 6, 5)
    with ca.enable():
        step(norm, x)
        monkeypatch.delattr(norm_choices, "BatchNormCall")
        assert operators.during(lambda: step(norm, x)) == (1, 1)
        assert operators.during(lambda: step(norm, x[:3])) == (0, 0)  # where asking fails


def test_a_forward_alone_is_measured_alone(operators: Operators) -> None:
    x = data(4, 8, 6, 5)
    with ca.enable(), torch.no_grad():
        assert operators.during(lambda: F.instance_norm(x))[1] == 0
        torch.testing.assert_close(F.instance_norm(x), F.instance_norm(x.double()).float())
    with ca.enable(), torch.inference_mode():
        assert operators.during(lambda: F.instance_norm(x)) == (1, 0)
    assert [one.signature.endswith("no gradients") for one in ca.norm_choices()] == [True]


def test_the_backward_is_that_of_its_forward(operators: Operators) -> None:
    norm, x = nn.BatchNorm2d(8), data(4, 8, 6, 5).requires_grad_()
    early = norm(x)
    with ca.enable():
        late = norm(x)
        assert operators.during(lambda: early.sum().backward()) == (0, 0)
    assert operators.during(lambda: late.sum().backward()) == (0, 1)


def test_where_hooks_on_saved_tensors_are_in_force_pytorch_computes(operators: Operators) -> None:
    """A checkpoint compares what a forward saves with what it saves when it is computed again,
    maybe without ``enable()``."""
    norm, x = nn.BatchNorm2d(8), data(4, 8, 6, 5)
    expected = step(copy.deepcopy(norm), x)
    with ca.enable():
        norm(x.clone().requires_grad_())
        norm.reset_running_stats()
        with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            assert operators.during(lambda: step(norm, x)) == (0, 0)
        norm.reset_running_stats()
        with save_on_cpu():
            assert_like_pytorch(step(norm, x), expected)
        inputs = x.clone().requires_grad_()
        output = checkpoint(norm, inputs, use_reentrant=False)
    assert operators.during(lambda: output.sum().backward()) == (0, 0)


def test_the_backward_of_cudnn_s_operator_is_that_of_its_forward(operators: Operators) -> None:
    """PyTorch has no kernels of these operators for a CPU, so a call fails that is not served."""
    forward = torch.ops.aten.cudnn_batch_norm
    x, weight = data(4, 8, 6, 5).requires_grad_(), data(8).requires_grad_()
    bias, mean, var = torch.zeros(8, requires_grad=True), torch.zeros(8), torch.ones(8)
    wide = [one.detach().double().requires_grad_() for one in (x, weight, bias)]
    exact = F.batch_norm(wide[0], mean.double(), var.double(), *wide[1:], training=True)
    expected = torch.autograd.grad(exact.pow(3).sum(), wide)
    with ca.enable():
        for retains in (False, True):
            output, *saved, reserve = forward(x, weight, bias, mean, var, True, 0.1, 1e-5)
            before = operators.backwards
            loss = output.pow(3).sum()
            found = torch.autograd.grad(loss, (x, weight, bias), retain_graph=retains)
            assert operators.backwards == before + 1
            for actual, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(actual, wanted.float(), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(mean, x.detach().mean((0, 2, 3)) * (1 - 0.9**2))
    # An input that the kernels do not take is the business of PyTorch's other kernel.
    other, grad = x.detach().transpose(0, 1).contiguous().transpose(0, 1), torch.ones_like(x)
    backward = torch.ops.aten.cudnn_batch_norm_backward
    of_bias = backward(other, grad, weight, None, None, *saved, 1e-5, reserve)[2]
    assert operators.backwards == before + 1
    torch.testing.assert_close(of_bias, grad.sum((0, 2, 3)))


ODD: dict[str, Callable[[], Tensor]] = {
    "float64": lambda: nn.BatchNorm2d(4).double()(data(2, 4, 5, 6).double()),
    "evaluation": lambda: nn.BatchNorm2d(4).eval()(data(2, 4, 5, 6)),
    "empty": lambda: nn.BatchNorm2d(4)(torch.empty(0, 4, 5, 6)),
    "by running statistics": lambda: F.instance_norm(
        data(2, 4, 5), torch.zeros(4), torch.ones(4), use_input_stats=False
    ),
    "other strides": lambda: nn.BatchNorm2d(4)(data(2, 5, 4, 6).transpose(1, 2)),
    "channels_last of one dimension": lambda: nn.BatchNorm1d(4)(data(2, 5, 4).mT),
    "rows of one channel": lambda: nn.BatchNorm2d(1)(
        data(2, 1, 5, 6).expand(2, 1, 5, 6)[:, :, ::2]
    ),
    "half statistics": lambda: nn.BatchNorm2d(4).bfloat16()(data(2, 4, 5, 6).bfloat16()),
    "a weight alone": lambda: F.batch_norm(data(2, 4, 5), None, None, torch.ones(4), training=True),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_left_to_pytorch(operators: Operators, name: str) -> None:
    expected = ODD[name]()
    with ca.enable():
        found = ODD[name]()
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert not operators.forwards


@pytest.mark.parametrize(
    "call",
    [
        lambda: nn.BatchNorm1d(4)(data(1, 4)),
        lambda: nn.BatchNorm2d(4)(data(1, 4, 1, 1)),
        lambda: nn.InstanceNorm1d(4)(data(2, 4, 1)),
        lambda: nn.InstanceNorm2d(4)(data(1, 4, 1, 1)),
        lambda: nn.BatchNorm2d(5)(data(2, 4, 3, 3)),
        lambda: nn.BatchNorm2d(4)(data(2, 4, 3)),
        lambda: F.batch_norm(data(2, 4, 3), torch.zeros(3), torch.ones(3), training=True),
        lambda: F.batch_norm(data(2, 4, 3), None, None, training=True, eps=0.0),
        lambda: F.instance_norm(data(2, 4, 3), weight=torch.ones(3)),
    ],
)
def test_errors_are_pytorch_s(operators: Operators, call: Callable[[], Any]) -> None:
    with pytest.raises((RuntimeError, ValueError)) as expected:
        call()
    with ca.enable(), pytest.raises(expected.type) as found:
        call()
    assert str(found.value) == str(expected.value)
    assert not operators.forwards


@pytest.mark.parametrize("spoilt", ["output", "statistics", "gradients"])
def test_a_wrong_form_is_left_out(
    operators: Operators, spoilt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward = reference.forward, reference.backward

    def wrong_forward(given: Any) -> Any:
        results = forward(given)
        if spoilt == "output":
            results.output.view(-1)[17] += 9
        elif spoilt == "statistics":
            results.unbiased_var[3] *= 1.5
        return results

    def wrong_backward(given: Any) -> Any:
        gradients = backward(given)
        if spoilt == "gradients":
            gradients.input.mul_(1.1)
        return gradients

    monkeypatch.setattr(reference, "forward", wrong_forward)
    monkeypatch.setattr(reference, "backward", wrong_backward)
    norm, x = nn.BatchNorm2d(8), data(4, 8, 6, 5)
    expected = step(copy.deepcopy(norm), x)
    with ca.enable():
        assert all(map(torch.equal, step(norm, x), expected))
    (choice,) = ca.norm_choices()
    assert choice.chosen == "pytorch"
    assert set(choice.rejected) == set(FORMS)
    assert not operators.timed


def test_what_measures_changes_nothing_else(operators: Operators) -> None:
    norm, x = nn.BatchNorm2d(8), data(4, 8, 6, 5).requires_grad_()
    seen: list[Any] = []
    x.register_hook(seen.append)
    norm.weight.grad = torch.ones(8)
    before, state = copy.deepcopy(norm.state_dict()), torch.get_rng_state()
    with ca.enable():
        norm(x)
        assert operators.timed
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(norm.weight.grad, torch.ones(8))
    assert not seen
    assert norm.num_batches_tracked == 1
    mean = x.detach().mean((0, 2, 3)) * 0.1
    torch.testing.assert_close(norm.running_mean, mean, atol=1e-6, rtol=1e-5)
    assert torch.equal(norm.weight, before["weight"])


def test_nan_and_infinity(operators: Operators) -> None:
    for value in (torch.nan, torch.inf):
        x = data(4, 8, 6, 5)
        x[1, 3, 2, 2] = value
        expected = F.batch_norm(x, None, None, training=True)
        with ca.enable():
            found = F.batch_norm(x, None, None, training=True)
        torch.testing.assert_close(found, expected, equal_nan=True)
    assert operators.forwards


def test_the_next_process_times_nothing(operators: Operators) -> None:
    x = data(2, 8, 5, 6)
    with ca.enable():
        F.instance_norm(x)
        ca.forget()
        assert not ca.norm_choices()
        F.instance_norm(x)
        assert [one.source for one in ca.norm_choices()] == ["store"]
        assert operators.during(lambda: F.instance_norm(x)) == (1, 0)
    assert len(operators.timed) == 1


def test_sizes_that_keep_changing_are_forgotten(
    operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def verdict(memory: Any, call: Any, asker: Any) -> norm_memory.Verdict:
        asked.append(call.input.shape[-1])
        return norm_memory.Verdict(norm_memory.NormChoice("pytorch"))

    monkeypatch.setattr(norm_memory.NormMemory, "verdict", verdict)
    x = torch.randn(4200)
    with ca.enable():
        for length in [*range(2, 4198), 4197, 2]:
            F.group_norm(x[:length].view(1, 1, length), 1)
    assert asked == [*range(2, 4198), 2]


def test_a_mode_that_times_nothing_leaves_it_to_pytorch(operators: Operators) -> None:
    with ca.enable("heuristic"):
        F.instance_norm(data(2, 8, 5))
    assert not operators.forwards
    assert not ca.norm_choices()


class Functional(nn.Module):
    """A model whose forward calls functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.instances = nn.InstanceNorm2d(8, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.instances(self.norm(self.conv(x)))
        return F.batch_norm(F.instance_norm(y), None, None, training=True)


def test_a_converted_model_s_instance_norms_are_served(operators: Operators) -> None:
    torch.manual_seed(0)
    model, x = Functional(), data(2, 3, 9, 8)
    expected = step(copy.deepcopy(model), x)
    ca.convert(model, norms=False)
    assert_like_pytorch(step(model, x), expected)
    # Its own forward calls these two; its modules see to batch norms.
    assert operators.during(lambda: step(model, x)) == (2, 2)
    ca.revert(model)
    assert operators.during(lambda: step(model, x)) == (0, 0)


def test_instance_norms_among_modules_of_pytorch_are_served(operators: Operators) -> None:
    model, x = nn.Sequential(nn.Conv1d(4, 8, 3), nn.InstanceNorm1d(8), nn.PReLU()), data(2, 4, 9)
    text, expected = repr(model), step(copy.deepcopy(model), x)
    ca.convert(model, norms=False)
    assert operators.during(lambda: step(model, x)) == (0, 0)
    ca.convert(model)
    assert_like_pytorch(step(model, x), expected)
    assert operators.during(lambda: step(model, x)) == (1, 1)
    ca.revert(model)
    assert operators.during(lambda: step(model, x)) == (0, 0)
    assert repr(model) == text
    assert type(model[1]) is nn.InstanceNorm1d


def test_lazy_instance_norms(operators: Operators) -> None:
    model = ca.convert(nn.Sequential(nn.Conv1d(4, 8, 3), nn.LazyInstanceNorm1d(affine=True)))
    x = data(2, 4, 9)
    step(model, x)
    assert operators.during(lambda: step(model, x)) == (1, 1)
    assert isinstance(model[1], nn.InstanceNorm1d)


def test_a_converted_norm_for_which_pytorch_was_chosen_is_not_asked_twice(
    operators: Operators,
) -> None:
    operators.fastest = "pytorch"
    model, x = ca.convert(nn.Sequential(nn.BatchNorm2d(8))), data(1, 8, 6, 5)
    with ca.enable():
        step(model, x)
        assert operators.during(lambda: step(model, x)) == (0, 0)
    assert len(operators.timed) == 1


def test_modules_and_functions_share_a_choice(operators: Operators) -> None:
    """Each converted module has its record, and what PyTorch has chosen is computed alike."""
    x = data(4, 8, 6, 5)
    plain, ours = nn.BatchNorm2d(8), ca.convert(nn.Sequential(nn.BatchNorm2d(8)))
    with ca.enable():
        step(plain, x)
    for _ in range(2):
        assert operators.during(lambda: step(ours, x)) == (1, 1)
    (choice,) = ca.conversion(ours).norms["0"]
    assert ca.norm_choices() == (choice,)
    assert len(operators.timed) == 1
    assert ours(x).grad_fn.name() == plain(x).grad_fn.name()


def test_a_converted_norm_asks_for_itself_alone(operators: Operators) -> None:
    """Its policy ends with its call, and stands before the process's."""
    x = data(4, 8, 6, 5)
    ours = ca.convert(nn.Sequential(nn.BatchNorm2d(8)), sampling="heuristic")
    plain = nn.BatchNorm2d(8)
    with ca.enable("heuristic"):
        assert operators.during(lambda: step(ours, x)) == (1, 1)
        assert operators.during(lambda: step(plain, x)) == (0, 0)
    assert operators.during(lambda: step(plain, x)) == (0, 0)
    ca.revert(ours)
    assert operators.during(lambda: step(ours, x)) == (0, 0)


def test_second_derivatives_are_pytorch_s(operators: Operators) -> None:
    def second(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        output = F.batch_norm(x, None, None, weight, torch.zeros(4), training=True)
        (first,) = torch.autograd.grad(output.pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, weight))

    x, weight = data(3, 4, 5).requires_grad_(), data(4).requires_grad_()
    expected = second(x, weight)
    with ca.enable():
        assert operators.during(lambda: second(x, weight))[1] > 0
        for actual, wanted in zip(second(x, weight), expected, strict=True):
            torch.testing.assert_close(actual, wanted, atol=1e-2, rtol=1e-3)


def test_checkpoints(operators: Operators) -> None:
    x = data(4, 8, 6, 5)
    for reentrant in (False, True):
        results = []
        for norm in (nn.BatchNorm2d(8), nn.BatchNorm2d(8)):
            inputs = x.clone().requires_grad_()
            with ca.enable() if results else torch.enable_grad():
                output = checkpoint(norm, inputs, use_reentrant=reentrant)
                output.pow(3).sum().backward()
            results.append([output.detach(), inputs.grad, *norm.buffers()])
        assert_like_pytorch(results[1], results[0])
    assert operators.backwards


def test_what_autocast_and_transforms_make_of_it(operators: Operators) -> None:
    norm, x = nn.BatchNorm1d(8, track_running_stats=False), data(3, 8, 5)
    images = data(2, 3, 8, 5)

    def results() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            cast = norm(x.bfloat16())
        each = torch.func.vmap(norm)(images)
        per_sample = torch.func.vmap(torch.func.grad(lambda one: norm(one).pow(3).sum()))(images)
        gradient = torch.func.grad(lambda one: norm(one).pow(3).sum())(x)
        _, tangent = torch.func.jvp(norm, (x,), (torch.ones_like(x).cumsum(-1),))
        return [cast, each, per_sample, gradient, tangent]

    expected = results()
    with ca.enable():
        for _ in range(2):
            found = results()
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.dtype == wanted.dtype
        torch.testing.assert_close(actual, wanted, atol=2e-3, rtol=2e-3)
    assert operators.forwards


def test_a_first_call_is_measured_where_hooks_are_refused(operators: Operators) -> None:
    """Transforms of derivatives refuse hooks on saved tensors."""
    x = data(3, 8, 5)
    with ca.enable():
        torch.func.grad(lambda one: F.instance_norm(one).pow(3).sum())(x)
        with disable_saved_tensors_hooks("refused"):
            F.instance_norm(data(2, 8, 5).requires_grad_())
    assert [choice.chosen for choice in ca.norm_choices()] == ["two passes"] * 2


def test_a_compiler_sees_pytorch_s_function(operators: Operators) -> None:
    model, x = nn.Sequential(nn.BatchNorm2d(8), nn.InstanceNorm2d(8)), data(4, 8, 6, 5)
    expected = step(copy.deepcopy(model), x)
    compiled = torch.compile(model, backend="aot_eager")
    with ca.enable():
        found = step(compiled, x)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted)
    assert not operators.forwards


def test_an_exported_program_is_served_when_it_runs(operators: Operators) -> None:
    norm, x = nn.InstanceNorm1d(8), data(4, 8, 7)
    with ca.enable():
        program = torch.export.export(norm, (x,))
        assert not operators.forwards
        torch.testing.assert_close(program.module()(x), F.instance_norm(x.double()).float())
        assert operators.forwards


def test_threads_at_once(operators: Operators) -> None:
    inputs = [data(2, 8, 5 + i) for i in range(4)]
    expected = [F.instance_norm(x) for x in inputs]
    with ca.enable(), ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: F.instance_norm(inputs[i % 4]), range(32)))
    for i, output in enumerate(found):
        torch.testing.assert_close(output, expected[i % 4], atol=1e-5, rtol=1e-4)
