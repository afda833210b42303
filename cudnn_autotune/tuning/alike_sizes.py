"""The rule for alike sizes of a layer: a time at one is evidence for the time at another.

All functions are pure. They take two problems that differ only in batch size and spatial sizes, and
a GPU that need not be here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import ConvProblem

# Alike sizes are nearer than this, in powers of two as in store.neighbours: a factor of two in the
# batch size or in one spatial size.
NEAR = 1.0
# The most bytes of one read of a thread.
_VECTOR_BYTES = 16
# The change of the logarithm of two kernels' ratio at a distance of one. Engines that won at 8/7 of
# a size were up to 5.1 % off the best, and at twice the batch size up to 14.2 %
# (docs/findings/neighbours.md).
_LOG_CHANGE = 0.15
# Milliseconds of a call that do not depend on its size: the launches of one or two kernels.
_FIXED_MS = 0.005
# Pixels and channels of a block's result: of engines that are matrix products, and of kernels with
# a tile in each spatial dimension, whose edge is the square root of the pixels.
_PRODUCT_TILES = ((64, 64), (128, 128), (256, 128))
_IMAGE_TILES = ((64, 64), (256, 64), (1024, 64))


def distance(one: ConvProblem, other: ConvProblem) -> float:
    """Returns the Euclidean norm of the base-2 logarithms of the ratios of all sizes; channels are
    equal in one layer."""
    pairs = zip(one.input_shape, other.input_shape, strict=True)
    return math.hypot(*(math.log2(a / b) for a, b in pairs))


def is_alike(problem: ConvProblem, neighbour: ConvProblem) -> bool:
    """Returns whether a kernel runs in the same way at two sizes.

    They are nearer than ``NEAR``, and so are their numbers of operations. The filter is larger than
    the input in the same dimensions. In the contiguous layout, rows have the same alignment for
    vector reads; for a filter with one tap, whole images have too.
    """
    if distance(problem, neighbour) >= NEAR or abs(_log2_work(problem, neighbour)) >= NEAR:
        return False
    return _class(problem) == _class(neighbour)


def _class(problem: ConvProblem) -> tuple[object, ...]:
    sizes, taps = problem.input_shape[2:], problem.weight_shape[2:]
    spans = (d * (k - 1) + 1 for d, k in zip(problem.dilation, taps, strict=True))
    is_small = tuple(size < span for size, span in zip(sizes, spans, strict=True))
    if problem.memory_format != torch.contiguous_format:
        return is_small
    results = problem.output_shape[2:]
    rows = [sizes[-1], results[-1]]
    if math.prod(taps) == 1:  # it may be a matrix product with images as rows
        rows += [math.prod(sizes), math.prod(results)]
    bytes_ = problem.dtype.itemsize
    return (is_small, *(math.gcd(row * bytes_, _VECTOR_BYTES) for row in rows))


def doubt(
    problem: ConvProblem,
    neighbour: ConvProblem,
    gpu: Gpu,
    time_ms: float,
    has_image_tiles: bool = False,
) -> float:
    """Estimates the possible change of the ratio of two kernels' times from one size to another.

    It has three parts. Unknown effects grow with the distance. A call of a few microseconds mostly
    takes a fixed time, and kernels have different shares of it. The last wave of blocks may be full
    for one kernel, and hardly begun for the other.

    Args:
        time_ms: milliseconds of a call at the neighbour.
        has_image_tiles: whether the kernel has a tile in each spatial dimension. PyTorch's is taken
            for a matrix product.

    Returns:
        The natural logarithm of a factor.
    """
    work = _log2_work(problem, neighbour)
    shorter_ms = time_ms * 2 ** min(0.0, work)
    fixed = math.log(2) * abs(work) * min(1.0, _FIXED_MS / shorter_ms)
    return (
        _LOG_CHANGE * distance(problem, neighbour)
        + fixed
        + _wave_doubt(problem, neighbour, gpu, has_image_tiles)
    )


def _wave_doubt(
    problem: ConvProblem, neighbour: ConvProblem, gpu: Gpu, has_image_tiles: bool
) -> float:
    if problem.op == "wgrad":
        return 0.0  # the sum over the pixels is split to fit the GPU
    products = list(_growth(problem, neighbour, gpu, False))
    ours = list(_growth(problem, neighbour, gpu, True)) if has_image_tiles else products
    return max(0.0, max(ours) - min(products))


def _growth(
    problem: ConvProblem, neighbour: ConvProblem, gpu: Gpu, has_image_tiles: bool
) -> Iterator[float]:
    """Yields for each tile the logarithm of the ratio of the numbers of waves of blocks."""
    for pixels, channels in _IMAGE_TILES if has_image_tiles else _PRODUCT_TILES:
        waves = [
            math.ceil(_blocks(one, pixels, channels, has_image_tiles) / gpu.multiprocessors)
            for one in (problem, neighbour)
        ]
        yield math.log(waves[0] / waves[1])


def _blocks(problem: ConvProblem, pixels: int, channels: int, has_image_tiles: bool) -> int:
    batch, width, *sizes = _result_shape(problem)
    columns = math.ceil(width / channels)
    if not has_image_tiles:
        return columns * math.ceil(batch * math.prod(sizes) / pixels)
    edge = round(pixels ** (1 / len(sizes)))
    return columns * batch * math.prod(math.ceil(size / edge) for size in sizes)


def _result_shape(problem: ConvProblem) -> tuple[int, ...]:
    return problem.input_shape if problem.op == "dgrad" else problem.output_shape


def _log2_work(problem: ConvProblem, neighbour: ConvProblem) -> float:
    """Returns the base-2 logarithm of the ratio of the arithmetic operations."""
    return math.log2(problem.flops / neighbour.flops)
