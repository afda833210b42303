"""What computes batch norms of eager training on a GPU: measured, checked, and then run."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.norms.cases import CHANNELS_LAST
from support.norms.models import Residual, SmallResNet, conv, overall_error
from support.norms.served import choice_for, choice_of, is_ours
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cudnn_autotune as ca
from cudnn_autotune.core.extension import _C
from cudnn_autotune.norms import choices as norm_choices
from cudnn_autotune.norms.plan import FORMS, Form
from cudnn_autotune.norms.reference import NORM_ACTIVATIONS

ops = torch.ops.cudnn_autotune
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool = True, offset: float = 1.0
) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(shape, generator=generator) * 2 + offset).to("cuda", dtype)
    if channels_last and len(shape) in CHANNELS_LAST:
        values = values.contiguous(memory_format=CHANNELS_LAST[len(shape)])
    return values


def test_a_network_s_norms_are_measured() -> None:
    torch.manual_seed(0)
    plain = SmallResNet().cuda().to(memory_format=torch.channels_last)
    model, exact = ca.convert(copy.deepcopy(plain)), copy.deepcopy(plain)
    x = inputs((16, 3, 64, 64), torch.float32)
    before = ca.fallbacks()
    with ca.flags(budget_ms=30), torch.autocast("cuda", torch.bfloat16):
        losses = [one(x) for one in (model, plain)]
        losses[0].backward()
    losses[1].backward()
    assert {name for name in ca.fallbacks() if "batch norm" in name} <= before.keys()
    norms = ca.conversion(model).norms
    assert len(norms) == 9
    for (choice,) in norms.values():
        assert not choice.rejected, choice
        assert not choice.note, choice
        assert set(choice.times_ms) <= {"pytorch", *FORMS}
        assert len(choice.times_ms) >= 2
        assert all(ms > 0 for ms in choice.times_ms.values())
        decide = choice.call_times_ms or choice.times_ms
        assert choice.chosen == min(decide, key=decide.__getitem__)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, fp32_precision=None):
        exact(x).backward()
    ours, theirs, expected = (
        [parameter.grad for parameter in one.parameters()] for one in (model, plain, exact)
    )
    # Rounding moves values across the zeros of nine ReLUs, PyTorch's too.
    error = overall_error(theirs, expected)  # type: ignore[arg-type]
    assert overall_error(ours, expected) < 1.5 * error  # type: ignore[arg-type]
    buffers, wanted = dict(model.named_buffers()), dict(plain.named_buffers())
    for name, buffer in buffers.items():
        assert overall_error([buffer], [wanted[name]]) < 0.02, name


SHAPES = ((32, 64, 28, 28), (8, 200, 12, 12), (300, 96), (7, 24, 52), (2, 16, 6, 10, 12))
ODD_SHAPES = ((8, 13, 9, 7), (4, 1, 5, 9), (7, 40, 1, 1), (2, 3, 33, 17))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_results_are_not_rejected(dtype: torch.dtype, channels_last: bool) -> None:
    for shape in SHAPES + ODD_SHAPES:
        dims = max(1, len(shape) - 2)
        norm = getattr(nn, f"BatchNorm{dims}d")(shape[1]).cuda()
        x = inputs(shape, dtype, channels_last).requires_grad_()
        choice = choice_for(norm, x)
        assert not choice.rejected, choice
        assert not choice.note, choice


@pytest.mark.parametrize("activation", NORM_ACTIVATIONS)
def test_activations_and_parts_of_the_gradients(activation: str) -> None:
    flags = itertools.product((True, False), repeat=3)
    for affine, tracks, needs in flags:
        norm = nn.BatchNorm2d(64, affine=affine, track_running_stats=tracks).cuda()
        x = inputs((16, 64, 14, 14), torch.bfloat16).requires_grad_(needs)
        choice = choice_for(norm, x, activation)
        assert not choice.rejected, choice
        assert not choice.note, choice


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_tensors_and_large_means_are_not_rejected(dtype: torch.dtype) -> None:
    for shape, offset in (
        ((64, 64, 56, 56), 1.0),
        ((64, 256, 56, 56), 1.0),
        ((16, 64, 28, 28), 50),
    ):
        norm = nn.BatchNorm2d(shape[1]).cuda()
        x = inputs(shape, dtype, offset=offset).requires_grad_()
        choice = choice_for(norm, x)
        assert not choice.rejected, choice
        assert not choice.note, choice


def by_form(form: Form, x: Tensor, norm: Any, grad: Tensor) -> list[Tensor]:
    """The output and gradients of the operators in a form, called by themselves."""
    _C.set_norm_form(1 + FORMS.index(form))
    try:
        output, mean, inv_std, _, _ = ops.batch_norm_act(
            x, norm.weight, norm.bias, None, "identity", norm.eps
        )
        gradients = ops.batch_norm_act_backward(
            grad, None, x, None, norm.weight, None, None, mean, inv_std, "identity",
            [True, True, True, False],
        )  # fmt: skip
    finally:
        _C.set_norm_form(0)
    return [output, *gradients[:3]]


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_chosen_form_runs(channels_last: bool, seems_fastest: Callable[[str], None]) -> None:
    """Forms add in other orders, so their bits differ; those of one form do not."""
    x = inputs((32, 64, 28, 28), torch.float32, channels_last)
    grad = torch.randn_like(x)
    bits = []
    for form in (*FORMS, "kept"):
        ca.forget()
        seems_fastest(form)
        model = ca.convert(nn.Sequential(nn.BatchNorm2d(64))).cuda()
        given = x.clone().requires_grad_()
        output = model(given)
        assert is_ours(output)
        assert choice_of(model[0]).chosen == form
        output.backward(grad)
        found = [output, given.grad, model[0].weight.grad, model[0].bias.grad]
        with torch.no_grad():
            expected = by_form(form, x, model[0], grad)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.detach(), other), form
        bits.append(found)
    assert any(not torch.equal(*pair) for pair in zip(bits[0], bits[2], strict=True))
    for one, again in zip(bits[0], bits[3], strict=True):
        assert torch.equal(one, again)


def nodes(output: Tensor) -> list[str]:
    """The nodes of autograd's graph from an output to the input of a norm with an activation."""
    names, node = list[str](), output.grad_fn
    for _ in range(2):
        names.append(node.name())
        node = node.next_functions[0][0]
    return names


