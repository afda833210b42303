"""Formulas that need fewer passes over tensors in channels_last after compilation.

Inductor takes the statistics of a group norm from ``x.view(N, groups, -1)``. If the channels of a
place are neighbours in memory, a group lies in small pieces. The kernel reads these one by one, or
a copy of the tensor. Here each channel has its own mean and variance, and a group's follow from
them. The tensor is read twice and written once, in its order in memory.

Results share no memory with an input, and have PyTorch's strides on a GPU: a reshape behind them,
and writes into that, depend on strides. This has no cost if a compiler chooses the layout: for
Inductor a copy's memory format is only a wish.

Inductor looks up the nearest neighbours of an upsampled place in a table. It does not see the order
of these reads, and writes volumes in the order of contiguous ones, in float32. Here they are a
view.

Inductor computes the maximum of 25 places or more without neighbours in memory at once. Here it is
that of rows and then of columns, with fewer reads.

Images with filters of their own are convolved one by one. As the groups of one convolution they
would be interleaved pixel by pixel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from cudnn_autotune.engines.conv_layout import laid_out

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# One kernel of Inductor's computes a norm with smaller groups in one pass.
_LEAST_NUMBERS = 1024
# On a GPU too, where earlier versions return a contiguous tensor.
_GROUP_NORM_KEEPS_LAYOUT = TorchVersion(torch.__version__) >= "2.15"
# Inductor writes out the maximum of fewer places.
_LEAST_PLACES = 25
_EXACT = {1, 2, 4, 8, 16}  # factors whose reciprocal, by which PyTorch multiplies, is exact


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    keeps_layout: bool = False,
) -> Tensor:
    """Computes :func:`torch.nn.functional.group_norm`, by channels if that takes fewer passes;
    raises as that function.

    Args:
        input: (N, C, *spatial).
        num_groups: a divisor of C.
        weight, bias: (C,), or None.
        eps: the number added to a variance.
        dtype: of PyTorch's result, if it is known. Autocast has one of its own.
        keeps_layout: whether the result is in the input's layout, and not in PyTorch's.
    """
    if _suits(input, num_groups, weight, bias, dtype):
        memory_format = torch.contiguous_format
        if _GROUP_NORM_KEEPS_LAYOUT:
            memory_format = torch._prims_common.suggest_memory_format(input)
        output = _by_channels(input, num_groups, weight, bias, eps, dtype or input.dtype)
        if not keeps_layout:
            return output.contiguous(memory_format=memory_format)
    else:
        output = F.group_norm(input, num_groups, weight, bias, eps)
    return _laid_out_like(output, input) if keeps_layout else output


def _by_channels(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Computes a group norm in float32 by the statistics of channels, rounded once, in the layout
    of the input."""
    images, channels = input.shape[:2]
    wide = input.float()
    var, mean = torch.var_mean(wide, [*range(2, input.dim())], correction=0)
    if num_groups < channels:
        # The variance of a group is the mean of its channels' variances, plus the variance of their
        # means.
        of_groups = (images, num_groups, channels // num_groups)
        between, mean = torch.var_mean(mean.view(of_groups), -1, correction=0, keepdim=True)
        var = var.view(of_groups).mean(-1, keepdim=True) + between
        var, mean = (one.expand(of_groups).reshape(images, channels) for one in (var, mean))
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    of_channels = (images, channels, *[1] * (input.dim() - 2))
    scale, shift = (_in_memory(one).view(of_channels) for one in (scale, shift))
    return (wide * scale + shift).to(dtype)


def _in_memory(x: Tensor) -> Tensor:
    """Returns a small tensor that a compiler computes once, and not for each place that reads it. A
    kernel that reads many tensors is not computed together with an activation and a padding behind
    it."""
    return x.as_strided(x.shape, x.stride())


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    keeps_layout: bool = False,
) -> Tensor:
    """Computes :func:`torch.nn.functional.instance_norm`; without running statistics as a group
    norm with channels as groups.

    Args:
        input: (N, C, *spatial).
        running_mean, running_var, weight, bias: (C,), or None.
        use_input_stats, momentum, eps: as in PyTorch.
        dtype, keeps_layout: as of :func:`group_norm`.
    """
    has_own = use_input_stats and running_mean is None and running_var is None
    if has_own and input.dim() > 2 and _suits(input, input.shape[1], weight, bias, dtype):
        output = _by_channels(input, input.shape[1], weight, bias, eps, dtype or input.dtype)
        if not keeps_layout:
            return output.contiguous()
    else:
        output = F.instance_norm(
            input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        )
    return _laid_out_like(output, input) if keeps_layout else output


def _laid_out_like(output: Tensor, input: Tensor) -> Tensor:
    """Returns a norm's output in the layout of its input, where that has 1 to 3 dimensions."""
    if input.dim() not in (3, 4, 5):
        return output
    image = input.unsqueeze(2) if input.dim() == 3 else input
    return laid_out(output, torch._prims_common.suggest_memory_format(image))


