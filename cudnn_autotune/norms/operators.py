"""The operators ``batch_norm_act`` and ``batch_norm_act_backward``: a batch norm by statistics of
the batch, then the sum with a residual, then an activation; and the gradients.

They do not change their arguments. The caller updates running statistics from the mean and the
unbiased variance that the first operator returns. Autograd is in csrc/norm/batch_norm_autograd.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.norms import reference
from cudnn_autotune.norms.reference import (
    MASKED_BYTES,
    NORM_ACTIVATIONS,
    BackwardOperands,
    Operands,
    dense,
    has_mask,
    mask_size,
    statistics_dtype,
    values_a_channel,
)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_library = torch.library.Library("cudnn_autotune", "FRAGMENT")
_library.define(
    "batch_norm_act(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, str activation, "
    "float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
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
    """Returns the reason why a batch norm of these tensors is left to PyTorch, or None if it is
    served.

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


def _check_backward(given: BackwardOperands) -> None:
    _check(given.input, given.weight, given.bias, given.residual, given.activation)
    for name in ("grad_output", "grad_output_2"):
        _check_like_input(name, getattr(given, name), given.input)
    if given.output is None or given.output.dtype != torch.uint8:
        _check_like_input("output", given.output, given.input)
    elif NORM_ACTIVATIONS[given.activation].passes is None or (
        given.output.numel() * MASKED_BYTES != given.input.numel() * given.input.dtype.itemsize
    ):
        raise ValueError(
            f"output: expected the output or the mask of a norm of {tuple(given.input.shape)} with "
            f"{given.activation!r}, got a mask of shape {tuple(given.output.shape)}"
        )


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    """Computes ``batch_norm_act`` by PyTorch's functions.

    Raises:
        TypeError, ValueError: an argument is not served; the message names it.
    """
    given = Operands(*arguments)
    _check(*given[:5])
    return tuple(reference.forward(given))


def backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """Computes ``batch_norm_act_backward`` by PyTorch's functions.

    Raises:
        TypeError, ValueError: an argument is not served; the message names it.
    """
    given = BackwardOperands(*arguments)
    _check_backward(given)
    return tuple(reference.backward(given))


_library.impl("batch_norm_act", forward, "CompositeExplicitAutograd")
_library.impl("batch_norm_act_backward", backward, "CompositeExplicitAutograd")


@torch.library.register_fake("cudnn_autotune::batch_norm_act")
def _(*arguments: Any) -> tuple[Tensor, ...]:
    given = Operands(*arguments)
    _check(*given[:5])
    input = dense(given.input)
    mean = input.new_empty(input.shape[1], dtype=statistics_dtype(input.dtype))
    size = mask_size(input) if has_mask(given.residual, given.activation) else 0
    mask = input.new_empty(size, dtype=torch.uint8)
    return torch.empty_like(input), mean, torch.empty_like(mean), torch.empty_like(mean), mask


@torch.library.register_fake("cudnn_autotune::batch_norm_act_backward")
def _(*arguments: Any) -> tuple[Tensor | None, ...]:
    given = BackwardOperands(*arguments)
    _check_backward(given)
    parameter = next((one for one in (given.weight, given.bias) if one is not None), given.mean)
    input = dense(given.input)
    like = (input, parameter, parameter, input)
    asked = zip(like, given.output_mask, strict=True)
    return tuple(torch.empty_like(one) if is_asked else None for one, is_asked in asked)


def load_plan(*arguments: Any) -> Any:
    """Calls :func:`~cudnn_autotune.norms.loading.load_plan`, which is imported at the first
    norm: it needs the package's kernels."""
    with IMPORTING:
        from cudnn_autotune.norms import loading

    return loading.load_plan(*arguments)
