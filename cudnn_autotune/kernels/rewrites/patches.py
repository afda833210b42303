"""Adjacent windows, as in cutting patches, as a matrix product."""

from __future__ import annotations

import math
from dataclasses import replace

from cudnn_autotune.engines.implementations import Gpu
from cudnn_autotune.engines.problem import CHANNELS_LAST, ConvProblem
from cudnn_autotune.engines.recipe import (
    Address,
    Buffer,
    EngineLaunch,
    Recipe,
    workspace_room,
)
from cudnn_autotune.kernels.rewrites.packing import Packing, pair
from cudnn_autotune.kernels.rewrites.rewrite import (
    Form,
    Rewrite,
    is_channels_last,
    may_use_half,
    may_use_tf32,
    round_up,
)
from cudnn_autotune.kernels.rewrites.transpose import (
    is_same,
    to_channels_last,
    to_contiguous,
    transpose,
)

_GRANULE_BYTES = 16
"""The divisor of the bytes of a pixel's channels for engines with tensor cores."""
_MOST_CHANNELS = 8
"""Input channels above which engines do not need gathered windows."""
_LEAST_WINDOW = 513
"""Elements of a 2-d filter from which windows are gathered; smaller ones are ``few_channels``'s."""


class Patches(Rewrite):
    """A rewrite that turns a window's pixels into channels, if windows do not overlap.

    Without padding, and with a stride of the kernel's size, ``y = W X'``: W has a filter in each
    row, and X' a window in each column. So it is a convolution of kernel size 1, with a channel for
    each element of a filter.

    If the kernel is as large as the input, x itself is X' and w is W, since both are dense in the
    same order. This holds in both layouts and up to three dimensions. There is no copy, unless
    engines need the number of elements padded with zeros.

    Else rows of windows are gathered in one launch. In ``channels_last`` the pixels of a window in
    height and width become channels, in the order of w, and its depth stays a kernel of the inner
    problem. In a contiguous tensor each channel is an image of its own. So the channels become a
    dimension that the inner kernel fills, and w is again used as it is; y is transposed.

    Every row of a window is padded with zeros to a part of the tensor cores' multiple. These are
    multiplied by zeros only, so non-finite values spread as in the engine.
    """

    name = "patches"
    note = "TENSOR_CORE"

    def form(self, problem: ConvProblem, gpu: Gpu) -> Form | None:
        """Returns a form if :func:`is_computed`, in the tensor cores' types."""
        if not is_computed(problem):
            return None
        if not may_use_half(problem, gpu) and not may_use_tf32(problem, gpu):
            return None
        granule = _GRANULE_BYTES // problem.dtype.itemsize
        if _covers_the_input(problem):
            return _as_matrices(problem, granule)
        return _gathered(problem, granule)

    def build(self, problem: ConvProblem, form: Form, engine_text: str) -> Recipe:
        """Returns the launches, with a transposition of a contiguous y."""
        recipe = super().build(problem, form, engine_text)
        shape = problem.output_shape
        if is_channels_last(problem) or is_same(shape):
            return recipe
        y, place = Address("y"), Address("workspace", recipe.workspace_bytes)
        launches = [
            replace(launch, y=place) if isinstance(launch, EngineLaunch) else launch
            for launch in recipe.launches
        ]
        if problem.op == "fprop":
            launches.append(transpose([to_contiguous(shape, place, y)], problem.dtype))
        else:
            launches.insert(0, transpose([to_channels_last(shape, y, place)], problem.dtype))
        room = workspace_room(math.prod(shape) * problem.dtype.itemsize)
        return Recipe(tuple(launches), recipe.workspace_bytes + room)


def is_computed(problem: ConvProblem) -> bool:
    """Returns whether windows are adjacent, and either cover the input or are worth gathering: with
    few channels, in fprop and wgrad."""
    c, *kernel = problem.weight_shape[1:]
    if problem.groups > 1 or any(problem.padding) or max(problem.dilation) > 1:
        return False
    if math.prod(kernel) == 1:
        return False
    if _covers_the_input(problem):
        return True
    if problem.stride != tuple(kernel) or problem.op == "dgrad" or c > _MOST_CHANNELS:
        return False
    if problem.residual and not is_channels_last(problem):
        return False  # it would have to be transposed, too
    return problem.spatial_dims == 3 or c * math.prod(kernel) >= _LEAST_WINDOW


def _covers_the_input(problem: ConvProblem) -> bool:
    return problem.input_shape[2:] == problem.weight_shape[2:]


def _as_matrices(problem: ConvProblem, granule: int) -> Form:
    """Returns the form with each image as a pixel of one row."""
    n, k = problem.input_shape[0], problem.weight_shape[0]
    window = math.prod(problem.weight_shape[1:])
    channels = round_up(window, granule)
    packings: dict[Buffer, Packing] = {}
    if channels > window:
        packings["x"] = Packing(n, (1, 1), window, channels, n, (1, 1))
        packings["w"] = Packing(k, (1, 1), window, channels, k, (1, 1))
    return Form(_inner(problem, (1, channels, 1, n), (k, channels, 1, 1), (1, 1)), packings)


def _gathered(problem: ConvProblem, granule: int) -> Form:
    """Returns the form with height and width of a window as a pixel's channels, and the windows of
    a plane as the pixels of a row."""
    (n, c), k = problem.input_shape[:2], problem.weight_shape[0]
    depth, *size = _depth_height_width(problem.input_shape)
    kernel_depth, *kernel = _depth_height_width(problem.weight_shape)
    out = _depth_height_width(problem.output_shape)[1:]
    planes = [(depth, kernel_depth, kernel_depth)]  # sizes, kernel sizes and strides
    if not is_channels_last(problem):
        planes.insert(0, (c, c, 1))
        c = 1
    planes = [one for one in planes if one[0] > 1] or [(1, 1, 1)]
    sizes, taps, stride = zip(*planes, (math.prod(out), 1, 1), strict=True)
    run = round_up(kernel[1] * c, granule // math.gcd(granule, kernel[0]))
    channels = kernel[0] * run
    of_x, of_w = n * math.prod(sizes[:-1]), k * math.prod(taps)
    windows = {"stride": pair(kernel), "phases": pair(kernel)}
    read = pair([o * s for o, s in zip(out, kernel, strict=True)])
    packings: dict[Buffer, Packing] = {
        "x": Packing(of_x, pair(size), c, run, of_x, pair(out), **windows, limit=read)
    }
    if run > kernel[1] * c:
        packings["w"] = Packing(of_w, pair(kernel), c, run, of_w, (1, 1), **windows)
    return Form(_inner(problem, (n, channels, *sizes), (k, channels, *taps), stride), packings)


def _depth_height_width(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the spatial sizes in three dimensions."""
    return (1,) * (5 - len(shape)) + shape[2:]


def _inner(
    problem: ConvProblem,
    input_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> ConvProblem:
    return replace(
        problem,
        input_shape=input_shape,
        weight_shape=weight_shape,
        stride=stride,
        padding=(0,) * (2 * len(stride)),
        dilation=(1,) * len(stride),
        memory_format=CHANNELS_LAST[len(stride)],
    )
