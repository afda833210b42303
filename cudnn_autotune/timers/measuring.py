"""Operands of a problem to measure with, and the copies that keep the L2 cache cold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cudnn_autotune.core.guard_bands import GuardedMemory, reach_of
from cudnn_autotune.engines.problem import MOST_ALIGNED, ConvProblem, Operands

# The share of free memory that the copies for a cold cache may use.
_MEMORY_SHARE = 0.25
# After traffic of this many times its size the L2 cache holds no earlier data.
_L2_MULTIPLE = 5

WRITTEN = {"fprop": 2, "dgrad": 0, "wgrad": 1}
"""The index of the operand (0: input, 1: weight, 2: output) that an operation writes."""
ADDED = ("bias", "residual", "slope")
"""Names of a fused problem's possible operands from the fourth on, in their order."""


def operands(problem: ConvProblem, device: torch.device | int | str = "cuda") -> Operands:
    """Returns the operands of ``problem`` with normal random data, in its layout and dtype: input,
    weight, output, and a fused problem's bias, residual and slopes. Each has exactly the problem's
    alignment. The result is :func:`surrounded`.

    The data are not zeros: zeros draw less power, so engines run faster on them. They are the same
    at each call, and the caller's random generator is not used.

    Raises:
        ValueError: an alignment is less than one element.
        OutOfMemoryError: there is no memory for them.
    """
    shapes = [problem.input_shape, problem.weight_shape, problem.output_shape]
    alignments = list(problem.alignment)
    for added in added_shapes(problem):
        shapes.append(added)
        alignments.append(MOST_ALIGNED)
    size = problem.dtype.itemsize
    if min(problem.alignment) < size:
        raise ValueError(
            f"problem.alignment must be {size} bytes or more for {problem.dtype}, "
            f"got {problem.alignment}"
        )
    found = []
    generator = torch.Generator(torch.device(device)).manual_seed(0)
    for place, (shape, alignment) in enumerate(zip(shapes, alignments, strict=True)):
        if place < len(problem.strides):
            strides = problem.strides[place]
            like = torch.empty_strided(shape, strides, dtype=problem.dtype, device="meta")
        else:  # a bias has no memory format
            layout = problem.memory_format if len(shape) > 1 else torch.contiguous_format
            like = torch.empty(shape, dtype=problem.dtype, device="meta", memory_format=layout)
        is_written = place == WRITTEN[problem.op]
        new = _surrounded if is_written else _aligned
        found.append(new(like, device, alignment).normal_(generator=generator))
    return tuple(found)


def telling_operands(problem: ConvProblem, device: torch.device | int | str = "cuda") -> Operands:
    """Returns the same :func:`operands` each time, scaled to results of about one. They show
    whether an output is right, and none overflows.

    Raises:
        OutOfMemoryError: there is no memory for them.
    """
    data = operands(problem, device)
    share = terms(problem) ** -0.25
    for place, tensor in enumerate(data[:3]):
        if place != WRITTEN[problem.op]:
            tensor.mul_(share)
    return data