@pytest.mark.parametrize("enabled", [True, False], ids=["cudnn", "without cudnn"])
@pytest.mark.parametrize("channels_last", [True, False])
def test_pytorchs_functions_run_where_they_are_chosen(
    channels_last: bool, enabled: bool, seems_fastest: Callable[[str], None]
) -> None:
    """Bits, nodes and updates are those of PyTorch's modules, with the same use of cuDNN."""
    seems_fastest("pytorch")
    plain = nn.Sequential(nn.BatchNorm2d(64), nn.ReLU(inplace=True)).cuda()
    model = ca.convert(copy.deepcopy(plain))
    x = inputs((16, 64, 14, 14), torch.bfloat16, channels_last)
    with torch.backends.cudnn.flags(enabled=enabled, allow_tf32=False, fp32_precision=None):
        for _ in range(3):
            found = []
            for one in (model, plain):
                one.zero_grad()
                given = x.clone().requires_grad_()
                output = one(given)
                names = nodes(output)
                output.float().square().sum().backward()
                gradients = [given.grad, *(parameter.grad for parameter in one.parameters())]
                found.append([names, output, *gradients, *one.buffers()])
            (ours, *tensors), (theirs, *expected) = found
            assert ours == theirs
            for one, other in zip(tensors, expected, strict=True):
                assert torch.equal(one, other)  # type: ignore[arg-type]
    assert choice_of(model[0]).chosen == "pytorch"


