"""Fake kernels of the operators, for ``torch.compile``.

They compute shapes and strides, which are those of the kernels (csrc/conv_cuda.cpp): channels_last
if either operand is, and never in float64. Tensors of 1-d convolutions are channels_last as images
of height 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Ints = Sequence[int]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _check_least(name: str, values: Ints, least: int) -> None:
    for value in values:
        torch._check(value >= least, lambda: f"{name} must be {least} or more")


def _output_size(
    input_size: Ints, weight_size: Ints, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> list[int]:
    """The size of the forward convolution's output. It checks what the CUDA kernels check."""
    n = len(stride)
    lists = (len(input_size) - 2, len(weight_size) - 2, len(dilation))
    torch._check(
        1 <= n <= 3 and lists == (n, n, n) and len(padding) in (n, 2 * n),
        lambda: (
            f"a convolution of input {list(input_size)} and weight {list(weight_size)} does not "
            f"take stride {list(stride)}, padding {list(padding)}, dilation {list(dilation)}"
        ),
    )
    _check_least("stride", stride, 1)
    _check_least("dilation", dilation, 1)
    _check_least("padding", padding, 0)
    torch._check(groups >= 1, lambda: "groups must be 1 or more")
    torch._check(
        input_size[1] == weight_size[1] * groups,
        lambda: (
            f"expected input {list(input_size)} to have {weight_size[1] * groups} channels for "
            f"weight {list(weight_size)} and groups {groups}"
        ),
    )
    torch._check(
        weight_size[0] % groups == 0,
        lambda: f"weight {list(weight_size)} does not divide into {groups} groups",
    )
    after = padding[n:] if len(padding) == 2 * n else padding
    size = [input_size[0], weight_size[0]]
    for d in range(n):
        room = input_size[2 + d] + padding[d] + after[d] - dilation[d] * (weight_size[2 + d] - 1)
        torch._check(
            room >= 1,
            lambda: (
                f"the kernel of weight {list(weight_size)} is larger than the padded input "
                f"{list(input_size)}"
            ),
        )
        size.append((room - 1) // stride[d] + 1)
    return size


def _check_operands(a: Tensor, b: Tensor) -> None:
    torch._check(
        a.dtype == b.dtype and a.device == b.device,
        lambda: (
            f"expected one dtype and device, got {a.dtype} on {a.device}, {b.dtype} on {b.device}"
        ),
    )


def _check_gradient(grad_output: Tensor, other: Tensor, expected: Sequence[int]) -> None:
    _check_operands(grad_output, other)
    torch._check(
        grad_output.dim() == len(expected),
        lambda: f"expected grad_output of size {list(expected)}, got {list(grad_output.shape)}",
    )
    for found, size in zip(grad_output.shape, expected, strict=True):
        torch._check(
            found == size,
            lambda: f"expected grad_output of size {list(expected)}, got {list(grad_output.shape)}",
        )


def conv_memory_format(a: Tensor, b: Tensor) -> torch.memory_format:
    """The memory format that the CUDA kernels compute in for these operands."""
    if a.dtype == torch.float64 or a.dim() not in _CHANNELS_LAST:
        return torch.contiguous_format
    wanted = _CHANNELS_LAST[a.dim()]
    suggest = torch._prims_common.suggest_memory_format
    return wanted if wanted in (suggest(a), suggest(b)) else torch.contiguous_format


def is_channels_last_image(tensor: Tensor) -> bool:
    """Whether a tensor of a 1-d convolution is channels_last as images of height 1."""
    suggest = torch._prims_common.suggest_memory_format
    return suggest(tensor.unsqueeze(2)) == torch.channels_last


# These three are as those of csrc/conv_layout.h.


def is_image_of_height_1(input: Tensor, weight: Tensor, pads: bool) -> bool:
    """Whether a 1-d convolution runs as one of images of height 1 in channels_last.

    Args:
        pads: whether its padding differs before and after.
    """
    if input.dim() != 3 or weight.dim() != 3 or input.dtype == torch.float64:
        return False
    if is_channels_last_image(weight):
        return True
    return not pads and input.is_contiguous() and is_channels_last_image(input)


def is_dgrad_of_height_1(grad_output: Tensor, weight: Tensor) -> bool:
    """Whether a gradient of the input of a 1-d convolution runs so."""
    if grad_output.dim() != 3 or weight.dim() != 3 or grad_output.dtype == torch.float64:
        return False
    return is_channels_last_image(weight)


def is_wgrad_of_height_1(grad_output: Tensor, input: Tensor) -> bool:
    """Whether a gradient of the weight of a 1-d convolution runs so."""
    if grad_output.dim() != 3 or input.dim() != 3 or grad_output.dtype == torch.float64:
        return False
    operands = (grad_output, input)
    return any(not t.is_contiguous() and is_channels_last_image(t) for t in operands)


def _empty(size: Sequence[int], a: Tensor, b: Tensor, has_height_1: bool) -> Tensor:
    """A result of operands ``a`` and ``b``, channels_last as images of height 1 or as they are."""
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
    sampling: str = "",
    workspace_limit: int = -1,
) -> Tensor:
    size = _output_size(input.shape, weight.shape, stride, padding, dilation, groups)
    _check_operands(input, weight)
    pads = len(padding) > len(stride)
    return _empty(size, input, weight, is_image_of_height_1(input, weight, pads))


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
) -> Tensor:
    convolved = torch.ops.cudnn_autotune.conv_fprop(
        input, weight, bias, stride, padding, dilation, groups, sampling, workspace_limit
    )
    if residual is not None:
        torch._check(
            residual.shape == convolved.shape and residual.dtype == convolved.dtype,
            lambda: (
                f"residual must be of size {list(convolved.shape)} and {convolved.dtype}, got "
                f"{list(residual.shape)} and {residual.dtype}"
            ),
        )
    # Elementwise operators of ATen's keep the layout of what they are given.
    return convolved


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
    sampling: str = "",
    workspace_limit: int = -1,
) -> Tensor:
    output = torch.ops.aten.convolution(
        input, weight, bias, stride, padding, dilation, True, output_padding, groups
    )
    has_height_1 = is_image_of_height_1(input, weight, pads=False)
    return _empty(output.shape, input, weight, has_height_1)


@torch.library.register_fake("cudnn_autotune::conv_dgrad")
def _(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    sampling: str = "",
    workspace_limit: int = -1,
) -> Tensor:
    expected = _output_size(input_size, weight.shape, stride, padding, dilation, groups)
    _check_gradient(grad_output, weight, expected)
    has_height_1 = is_dgrad_of_height_1(grad_output, weight)
    return _empty(input_size, grad_output, weight, has_height_1)


@torch.library.register_fake("cudnn_autotune::conv_wgrad")
def _(
    grad_output: Tensor,
    input: Tensor,
    weight_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    sampling: str = "",
    workspace_limit: int = -1,
) -> Tensor:
    expected = _output_size(input.shape, weight_size, stride, padding, dilation, groups)
    _check_gradient(grad_output, input, expected)
    has_height_1 = is_wgrad_of_height_1(grad_output, input)
    return _empty(weight_size, grad_output, input, has_height_1)
