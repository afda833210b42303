"""The convolution's definition at a sample of its output's places.

It is the sum over taps, gathered from the operands and multiplied in a wider type, at the output's
corners, where padding matters, and at places drawn at random. It shares no code with any engine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cudnn_autotune.engines.problem import ACTIVATIONS, ConvProblem

Ints = npt.NDArray[np.int64]

# How many places of the output of fprop and dgrad are compared, in every channel. Fewer than
# _MOST_PLACES are, if the inputs that they depend on are more than _MOST_GATHERED numbers.
_MOST_PLACES = 256
_LEAST_PLACES = 32
_MOST_GATHERED = 2**24
# Where they lie, in each dimension of any tensor, as a share of its size.
_DRAWN = np.random.default_rng(0).random((_MOST_PLACES, 4))
# How many taps of the weight's gradient are compared, in how many kernels (of as many groups), and
# in how many channels of each; the channels of all these groups are no more than _MOST_COLUMNS.
_TAPS = 9
_KERNELS = 16
_CHANNELS = 16
_MOST_COLUMNS = 64


def _wide_type(problem: ConvProblem) -> torch.dtype:
    """A type with exact enough matrix products; those of float32 may be rounded to TF32."""
    is_half = problem.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if is_half or problem.may_use_tf32 else torch.float64


def _taps(problem: ConvProblem) -> Ints:
    """The index of every tap of the kernel, of shape (taps, spatial dimensions)."""
    kernel = problem.weight_shape[2:]
    return np.indices(kernel).reshape(len(kernel), -1).T


def _places(problem: ConvProblem, shape: Sequence[int], channels: int) -> Ints:
    """Places of a tensor of ``shape`` (batch and spatial index), of shape (places, 1 + spatial
    dimensions)."""
    sizes = [shape[0], *shape[2:]]
    taps = math.prod(problem.weight_shape[2:])
    most = min(max(_MOST_GATHERED // (taps * channels), _LEAST_PLACES), _MOST_PLACES)
    corners = np.array(list(itertools.product(*({0, size - 1} for size in sizes))))
    drawn = (_DRAWN[:most, : len(sizes)] * sizes).astype(np.int64)
    return np.concatenate([corners, drawn])


def _offsets(tensor: Tensor, batch: Ints, place: Ints) -> Ints:
    """The offsets in memory of ``tensor[batch, 0, *place]``; ``place`` is (..., spatial)."""
    first, _, *rest = tensor.stride()
    return batch * first + place @ np.array(rest)


def _on(device: torch.device, *arrays: Ints) -> Sequence[Tensor]:
    """Copies arrays of the host together, without waiting for the device."""
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts = packed.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _at(tensor: Tensor, offsets: Tensor) -> Tensor:
    """All channels at each of ``offsets``, whatever the layout: of shape (..., channels)."""
    channels, step = tensor.shape[1], tensor.stride(1)
    return tensor.as_strided((_reach(tensor.select(1, 0)), channels), (1, step))[offsets]


def _reach(tensor: Tensor) -> int:
    """How many numbers of memory there are from a tensor's first to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _gathered(tensor: Tensor, offsets: Tensor, is_padded: bool, wide: torch.dtype) -> Tensor:
    """As :func:`_at`; zero where an offset is negative, which only ``is_padded`` ones are."""
    if not is_padded:
        return _at(tensor, offsets).to(wide)
    return _at(tensor, offsets.clamp(min=0)).to(wide) * (offsets >= 0)[..., None]