def terms(problem: ConvProblem) -> int:
    """Returns the largest number of products that are summed to one element of the result."""
    kernels, channels, *taps = problem.weight_shape
    if problem.op == "wgrad":
        return problem.output_shape[0] * math.prod(problem.output_shape[2:])
    return (channels if problem.op == "fprop" else kernels // problem.groups) * math.prod(taps)


def surrounded(problem: ConvProblem, data: Sequence[Tensor]) -> Operands:
    """Returns ``data`` with another tensor for the result, with a MiB of unused memory on both
    sides. Some engines of cuDNN write behind their result (csrc/core/cudnn/errata.cpp). Candidates
    are measured before they are checked, and must not spoil other tensors.

    Raises:
        OutOfMemoryError: there is no memory for another result.
    """
    place = WRITTEN[problem.op]
    result = GuardedMemory.like(data[place]).as_tensor(data[place])
    return (*data[:place], result.copy_(data[place]), *data[place + 1 :])


def added_shapes(problem: ConvProblem) -> list[tuple[int, ...]]:
    """Returns the shapes of the bias, the residual and the slopes that the problem has."""
    shapes = {"residual": problem.output_shape}
    return [shapes.get(name, problem.weight_shape[:1]) for name in added_names(problem)]


def added_names(problem: ConvProblem) -> list[str]:
    """Returns the names of the operands that the problem has from the fourth on."""
    has = (problem.bias, problem.residual, problem.has_slope)
    return list(itertools.compress(ADDED, has))


def _aligned(like: Tensor, device: torch.device | int | str, alignment: int) -> Tensor:
    """Returns new memory for a tensor like another one, aligned to ``alignment`` bytes, or to 32 or
    more if that is ``MOST_ALIGNED``."""
    ahead = alignment % MOST_ALIGNED // like.element_size()
    room = torch.empty(ahead + reach_of(like), dtype=like.dtype, device=device)
    return room.as_strided(like.shape, like.stride(), ahead)


def _surrounded(like: Tensor, device: torch.device | int | str, alignment: int) -> Tensor:
    """Does as :func:`_aligned`, with a MiB of unused memory on both sides."""
    size = reach_of(like) * like.element_size()
    memory = GuardedMemory(size, torch.device(device), alignment % MOST_ALIGNED)
    return memory.as_tensor(like)


def added_operands(problem: ConvProblem, added: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the bias, the residual and the slopes from a problem's operands from the fourth on;
    None for each that it does not have."""
    given = dict(zip(added_names(problem), added, strict=True))
    return [given.get(name) for name in ADDED]


def run_operator(problem: ConvProblem, data: Operands, sampling: str) -> Tensor:
    """Computes ``problem`` with the package's operator, as a layer would. The first call chooses
    the engine in the mode ``sampling``."""
    x, w, y, *added = data
    ops = torch.ops.cudnn_autotune
    tail = (problem.stride, problem.padding, problem.dilation, problem.groups, sampling, -1)
    output: Tensor
    if problem.is_fused or problem.pixel_strides is not None:
        bias, residual, slope = added_operands(problem, added)
        arguments = (x, w, bias, residual, *tail[:4], problem.activation, *tail[4:], slope)
        if problem.pixel_strides is not None:
            ops.conv_fused_into_(y, *arguments)
            return y
        output = ops.conv_fused(*arguments)
    elif problem.op == "fprop":
        output = ops.conv_fprop(x, w, None, *tail)
    elif problem.op == "dgrad":
        output = ops.conv_dgrad(y, w, problem.input_shape, *tail)
    else:
        output = ops.conv_wgrad(y, x, problem.weight_shape, *tail)
    return output


def fills_cache(problem: ConvProblem, data: Operands) -> bool:
    """Returns whether one call's reads replace all earlier data in the L2 cache."""
    return _read_bytes(problem, data) >= _wanted_bytes(data[0].device)


def _read_bytes(problem: ConvProblem, data: Operands) -> int:
    return sum(t.nbytes for i, t in enumerate(data) if i != WRITTEN[problem.op])


def _wanted_bytes(device: torch.device) -> int:
    return _L2_MULTIPLE * torch.cuda.get_device_properties(device).L2_cache_size


def cold_sets(problem: ConvProblem, first: Operands, most: int | None = None) -> list[Operands]:
    """Returns ``first`` and sets with copies of the operands that are read. Calls that rotate over
    them do not find their operands in the L2 cache. One set suffices if one call
    :func:`fills_cache`. There are at most ``most`` sets, in a quarter of the free memory.

    All sets write to the result of ``first``, as PyTorch's own path does, whose result the
    allocator puts at the same address each time. With a result of its own in each set an engine
    would seem up to 4 % slower than the same one in PyTorch. If memory runs out, half of the copies
    are kept.
    """
    written = WRITTEN[problem.op]
    device, size = first[0].device, _read_bytes(problem, first)
    if fills_cache(problem, first):
        return [first]
    free, _ = torch.cuda.mem_get_info(device)
    affordable = max(1, int(_MEMORY_SHARE * free / size))
    wanted = min(math.ceil(_wanted_bytes(device) / size) + 1, affordable)
    sets = [first]
    try:
        while len(sets) < min(wanted, most or wanted):
            sets.append(tuple(t if i == written else _copy(t) for i, t in enumerate(first)))
    except torch.OutOfMemoryError:
        del sets[(len(sets) - 1) // 2 + 1 :]  # leaves some memory for the caller
    return sets


def _copy(tensor: Tensor) -> Tensor:
    """Returns a copy with the same strides, which clone() keeps of dense tensors only."""
    strides = tensor.stride()
    return torch.empty_strided(
        tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)
