"""PyTorch's six convolutions, computed by the chosen engine, or by PyTorch if this package does not
serve the call."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Protocol, SupportsIndex, cast

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
# else, which the general functions below take.
fast_functions: dict[str, Callable[..., Tensor]] = {
    name: getattr(_C, name)
    for name in (
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
    )
}

_HAS_CUDA = extension_available()
_TOO_LARGE = 2**63
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_SIZES = {1: "W", 2: "H, W", 3: "D, H, W"}


class Convolution(Protocol):
    def __call__(
        self,
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
    ) -> Tensor: ...


class TransposedConvolution(Protocol):
    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
        *,
        sampling: str | None = None,
        workspace_limit: int | None = None,
    ) -> Tensor: ...


def _convolution(dims: int) -> Convolution:
    name = f"conv{dims}d"
    fast = fast_functions[name]

    def convolution(
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
        """``torch.nn.functional.{name}``, by the cuDNN engine that a search chose for the shape.

        The first call of a shape on a CUDA device searches; later calls run the engine that was
        chosen. The function is differentiable to any order. Its backward searches for its own
        convolutions in the mode that the forward used. For tensors that are not on a CUDA device
        this is ``torch.nn.functional.{name}``. It is that as well while ``torch.export``,
        ``torch.onnx`` or ``torch.jit.trace`` record a program, so what they save runs without this
        package.

        Args:
            input: ``(N, C, {sizes})`` or ``(C, {sizes})``.
            weight: ``(K, C / groups, kernel size)``, of the input's dtype: float16, bfloat16,
                float32 or float64. Others go to PyTorch.
            bias: ``(K,)``, or None.
            stride, padding, dilation, groups: as PyTorch's; padding may be ``"same"`` or
                ``"valid"``.
            sampling: one of ``cudnn_autotune.sampling.names()``; None stands for the settings'.
            workspace_limit: the most bytes of workspace that the engine may need; None stands for
                the settings'.

        Returns:
            ``(N, K, *output size)`` or ``(K, *output size)``, in the layout of PyTorch's result:
            channels_last where input or weight is.

        Raises:
            ValueError: the mode is unknown, or the limit negative.
            RuntimeError, TypeError: PyTorch's, for arguments that do not fit.
        """
        if not torch.compiler.is_compiling():
            output = fast(
                input, weight, bias, stride, padding, dilation, groups, sampling, workspace_limit
            )
            if output is not NotImplemented:
                return output
        return general_conv(
            dims, input, weight, bias, stride, padding, dilation, groups, sampling, workspace_limit
        )

    return cast("Convolution", _named(convolution, name, dims))


def _transposed_convolution(dims: int) -> TransposedConvolution:
    name = f"conv_transpose{dims}d"
    fast = fast_functions[name]

    def convolution(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
        *,
        sampling: str | None = None,
        workspace_limit: int | None = None,
    ) -> Tensor:
        """``torch.nn.functional.{name}``, by the cuDNN engine that a search chose for the shape.

        It is computed as the gradient of the input of a convolution, and tuned as that problem
        (``dgrad``). In every other respect it is as :func:`conv{dims}d`.

        Args:
            input: ``(N, C, {sizes})`` or ``(C, {sizes})``.
            weight: ``(C, K / groups, kernel size)``, of the input's dtype: float16, bfloat16,
                float32 or float64. Others go to PyTorch.
            bias: ``(K,)``, or None.
            stride, padding, output_padding, groups, dilation: as PyTorch's. An output padding that
                is not below the stride goes to PyTorch.
            sampling: one of ``cudnn_autotune.sampling.names()``; None stands for the settings'.
            workspace_limit: the most bytes of workspace that the engine may need; None stands for
                the settings'.

        Returns:
            ``(N, K, *output size)`` or ``(K, *output size)``, in the layout of PyTorch's result:
            channels_last where input or weight is.

        Raises:
            ValueError: the mode is unknown, or the limit negative.
            RuntimeError, TypeError: PyTorch's, for arguments that do not fit.
        """
        arguments = (input, weight, bias, stride, padding, output_padding, groups, dilation)
        if not torch.compiler.is_compiling():
            output = fast(*arguments, sampling, workspace_limit)
            if output is not NotImplemented:
                return output
        return general_conv_transpose(dims, *arguments, sampling, workspace_limit)

    return cast("TransposedConvolution", _named(convolution, name, dims))


def _named(function: Callable[..., Tensor], name: str, dims: int) -> Callable[..., Tensor]:
    """Makes the function the one of this name in this module, for its users, pickle and fx."""
    assert isinstance(function, FunctionType)
    function.__name__ = function.__qualname__ = name
    if function.__doc__ is not None:  # python -OO has none
        function.__doc__ = function.__doc__.format(name=name, dims=dims, sizes=_SIZES[dims])
    return function


def general_conv(
    dims: int,
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
    """:func:`conv1d` to ``3d``, for calls that the fast path refuses."""
    check_policy(sampling, workspace_limit)
    is_served = _is_served(dims, input, weight, bias)
    strides = _ints(stride, dims) if is_served else None
    dilations = _ints(dilation, dims) if is_served else None
    group_count = _integer(groups) if is_served else None
    paddings = _paddings(padding, strides, dilations, weight) if is_served else None
    if strides is None or dilations is None or paddings is None or group_count is None:
        # PyTorch computes it, or refuses it in its own words.
        function = getattr(F, f"conv{dims}d")
        return function(input, weight, bias, stride, padding, dilation, groups)
    if len(paddings) > dims and torch.compiler.is_compiling():
        # PyTorch pads in the same way. A compiler fuses the padding with what comes before.
        sides = [paddings[side + d] for d in reversed(range(dims)) for side in (0, dims)]
        input, paddings = F.pad(input, sides), (0,) * dims
    is_unbatched = input.dim() == dims + 1
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


def general_conv_transpose(
    dims: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
    output_padding: Ints,
    groups: int,
    dilation: Ints,
    sampling: str | None,
    workspace_limit: int | None,
) -> Tensor:
    """:func:`conv_transpose1d` to ``3d``, for calls that the fast path refuses."""
    check_policy(sampling, workspace_limit)
    numbers = [_ints(value, dims) for value in (stride, padding, output_padding, dilation)]
    group_count = _integer(groups)
    if not _is_served(dims, input, weight, bias) or None in numbers or group_count is None:
        # PyTorch computes it, or refuses it in its own words.
        function = getattr(F, f"conv_transpose{dims}d")
        return function(input, weight, bias, stride, padding, output_padding, groups, dilation)
    is_unbatched = input.dim() == dims + 1
    output: Tensor = torch.ops.cudnn_autotune.conv_transpose(
        input.unsqueeze(0) if is_unbatched else input,
        weight,
        bias,
        *numbers,
        group_count,
        sampling or "",
        -1 if workspace_limit is None else workspace_limit,
    )
    return output.squeeze(0) if is_unbatched else output


def _is_served(dims: int, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the operators take these tensors; else they are PyTorch's to compute or to refuse."""
    return (
        _HAS_CUDA
        and not _is_exported()
        and isinstance(input, Tensor)
        and isinstance(weight, Tensor)
        and (bias is None or isinstance(bias, Tensor))
        and input.is_cuda
        and input.dtype in DTYPES
        and weight.dim() == dims + 2
        and not any(_has_rules_of_its_own(tensor) for tensor in (input, weight, bias))
    )


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