def test_a_first_call_inside_a_capture_is_pytorchs(seems_fastest: Callable[[str], None]) -> None:
    seems_fastest("kept")
    plain = nn.BatchNorm2d(64).cuda()
    model = ca.convert(nn.Sequential(copy.deepcopy(plain)))
    x = inputs((16, 64, 14, 14), torch.bfloat16).requires_grad_()
    plain(x)  # cuDNN is loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model(x)
    assert not is_ours(captured)
    assert norm_choices.choices_of(model[0]) == ()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, plain(x))
    assert is_ours(model(x))
    assert choice_of(model[0]).chosen == "kept"
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again):
        captured = model(x)
    assert is_ours(captured)
    again.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, plain(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_first_call_in_a_checkpoint(
    reentrant: bool, seems_fastest: Callable[[str], None]
) -> None:
    """The reentrant one measures on autograd's thread. The other one leaves norms to PyTorch."""
    seems_fastest("kept")
    torch.manual_seed(0)
    plain = nn.Sequential(conv(16, 16), nn.BatchNorm2d(16), nn.ReLU()).cuda()
    model = ca.convert(copy.deepcopy(plain), sampling="auto")
    for seed in range(3):
        x = torch.randn(8, 16, 12, 12, generator=torch.Generator().manual_seed(seed)).cuda()
        for one in (model, plain):
            given = x.clone().requires_grad_()
            checkpoint(one, given, use_reentrant=reentrant).square().sum().backward()
    assert len(norm_choices.choices_of(model[1])) == 2 * reentrant
    for name, value in model.state_dict().items():
        assert overall_error([value], [plain.state_dict()[name]]) < 1e-2, name
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert overall_error([ours.grad], [expected.grad]) < 1e-2  # type: ignore[list-item]


def test_a_compiled_call_has_the_chosen_form(seems_fastest: Callable[[str], None]) -> None:
    """Plans without a form are adopted for whoever calls the operators."""
    seems_fastest("two passes")
    model = ca.convert(nn.Sequential(nn.BatchNorm2d(64))).cuda()
    x = inputs((32, 64, 28, 28), torch.float32)
    model(x.clone().requires_grad_())
    with torch.no_grad():
        directly = ops.batch_norm_act(
            x, model[0].weight, model[0].bias, None, "identity", model[0].eps
        )
        by_itself = by_form("two passes", x, model[0], torch.ones_like(x))
    assert torch.equal(directly[0], by_itself[0])


def test_a_choice_of_the_store_has_its_form(
    tmp_path: Path, seems_fastest: Callable[[str], None]
) -> None:
    """Another form was adopted meanwhile, and nothing is timed."""
    x = inputs((32, 64, 28, 28), torch.float32)
    grad = torch.randn_like(x)

    def called(form: Form) -> tuple[nn.Module, list[Tensor]]:
        ca.set_store(tmp_path / form.replace(" ", "_"), mode="read_write")
        norm_choices.forget()
        model = ca.convert(nn.Sequential(nn.BatchNorm2d(64))).cuda()
        given = x.clone().requires_grad_()
        output = model(given)
        assert is_ours(output)
        output.backward(grad)
        return model[0], [output.detach(), given.grad, model[0].weight.grad, model[0].bias.grad]

    for form in FORMS:
        seems_fastest(form)
        norm, _ = called(form)
        assert choice_of(norm).source == "tuned"
    seems_fastest("pytorch")
    for form in FORMS:
        norm, found = called(form)
        assert (choice_of(norm).chosen, choice_of(norm).source) == (form, "store")
        with torch.no_grad():
            expected = by_form(form, x, norm, grad)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), form


class ResNet18(nn.Module):
    """ResNet-18 for images of 8x8 with one channel: its stem keeps their size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(1, 64), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        self.stages = nn.ModuleList()
        self.downs = nn.ModuleList()
        channels = 64
        for width in (64, 128, 256, 512):
            down = nn.Identity()
            if width != channels:
                down = nn.Sequential(
                    conv(channels, width, stride=2), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
                )
            self.downs.append(down)
            self.stages.append(nn.Sequential(Residual(width), Residual(width)))
            channels = width
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for down, stage in zip(self.downs, self.stages, strict=True):
            x = stage(down(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def accuracy(images: Tensor, labels: Tensor, seed: int, is_converted: bool) -> float:
    """The part of the last 360 images that a network tells after eight epochs of the others."""
    torch.manual_seed(seed)
    model = ResNet18().cuda().to(memory_format=torch.channels_last)
    if is_converted:  # in a mode that times nothing all norms are the operators'
        ca.convert(model, sampling="heuristic")
    epochs, batch, count = 8, 64, len(images) - 360
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs * (count // batch))
    for _ in range(epochs):
        order = torch.randperm(count)
        for first in range(0, count - batch + 1, batch):
            chosen = order[first : first + batch].cuda()
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(images[chosen]).float(), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    if is_converted:
        norms = ca.conversion(model).norms
        assert len(norms) == 20
        for choices in norms.values():
            assert choices
            assert all(choice.is_served for choice in choices)
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        found = model(images[count:]).argmax(1)
    return (found == labels[count:]).float().mean().item()


@pytest.mark.slow
def test_a_resnet_18_learns_digits_as_with_pytorchs_norms() -> None:
    """scikit-learn's 1,797 handwritten digits, three seeds each."""
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is not installed")
    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None].cuda() / 8 - 1
    images = images.to(memory_format=torch.channels_last)
    labels = torch.tensor(digits.target)[order].cuda()
    ours, theirs = (
        [accuracy(images, labels, seed, is_converted) for seed in range(3)]
        for is_converted in (True, False)
    )
    mean, wanted = sum(ours) / 3, sum(theirs) / 3
    spread = max(theirs) - min(theirs)
    assert min(theirs) > 0.95, theirs
    assert abs(mean - wanted) <= spread + 0.01, (ours, theirs)
