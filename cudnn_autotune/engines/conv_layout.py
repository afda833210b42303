"""The operators' layouts, as in csrc/call/conv_layout.h: channels_last if either operand is, and
never in float64. Tensors of 1-d convolutions are channels_last as images of height 1."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_autotune.engines.problem import CHANNELS_LAST


def conv_memory_format(a: Tensor, b: Tensor) -> torch.memory_format:
    """Returns the memory format in which the CUDA kernels compute with these operands."""
    wanted = CHANNELS_LAST.get(a.dim() - 2)
    if a.dtype == torch.float64 or wanted is None:
        return torch.contiguous_format
    suggest = torch._prims_common.suggest_memory_format
    return wanted if wanted in (suggest(a), suggest(b)) else torch.contiguous_format


def laid_out(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Returns a tensor contiguous or in channels_last; it is no copy if the layout is that already.
    A tensor of 3 dimensions is laid out as images of height 1.

    ``contiguous()`` would keep the strides of a kernel of size 1, which fit both layouts: an
    operator would take that weight as contiguous.
    """
    if tensor.dim() == 3:
        return laid_out(tensor.unsqueeze(2), memory_format).squeeze(2)
    is_last = memory_format != torch.contiguous_format
    wanted = CHANNELS_LAST[tensor.dim() - 2] if is_last else torch.contiguous_format
    return tensor.to(memory_format=wanted)


def is_channels_last_image(tensor: Tensor) -> bool:
    """Returns whether a tensor of a 1-d convolution is channels_last as images of height 1."""
    suggest = torch._prims_common.suggest_memory_format
    return suggest(tensor.unsqueeze(2)) == torch.channels_last


# The next three functions are as in csrc/call/conv_layout.h.


def is_image_of_height_1(input: Tensor, weight: Tensor, pads: bool) -> bool:
    """Returns whether a 1-d convolution runs as one of images of height 1 in channels_last.

    Args:
        pads: whether its padding differs before and after.
    """
    if input.dim() != 3 or weight.dim() != 3 or input.dtype == torch.float64:
        return False
    if is_channels_last_image(weight):
        return True
    return not pads and input.is_contiguous() and is_channels_last_image(input)


def is_dgrad_of_height_1(grad_output: Tensor, weight: Tensor) -> bool:
    """Returns whether the gradient of a 1-d convolution's input runs so."""
    if grad_output.dim() != 3 or weight.dim() != 3 or grad_output.dtype == torch.float64:
        return False
    return is_channels_last_image(weight)


def is_wgrad_of_height_1(grad_output: Tensor, input: Tensor) -> bool:
    """Returns whether the gradient of a 1-d convolution's weight runs so."""
    if grad_output.dim() != 3 or input.dim() != 3 or grad_output.dtype == torch.float64:
        return False
    operands = (grad_output, input)
    return any(not t.is_contiguous() and is_channels_last_image(t) for t in operands)
