"""Group and instance norms of models in channels_last, on a CPU that takes the way of a GPU: the
operators of the kernels are computed by ATen's there."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import assert_close
from support.conv.served_on_cpu import served_on_cpu
from support.norms.served import FORM, Turns
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cudnn_autotune as ca
from cudnn_autotune.core.extension import _C
from cudnn_autotune.norms import kept_layouts
from cudnn_autotune.norms import measuring as norm_measuring

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    found = Turns()
    monkeypatch.setattr(norm_measuring, "_forms", lambda call: [FORM, "kept"])
    monkeypatch.setattr(norm_measuring, "time_in_turns", found)
    ca.set_store(tmp_path / "store", mode="read_write")
    ca.forget()
    _C.set_norm_device("cpu")
    with served_on_cpu():
        yield found
    _C.set_norm_device("cuda")
    ca.forget()


def in_channels_last(tensor: Tensor) -> Tensor:
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def is_in_channels_last(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() and tensor.movedim(1, -1).is_contiguous()


NORMS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "InstanceNorm1d": (lambda **kw: nn.InstanceNorm1d(6, **kw), (2, 6, 9)),
    "InstanceNorm2d": (lambda **kw: nn.InstanceNorm2d(6, **kw), (3, 6, 5, 4)),
    "InstanceNorm3d": (lambda **kw: nn.InstanceNorm3d(8, **kw), (1, 8, 3, 5, 4)),
    "GroupNorm": (lambda **kw: nn.GroupNorm(3, 6, **kw), (2, 6, 5, 4)),
    "GroupNorm, one group": (lambda **kw: nn.GroupNorm(1, 7, **kw), (2, 7, 3, 5, 4)),
    "GroupNorm, 1-d": (lambda **kw: nn.GroupNorm(6, 6, **kw), (2, 6, 9)),
}


def converted(norm: nn.Module) -> nn.Module:
    """The norm in a model that is converted for channels_last, with random parameters."""
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no convolution
        return ca.convert(norm, memory_format=torch.channels_last)


def results(norm: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """The output, the gradients, and second derivatives of a call."""
    x = x.detach().requires_grad_()
    output = norm(x)
    leaves = [x, *norm.parameters()]
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
    grads = torch.autograd.grad((output * weights).float().sum(), leaves, retain_graph=True)
    loss = (output.float() ** 4).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    second = torch.autograd.grad((first.float() * weights).sum(), leaves)
    return (output, *grads, *second)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", NORMS)
def test_results_are_pytorch_s_in_the_input_s_layout(
    turns: Turns, name: str, dtype: torch.dtype, affine: bool
) -> None:
    make, shape = NORMS[name]
    torch.manual_seed(0)
    norm = converted(make(affine=affine)).to(dtype)
    exact = ca.revert(copy.deepcopy(norm)).double()
    x = in_channels_last(torch.randn(shape)).to(dtype)
    found, expected = results(norm, x), results(exact, x.double())
    assert is_in_channels_last(found[0])
    assert found[0].dtype == dtype
    assert is_in_channels_last(found[1])
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.dtype == dtype
        assert_close(ours, theirs, 3 * TOLERANCES[dtype], f"result {i}")
    (choice,) = ca.norm_choices()
    assert choice.chosen == FORM
    wanted = "input, weight, bias" if affine else "input"
    assert f"gradients of {wanted} groups=" in choice.signature
    with torch.no_grad():
        assert is_in_channels_last(norm(x))
    assert "no gradients groups=" in ca.norm_choices()[-1].signature


@pytest.mark.parametrize("name", NORMS)
def test_pytorch_s_functions_where_they_are_faster(turns: Turns, name: str) -> None:
    turns.fastest = "pytorch"
    make, shape = NORMS[name]
    norm = converted(make())
    x = in_channels_last(torch.randn(shape)).requires_grad_()
    output = norm(x)
    assert is_in_channels_last(output)
    assert torch.equal(output, ca.revert(norm)(x))
    assert [one.chosen for one in ca.norm_choices()][:1] == ["pytorch"]


def test_a_later_process_finds_the_choice(turns: Turns) -> None:
    norm = converted(nn.GroupNorm(2, 6))
    x = in_channels_last(torch.randn(2, 6, 5, 4)).requires_grad_()
    for source, groups, count in (("tuned", 2, 1), ("store", 2, 1), ("tuned", 3, 2)):
        ca.forget()
        norm.num_groups = groups
        norm(x)
        (choice,) = ca.norm_choices()
        assert (choice.source, choice.chosen) == (source, FORM)
        assert turns.count == count


@pytest.mark.parametrize("name", NORMS)
def test_short_calls_are_timed_as_a_program_makes_them(
    turns: Turns, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    operators: dict[str, list[list[str]]] = {}

    def times(programs: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        for program, run in programs.items():
            with torch.profiler.profile() as profile:
                run()
            keys = [one.key for one in profile.key_averages()]
            operators.setdefault(program, []).append(
                [k for k in keys if k.startswith("cudnn_autotune")]
            )
        return turns(programs)

    monkeypatch.setattr(norm_measuring, "time_in_turns", times)
    monkeypatch.setattr(norm_measuring, "_HOST_MAY_DECIDE_MS", 10.0)
    make, shape = NORMS[name]
    converted(make(affine=False))(in_channels_last(torch.randn(shape)).requires_grad_())
    (choice,) = ca.norm_choices()
    assert set(choice.call_times_ms) == {"pytorch", FORM}
    ours = {"cudnn_autotune::group_norm", "cudnn_autotune::group_norm_backward"}
    assert [set(names) for names in operators["pytorch"]] == [set(), set()]
    assert [set(names) for names in operators[FORM]] == [ours, ours]


def test_wrong_kernels_are_left_out(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = converted(nn.InstanceNorm2d(6, affine=True))
    x = in_channels_last(torch.randn(2, 6, 5, 4)).requires_grad_()
    library = torch.library.Library("cudnn_autotune", "IMPL")

    def wrong(grad: Tensor, input: Tensor, *others: Any) -> tuple[Tensor, ...]:
        return grad * 1.1, input.new_ones(6), input.new_ones(6)

    library.impl("group_norm_backward", wrong, "CPU")
    try:
        output = norm(x)
    finally:
        library._destroy()
        torch.ops.cudnn_autotune.group_norm_backward.default._dispatch_cache.clear()
    choice, *_ = ca.norm_choices()
    assert choice.chosen == "pytorch"
    assert "gradient of the" in choice.rejected[FORM]
    assert_close(output, ca.revert(norm)(x), 1e-5, "output")


LEFT: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "contiguous": (lambda: nn.InstanceNorm2d(6), torch.randn(2, 6, 5, 4)),
    "no batch": (lambda: nn.InstanceNorm2d(6), in_channels_last(torch.randn(6, 5, 4))),
    "one channel": (lambda: nn.InstanceNorm2d(1), in_channels_last(torch.randn(2, 1, 5, 4))),
    "a slice": (lambda: nn.GroupNorm(2, 6), in_channels_last(torch.randn(2, 8, 5, 4))[:, :6]),
    "empty": (lambda: nn.GroupNorm(2, 6), in_channels_last(torch.randn(0, 6, 5, 4))),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_layouts_are_pytorch_s(turns: Turns, name: str) -> None:
    turns.fastest = "pytorch"
    make, x = LEFT[name]
    norm = converted(make())
    found, expected = norm(x), ca.revert(copy.deepcopy(norm))(x)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()


def test_running_statistics_are_pytorch_s(turns: Turns) -> None:
    turns.fastest = "pytorch"
    norm = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
    other = copy.deepcopy(norm)
    converted(norm).load_state_dict(other.state_dict())
    for _ in range(2):
        x = in_channels_last(torch.randn(2, 6, 5, 4))
        found, expected = norm(x), other(x)
        assert torch.equal(found, expected)
        assert is_in_channels_last(found)
    assert torch.equal(norm.running_var, other.running_var)
    norm.eval()
    other.eval()
    assert torch.equal(norm(x), other(x))
    assert is_in_channels_last(norm(x))


def test_errors_are_pytorch_s(turns: Turns) -> None:
    for norm, shape in ((nn.InstanceNorm2d(6, affine=True), (2, 4, 5, 4)),):
        x = in_channels_last(torch.randn(shape))
        with pytest.raises(ValueError, match="num_features") as expected:
            norm(x)
        with pytest.raises(ValueError) as found:
            converted(norm)(x)
        assert str(found.value) == str(expected.value)
    with pytest.raises(RuntimeError, match="groups"):
        converted(nn.GroupNorm(3, 6, affine=False))(in_channels_last(torch.randn(2, 4, 5, 4)))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_in_a_checkpoint(turns: Turns, use_reentrant: bool) -> None:
    norm = converted(nn.InstanceNorm3d(6, affine=True))
    x = in_channels_last(torch.randn(2, 6, 3, 5, 4)).requires_grad_()
    output = checkpoint(norm, x, use_reentrant=use_reentrant)
    assert is_in_channels_last(output)
    plain = norm(x)
    assert_close(output, plain, 1e-5, "output")
    weights = torch.randn(plain.shape)
    (expected,) = torch.autograd.grad((plain * weights).sum(), x)
    (output * weights).sum().backward()
    assert x.grad is not None
    assert_close(x.grad, expected, 1e-4, "gradient")


def test_under_autocast(turns: Turns) -> None:
    x = in_channels_last(torch.randn(2, 6, 5, 4)).bfloat16().requires_grad_()
    for norm in (nn.GroupNorm(2, 6), nn.InstanceNorm2d(6, affine=True)):
        with torch.autocast("cpu", torch.bfloat16):
            expected = norm(x)
            found = converted(norm)(x)
        assert is_in_channels_last(found)
        assert found.requires_grad
        wanted = ca.revert(norm)(x.float())
        assert_close(found, wanted, TOLERANCES[torch.bfloat16], "output")
        (grad,) = torch.autograd.grad(found.float().sum(), x)
        assert grad.dtype == torch.bfloat16
        assert found.dtype == expected.dtype


def test_modes_and_transforms_see_pytorch_s(turns: Turns) -> None:
    norm = converted(nn.GroupNorm(2, 6))
    x = in_channels_last(torch.randn(2, 6, 5, 4))
    plain = ca.revert(copy.deepcopy(norm))
    with FlopCounterMode(display=False):
        assert torch.equal(norm(x), plain(x))
    stacked = torch.stack([x, 2 * x])
    try:
        expected = torch.func.vmap(plain)(stacked)
    except RuntimeError as error:  # torch 2.11 has no rule for it
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            torch.func.vmap(norm)(stacked)
    else:
        assert torch.equal(torch.func.vmap(norm)(stacked), expected)
    assert not ca.norm_choices()


def test_gradients_in_a_batch(turns: Turns) -> None:
    norm = converted(nn.GroupNorm(2, 6))
    x = in_channels_last(torch.randn(2, 6, 5, 4)).requires_grad_()
    weights = torch.randn(3, *x.shape)
    output, leaves = norm(x), [x, *norm.parameters()]
    found = torch.autograd.grad(output, leaves, weights, retain_graph=True, is_grads_batched=True)
    for i, grad_output in enumerate(weights):
        each = torch.autograd.grad(output, leaves, grad_output, retain_graph=True)
        for ours, expected in zip(found, each, strict=True):
            assert_close(ours[i], expected, 1e-5, "gradient")


def test_in_evaluation_and_without_gradients_of_parameters(turns: Turns) -> None:
    norm = converted(nn.InstanceNorm2d(6, affine=True)).eval().requires_grad_(False)
    x = in_channels_last(torch.randn(2, 6, 5, 4)).requires_grad_()
    exact = F.instance_norm(x.double(), weight=norm.weight.double(), bias=norm.bias.double())
    weights = torch.randn_like(x)
    (found,) = torch.autograd.grad((norm(x) * weights).sum(), x)
    (expected,) = torch.autograd.grad((exact * weights).sum(), x)
    assert_close(found, expected, 1e-5, "gradient")
    assert "gradients of input" in ca.norm_choices()[0].signature


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True)
        self.last = nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.LeakyReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.leaky_relu(self.norm(self.conv(x))))


def kinds(model: nn.Module) -> set[type]:
    return {type(one) for one in model.modules()} & {
        kept_layouts.GroupNorm,
        kept_layouts.InstanceNorm2d,
    }


@pytest.mark.parametrize("memory_format", [None, torch.contiguous_format])
def test_who_does_not_ask_has_pytorch_s_strides(
    turns: Turns, memory_format: torch.memory_format | None
) -> None:
    model = ca.convert(Model().to(memory_format=torch.channels_last), memory_format=memory_format)
    assert not kinds(model)
    x = in_channels_last(torch.randn(2, 8, 5, 4))
    assert model.norm(x).is_contiguous()


def test_a_model_in_channels_last(turns: Turns) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 3, 9, 9)
    expected, text = model(x), repr(model)
    ca.convert(model, memory_format=torch.channels_last)
    assert len(kinds(model)) == 2
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
    assert is_in_channels_last(model(x))
    named = ca.conversion(model).norms
    assert set(named) == {"norm", "last.1"}
    assert all(one.is_served for choices in named.values() for one in choices)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(kinds(other)) == 2
        assert is_in_channels_last(other(x))
    ca.revert(model)
    assert repr(model) == text
    assert type(model.norm) is nn.InstanceNorm2d


def test_norms_that_are_left_to_pytorch(turns: Turns) -> None:
    assert not kinds(ca.convert(Model(), memory_format=torch.channels_last, norms=False))


def test_auto_times_both_layouts_with_these_norms(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cudnn_autotune.models import memory_format as layouts

    def times(steps: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {name: 1.0 + (name == "contiguous") for name in steps}

    monkeypatch.setattr(layouts, "time_in_turns", times)
    model, x = Model(), torch.randn(2, 3, 9, 9)
    ca.convert(model, memory_format="auto", example_input=x)
    chosen = ca.conversion(model).memory_format
    assert chosen is not None
    assert chosen.chosen is torch.channels_last
    assert is_in_channels_last(model(x))
