"""The operators by PyTorch's functions, for CPUs and for what the kernels do not take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_autotune.engines.problem import ACTIVATIONS

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An activation with its derivative."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    """(gradient of the output, argument or output) -> gradient of the argument."""
    by_output: bool
    """Whether ``backward`` takes the output in place of the argument."""


NORM_ACTIVATIONS: Mapping[str, Activation] = {
    "identity": Activation(lambda z: z, lambda grad, z: grad, by_output=False),
    "relu": Activation(F.relu, lambda grad, y: aten.threshold_backward(grad, y, 0), by_output=True),
    "relu6": Activation(
        F.relu6, lambda grad, y: aten.hardtanh_backward(grad, y, 0, 6), by_output=True
    ),
    "sigmoid": Activation(ACTIVATIONS["sigmoid"], aten.sigmoid_backward, by_output=True),
    "silu": Activation(ACTIVATIONS["silu"], aten.silu_backward, by_output=False),
    "gelu": Activation(ACTIVATIONS["gelu"], aten.gelu_backward, by_output=False),
    "gelu_tanh": Activation(
        ACTIVATIONS["gelu_tanh"],
        lambda grad, z: aten.gelu_backward(grad, z, approximate="tanh"),
        by_output=False,
    ),
    "hardswish": Activation(ACTIVATIONS["hardswish"], aten.hardswish_backward, by_output=False),
}
"""The activations that a norm can be followed by, by name."""


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which statistics of an input are computed and kept."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def values_a_channel(input: Tensor) -> int:
    """Returns how many values of each channel there are: N times the spatial size."""
    return input.shape[0] * math.prod(input.shape[2:])


def dense(input: Tensor) -> Tensor:
    """Returns the input itself if it is contiguous in (N, C, *spatial) or in (N, *spatial, C), else
    a copy that is, in the memory format that it is nearest to."""
    if input.is_contiguous() or input.movedim(1, -1).is_contiguous():
        return input
    return input.contiguous(memory_format=torch._prims_common.suggest_memory_format(input))


def like(tensor: Tensor, input: Tensor) -> Tensor:
    """Returns a tensor with the strides of a dense input, which is a copy if they differ."""
    if tensor.stride() == input.stride():
        return tensor
    return torch.empty_like(input, dtype=tensor.dtype).copy_(tensor)


def _by_channel(values: Tensor, input: Tensor) -> Tensor:
    return values.to(statistics_dtype(input.dtype)).view(-1, *(1,) * (input.dim() - 2))


def _argument(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
) -> Tensor:
    """Returns what the activation is computed of, in the dtype of statistics."""
    z = (input.to(mean.dtype) - _by_channel(mean, input)) * _by_channel(inv_std, input)
    if weight is not None:
        z = z * _by_channel(weight, input)
    if bias is not None:
        z = z + _by_channel(bias, input)
    return z if residual is None else z + residual


def forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes ``batch_norm_act``."""
    input = dense(input)
    count = values_a_channel(input)
    dims = [0, *range(2, input.dim())]
    wide = input.to(statistics_dtype(input.dtype))
    if count == 0:
        mean = var = wide.new_full((input.shape[1],), math.nan)
    else:
        var, mean = torch.var_mean(wide, dims, correction=0)
    inv_std = torch.rsqrt(var + eps)
    z = _argument(input, weight, bias, residual, mean, inv_std)
    output = NORM_ACTIVATIONS[activation].forward(z).to(input.dtype)
    unbiased = var * (count / (count - 1)) if count > 1 else var.clone()
    return like(output, input), mean, inv_std, unbiased


def backward(
    grad_output: Tensor,
    grad_output_2: Tensor | None,
    input: Tensor,
    output: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    mean: Tensor,
    inv_std: Tensor,
    activation: str,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Computes ``batch_norm_act_backward``."""
    input = dense(input)
    grad = grad_output.to(mean.dtype)
    if grad_output_2 is not None:
        grad = grad + grad_output_2
    derivative = NORM_ACTIVATIONS[activation]
    if activation == "identity":
        grad_z = grad
    elif derivative.by_output and output is not None:
        grad_z = derivative.backward(grad, output.to(mean.dtype))
    else:
        z = _argument(input, weight, bias, residual, mean, inv_std)
        given = derivative.forward(z) if derivative.by_output else z
        grad_z = derivative.backward(grad, given)
    dims = [0, *range(2, input.dim())]
    normalized = (input.to(mean.dtype) - _by_channel(mean, input)) * _by_channel(inv_std, input)
    grad_bias = grad_z.sum(dims)
    grad_weight = (grad_z * normalized).sum(dims)
    grad_input = grad_residual = None
    if output_mask[0]:
        count = max(values_a_channel(input), 1)
        centred = grad_z - _by_channel(grad_bias / count, input)
        grad_input = centred - normalized * _by_channel(grad_weight / count, input)
        scale = inv_std if weight is None else inv_std * weight.to(mean.dtype)
        grad_input = like((grad_input * _by_channel(scale, input)).to(input.dtype), input)
    if output_mask[3]:
        grad_residual = like(grad_z.to(input.dtype), input)
        if grad_residual is grad_output:
            grad_residual = grad_residual.clone()
    parameters = mean.dtype if weight is None else weight.dtype
    if weight is None and bias is not None:
        parameters = bias.dtype
    return (
        grad_input,
        grad_weight.to(parameters) if output_mask[1] else None,
        grad_bias.to(parameters) if output_mask[2] else None,
        grad_residual,
    )
