"""PyTorch's six convolutions with arguments for their policy.

The calls are PyTorch's own. During a call its policy is in force on this thread, and the kernels of
``aten::convolution`` (csrc/conv/aten_kernels.h) serve it. A compiler runs its programs later: there
the input is marked with the policy instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.engines.problem import DTYPES, in_pairs, same_padding, split_sides
from cudnn_autotune.sampling.strategy import SamplingMode
from cudnn_autotune.tuning.settings import check_policy

__all__ = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]

Ints = int | Sequence[int]

# They take plain CUDA tensors, ints and tuples of ints, and return NotImplemented for all else.
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
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
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
        sampling: SamplingMode | str | None = None,
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
        sampling: SamplingMode | str | None = None,
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
        sampling: SamplingMode | str | None = None,
        workspace_limit: int | None = None,
    ) -> Tensor:
        """``torch.nn.functional.{name}``, by the cuDNN engine that a search chose for the shape.

        The first call of a shape on a CUDA device searches; later calls run the chosen engine. The
        call and its derivatives are PyTorch's operators: transforms, modes, tensor subclasses and
        recorders of programs see ``aten::convolution``. The derivatives search in the mode of the
        forward. For tensors on other devices this is ``torch.nn.functional.{name}``. So it is while
        ``torch.export``, ``torch.onnx`` or ``torch.jit.trace`` record a program: saved programs run
        without this package.

        Args:
            input: ``(N, C, {sizes})`` or ``(C, {sizes})``.
            weight: ``(K, C / groups, kernel size)``, of the input's dtype: float16, bfloat16,
                float32 or float64. Others go to PyTorch.
            bias: ``(K,)``, or None.
            stride, padding, dilation, groups: as PyTorch's; padding may be ``"same"`` or
                ``"valid"``, or have twice as many numbers: all before, then all after.
            sampling: one of ``cudnn_autotune.sampling.names()``; None stands for the settings'.
            workspace_limit: the most bytes of workspace that the engine may need; None stands for
                the settings'.

        Returns:
            ``(N, K, *output size)`` or ``(K, *output size)``, in PyTorch's layout,
            which is channels_last where input or weight is.

        Raises:
            ValueError: the mode is unknown, or the limit negative.
            RuntimeError, TypeError: PyTorch's, for arguments that do not fit.
        """
        arguments = (input, weight, bias, stride, padding, dilation, groups)
        if not torch.compiler.is_compiling():
            output = fast(*arguments, sampling, workspace_limit)
            if output is not NotImplemented:
                return output
        return general(name, arguments, sampling, workspace_limit)

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
        sampling: SamplingMode | str | None = None,
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
            ``(N, K, *output size)`` or ``(K, *output size)``, in PyTorch's layout,
            which is channels_last where input or weight is.

        Raises:
            ValueError: the mode is unknown, or the limit negative.
            RuntimeError, TypeError: PyTorch's, for arguments that do not fit.
        """
        arguments = (input, weight, bias, stride, padding, output_padding, groups, dilation)
        if not torch.compiler.is_compiling():
            output = fast(*arguments, sampling, workspace_limit)
            if output is not NotImplemented:
                return output
        return general(name, arguments, sampling, workspace_limit)

    return cast("TransposedConvolution", _named(convolution, name, dims))


def _named(function: Callable[..., Tensor], name: str, dims: int) -> Callable[..., Tensor]:
    """Gives the function this name in this module, for its users, pickle and fx."""
    assert isinstance(function, FunctionType)
    function.__name__ = function.__qualname__ = name
    if function.__doc__ is not None:  # python -OO has none
        function.__doc__ = function.__doc__.format(name=name, dims=dims, sizes=_SIZES[dims])
    return function


def general(
    name: str, arguments: tuple[Any, ...], sampling: str | None, workspace_limit: int | None
) -> Tensor:
    """Calls PyTorch's function of this name, for calls that the fast path refuses."""
    # AOTAutograd traces a backend's additions to its graph without Dynamo.
    if torch.compiler.is_compiling() or type(arguments[0]) is FunctionalTensor:
        return marked(name, arguments, sampling, workspace_limit)
    enter_policy(sampling, workspace_limit)
    try:
        output: Tensor = getattr(F, name)(*_with_pytorchs_padding(name, arguments))
    finally:
        leave_policy()
    return output


def enter_policy(sampling: str | None, workspace_limit: int | None) -> None:
    """Serves this thread's calls of convolutions until it calls :func:`leave_policy`.

    Raises:
        ValueError: the mode is unknown, or the limit negative. The policy is then not in force.
    """
    if not _C.enter_policy(sampling, workspace_limit):
        check_policy(sampling, workspace_limit)
        # Subclasses of str and int.
        mode, limit = sampling and str(sampling), workspace_limit and int(workspace_limit)
        _C.enter_policy(mode, limit)