def _ints(value: Ints, dims: int) -> Sequence[int] | None:
    """One number for each dimension, or None if PyTorch would not take ``value``."""
    numbers = [_integer(one) for one in (value if isinstance(value, (tuple, list)) else [value])]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        return None
    if len(known) == 1:  # PyTorch takes a list of one number as well
        return known * dims
    return known if len(known) == dims else None


def _integer(value: object) -> int | None:
    """The integer, also of NumPy's and of a tensor of one; None for what PyTorch may refuse."""
    if isinstance(value, torch.SymInt):
        return cast("int", value)  # taking the index of a symbolic one would fix its value
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if torch.compiler.is_compiling() or -_TOO_LARGE <= value < _TOO_LARGE else None
    is_tensor = isinstance(value, Tensor) and value.dtype in _INTEGERS and value.numel() == 1
    is_numpys = isinstance(value, numbers.Integral) and type(value).__module__ == "numpy"
    return operator.index(cast("SupportsIndex", value)) if is_tensor or is_numpys else None


def _paddings(
    padding: Ints | str,
    stride: Sequence[int] | None,
    dilation: Sequence[int] | None,
    weight: Tensor,
) -> Sequence[int] | None:
    """The padding of both sides, twice as long if they differ; None if PyTorch refuses it."""
    dims = weight.dim() - 2
    if not isinstance(padding, str):
        return _ints(padding, dims)
    if padding == "valid":
        return (0,) * dims
    if padding != "same" or stride is None or dilation is None or any(s != 1 for s in stride):
        return None
    both = same_padding(dilation, weight.shape[2:])
    before, after = both[:dims], both[dims:]
    return before if before == after else both


conv1d = _convolution(1)
conv2d = _convolution(2)
conv3d = _convolution(3)
conv_transpose1d = _transposed_convolution(1)
conv_transpose2d = _transposed_convolution(2)
conv_transpose3d = _transposed_convolution(3)

for _name in fast_functions:
    torch.fx.wrap(_name)  # its symbolic tracer records the function as one call
