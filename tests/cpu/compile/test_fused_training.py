"""The forward of a training graph has fused groups, and its gradients are PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.conv.references import relative_error
from support.models.made import Made
from support.norms.frozen import GROUPS, Block, frozen, in_eval_mode, step, trained
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cudnn_autotune as ca
from cudnn_autotune.compile import training_graph

FUSED = {"fuse": "always", "norms": "never", "cpp.weight_prepack": False}
LAID_OUT = {**FUSED, "compare": False}
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def last() -> ca.Compilation:
    return ca.compilations()[-1]


def fused() -> list[str]:
    """The groups of the last graph that are fused, in words."""
    return [group.text for group in last().fused]


def check(model: nn.Module, x: Tensor, **options: Any) -> None:
    """Holds a step in float64 to PyTorch's."""
    model, x = model.double(), x.double()
    theirs = copy.deepcopy(model)
    ours = torch.compile(model, backend="cudnn_autotune", options={**FUSED, **options})
    found, expected = step(ours, model, x), step(theirs, theirs, x)
    assert last().mode == "training"
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **EXACT, msg=lambda text, n=name: n + text)


def images() -> Tensor:
    return torch.randn(2, 6, 7, 5)


@pytest.mark.parametrize("norm", [frozen, in_eval_mode])
def test_frozen_norms_are_folded(norm: Callable[[int], nn.Module]) -> None:
    check(nn.Sequential(Block(norm), Block(norm)), images())
    assert fused() == [*GROUPS, *GROUPS]


# torchvision's norm of buffers computes in float32, and so residuals are added in it.
IN_FLOAT32 = [GROUPS[0], GROUPS[0], "conv + bias"]


@pytest.mark.parametrize(
    ("norm", "expected"), [(in_eval_mode, [*GROUPS, *GROUPS]), (frozen, IN_FLOAT32)]
)
def test_under_autocast_it_errs_like_pytorch(
    norm: Callable[[int], nn.Module], expected: list[str]
) -> None:
    x = images().bfloat16().float()
    model = nn.Sequential(nn.Conv2d(6, 6, 1), Block(norm), Block(norm), nn.Conv2d(6, 6, 1))
    call = torch.compile(model, backend="cudnn_autotune", options=FUSED)
    with torch.autocast("cpu", torch.bfloat16):
        found, eager = step(call, model, x), step(model, model, x)
    assert fused() == ["conv + bias", *expected, "conv + bias"]
    exact = step(model.double(), model, x.double())
    for name, value in exact.items():
        assert found[name].dtype == eager[name].dtype
        error, allowed = (relative_error(one[name], value) for one in (found, eager))
        assert error <= 3 * allowed, name


def test_a_norm_with_trained_parameters_stays() -> None:
    check(nn.Sequential(Block(trained), nn.Conv2d(6, 6, 1)), images())
    assert fused() == ["conv + bias"]
    assert {group.reason for group in last().groups[:2]} == {"the backward reads its output"}


def chain(x: Tensor, *functions: Callable[[Tensor], Tensor]) -> Tensor:
    for function in functions:
        x = function(x)
    return x


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (nn.ReLU(), "conv + bias + relu"),
        (nn.LeakyReLU(0.1), "conv + bias + leaky_relu(0.1)"),
        (nn.SiLU(), None),
    ],
    ids=["relu", "leaky_relu", "silu"],
)
def test_an_activation_is_fused_if_its_output_tells_the_gradient(
    activation: nn.Module, expected: str | None
) -> None:
    check(nn.Sequential(nn.Conv2d(6, 8, 3), activation, nn.Conv2d(8, 4, 3), nn.Tanh()), images())
    assert fused()[:-1] == ([] if expected is None else [expected])


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1)], ids=["relu", "leaky_relu"])
def test_the_backward_needs_no_mask(activation: nn.Module) -> None:
    """The next convolution's input tells the signs."""
    model = nn.Sequential(nn.Conv2d(6, 6, 3), frozen(6), activation, nn.Conv2d(6, 4, 3))
    call = torch.compile(model, backend="cudnn_autotune", options=FUSED)
    dtypes: list[torch.dtype] = []

    def pack(tensor: Tensor) -> Tensor:
        dtypes.append(tensor.dtype)
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        call(images())
    assert torch.bfloat16 in dtypes
    assert torch.bool not in dtypes


def test_an_integer_does_not_tell_the_sign() -> None:
    """A conversion makes 0 of 0.5."""

    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.conv(x)
        return nn.functional.leaky_relu(x, 0.1) * (x.int() > 0)

    check(Made(forward, conv=nn.Conv2d(6, 6, 3)), images())


@pytest.mark.slow
def test_a_graph_that_is_laid_out_has_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_graph, "favours_channels_last", lambda *_, **__: True)
    model, x = nn.Sequential(Block(in_eval_mode), nn.Conv2d(6, 6, 1)), images()
    ours = torch.compile(copy.deepcopy(model), backend="cudnn_autotune", options=LAID_OUT)
    found, expected = step(ours, ours, x), step(model, model, x)
    assert last().chosen == "cudnn_autotune, channels_last"
    assert fused() == [*GROUPS, "conv + bias"]
    for name, value in expected.items():
        mine = found[name if name in found else f"_orig_mod.{name}"]
        torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-5)


def test_an_output_that_is_used_twice_stays() -> None:
    model = Made(
        lambda model, x: (y := model.conv(x)).relu() + y.sin(), conv=nn.Conv2d(6, 6, 3, bias=False)
    )
    check(model, images())
    assert not fused()


def test_a_checkpointed_block_is_fused_in_the_forward() -> None:
    model = Made(
        lambda model, x: model.last(checkpoint(model.block, x, use_reentrant=False)),
        block=Block(),
        last=Block(),
    )
    check(model, images())
    assert fused() == [*GROUPS, *GROUPS]


class Backbone(nn.Module):
    """The beginning of a detector: the first layers get no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False)
        self.norm = frozen(6)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.lateral, self.top = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 1)
        self.stem.requires_grad_(False)
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.blocks[:2](torch.relu(self.norm(self.stem(x))))
        low = self.lateral(x)
        high = self.top(self.blocks[2](nn.functional.max_pool2d(x, 2)))
        return low + nn.functional.interpolate(high, low.shape[-2:]), high


@pytest.mark.slow
def test_a_backbone_with_frozen_layers() -> None:
    check(Backbone(), torch.randn(2, 3, 18, 14))
    assert {text: fused().count(text) for text in GROUPS} == {GROUPS[0]: 4, GROUPS[1]: 3}