def _product(problem: ConvProblem, gathered: Tensor, weight: Tensor) -> Tensor:
    """Multiplies (places, taps, groups * in) by (groups, taps * in, out), for each group; returns
    (places, groups * out)."""
    places, taps, channels = gathered.shape
    g = problem.groups
    rows = gathered.reshape(places, taps, g, channels // g).permute(2, 0, 1, 3)
    product = _matmul(rows.reshape(g, places, -1), weight)
    return product.permute(1, 0, 2).reshape(places, -1)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` without cuBLAS where deterministic algorithms are demanded, since torch may then
    refuse it."""
    if not torch.are_deterministic_algorithms_enabled():
        return a @ b
    return torch.stack([(row[..., None] * b).sum(-2) for row in a.unbind(-2)], dim=-2)


def _by_tap(problem: ConvProblem, w: Tensor) -> Tensor:
    """The weight in the wider type, of shape (groups, taps, K / groups, C / groups)."""
    g = problem.groups
    weight = w.to(_wide_type(problem)).reshape(g, w.shape[0] // g, w.shape[1], -1)
    return weight.permute(0, 3, 1, 2)


def _fprop(
    problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, *added: Tensor
) -> tuple[Tensor, Tensor]:
    n = problem.spatial_dims
    places, taps = _places(problem, y.shape, x.shape[1]), _taps(problem)
    source = places[:, None, 1:] * problem.stride - problem.padding[:n] + taps * problem.dilation
    inside = np.all((source >= 0) & (source < x.shape[2:]), axis=-1)
    return _sums_at(problem, x, source, inside, _by_tap(problem, w).mT, y, places, added)


def _dgrad(problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    n = problem.spatial_dims
    places, taps = _places(problem, x.shape, y.shape[1]), _taps(problem)
    reached = places[:, None, 1:] + problem.padding[:n] - taps * problem.dilation
    source, rest = np.divmod(reached, problem.stride)
    inside = np.all((source >= 0) & (source < y.shape[2:]) & (rest == 0), axis=-1)
    return _sums_at(problem, y, source, inside, _by_tap(problem, w), x, places)


def _sums_at(
    problem: ConvProblem,
    operand: Tensor,
    source: Ints,
    inside: npt.NDArray[np.bool_],
    weight: Tensor,
    output: Tensor,
    places: Ints,
    added: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """What ``output`` has at ``places``, and what it must have there.

    Args:
        source, inside: the place of ``operand`` that each tap of each place reads, of shape
            (places, taps, spatial dimensions), and whether there is one.
        weight: the taps' factors, of shape (groups, taps, in, out).
        added: as of :func:`sampled`.
    """
    read = np.where(inside, _offsets(operand, places[:, :1], source), -1)
    written = _offsets(output, places[:, 0], places[:, 1:])
    residual = _offsets(added[-1], places[:, 0], places[:, 1:]) if problem.residual else written[:0]
    read_at, written_at, residual_at = _on(output.device, read, written, residual)
    gathered = _gathered(operand, read_at, not inside.all(), weight.dtype)
    sums = _product(problem, gathered, weight.flatten(1, 2))
    if problem.bias:
        sums = sums + added[0].to(sums.dtype)
    if problem.residual:
        sums = sums + _at(added[-1], residual_at).to(sums.dtype)
    if problem.activation:
        sums = ACTIVATIONS[problem.activation](sums)
    return _at(output, written_at), sums


def _wgrad(problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    wide, n = _wide_type(problem), problem.spatial_dims
    taps = _taps(problem)
    taps = taps[_spread(len(taps), _TAPS)]
    groups = _spread(problem.groups, _KERNELS)
    kernels = _spread(w.shape[0] // problem.groups, _KERNELS // len(groups))
    channels = _spread(w.shape[1], min(_CHANNELS, _MOST_COLUMNS // len(groups)))
    # Their indices in y and w, and in x, group by group.
    rows = (groups[:, None] * (w.shape[0] // problem.groups) + kernels).ravel()
    columns = (groups[:, None] * w.shape[1] + channels).ravel()
    of_taps = taps @ np.array(w.stride()[2:])
    in_w = of_taps[:, None, None] + rows[:, None] * w.stride(0) + channels * w.stride(1)
    rows_of_y, columns_of_x, compared = _on(w.device, rows, columns, in_w)
    grads, inputs = y[:, rows_of_y].to(wide), x[:, columns_of_x].to(wide)
    wanted = []
    for tap in taps.tolist():
        inner, outer = (
            (slice(None), slice(None), *places) for places in _overlap(problem, x, y, tap, n)
        )
        # Sum over the batch and all places.
        sums = _matmul(
            _by_group(grads[outer], len(groups)), _by_group(inputs[inner], len(groups)).mT
        )
        wanted.append(sums.flatten())
    return w.as_strided((_reach(w),), (1,))[compared.flatten()], torch.cat(wanted)


def _by_group(tensor: Tensor, groups: int) -> Tensor:
    """(batch, groups * channels, *spatial) as (groups, channels, batch * places)."""
    channels = tensor.shape[1] // groups
    return tensor.movedim(1, 0).reshape(groups, channels, math.prod(tensor[:, 0].shape))


def _spread(size: int, most: int) -> Ints:
    """Up to ``most`` indices below ``size``, evenly spread, including the first and the last."""
    return np.linspace(0, size - 1, min(size, most)).round().astype(np.int64)


def _overlap(
    problem: ConvProblem, x: Tensor, y: Tensor, tap: Sequence[int], n: int
) -> tuple[list[slice], list[slice]]:
    """The places of the input that a tap reads, and the places of the output that it adds to."""
    inner, outer = [], []
    for d in range(n):
        stride = problem.stride[d]
        offset = tap[d] * problem.dilation[d] - problem.padding[d]
        first = max(0, -(offset // stride))
        last = min(y.shape[2 + d] - 1, (x.shape[2 + d] - 1 - offset) // stride)
        count = max(0, last - first + 1)
        begin = first * stride + offset if count else 0
        inner.append(slice(begin, begin + (count - 1) * stride + 1 if count else 0, stride))
        outer.append(slice(first, first + count) if count else slice(0, 0))
    return inner, outer


_SAMPLED = {"fprop": _fprop, "dgrad": _dgrad, "wgrad": _wgrad}


def sampled(
    problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, *added: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns what the output has at the sample, and what it must have there.

    Args:
        problem: the problem that the tensors belong to.
        x, w, y: the forward's input, weight and output, on any device, in any layout. One of them
            is the output of ``problem``.
        added: the bias and the residual of a fused problem that has them.

    Returns:
        Two tensors of one shape, on the operands' device: in the problem's dtype, and in float32 or
        float64. The host does not wait for the device.

    Raises:
        OutOfMemoryError: there is no memory for the reference.
    """
    return _SAMPLED[problem.op](problem, x, w, y, *added)