def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Computes :func:`torch.nn.functional.interpolate`; nearest neighbours as a view if each length
    grows by 1, 2, 4, 8 or 16.

    Args:
        input: (N, C, *spatial).
        size, scale_factor, mode, align_corners, recompute_scale_factor, antialias: as in PyTorch.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow to import

    is_nearest = mode in ("nearest", "nearest-exact") and input.dim() in (3, 4, 5)
    is_plain = align_corners is None and not antialias
    factors = _factors(input.shape[2:], size, scale_factor) if is_nearest and is_plain else []
    is_plain &= size is None or not recompute_scale_factor
    # A size that depends on data may be 0.
    if is_plain and any(factor > 1 for factor in factors) and guard_or_false(input.numel() > 0):
        memory_format = torch._prims_common.suggest_memory_format(input)
        for dim, factor in enumerate(factors, 2):
            if factor > 1:
                repeated = (*input.shape[: dim + 1], factor, *input.shape[dim + 1 :])
                input = input.unsqueeze(dim + 1).expand(repeated).flatten(dim, dim + 1)
        return input.contiguous(memory_format=memory_format)
    return F.interpolate(
        *(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    )


def _factors(lengths: Sequence[Any], size: Any, scale_factor: Any) -> list[int]:
    """Returns the factor by which each length grows, of the exact ones; none if another one does,
    or PyTorch would refuse it."""
    given = scale_factor if size is None else size
    each = list(given) if isinstance(given, Sequence) else [given] * len(lengths)
    known = int | float if size is None else int
    if len(each) != len(lengths) or not all(isinstance(one, known) for one in each):
        return []
    if size is None:
        return [int(one) for one in each] if _EXACT.issuperset(each) else []
    if scale_factor is not None or not all(isinstance(one, int) for one in lengths):
        return []
    factors = [one // max(1, length) for one, length in zip(each, lengths, strict=True)]
    is_whole = all(n * f == one for n, f, one in zip(lengths, factors, each, strict=True))
    return factors if is_whole and _EXACT.issuperset(factors) else []


def max_pool2d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Computes :func:`torch.nn.functional.max_pool2d`, of large windows by rows and columns. Of
    equal numbers the first gets the gradient, as in PyTorch.

    Args:
        input: (N, C, H, W) or (C, H, W).
        kernel_size, stride, padding, dilation, ceil_mode, return_indices: as in PyTorch.
    """
    pool: Callable[..., Any] = F.max_pool2d
    given = (kernel_size, kernel_size if stride is None else stride, padding, dilation)
    each = [list(one) if isinstance(one, Sequence) else [one] for one in given]
    is_known = all(isinstance(number, int) for one in each for number in one)
    if is_known and all(len(one) in (1, 2) for one in each) and not return_indices:
        rows, columns = zip(*(one * 2 if len(one) == 1 else one for one in each), strict=True)
        fits = all(k > 1 and 0 <= 2 * pad <= k for k, _, pad, _ in (rows, columns))
        if fits and rows[0] * columns[0] >= _LEAST_PLACES:
            neutral = (1, 1, 0, 1)
            for pair in ((neutral, columns), (rows, neutral)):
                input = pool(input, *zip(*pair, strict=True), ceil_mode=ceil_mode)
            return input
    return pool(input, *given, ceil_mode=ceil_mode, return_indices=return_indices)


def conv_each_image(
    input: Tensor,
    weight: Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    sampling: str | None,
    workspace_limit: int | None,
) -> Tensor:
    """Convolves each image with filters of its own, in channels_last, by the operator
    ``cudnn_autotune::conv_each_image`` (csrc/conv/conv_cuda.cpp).

    Args:
        input: (N, C, H, W), of any floating dtype.
        weight: (N * K, C, R, S), of the same dtype, in channels_last; the K filters of the first
            image come first.
        stride, padding, dilation: numbers of pixels, one for both dimensions or one for each.
        sampling, workspace_limit: as of :func:`cudnn_autotune.functional.conv2d`.

    Returns:
        The convolved images, (N, K, P, Q), in channels_last.

    Raises:
        RuntimeError: the shapes do not fit together.
    """
    x = laid_out(input, torch.channels_last)
    sizes = (_pair(one) for one in (stride, padding, dilation))
    limit = -1 if workspace_limit is None else workspace_limit
    policy = (sampling or "", limit)
    output: Tensor = torch.ops.cudnn_autotune.conv_each_image(x, weight, *sizes, *policy)
    return output


def _pair(sizes: int | Sequence[int]) -> list[int]:
    each = [sizes] if isinstance(sizes, int) else list(sizes)
    return each * 2 if len(each) == 1 else each


FORMULAS: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    F.group_norm: group_norm,
    F.instance_norm: instance_norm,
    F.interpolate: interpolate,
    F.max_pool2d: max_pool2d,
}
"""PyTorch's functions -> functions that compute the same by another formula."""


def _suits(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype | None,
) -> bool:
    """Returns whether a norm is an ordinary one with large groups.

    Args:
        dtype: of PyTorch's result; None if it is unknown.
    """
    if not all(isinstance(size, int) for size in input.shape):
        return False
    if input.dim() < 3 or input.dtype not in _DTYPES or num_groups <= 0:
        return False
    channels = input.shape[1]
    given = [one for one in (weight, bias) if one is not None]
    if dtype is None and torch.is_autocast_enabled(input.device.type):
        return False  # it has some norms in float32
    # Under autocast, and of PyTorch's instance norms, parameters may be in float32.
    allowed = {input.dtype, torch.float32} if dtype is not None else {input.dtype}
    return (
        channels % num_groups == 0
        and channels // num_groups * math.prod(input.shape[2:]) > _LEAST_NUMBERS
        and input.shape[0] > 0
        and all(one.shape == (channels,) and one.dtype in allowed for one in given)
    )
