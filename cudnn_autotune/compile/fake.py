"""The operators' fake kernels, for ``torch.compile``. Shapes and strides are as in the kernels
(csrc/conv/conv_cuda.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_autotune.engines.conv_layout import (
    conv_memory_format,
    is_dgrad_of_height_1,
    is_image_of_height_1,
    is_wgrad_of_height_1,
)
from cudnn_autotune.engines.problem import in_pairs, split_sides

Ints = Sequence[int]


def _check_operands(a: Tensor, b: Tensor) -> None:
    torch._check(
        a.dtype == b.dtype and a.device == b.device,
        lambda: (
            f"expected one dtype and device, got {a.dtype} on {a.device}, {b.dtype} on {b.device}"
        ),
    )


def _empty(size: Sequence[int], a: Tensor, b: Tensor, has_height_1: bool) -> Tensor:
    """Returns a result of operands ``a`` and ``b``, as images of height 1 in channels_last or
    not."""
    if not has_height_1:
        memory_format = conv_memory_format(a, b)
        return torch.empty(size, dtype=a.dtype, device=a.device, memory_format=memory_format)
    image = [size[0], size[1], 1, size[2]]
    result = torch.empty(image, dtype=a.dtype, device=a.device, memory_format=torch.channels_last)
    return result.squeeze(2)


@torch.library.register_fake("cudnn_autotune::conv_fprop")
def _(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    *policy: object,
) -> Tensor:
    _check_operands(input, weight)
    n = len(stride)
    pads = len(padding) > n
    padded, both = input, padding
    if pads:
        both, rest = split_sides(padding)
        padded = F.pad(input, in_pairs(rest))
    # PyTorch's operator refuses unfit arguments.
    output = torch.ops.aten.convolution(
        padded, weight, bias, stride, both, dilation, False, [0] * n, groups
    )
    return _empty(output.shape, input, weight, is_image_of_height_1(input, weight, pads))


@torch.library.register_fake("cudnn_autotune::conv_fused")
def _(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    activation: str = "",
    sampling: str = "",
    workspace_limit: int = -1,
    slope: Tensor | None = None,
) -> Tensor:
    convolved = torch.ops.cudnn_autotune.conv_fprop(
        input, weight, bias, stride, padding, dilation, groups
    )
    if residual is not None:
        torch._check(
            residual.shape == convolved.shape and residual.dtype == convolved.dtype,
            lambda: (
                f"residual must be of size {list(convolved.shape)} and {convolved.dtype}, got "
                f"{list(residual.shape)} and {residual.dtype}"
            ),
        )
    torch._check_value(
        (slope is not None) == (activation == "prelu"),
        lambda: "slope must be a tensor with the activation prelu, and None with any other",
    )
    if slope is not None:
        torch._check_value(
            (slope.shape, slope.dtype) == (convolved.shape[1:2], convolved.dtype),
            lambda: (
                f"slope must have the shape ({convolved.shape[1]},) and {convolved.dtype}, got "
                f"{list(slope.shape)} and {slope.dtype}"
            ),
        )
    # Elementwise operators of ATen's keep the layout of their operands.
    return convolved


@torch.library.register_fake("cudnn_autotune::conv_fused_into_")
def _(output: Tensor, *arguments: Any) -> None:
    convolved = torch.ops.cudnn_autotune.conv_fused(*arguments)
    torch._check(
        (output.shape, output.dtype) == (convolved.shape, convolved.dtype),
        lambda: (
            f"output must be of size {list(convolved.shape)} and {convolved.dtype}, got "
            f"{list(output.shape)} and {output.dtype}"
        ),
    )


@torch.library.register_fake("cudnn_autotune::conv_each_image")
def _(
    input: Tensor, weight: Tensor, stride: Ints, padding: Ints, dilation: Ints, *policy: object
) -> Tensor:
    _check_operands(input, weight)
    images, n = input.shape[0], len(stride)
    torch._check(
        input.dim() == weight.dim() in (4, 5) and images > 0 and weight.shape[0] % images == 0,
        lambda: (
            "expected an input of (N, C, *spatial) with 2 or 3 spatial dimensions and a weight of "
            f"(N * K, C, *kernel), got {list(input.shape)} and {list(weight.shape)}"
        ),
    )
    torch._check(
        len(stride) == len(padding) == len(dilation) == input.dim() - 2,
        lambda: (
            f"expected a stride, padding and dilation of {input.dim() - 2} numbers each, got "
            f"{list(stride)}, {list(padding)} and {list(dilation)}"
        ),
    )
    filters = weight[: weight.shape[0] // images]
    output = torch.ops.aten.convolution(
        input, filters, None, stride, padding, dilation, False, [0] * n, 1
    )
    return _empty(output.shape, input, weight, False)


@torch.library.register_fake("cudnn_autotune::conv_transpose")
def _(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    output_padding: Ints,
    dilation: Ints,
    groups: int,
    *policy: object,
) -> Tensor:
    output = torch.ops.aten.convolution(
        input, weight, bias, stride, padding, dilation, True, output_padding, groups
    )
    has_height_1 = is_image_of_height_1(input, weight, pads=False)
    return _empty(output.shape, input, weight, has_height_1)


# The sizes of a gradient are given. The kernels refuse operands that do not fit.


@torch.library.register_fake("cudnn_autotune::conv_dgrad")
def _(
    grad_output: Tensor, weight: Tensor, input_size: Ints, *geometry_and_policy: object
) -> Tensor:
    _check_operands(grad_output, weight)
    return _empty(input_size, grad_output, weight, is_dgrad_of_height_1(grad_output, weight))


@torch.library.register_fake("cudnn_autotune::conv_wgrad")
def _(
    grad_output: Tensor, input: Tensor, weight_size: Ints, *geometry_and_policy: object
) -> Tensor:
    _check_operands(grad_output, input)
    return _empty(weight_size, grad_output, input, is_wgrad_of_height_1(grad_output, input))
