"""Convolutions whose groups are the images of a batch: each image has filters of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import TOLERANCES, assert_close
from support.models.made import Made
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

from cudnn_autotune.compile.entry import compilations

OPERATOR = "torch.ops.cudnn_autotune.conv_each_image"
each_image = torch.ops.cudnn_autotune.conv_each_image
LAST = torch.channels_last


def operands(n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, *[9, 8, 5][:n], generator=generator, dtype=torch.float64)
    w = torch.randn(15, 4, *[3, 2, 2][:n], generator=generator, dtype=torch.float64)
    return x.to(dtype), w.to(dtype)


GEOMETRIES: dict[str, Any] = {
    "2-d": ((2, 1), (1, 0), (1, 2)),
    "3-d": ((1, 1, 2), (0, 1, 1), (1, 1, 1)),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_each_image_is_convolved_with_its_part_of_the_weight(name: str) -> None:
    stride, padding, dilation = geometry = GEOMETRIES[name]
    x, w = operands(len(stride))
    found = each_image(x, w, *geometry)
    conv = {2: F.conv2d, 3: F.conv3d}[len(stride)]
    joined = conv(x.flatten(0, 1)[None], w, None, stride, padding, dilation, groups=3)
    torch.testing.assert_close(found, joined.view(found.shape))
    checks = ("test_schema", "test_faketensor")
    arguments = (*operands(len(stride), torch.float32), *geometry)
    checked = torch.library.opcheck(each_image, arguments, test_utils=checks)
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("of_weight", [False, True])
def test_the_result_is_channels_last_where_an_operand_is(of_weight: bool) -> None:
    x, w = operands(2, torch.float16)
    x, w = (x, w.to(memory_format=LAST)) if of_weight else (x.to(memory_format=LAST), w)
    found = each_image(x, w, *GEOMETRIES["2-d"])
    assert found.is_contiguous(memory_format=LAST)
    with FakeTensorMode() as mode:
        x, w = (mode.from_tensor(one).to("cuda") for one in (x, w))
        assert each_image(x, w, *GEOMETRIES["2-d"]).stride() == found.stride()


def test_what_does_not_fit_is_refused() -> None:
    x, w = operands(2)
    geometry = GEOMETRIES["2-d"]
    for other in (w[:14], w[..., 0], w[:, :3]):
        with pytest.raises(RuntimeError, match=r"\(N \* K, C, \*kernel\)|4 channels"):
            each_image(x, other, *geometry)
    for where in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with where, pytest.raises(RuntimeError, match="2 or 3 spatial dimensions"):
            each_image(x[..., 0], w[..., 0], (1,), (0,), (1,))
    with pytest.raises(ValueError, match="sampling"):
        each_image(x, w, *geometry, "often")
    # PyTorch's convolutions would take one number for both dimensions.
    for lists in (((1,), (1, 1), (1, 1)), ((1,), (1,), (1,)), ((1, 1), (1, 1, 1, 1), (1, 1))):
        with pytest.raises(RuntimeError, match="2 numbers each"):
            each_image(x, w, *lists)
        with FakeTensorMode() as mode, pytest.raises(RuntimeError, match="2 numbers each"):
            each_image(mode.from_tensor(x), mode.from_tensor(w), *lists)


# The backend


class Modulated(nn.Module):
    """StyleGAN2's convolution: the filters are scaled for each image."""

    def __init__(self, kernel: int = 3, channels: int = 64, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, channels, kernel, kernel) / 30)
        self.options = {"padding": kernel // 2, **options}

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        weight = self.weight * (style[:, None, :, None, None] + 1)
        weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        y = self.convolved(x.reshape(1, -1, *x.shape[2:]), weight.flatten(0, 1), len(x))
        return F.leaky_relu(y.reshape(len(x), -1, *y.shape[2:]), 0.2)

    def convolved(self, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        return F.conv2d(x, weight, groups=groups, **self.options)


OPTIONS = {"compare": False, "fuse": "always", "cpp.weight_prepack": False}


def program_of(model: nn.Module, *inputs: Tensor) -> str:
    """Compiles and checks a model, and returns the code of the program that is this package's."""
    with torch.no_grad():
        compiled = torch.compile(model, backend="cudnn_autotune", options=OPTIONS)
        output, codes = run_and_get_code(compiled, *inputs)
        expected = model.double()(*(one.double() for one in inputs))
    assert_close(output, expected, 4 * TOLERANCES[inputs[0].dtype])
    assert output.stride() == expected.stride()
    code: str = codes[-1]
    return code


def inputs(channels: int = 64, images: int = 3) -> tuple[Tensor, Tensor]:
    x, style = torch.randn(images, channels, 9, 8), torch.randn(images, channels)
    return x.bfloat16(), style.bfloat16()


@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": (0, 1)}, {"dilation": (1, 2)}, {"kernel": 1}], ids=str
)
def test_the_backend_convolves_each_image(options: dict[str, Any]) -> None:
    code = program_of(Modulated(**options).eval().bfloat16(), *inputs())
    assert OPERATOR in code
    assert "extern_kernels.convolution" not in code
    # The filters that are scaled are laid out once for all images.
    assert ("fold_weights" in code) == (options.get("kernel") != 1)


def test_a_chain_keeps_the_images_apart() -> None:
    def forward(model: Any, x: Tensor, style: Tensor) -> Tensor:
        y = F.interpolate(model.first(x, style), scale_factor=2.0)
        return model.second(y, style[:, :48])

    model = Made(forward, first=Modulated(), second=Modulated(1, 48))
    code = program_of(model.eval().bfloat16(), *inputs())
    assert code.count(f"= {OPERATOR}") == 1  # 48 channels are few
    assert "extern_kernels.convolution" in code


class Viewed(Modulated):
    """The images, and what is convolved, are reshaped in other words."""

    def __init__(self, *, by_name: bool, **options: Any) -> None:
        super().__init__(**options)
        self.by_name = by_name

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        weight = self.weight.repeat(len(x), 1, 1, 1) * style.sum()
        shape = (1, x.shape[0] * x.shape[1], *x.shape[2:])
        joined = torch.reshape(input=x, shape=shape) if self.by_name else x.view(shape)
        y = self.convolved(joined, weight, len(x))
        return y.view(len(x), -1, *y.shape[2:]).relu()


@pytest.mark.parametrize("by_name", [False, True])
def test_other_words_for_a_reshape(by_name: bool) -> None:
    assert OPERATOR in program_of(Viewed(by_name=by_name).eval().bfloat16(), *inputs())


def test_images_that_are_viewed_as_one_again_stay_contiguous() -> None:
    """In channels_last such a view is impossible."""

    model = Made(
        lambda model, x, style: model.second(model.first(x, style), style),
        first=Modulated(),
        second=Viewed(by_name=False, channels=48),
    )
    code = program_of(model.eval().bfloat16(), *inputs())
    assert OPERATOR not in code
    assert compilations()[-1].chosen == "cudnn_autotune"


def test_outputs_that_share_memory_go_on_sharing_it() -> None:
    class Twice(Modulated):
        def forward(self, x: Tensor, style: Tensor) -> tuple[Tensor, Tensor]:
            weight = self.weight.repeat(len(x), 1, 1, 1) * style.sum()
            y = self.convolved(x.reshape(1, -1, *x.shape[2:]), weight, len(x))
            y = y.reshape(len(x), -1, *y.shape[2:])
            return y, y.flatten(1)

    with torch.no_grad():
        model = torch.compile(Twice().bfloat16(), backend="cudnn_autotune", options=OPTIONS)
        y, flat = model(*inputs())
    assert y.is_contiguous()
    assert flat.data_ptr() == y.data_ptr()


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64], ids=str)
def test_parameters_of_other_dtypes_keep_their_values(dtype: torch.dtype) -> None:
    """They are laid out, too, where weights are computed of them."""

    class Decoded(Modulated):
        def forward(self, x: Tensor, code: Tensor) -> Tensor:
            values = code.imag if code.is_complex() else code % 16
            weight = values.to(x.dtype).repeat(len(x), 1, 1, 1) / 256
            y = self.convolved(x.reshape(1, -1, *x.shape[2:]), weight, len(x))
            return y.reshape(len(x), -1, *y.shape[2:])

    x, _ = inputs()
    code = torch.randint(2**30, 2**30 + 16, (48, 64, 3, 3), dtype=torch.int32)
    if dtype.is_complex:
        code = 1j * (code % 16)
    with torch.no_grad():
        model = torch.compile(Decoded(), backend="cudnn_autotune", options=OPTIONS)
        assert_close(model(x, code), Decoded()(x.double(), code), 4 * TOLERANCES[x.dtype])


