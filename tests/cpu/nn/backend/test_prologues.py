"""A norm and a ReLU before a 1x1 convolution become a part of its kernel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import relative_error
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torchvision.models.densenet import DenseNet

import cudnn_autotune as ca
from cudnn_autotune.nn.backend import programs
from cudnn_autotune.nn.backend.groups import Judge, Measured, never
from cudnn_autotune.nn.prologues import judge_prologues

OPTIONS = {"fuse": "always", "cpp.weight_prepack": False, "compare": False}
LAST = torch.channels_last
ALLOWED = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Layer(nn.Module):
    """A dense layer, whose convolutions have biases."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 32, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(32), nn.Conv2d(32, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm2(self.conv1(F.relu(self.norm1(x)))))
        result: Tensor = self.conv2(y)
        return result


class Dense(nn.Module):
    """A dense block, and the transition behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(16 + 16 * i) for i in range(3))
        self.norm, self.conv = nn.BatchNorm2d(64), nn.Conv2d(64, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x * 2]
        for layer in self.layers:
            parts.append(layer(torch.cat(parts, 1)))
        y = self.conv(F.relu(self.norm(torch.cat(parts, 1))))
        return F.avg_pool2d(y, 2)


class PreActivation(nn.Module):
    """A block of a pre-activation ResNet, whose input is its shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (32, 16, 16))
        self.a, self.b = nn.Conv2d(32, 16, 1), nn.Conv2d(16, 16, 3, padding=1)
        self.c = nn.Conv2d(16, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(x.repeat(1, 2, 1, 1), 3, 1, 1)
        y = self.a(F.relu(self.norms[0](x)))
        y = self.b(F.relu(self.norms[1](y))) + y
        result: Tensor = self.c(F.relu(self.norms[2](y))) + x
        return result


def trained(model: nn.Module, dtype: torch.dtype = torch.float16) -> nn.Module:
    """Returns a model with norms that do something."""
    generator = torch.Generator().manual_seed(0)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for of in (norm.weight.data, norm.running_var):
                assert of is not None
                of.uniform_(0.5, 1.5, generator=generator)
            for of in (norm.bias.data, norm.running_mean):
                assert of is not None
                of.normal_(generator=generator)
    return model.eval().to(dtype=dtype, memory_format=LAST)


def data(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape or (2, 16, 10, 12), generator=generator)
    return x.to(dtype=dtype, memory_format=LAST)


def run(model: nn.Module, x: Tensor, **options: Any) -> tuple[Tensor, str]:
    """The output of the compiled model, and the generated code."""
    compiled = torch.compile(model, backend="cudnn_autotune", options={**OPTIONS, **options})
    with torch.no_grad():
        output, codes = run_and_get_code(compiled, x)
    return output, codes[0].partition("def call")[2]


def check(model: nn.Module, x: Tensor, **options: Any) -> str:
    """Compares values with float64 and strides with PyTorch's; returns the generated code."""
    output, code = run(model, x, **options)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
        by_pytorch = model(x)
    assert output.stride() == by_pytorch.stride()
    error, theirs = (relative_error(one, expected) for one in (output, by_pytorch))
    assert error <= min(2 * theirs, ALLOWED[x.dtype]), f"{error:.3g}, PyTorch's {theirs:.3g}"
    return code


def fused() -> list[bool]:
    return [one.is_fused for one in ca.compilations()[-1].prologues]


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("freezing", [False, True])
def test_a_dense_block_is_one_tensor(dtype: torch.dtype, freezing: bool) -> None:
    code = check(trained(Dense(), dtype), data(dtype=dtype), freezing=freezing)
    assert code.count("norm_pointwise.default(") == 4
    assert code.count("conv_fused_into_.default(") == 3
    assert "cat" not in code
    record = ca.compilations()[-1]
    assert [one.is_in_place for one in record.concatenations] == [True]
    assert [one.text for one in record.prologues] == [
        *["norm + relu + conv + bias + relu"] * 3,
        "norm + relu + conv + bias",
    ]
    assert "4 of 4 norms fused with the convolution behind" in repr(record)
    first = "norm + relu + conv + bias + relu -> 2x32x10x12: fused, it was asked for"
    assert first in str(record).splitlines()


def test_later_calls_see_nothing_of_earlier_ones() -> None:
    model = trained(Dense())
    compiled = torch.compile(model, backend="cudnn_autotune", options=OPTIONS)
    with torch.no_grad():
        inputs = [data() * scale for scale in (1, 2, 3)]
        outputs = [compiled(x) for x in inputs]
        for x, output in zip(inputs, outputs, strict=True):
            expected = copy.deepcopy(model).double()(x.double())
            assert relative_error(output, expected) <= ALLOWED[torch.float16]
    assert fused() == [True] * 4


def test_a_pre_activation_block() -> None:
    """The input is read by the shortcut as it is, and a shortcut is added to what is fused."""
    code = check(trained(PreActivation()), data())
    assert code.count("norm_pointwise.default(") == 2
    texts = [one.text for one in ca.compilations()[-1].prologues]
    assert texts == ["norm + relu + conv + bias", "norm + relu + conv + bias + residual"]


class OfAProduct(nn.Module):
    """A norm of what is computed in float32, and rounded for nothing else than the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(16), nn.Conv2d(16, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        product = (x.float() * x.mean(1, keepdim=True).float()).to(x.dtype)
        return F.relu(self.conv(F.relu(self.norm(product))))


def test_a_value_that_is_rounded_is_the_input_of_its_norm() -> None:
    check(trained(OfAProduct()), data())
    assert fused() == [True]


@pytest.mark.parametrize("freezing", [False, True])
def test_a_densenet(freezing: bool) -> None:
    model = trained(DenseNet(16, (2, 3), 32, num_classes=8))
    code = check(model, data(2, 3, 64, 64), freezing=freezing)
    assert code.count("norm_pointwise.default(") == 5
    assert fused() == [True] * 5


def test_weights_stay_variable() -> None:
    model = trained(Dense())
    compiled = torch.compile(model, backend="cudnn_autotune", options=OPTIONS)
    x = data()
    with torch.no_grad():
        before = compiled(x)
        for name, tensor in model.state_dict().items():
            if "norm" in name and tensor.is_floating_point():
                tensor.mul_(1.5).add_(0.25)
        after = compiled(x)
        expected = copy.deepcopy(model).double()(x.double())
    assert fused() == [True] * 4
    assert relative_error(after, before.double()) > 0.1
    assert relative_error(after, expected) <= ALLOWED[torch.float16]


def test_nan_and_infinity_stay() -> None:
    """Those of a pixel reach what PyTorch lets them reach."""
    model, x = trained(Dense()), data()
    x[0, 3, 4, 4], x[1, 2, 0, 0] = float("nan"), float("inf")
    output, _ = run(model, x)
    assert fused() == [True] * 4
    with torch.no_grad():
        expected = model(x)
    assert torch.equal(output.isnan(), expected.isnan())
    assert 0 < output.isnan().sum() < output.numel()


class Others(nn.Module):
    """Norms that are not fused, for one reason each."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason
        self.norm, self.conv = nn.BatchNorm2d(16), nn.Conv2d(16, 32, 1)
        self.wide, self.strided = nn.Conv2d(16, 32, 3), nn.Conv2d(16, 32, 1, stride=2)
        self.padded, self.grouped = nn.Conv2d(16, 32, 1, padding=1), nn.Conv2d(16, 32, 1, groups=2)
        self.odd, self.factor = nn.Conv2d(16, 12, 1), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        n = self.norm(x)
        y = F.relu(n)
        relu: Callable[[Tensor], Tensor] = F.relu  # groups on a CPU have one
        results: dict[str, Callable[[], Any]] = {
            "3x3": lambda: self.wide(y),
            "a stride": lambda: self.strided(y),
            "a padding": lambda: self.padded(y),
            "groups": lambda: self.grouped(y),
            "channels": lambda: self.odd(y),
            "no relu": lambda: self.conv(n),
            "another activation": lambda: self.conv(F.silu(n)),
            "the relu is read elsewhere": lambda: (self.conv(y), y * 2),
            "the norm is read elsewhere": lambda: (self.conv(y), n * 2),
            "no norm": lambda: self.conv(F.relu(x)),
            "a factor of the input": lambda: self.conv(
                F.relu(x * self.factor(x.mean((0, 2, 3)))[:, None, None])
            ),
        }
        return torch.utils._pytree.tree_map(relu, results[self.reason]())


OTHERS = [
    *("3x3", "a stride", "a padding", "groups", "channels", "no relu", "another activation"),
    *("the relu is read elsewhere", "the norm is read elsewhere", "no norm"),
    "a factor of the input",
]


@pytest.mark.parametrize("reason", OTHERS)
def test_others_stay(reason: str) -> None:
    _, code = run(trained(Others(reason)), data())
    assert "norm_pointwise" not in code
    assert fused() == []


def test_float32_and_dynamic_sizes_stay() -> None:
    run(trained(Dense(), torch.float32), data(dtype=torch.float32))
    assert fused() == []
    compiled = torch.compile(
        trained(Dense()), backend="cudnn_autotune", options=OPTIONS, dynamic=True
    )
    with torch.no_grad():
        compiled(data())
    assert fused() == []


@pytest.mark.parametrize(
    ("judge", "reason"),
    [(never("it was asked for"), "it was asked for"), (Measured(), "it is on the device cpu")],
    ids=["never", "measured"],
)
def test_what_is_not_fused_says_why(
    judge: Judge, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU only fused groups are this package's, so ``fuse`` is for these."""
    monkeypatch.setattr(programs, "judge_prologues", lambda _, found: judge_prologues(judge, found))
    assert "norm_pointwise" not in check(trained(Dense()), data())
    assert [(one.is_fused, one.reason) for one in ca.compilations()[-1].prologues] == [
        (False, reason)
    ] * 4


class Returned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        joined = torch.cat([x, x + 1], 1)
        return self.layer(joined), joined


def test_a_concatenation_that_is_not_in_place_is_not_read_so() -> None:
    check_outputs, code = run(trained(Returned()), data())
    assert "norm_pointwise" not in code
    (report,) = ca.compilations()[-1].prologues
    assert (report.is_fused, report.reason) == (False, "its input would be a copy")
    assert len(check_outputs) == 2