leave_policy: Callable[[], None] = _C.leave_policy


def marked(
    name: str, arguments: tuple[Any, ...], sampling: str | None, workspace_limit: int | None
) -> Tensor:
    """Calls PyTorch's function of this name with a marked input, for a compiler that records it.

    An input on another device, or left to PyTorch for another reason, is not marked.
    """
    check_policy(sampling, workspace_limit)
    input, weight, bias, stride, padding, *others = arguments
    groups = others[1]
    if not (
        _is_served(int(name[-2]), input, weight, bias)
        and not _is_exported()
        and type(groups) is not bool  # PyTorch's function refuses a bool, and its operator does not
    ):
        output: Tensor = getattr(F, name)(*_with_pytorchs_padding(name, arguments))
        return output
    # PyTorch's operator would add the batch, and pad, behind the mark.
    is_unbatched = input.dim() == weight.dim() - 1
    if is_unbatched:
        input = input.unsqueeze(0)
    if padding == "same" and all(s == 1 for s in _for_each(stride, name)):
        padding = same_padding(_for_each(others[0], name), weight.shape[2:])
    elif padding == "valid" and "transpose" not in name:
        padding = 0
    padding, extra = _split(name, padding)
    policy = (sampling or "", -1 if workspace_limit is None else workspace_limit)
    if extra:
        input = torch.ops.cudnn_autotune.mark_padded(input, extra, *policy)
    else:
        input = torch.ops.cudnn_autotune.mark_input(input, *policy)
    # The operator, since a function mode would see the function a second time. It takes no integer
    # for a list.
    first = padding if isinstance(padding, str) else _for_each(padding, name)
    rest = [_for_each(value, name) if i != 1 else value for i, value in enumerate(others)]
    operator = getattr(torch.ops.aten, name)
    output = operator(input, weight, bias, _for_each(stride, name), first, *rest)
    if "transpose" in name:
        output = torch.ops.cudnn_autotune.mark_output(output)
    return output.squeeze(0) if is_unbatched else output


def _is_served(dims: int, input: Any, weight: Any, bias: Any) -> bool:
    """Returns whether the kernels may serve these tensors; else PyTorch handles them."""
    return (
        _HAS_CUDA
        and not any(_has_rules_of_its_own(tensor) for tensor in (input, weight, bias))
        and input.is_cuda
        and input.dtype in DTYPES
        and weight.dim() == dims + 2
    )


def _has_rules_of_its_own(tensor: Any) -> bool:
    """Returns whether the value is no tensor, or its class handles operators, as DTensor does."""
    return tensor is not None and type(tensor) not in _PLAIN


def _is_exported() -> bool:
    """Returns whether a program is being recorded that may run without this package."""
    # torch.compiler.is_exporting() is True whenever Dynamo traces; this flag only while exporting.
    is_exporting: bool = getattr(torch.compiler, "_is_exporting_flag", False)
    is_traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined]
    return is_exporting or is_traced


def _for_each(value: Ints, name: str) -> list[int]:
    """Returns the numbers for the dimensions of a function; a list of one stands for all."""
    values = list(value) if isinstance(value, (tuple, list)) else [cast("int", value)]
    return values * int(name[-2]) if len(values) == 1 else values


def _with_pytorchs_padding(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns arguments of PyTorch's function: an uneven padding is padded onto the input."""
    input, weight, bias, stride, padding, *others = arguments
    padding, extra = _split(name, padding)
    if extra:
        input = F.pad(input, in_pairs(extra))
    return (input, weight, bias, stride, padding, *others)


def _split(name: str, padding: Any) -> tuple[Any, list[int]]:
    """Splits a padding of both sides into what both sides have, and what one side has more: first
    before each dimension, then after each; nothing where the sides are even, or are not given."""
    n = int(name[-2])
    has_sides = isinstance(padding, (tuple, list)) and len(padding) == 2 * n
    if "transpose" in name or not has_sides:
        return padding, []
    both, extra = split_sides(padding)
    return both, extra if any(extra) else []


conv1d = _convolution(1)
conv2d = _convolution(2)
conv3d = _convolution(3)
conv_transpose1d = _transposed_convolution(1)
conv_transpose2d = _transposed_convolution(2)
conv_transpose3d = _transposed_convolution(3)

for _name in fast_functions:
    torch.fx.wrap(_name)  # its symbolic tracer records the function as one call


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