class WithBias(Modulated):
    def convolved(self, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        return F.conv2d(x, weight, torch.ones_like(weight[:, 0, 0, 0]), groups=groups, padding=1)


class Read(Modulated):
    """Something else reads the joined images."""

    def convolved(self, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        y = super().convolved(x, weight, groups)
        return y + y.mean()


class Written(Modulated):
    """A view of the result, which is joined again, is written into."""

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        y = self.convolved(
            x.reshape(1, -1, *x.shape[2:]), self.weight.repeat(len(x), 1, 1, 1), len(x)
        )
        y = y.reshape(len(x), -1, *y.shape[2:])
        y.flatten(0, 1).add_(style.sum())
        return y.relu()


class Shuffled(Modulated):
    """The groups are not the images."""

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        weight = self.weight.repeat(len(x), 1, 1, 1) * math.sqrt(0.5)
        joined = x.transpose(0, 1).reshape(1, -1, *x.shape[2:])
        y = self.convolved(joined, weight, len(x))
        return y.reshape(len(x), -1, *y.shape[2:]) + style.sum()


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        (WithBias, torch.bfloat16),
        (Read, torch.bfloat16),
        (Written, torch.bfloat16),
        (Shuffled, torch.bfloat16),
        (lambda: Modulated(padding="same"), torch.bfloat16),
        (lambda: Modulated(channels=32), torch.bfloat16),
        (Modulated, torch.float32),
    ],
)
def test_other_groups_stay_as_they_are(model: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    channels = 32 if model().weight.shape[1] == 32 else 64  # type: ignore[union-attr, index]
    code = program_of(model().eval().to(dtype), *(one.to(dtype) for one in inputs(channels)))
    assert OPERATOR not in code


def test_one_image_has_no_groups() -> None:
    assert OPERATOR not in program_of(Modulated().eval().bfloat16(), *inputs(images=1))
