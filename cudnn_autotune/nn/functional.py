"""``conv2d``, computed by the chosen engine, or by PyTorch if this package does not serve the
call."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import SupportsIndex, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.engines.problem import DTYPES, same_padding
from cudnn_autotune.tuning.settings import check_policy

Ints = int | Sequence[int]

# The fast path takes plain CUDA tensors, ints and tuples of ints. It returns NotImplemented for all
# else, which `general_conv2d` takes.
fast_conv2d = _C.conv2d

_SPATIAL_DIMS = 2
_HAS_CUDA = extension_available()


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    sampling: str | None = None,
    workspace_limit: int | None = None,
) -> Tensor:
    """``torch.nn.functional.conv2d``, by the cuDNN engine that a search chose for the shape.

    The first call of a shape on a CUDA device searches; later calls run the engine that was chosen.
    The function is differentiable to any order. Its backward searches for its own two convolutions
    in the mode that the forward used. For tensors that are not on a CUDA device this is
    ``torch.nn.functional.conv2d``. It is that as well while ``torch.export``, ``torch.onnx`` or
    ``torch.jit.trace`` record a program, so what they save runs without this package.

    Args:
        input: ``(N, C, H, W)`` or ``(C, H, W)``.
        weight: ``(K, C / groups, R, S)``, of the input's dtype: float16, bfloat16, float32 or
            float64. Others go to PyTorch.
        bias: ``(K,)``, or None.
        stride, padding, dilation, groups: as PyTorch's; padding may be ``"same"`` or ``"valid"``.
        sampling: one of ``cudnn_autotune.SAMPLING_MODES`` or a registered mode; None stands for the
            settings'.
        workspace_limit: the most bytes of workspace that the engine may need; None stands for the
            settings'.

    Returns:
        ``(N, K, P, Q)`` or ``(K, P, Q)``, channels_last where input or weight is.

    Raises:
        ValueError: the mode is unknown, or the limit negative.
        RuntimeError, TypeError: PyTorch's, for arguments that do not fit.
    """
    if not torch.compiler.is_compiling():
        fast = fast_conv2d(
            input, weight, bias, stride, padding, dilation, groups, sampling, workspace_limit
        )
        if fast is not NotImplemented:
            return fast
    return general_conv2d(
        input, weight, bias, stride, padding, dilation, groups, sampling, workspace_limit
    )


def general_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    groups: int,
    sampling: str | None,
    workspace_limit: int | None,
) -> Tensor:
    """:func:`conv2d`, with the same arguments and errors, for calls that the fast path refuses."""
    check_policy(sampling, workspace_limit)
    is_served = (
        not _is_exported()
        and isinstance(input, Tensor)
        and isinstance(weight, Tensor)
        and input.is_cuda
        and weight.dim() == _SPATIAL_DIMS + 2
        and not any(_has_rules_of_its_own(tensor) for tensor in (input, weight, bias))
    )
    is_unbatched = is_served and input.dim() == _SPATIAL_DIMS + 1
    strides = _pair(stride) if is_served else None
    dilations = _pair(dilation) if is_served else None
    group_count = _integer(groups) if is_served else None
    paddings = _paddings(padding, strides, dilations, weight) if is_served else None
    if (
        not is_served
        or not _HAS_CUDA
        or input.dtype not in DTYPES
        or strides is None
        or dilations is None
        or paddings is None
        or group_count is None
    ):
        # PyTorch computes it, or refuses it in its own words.
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    if len(paddings) > _SPATIAL_DIMS and torch.compiler.is_compiling():
        # PyTorch pads in the same way. A compiler fuses the padding with what comes before.
        (top, left), (bottom, right) = paddings[:2], paddings[2:]
        input, paddings = F.pad(input, (left, right, top, bottom)), (0, 0)
    output: Tensor = torch.ops.cudnn_autotune.conv_fprop(
        input.unsqueeze(0) if is_unbatched else input,
        weight,
        bias,
        strides,
        paddings,
        dilations,
        group_count,
        sampling or "",
        -1 if workspace_limit is None else workspace_limit,
    )
    return output.squeeze(0) if is_unbatched else output


def _is_exported() -> bool:
    """Whether a program is being recorded that may run in processes without this package."""
    # torch.compiler.is_exporting() is True whenever Dynamo traces; this flag only while exporting.
    is_exporting: bool = getattr(torch.compiler, "_is_exporting_flag", False)
    is_traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined]
    return is_exporting or is_traced


def _has_rules_of_its_own(tensor: Tensor | None) -> bool:
    """Whether the tensor's class handles ATen's operators itself, as DTensor does."""
    if torch.compiler.is_compiling():
        return False  # Dynamo has unwrapped the tensor, or unwraps the result
    dispatch = type(tensor).__torch_dispatch__ if isinstance(tensor, Tensor) else None
    if dispatch in (None, Tensor.__torch_dispatch__):
        return False
    return not isinstance(tensor, (FakeTensor, FunctionalTensor))


def _pair(value: Ints) -> Sequence[int] | None:
    """One number for each dimension, or None if PyTorch would not take ``value``."""
    numbers = [_integer(one) for one in (value if isinstance(value, (tuple, list)) else [value])]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        return None
    # PyTorch takes a list of one number as well.
    return {1: known * 2, _SPATIAL_DIMS: known}.get(len(known))


def _integer(value: object) -> int | None:
    """The integer, also of NumPy's and of a tensor of one; None for what is no integer."""
    if isinstance(value, (int, torch.SymInt)):
        return cast("int", value)  # taking the index of a symbolic one would fix its value
    try:
        return operator.index(cast("SupportsIndex", value))
    except TypeError:
        return None


def _paddings(
    padding: Ints | str,
    stride: Sequence[int] | None,
    dilation: Sequence[int] | None,
    weight: Tensor,
) -> Sequence[int] | None:
    """The padding of both sides, twice as long if they differ; None if PyTorch refuses it."""
    if not isinstance(padding, str):
        return _pair(padding)
    if padding == "valid":
        return (0, 0)
    if padding != "same" or stride is None or dilation is None or any(s != 1 for s in stride):
        return None
    both = same_padding(dilation, weight.shape[2:])
    before, after = both[:_SPATIAL_DIMS], both[_SPATIAL_DIMS:]
    return before if before == after else both


# torch.fx's symbolic tracer records the function as one call.
torch.fx.wrap("conv2d")
