"""Convolutions of images that nearest neighbours make twice as large, in a graph of Dynamo.

A filter of three places reads two equal pixels at one of its edges. Their weights can be added
before. The pixels of even and of odd places then have filters of two places each, which read the
small image: of 36 products of a pixel with 3 x 3 filters 16 are left, and the large image is never
written.

Sums of weights are rounded to the weights' dtype once. In a half type this adds an error about as
large as that of rounding the output. An infinite pixel that the sum of its weights does not cancel
stays infinite, where PyTorch's result may be NaN.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from cudnn_autotune.compile.aliasing import fake_tensors, written_among
from cudnn_autotune.compile.formulas import nearest_factors
from cudnn_autotune.engines.conv_layout import conv_memory_format, laid_out
from cudnn_autotune.functional import conv2d, conv3d

_CONVOLUTIONS: dict[Any, int] = {conv2d: 2, conv3d: 3}
"""Convolution -> number of spatial dimensions."""
_CONVERSIONS = {"to", "type_as", "bfloat16", "half", "float", "double"}
# The least numbers of places of the small input, for which filters are worth adding at each call,
# and of its products with weights of one tap, which make up for more launches.
_LEAST_PLACES = 2**10
_LEAST_PRODUCTS = 2**28


def convolve_before_upsampling(graph: GraphModule) -> None:
    """Lets convolutions read what nearest neighbours make larger in front of them.

    Each length grows by 2 in front of 3 taps with padding 1, or not at all. What is made larger may
    be converted before and back after, as in Wan's decoder.

    Args:
        graph: of Dynamo, with this package's convolutions. It is changed.
    """
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in _CONVOLUTIONS:
            _convolve_before_upsampling(graph.graph, node)
    graph.recompile()


def _convolve_before_upsampling(graph: Graph, node: Node) -> None:
    target: Any = node.target
    call = inspect.signature(target).bind(*node.args, **node.kwargs)
    call.apply_defaults()
    input, weight, _, *geometry, groups = call.args
    upsampling, between = _unconverted(input)
    if not isinstance(upsampling, Node) or upsampling.target is not F.interpolate:
        return
    given = inspect.signature(F.interpolate).bind(*upsampling.args, **upsampling.kwargs)
    source, before = _unconverted(given.arguments.pop("input"))
    between = [*between, upsampling, *before]
    tensors = fake_tensors([source, weight, node, *between])
    if len(tensors) < 3 + len(between) or written_among(graph, (source, *between)):
        return
    small, filters, output, *others = tensors.values()
    same = (filters, output, input.meta["example_value"])
    is_exact = {one.dtype for one in same} == {small.dtype}
    # A wider type has each number of the narrower one.
    is_exact &= all(torch.promote_types(one.dtype, small.dtype) == one.dtype for one in others)
    sizes = (*small.shape, *filters.shape)
    is_known = all(isinstance(size, int) for size in sizes) and small.dim() == filters.dim()
    if not is_exact or not is_known:
        return
    factors = nearest_factors(small.shape[2:], **given.arguments)
    places = small.shape[0] * math.prod(small.shape[2:])
    products = places * math.prod(filters.shape[:2])
    is_large = places >= _LEAST_PLACES and products >= _LEAST_PRODUCTS
    if groups != 1 or not is_large or not _fits(factors, filters.shape[2:], *geometry):
        return
    node.target = conv_upsampled
    node.args = (source, *call.args[1:-1])
    node.kwargs = {"doubled": tuple(factor == 2 for factor in factors), **call.kwargs}
    for one in between:
        if not one.users:
            graph.erase_node(one)


def _unconverted(value: Any) -> tuple[Any, list[Node]]:
    """Returns what conversions to other types read, and the conversions, the last one first."""
    conversions = []
    while isinstance(value, Node) and value.op == "call_method" and value.target in _CONVERSIONS:
        conversions.append(value)
        value = value.args[0]
    return value, conversions


def _fits(
    factors: Sequence[int], taps: Sequence[int], stride: Any, padding: Any, dilation: Any
) -> bool:
    """Returns whether one length grows at least, and each by 1, or by 2 in front of 3 taps that add
    a place on each side."""
    dims = len(taps)
    if isinstance(padding, str) or not factors or (set(factors) != {2} and set(factors) != {1, 2}):
        return False
    strides, paddings, dilations = (
        [one] * 2 * dims if isinstance(one, int) else list(one) * 2
        for one in (stride, padding, dilation)
    )
    return all(
        factor == 1
        or (taps[d], strides[d], dilations[d], paddings[d], paddings[d + dims]) == (3, 1, 1, 1, 1)
        for d, factor in enumerate(factors)
    )


def conv_upsampled(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    *,
    doubled: Sequence[bool],
    sampling: str | None = None,
    workspace_limit: int | None = None,
) -> Tensor:
    """Computes a convolution of what nearest neighbours make larger, from the small input.

    Args:
        input: the small one, (N, C, *spatial), of any floating dtype.
        weight: (K, C, *taps), of the same dtype.
        bias: (K,), or None.
        stride, padding, dilation: of the convolution, as of
            :func:`cudnn_autotune.functional.conv2d`.
        doubled: whether each length grows by 2; its taps are then 3 with padding 1.
        sampling, workspace_limit: as of :func:`cudnn_autotune.functional.conv2d`.

    Returns:
        The convolved large image, (N, K, *output size), in PyTorch's layout.
    """
    memory_format = conv_memory_format(input, weight)
    filters = laid_out(_of_phases(weight, doubled), memory_format)
    biases = None if bias is None else bias.repeat(2 ** sum(doubled))
    convolution = conv2d if input.dim() == 4 else conv3d
    output = convolution(
        *(input, filters, biases, stride, padding, dilation),
        sampling=sampling,
        workspace_limit=workspace_limit,
    )
    return laid_out(_interleaved(output, doubled), memory_format)


def _of_phases(weight: Tensor, doubled: Sequence[bool]) -> Tensor:
    """Returns the filters of the even and the odd places, with 2 taps for 3 in each doubled length:
    those of both, or of all 4 or 8 phases, after one another."""
    lengths = [length for length, is_doubled in enumerate(doubled) if is_doubled]
    phases, dims = len(lengths), 2 + len(doubled)
    filters = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
    # Dimensions are the phases, those of the weight with 2 taps for 3, and the 3 taps.
    filters = filters.movedim([2 + length for length in lengths], list(range(-phases, 0)))
    for length in lengths:
        filters = filters.unsqueeze(2 + length)
    adds: Tensor | bool = True
    for i, length in enumerate(lengths):
        places = ((i, 2), (phases + 2 + length, 2), (phases + dims + i, 3))
        phase, new, old = (
            torch.arange(n, device=weight.device).view(
                [n if d == at else 1 for d in range(2 * phases + dims)]
            )
            for at, n in places
        )
        # Even places add the last two taps, odd ones the first two.
        adds = adds & torch.where(new == 1, old > phase, old <= phase)
    added = torch.where(adds, filters, 0).sum(list(range(-phases, 0)))
    return added.flatten(0, phases).to(weight.dtype)


def _interleaved(output: Tensor, doubled: Sequence[bool]) -> Tensor:
    """Returns the large image of the phases.

    The even places begin at the first place of their phase, the odd ones at the second one.
    """
    phases = sum(doubled)
    y = output.unflatten(1, (*[2] * phases, -1))
    sizes = list(output.shape[2:])
    behind = 0  # dimensions
    for length in reversed(range(len(doubled))):
        behind += 1
        if doubled[length]:
            small = sizes[length] - 1
            dim = y.dim() - behind
            # The first window of the first phase and the last window of the second one.
            windows = y.unfold(dim, small, 1).movedim((-1, phases), (dim - 1, dim + 1))
            y = windows.flatten(dim, dim + 1)[(slice(None),) * dim + (slice(None, None, 3),)]
            sizes[length] = 2 * small
            phases -= 1
            behind += 1
    return y.reshape(*y.shape[:2], *sizes)
