"""The operators ``batch_norm_act`` and ``batch_norm_act_backward``: a batch norm by statistics of
the batch, then the sum with a residual, then an activation, and the gradients of that.

They change none of their arguments. Running statistics are updated by the caller, from the mean
and the unbiased variance that the first operator returns. Autograd is csrc/norm_autograd.cpp's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_autotune.engines.norms import reference
from cudnn_autotune.engines.norms.reference import (
    NORM_ACTIVATIONS,
    dense,
    statistics_dtype,
    values_a_channel,
)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_library = torch.library.Library("cudnn_autotune", "FRAGMENT")
_library.define(
    "batch_norm_act(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, str activation, "
    "float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "batch_norm_act_backward(Tensor grad_output, Tensor? grad_output_2, Tensor input, "
    "Tensor? output, Tensor? weight, Tensor? bias, Tensor? residual, Tensor mean, Tensor inv_std, "
    "str activation, bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def unsupported(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None = None
) -> str | None:
    """Returns why a batch norm of these tensors is left to PyTorch, or None if it is served.

    Args:
        input: (N, C, *spatial), with up to three spatial dimensions.
        weight: (C,), or None.
        bias: (C,), or None.
        residual: Of the input's shape and dtype, or None. It is added before the activation.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func is active"
    try:
        _check(input, weight, bias, residual, "identity")
    except (ValueError, TypeError) as error:
        return str(error)
    return "input is empty" if input.numel() == 0 else None


def _check(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
) -> None:
    if not 2 <= input.dim() <= 5:
        raise ValueError(f"input: expected 2 to 5 dimensions, got {input.dim()}")
    if input.dtype not in _DTYPES:
        allowed = ", ".join(map(str, _DTYPES))
        raise TypeError(f"input: {input.dtype} is not served; allowed are {allowed}")
    if activation not in NORM_ACTIVATIONS:
        allowed = ", ".join(NORM_ACTIVATIONS)
        raise ValueError(f"activation: {activation!r} is not served; allowed are {allowed}")
    for name, values in (("weight", weight), ("bias", bias)):
        if values is None:
            continue
        if values.dim() != 1 or values.shape[0] != input.shape[1]:
            raise ValueError(
                f"{name}: expected shape ({input.shape[1]},), the channels of the input, got "
                f"{tuple(values.shape)}"
            )
        if values.dtype not in (input.dtype, statistics_dtype(input.dtype)):
            raise TypeError(
                f"{name}: expected {input.dtype} or {statistics_dtype(input.dtype)} for an input "
                f"of {input.dtype}, got {values.dtype}"
            )
        if values.device != input.device:
            raise ValueError(f"{name}: expected on {input.device}, got {values.device}")
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise TypeError(f"bias: expected the weight's {weight.dtype}, got {bias.dtype}")
    _check_like_input("residual", residual, input)
    if values_a_channel(input) == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {input.shape}"
        )


def _check_like_input(name: str, tensor: Tensor | None, input: Tensor) -> None:
    if tensor is None:
        return
    if tensor.shape != input.shape:
        raise ValueError(
            f"{name}: expected the input's shape {tuple(input.shape)}, got {tuple(tensor.shape)}"
        )
    if tensor.dtype != input.dtype or tensor.device != input.device:
        raise TypeError(
            f"{name}: expected {input.dtype} on {input.device} as the input, got {tensor.dtype} on "
            f"{tensor.device}"
        )


def _check_backward(
    grad_output: Tensor,
    grad_output_2: Tensor | None,
    input: Tensor,
    output: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
) -> None:
    _check(input, weight, bias, residual, activation)
    named = (("grad_output", grad_output), ("grad_output_2", grad_output_2), ("output", output))
    for name, tensor in named:
        _check_like_input(name, tensor, input)


def forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes ``batch_norm_act`` by PyTorch's functions.

    Raises:
        TypeError, ValueError: an argument is not served; the message names it.
    """
    _check(input, weight, bias, residual, activation)
    return reference.forward(input, weight, bias, residual, activation, eps)


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
    """Computes ``batch_norm_act_backward`` by PyTorch's functions.

    Raises:
        TypeError, ValueError: an argument is not served; the message names it.
    """
    _check_backward(grad_output, grad_output_2, input, output, weight, bias, residual, activation)
    return reference.backward(
        grad_output,
        grad_output_2,
        input,
        output,
        weight,
        bias,
        residual,
        mean,
        inv_std,
        activation,
        output_mask,
    )


_library.impl("batch_norm_act", forward, "CompositeExplicitAutograd")
_library.impl("batch_norm_act_backward", backward, "CompositeExplicitAutograd")


@torch.library.register_fake("cudnn_autotune::batch_norm_act")
def _(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(input, weight, bias, residual, activation)
    mean = input.new_empty(input.shape[1], dtype=statistics_dtype(input.dtype))
    output = torch.empty_like(dense(input))
    return output, mean, torch.empty_like(mean), torch.empty_like(mean)


@torch.library.register_fake("cudnn_autotune::batch_norm_act_backward")
def _(
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
    _check_backward(grad_output, grad_output_2, input, output, weight, bias, residual, activation)
    parameter = next((given for given in (weight, bias) if given is not None), mean)
    input = dense(input)
    return (
        torch.empty_like(input) if output_mask[0] else None,
        torch.empty_like(parameter) if output_mask[1] else None,
        torch.empty_like(parameter) if output_mask[2] else None,
        torch.empty_like(input) if output_mask[3] else None,
    )


def load_plan(*arguments: Any) -> Any:
    """Calls :func:`~cudnn_autotune.engines.norms.loading.load_plan`, which is imported at the first
    norm: it needs the package's kernels."""
    from cudnn_autotune.engines.norms import loading

    return loading.load_plan(*arguments)
