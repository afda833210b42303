"""The operators by PyTorch's functions, for CPUs and for problems that the kernels do not take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cudnn_autotune.engines.activations import ACTIVATIONS

aten = torch.ops.aten


@dataclass(frozen=True)
class NormActivation:
    """An activation with its derivative."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    """(gradient of the output, argument or output) -> gradient of the argument."""
    by_output: bool
    """Whether ``backward`` takes the output in place of the argument."""
    passes: Callable[[Tensor], Tensor] | None = None
    """output -> mask of the places where the gradient passes unchanged, if it has one factor
    elsewhere."""
    slope: float = 0.0
    """Factor of the gradient elsewhere."""


def _leaky_relu(slope: float) -> NormActivation:
    return NormActivation(
        lambda z: F.leaky_relu(z, slope),
        lambda grad, y: aten.leaky_relu_backward(grad, y, slope, True),
        by_output=True,
        passes=lambda y: y > 0,
        slope=slope,
    )


LEAKY_RELUS = {slope: f"leaky_relu({slope})" for slope in (0.01, 0.1, 0.2)}
"""The leaky ReLUs behind a norm: slope -> name. The slopes are PyTorch's default, Darknet's and
those of discriminators."""
NORM_ACTIVATIONS: Mapping[str, NormActivation] = {
    "identity": NormActivation(lambda z: z, lambda grad, z: grad, by_output=False),
    "relu": NormActivation(
        F.relu,
        lambda grad, y: aten.threshold_backward(grad, y, 0),
        by_output=True,
        passes=lambda y: ~(y <= 0),
    ),
    "relu6": NormActivation(
        F.relu6,
        lambda grad, y: aten.hardtanh_backward(grad, y, 0, 6),
        by_output=True,
        passes=lambda y: ~((y <= 0) | (y >= 6)),
    ),
    "sigmoid": NormActivation(ACTIVATIONS["sigmoid"], aten.sigmoid_backward, by_output=True),
    "silu": NormActivation(ACTIVATIONS["silu"], aten.silu_backward, by_output=False),
    "gelu": NormActivation(ACTIVATIONS["gelu"], aten.gelu_backward, by_output=False),
    "gelu_tanh": NormActivation(
        ACTIVATIONS["gelu_tanh"],
        lambda grad, z: aten.gelu_backward(grad, z, approximate="tanh"),
        by_output=False,
    ),
    "hardswish": NormActivation(ACTIVATIONS["hardswish"], aten.hardswish_backward, by_output=False),
    **{name: _leaky_relu(slope) for slope, name in LEAKY_RELUS.items()},
}
"""The activations behind a norm, by name."""


MASKED_BYTES = 16
"""Neighbouring bytes of a tensor for each byte of a mask."""
_SEGMENT = 8
"""The neighbouring bytes of a mask for one row, if a row has enough."""


class Operands(NamedTuple):
    """The arguments of ``batch_norm_act``."""

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    activation: str
    eps: float


class Results(NamedTuple):
    """The results of ``batch_norm_act``."""

    output: Tensor
    mean: Tensor
    inv_std: Tensor
    unbiased_var: Tensor
    mask: Tensor
    """Bits of the places where the activation passes gradients on; empty if ``mask_size`` is 0."""


class BackwardOperands(NamedTuple):
    """The arguments of ``batch_norm_act_backward``."""

    grad_output: Tensor
    grad_output_2: Tensor | None
    """A second gradient of the output, which is added to the first."""
    input: Tensor
    output: Tensor | None
    """The output, or its mask, which suffices if there is one."""
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    mean: Tensor
    inv_std: Tensor
    activation: str
    output_mask: Sequence[bool]
    """Whether each of the gradients is needed."""


class Gradients(NamedTuple):
    """The results of ``batch_norm_act_backward``; None for each that is not needed."""

    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which statistics of an input are computed and kept."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def values_a_channel(input: Tensor) -> int:
    """Returns the number of values of each channel: N times the spatial size."""
    return input.shape[0] * math.prod(input.shape[2:])


def dense(input: Tensor) -> Tensor:
    """Returns the input itself if it is contiguous in (N, C, *spatial) or in (N, *spatial, C); else
    a copy in the nearer of the two formats."""
    if input.is_contiguous() or input.movedim(1, -1).is_contiguous():
        return input
    return input.contiguous(memory_format=torch._prims_common.suggest_memory_format(input))


def like(tensor: Tensor, input: Tensor) -> Tensor:
    """Returns a tensor with the strides of a dense input, as a copy if they differ."""
    if tensor.stride() == input.stride():
        return tensor
    return torch.empty_like(input, dtype=tensor.dtype).copy_(tensor)


def mask_size(input: Tensor) -> int:
    """Returns the bytes of the mask of a dense input's output, a uint8 tensor of one dimension. A
    byte stands for ``MASKED_BYTES`` of a row of channels, with a bit for each number, the first one
    lowest. The first eight bytes of each row come first, row by row, then the next ones.

    It is 0, and there is no mask, unless the input lies in (N, *spatial, C) with rows that are a
    multiple of ``MASKED_BYTES`` bytes.
    """
    numbers = MASKED_BYTES // input.dtype.itemsize
    is_by_planes = math.prod(input.shape[2:]) > 1 and input.is_contiguous()
    if input.shape[1] % numbers != 0 or is_by_planes:
        return 0
    return input.numel() // numbers


def has_mask(residual: Tensor | None, activation: str) -> bool:
    """Returns whether a norm's backward reads a mask, if there is one, instead of the output.
    Without a residual it computes the activation's argument from the input, which it reads
    anyway."""
    return residual is not None and NORM_ACTIVATIONS[activation].passes is not None


def packed_mask(output: Tensor, activation: str) -> Tensor:
    """Returns the mask of a norm's output with an activation that has one."""
    passes = NORM_ACTIVATIONS[activation].passes
    assert passes is not None
    bits = passes(output)
    numbers = MASKED_BYTES // output.dtype.itemsize
    weights = torch.tensor([1 << place for place in range(numbers)], device=bits.device)
    rows = bits.movedim(1, -1).reshape(-1, bits.shape[1] // numbers, numbers)
    columns = (rows * weights).sum(-1).to(torch.uint8)
    return torch.cat([segment.flatten() for segment in columns.split(_SEGMENT, 1)])


def _unpacked_mask(mask: Tensor, input: Tensor) -> Tensor:
    """Returns a mask as bits of an input's shape."""
    batch, channels, *spatial = input.shape
    numbers = MASKED_BYTES // input.dtype.itemsize
    columns, rows = channels // numbers, batch * math.prod(spatial)
    widths = [min(_SEGMENT, columns - first) for first in range(0, columns, _SEGMENT)]
    pairs = zip(mask.split([rows * width for width in widths]), widths, strict=True)
    joined = torch.cat([segment.view(rows, width) for segment, width in pairs], 1)
    places = torch.arange(numbers, dtype=torch.uint8, device=mask.device)
    bits = (joined[..., None] >> places & 1).bool()
    return bits.view(batch, *spatial, channels).movedim(-1, 1)


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
    """Returns the activation's argument, in the dtype of statistics."""
    z = (input.to(mean.dtype) - _by_channel(mean, input)) * _by_channel(inv_std, input)
    if weight is not None:
        z = z * _by_channel(weight, input)
    if bias is not None:
        z = z + _by_channel(bias, input)
    return z if residual is None else z + residual


def forward(given: Operands) -> Results:
    """Computes ``batch_norm_act``."""
    activation = NORM_ACTIVATIONS[given.activation]
    input = dense(given.input)
    count = values_a_channel(input)
    dims = [0, *range(2, input.dim())]
    wide = input.to(statistics_dtype(input.dtype))
    if count == 0:
        mean = var = wide.new_full((input.shape[1],), math.nan)
    else:
        var, mean = torch.var_mean(wide, dims, correction=0)
    inv_std = torch.rsqrt(var + given.eps)
    z = _argument(input, given.weight, given.bias, given.residual, mean, inv_std)
    output = activation.forward(z).to(input.dtype)
    mask = input.new_empty(0, dtype=torch.uint8)
    if has_mask(given.residual, given.activation) and mask_size(input) > 0:
        mask = packed_mask(output, given.activation)
    unbiased = var * (count / (count - 1)) if count > 1 else var.clone()
    return Results(like(output, input), mean, inv_std, unbiased, mask)


def backward(given: BackwardOperands) -> Gradients:
    """Computes ``batch_norm_act_backward``."""
    input, output, mean, inv_std = dense(given.input), given.output, given.mean, given.inv_std
    grad = given.grad_output.to(mean.dtype)
    if given.grad_output_2 is not None:
        grad = grad + given.grad_output_2
    derivative = NORM_ACTIVATIONS[given.activation]
    if given.activation == "identity":
        grad_z = grad
    elif output is not None and output.dtype == torch.uint8:
        elsewhere = grad * derivative.slope if derivative.slope else 0
        grad_z = torch.where(_unpacked_mask(output, input), grad, elsewhere)
    elif derivative.by_output and output is not None:
        grad_z = derivative.backward(grad, output.to(mean.dtype))
    else:
        z = _argument(input, given.weight, given.bias, given.residual, mean, inv_std)
        grad_z = derivative.backward(grad, derivative.forward(z) if derivative.by_output else z)
    dims = [0, *range(2, input.dim())]
    normalized = (input.to(mean.dtype) - _by_channel(mean, input)) * _by_channel(inv_std, input)
    grad_bias = grad_z.sum(dims)
    grad_weight = (grad_z * normalized).sum(dims)
    grad_input = grad_residual = None
    wants_input, wants_weight, wants_bias, wants_residual = given.output_mask
    if wants_input:
        count = max(values_a_channel(input), 1)
        centred = grad_z - _by_channel(grad_bias / count, input)
        grad_input = centred - normalized * _by_channel(grad_weight / count, input)
        scale = inv_std if given.weight is None else inv_std * given.weight.to(mean.dtype)
        grad_input = like((grad_input * _by_channel(scale, input)).to(input.dtype), input)
    if wants_residual:
        grad_residual = like(grad_z.to(input.dtype), input)
        if grad_residual is given.grad_output:
            grad_residual = grad_residual.clone()
    parameters = next((v.dtype for v in (given.weight, given.bias) if v is not None), mean.dtype)
    return Gradients(
        grad_input,
        grad_weight.to(parameters) if wants_weight else None,
        grad_bias.to(parameters) if wants_bias else None,
        grad_residual,
    )
