"""Fake kernels of the operators, for ``torch.compile``.

They compute shapes and strides, which are those of the kernels (csrc/conv_cuda.cpp): channels_last
if either operand is, and never in float64.
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


def _empty(size: Sequence[int], a: Tensor, b: Tensor) -> Tensor:
    return torch.empty(size, dtype=a.dtype, device=a.device, memory_format=conv_memory_format(a, b))


def _is_image_of_height_1(input: Tensor, weight: Tensor, pads: bool) -> bool:
    """Whether a 1-d convolution runs as one of images of height 1 in channels_last, as by
    ``is_image_of_height_1`` of csrc/conv_layout.h."""
    if input.dim() != 3 or weight.dim() != 3 or input.dtype == torch.float64:
        return False
    suggest = torch._prims_common.suggest_memory_format
    if suggest(weight.unsqueeze(2)) == torch.channels_last:
        return True
    of_input = input.unsqueeze(2)
    return not pads and input.is_contiguous() and suggest(of_input) == torch.channels_last


def _empty_output(size: Sequence[int], input: Tensor, weight: Tensor, pads: bool) -> Tensor:
    """The output of a forward; ``pads`` tells whether the padding differs before and after."""
    if not _is_image_of_height_1(input, weight, pads):
        return _empty(size, input, weight)
    image = [size[0], size[1], 1, size[2]]
    output = torch.empty(
        image, dtype=input.dtype, device=input.device, memory_format=torch.channels_last
    )
    return output.squeeze(2)


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
    return _empty_output(size, input, weight, pads=len(padding) > len(stride))


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
    return _empty_output(output.shape, input, weight, pads=False)


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
    return _empty(input_size, grad_output, weight)


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
    return _empty(weight_size, grad_output, input)
