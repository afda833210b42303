"""Group norms of converted models and under ``enable``, on a CPU that takes the way of a GPU: the
kernels' operator is computed by PyTorch there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.served_on_cpu import served_on_cpu
from support.norms.served import FORM, Turns
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.norms import measuring as norm_measuring


class Kernels:
    """The operator of the kernels, which counts its calls and may be wrong."""

    def __init__(self) -> None:
        self.calls = 0
        self.spoil: Callable[[Tensor], Any] = lambda output: None

    def __call__(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
    ) -> tuple[Tensor, Tensor]:
        self.calls += 1
        wide = [None if one is None else one.double() for one in (weight, bias)]
        output = F.group_norm(input.double(), groups, *wide, eps).to(input.dtype)
        values = input.double().reshape(input.shape[0], groups, -1)
        var, mean = torch.var_mean(values, -1, correction=0)
        self.spoil(output)
        return output, torch.stack([mean, (var + eps).rsqrt()]).float()


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    found = Kernels()
    library = torch.library.Library("cudnn_autotune", "IMPL")
    library.impl("group_norm", found, "CPU")
    monkeypatch.setattr(norm_measuring, "_forms", lambda call: [FORM, "kept"])
    ca.set_store(tmp_path / "store", mode="read_write")
    ca.forget()
    with served_on_cpu():
        yield found
    library._destroy()
    torch.ops.cudnn_autotune.group_norm.default._dispatch_cache.clear()
    ca.forget()


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    found = Turns()
    monkeypatch.setattr(norm_measuring, "time_in_turns", found)
    return found


class Model(nn.Module):
    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.GroupNorm(groups, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


def count(kernels: Kernels, call: Callable[[], Any]) -> int:
    before = kernels.calls
    call()
    return kernels.calls - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_converted_models_group_norm_is_served_where_it_is_faster(
    kernels: Kernels, turns: Turns, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model, x = Model().to(dtype), torch.randn(2, 4, 9, 7, dtype=dtype)
    nn.init.normal_(model.norm.weight)
    expected = model(x)
    assert kernels.calls == 0
    ca.convert(model)
    found = model(x)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert count(kernels, lambda: model(x)) == 1
    (choice,) = ca.norm_choices()
    assert (choice.chosen, choice.source) == (FORM, "tuned")
    assert set(choice.times_ms) == {"pytorch", FORM, "kept"}
    assert choice.signature.split()[1:3] == ["2x8x9x7", "groups=2"]
    assert turns.count == 1
    ca.revert(model)
    assert count(kernels, lambda: model(x)) == 0


def test_group_norms_among_modules_of_pytorch_are_served(kernels: Kernels, turns: Turns) -> None:
    x = torch.randn(2, 4, 9)
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Sequential(nn.GroupNorm(1, 8), nn.PReLU()))
    text, expected = repr(model), model(x)
    ca.convert(model, norms=False)
    assert count(kernels, lambda: model(x)) == 0
    ca.convert(model)
    torch.testing.assert_close(model(x), expected)
    assert count(kernels, lambda: model(x)) == 1
    assert count(kernels, lambda: copy.deepcopy(model)(x)) == 1
    assert count(kernels, lambda: pickle.loads(pickle.dumps(model))(x)) == 1
    ca.revert(model)
    assert count(kernels, lambda: model(x)) == 0
    assert repr(model) == text
    assert type(model[1][0]) is nn.GroupNorm


def test_pytorch_s_kernels_run_where_they_are_faster(kernels: Kernels, turns: Turns) -> None:
    turns.fastest = "pytorch"
    model, x = Model(), torch.randn(2, 4, 9, 7)
    expected = model(x)
    ca.convert(model)
    model(x)
    assert count(kernels, lambda: model(x)) == 0
    assert torch.equal(model(x), expected)
    assert ca.norm_choices()[0].chosen == "pytorch"
    assert turns.count == 1


def test_gradients_are_pytorch_s(kernels: Kernels, turns: Turns) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8, 5, dtype=torch.float32)
    norm = nn.GroupNorm(4, 8)
    nn.init.normal_(norm.weight)
    wide = nn.GroupNorm(4, 8).double()
    wide.load_state_dict(norm.state_dict())

    def gradients(norm: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.detach().clone().requires_grad_()
        norm(x).square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(p.grad for p in norm.parameters() if p.grad is not None)]

    expected = gradients(wide, x.double())
    with ca.enable():
        assert count(kernels, lambda: norm(x)) > 0
        found = gradients(norm, x)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted.float(), atol=1e-4, rtol=1e-4)
    assert torch.autograd.gradcheck(wide, (x.double().requires_grad_(),))


def test_enable_serves_and_disable_does_not(kernels: Kernels, turns: Turns) -> None:
    x = torch.randn(2, 6, 5)
    with ca.enable():
        F.group_norm(x, 3)
        assert count(kernels, lambda: F.group_norm(x, 3)) == 1
    assert count(kernels, lambda: F.group_norm(x, 3)) == 0


ODD = {
    "float64": lambda: F.group_norm(torch.randn(2, 4, 5).double(), 2),
    "empty": lambda: F.group_norm(torch.empty(0, 4, 5), 2),
    "channels_last": lambda: F.group_norm(
        torch.randn(2, 4, 5, 6).to(memory_format=torch.channels_last), 2
    ),
    "parameters of another dtype": lambda: F.group_norm(
        torch.randn(2, 4, 5).bfloat16(), 2, torch.ones(4), torch.zeros(4)
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_left_to_pytorch(kernels: Kernels, turns: Turns, name: str) -> None:
    torch.manual_seed(0)
    expected = ODD[name]()
    torch.manual_seed(0)
    with ca.enable():
        found = ODD[name]()
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert kernels.calls == 0


SPOILT = {
    "a number": lambda output: output.view(-1)[17].add_(1),
    "not finite": lambda output: output.view(-1)[3].fill_(torch.nan),
    "a group": lambda output: output[0, :4].zero_(),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_wrong_form_is_left_out(kernels: Kernels, turns: Turns, name: str) -> None:
    kernels.spoil = SPOILT[name]
    x = torch.randn(2, 8, 5, 6)
    expected = F.group_norm(x, 2)
    with ca.enable():
        assert torch.equal(F.group_norm(x, 2), expected)
    (choice,) = ca.norm_choices()
    assert choice.chosen == "pytorch"
    assert "output has" in choice.rejected[FORM]
    assert turns.count == 0


def test_inputs_that_tell_nothing_are_not_what_is_compared(kernels: Kernels, turns: Turns) -> None:
    kernels.spoil = lambda output: output.zero_()
    for x in (torch.zeros(2, 8, 5), torch.full((2, 8, 6), torch.inf), torch.full((2, 8, 7), 3.0)):
        with ca.enable():
            torch.testing.assert_close(F.group_norm(x, 2), F.group_norm(x, 2), equal_nan=True)
    assert [one.chosen for one in ca.norm_choices()] == ["pytorch"] * 3


def test_a_mode_that_times_nothing_leaves_it_to_pytorch(kernels: Kernels, turns: Turns) -> None:
    x = torch.randn(2, 8, 5)
    with ca.enable("heuristic"):
        F.group_norm(x, 2)
    assert (kernels.calls, turns.count) == (0, 0)
    with ca.enable("auto"):
        F.group_norm(x, 2)
    assert turns.count == 1


def test_the_next_process_times_nothing(kernels: Kernels, turns: Turns) -> None:
    x = torch.randn(2, 8, 5)
    with ca.enable():
        F.group_norm(x, 2)
        ca.forget()
        assert not ca.norm_choices()
        F.group_norm(x, 2)
        assert [one.source for one in ca.norm_choices()] == ["store"]
        assert turns.count == 1
        assert count(kernels, lambda: F.group_norm(x, 2)) == 1
        # A form that is wrong now is not served.
        ca.forget()
        kernels.spoil = lambda output: output.zero_()
        F.group_norm(x, 2)
        assert [one.chosen for one in ca.norm_choices()] == ["pytorch"]


def test_without_memory_it_is_pytorch_s_for_now(kernels: Kernels, turns: Turns) -> None:
    def fails(output: Tensor) -> None:
        raise torch.OutOfMemoryError("full")

    kernels.spoil = fails
    x = torch.randn(2, 8, 5)
    with ca.enable():
        F.group_norm(x, 2)
        assert "memory" in ca.norm_choices()[0].note
        ca.forget()
        kernels.spoil = lambda output: None
        F.group_norm(x, 2)
        assert ca.norm_choices()[0].chosen == FORM


def test_threads_at_once(kernels: Kernels, turns: Turns) -> None:
    inputs = [torch.randn(2, 8, 5 + i) for i in range(4)]
    with ca.enable(), ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: F.group_norm(inputs[i % 4], 2), range(32)))
    for i, output in enumerate(found):
        torch.testing.assert_close(output, F.group_norm(inputs[i % 4], 2))


def test_what_autocast_and_transforms_make_of_it(kernels: Kernels, turns: Turns) -> None:
    norm, x = nn.GroupNorm(2, 8), torch.randn(3, 8, 5)

    def results() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            cast = norm(x.bfloat16())
        per_sample = torch.func.vmap(lambda one: norm(one[None])[0])(x)
        gradient = torch.func.grad(lambda one: norm(one).square().sum())(x)
        _, tangent = torch.func.jvp(norm, (x,), (torch.ones_like(x),))
        return [cast, per_sample, gradient, tangent]

    expected = results()
    with ca.enable():
        found = results()
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.dtype == wanted.dtype
        torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-3)
