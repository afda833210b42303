"""Convolutions of size 1 of images that nearest neighbours make larger, in a graph of Dynamo.

Each pixel of the large image is one of the small image, so the convolution of the small image has
all different outputs. Kernels that read the large output can read the small one in its place.
Decoders whose norms are scaled and shifted by the latents have two such convolutions for each norm.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from cudnn_autotune.compile.aliasing import (
    CONCATENATIONS,
    fake_tensors,
    value_of,
    written_among,
)
from cudnn_autotune.compile.formulas import interpolate
from cudnn_autotune.engines.conv_layout import conv_memory_format, laid_out
from cudnn_autotune.functional import conv2d, conv3d

_CONVOLUTIONS = (conv2d, conv3d)
# The least number of a large image's pixels for each one of the small image.
_LEAST_RATIO = 2


class _Piece(NamedTuple):
    """A part of a large image, made larger by nearest neighbours."""

    small: Node
    """The whole small image."""
    slices: tuple[slice, ...]
    """Part of it that is made larger; empty for all of it."""
    options: dict[str, Any]
    """Arguments of :func:`torch.nn.functional.interpolate` without the input."""

    @classmethod
    def of(cls, node: Any) -> _Piece | None:
        """Returns the piece that a node makes; None if it does something else."""
        if not isinstance(node, Node) or node.target is not F.interpolate:
            return None
        options = dict(inspect.signature(F.interpolate).bind(*node.args, **node.kwargs).arguments)
        small: Any = options.pop("input")
        is_nearest = options.get("mode", "nearest") in ("nearest", "nearest-exact")
        if not is_nearest or len(node.all_input_nodes) > 1:  # a size that is computed
            return None
        if small.target is operator.getitem and len(small.all_input_nodes) == 1:
            image, slices = small.args
            is_part = isinstance(slices, tuple) and all(isinstance(one, slice) for one in slices)
            if is_part and slices[1:2] in ((), (slice(None),)):  # all channels
                return cls(image, slices, options)
        return cls(small, (), options)


class _Call(NamedTuple):
    """A call of :func:`conv_before_upsampling` in place of a convolution."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    images: list[Node]
    """The small image, the pieces and the large image."""


def convolve_before_upsampling(graph: GraphModule) -> None:
    """Lets convolutions of size 1 read what nearest neighbours make larger in front of them.

    The large image may be a concatenation of slices that are made larger, as the first and the
    other frames of CogVideoX.

    Args:
        graph: of Dynamo, with this package's convolutions. It is changed.
    """
    found = {
        node: call
        for target in _CONVOLUTIONS
        for node in graph.graph.find_nodes(op="call_function", target=target)
        if (call := _call_of(node)) is not None
    }
    if not found:
        return
    written = written_among(graph.graph, {one for call in found.values() for one in call.images})
    for node, call in found.items():
        if written.isdisjoint(call.images):
            node.target = conv_before_upsampling
            node.args, node.kwargs = call.arguments, call.options
    graph.recompile()


def _call_of(node: Node) -> _Call | None:
    """Returns the call for a convolution; None if it does not read an upsampled image, or would
    save too little."""
    target: Any = node.target
    given = inspect.signature(target).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    large, weight, bias, stride, padding, _, groups, *policy = given.arguments.values()
    parts, dim = _concatenated(large)
    pieces = [piece for piece in map(_Piece.of, parts) if piece is not None]
    if len(pieces) < len(parts) or len({piece.small for piece in pieces}) != 1:
        return None
    small = pieces[0].small
    tensors = fake_tensors([small, large, weight])
    if len(tensors) < 3:
        return None
    size, large_size, filters = (tuple(one.shape) for one in tensors.values())
    strides, paddings = ([one] if isinstance(one, (int, str)) else one for one in (stride, padding))
    if any(isinstance(one, Node) for one in (strides, paddings, dim)):
        return None
    is_known = all(isinstance(one, int) for one in (*size, *large_size, *filters, *strides))
    if not is_known or len(size) != len(filters) or not 2 <= dim < len(size):
        return None
    if {*filters[2:], *strides} != {1} or not all(one in (0, "valid") for one in paddings):
        return None
    # The strides of an image of one channel or one pixel fit every layout.
    has_layout = size[1] > 1 and math.prod(size[2:]) > 1
    if not has_layout or math.prod(large_size) < _LEAST_RATIO * math.prod(size):
        return None
    options = {"pieces": [piece[1:] for piece in pieces], "dim": dim}
    return _Call((small, weight, bias, groups, *policy), options, [small, *parts, large])


def _concatenated(node: Any) -> tuple[list[Any], int]:
    """Returns the parts of a concatenation and its dimension; of others the node itself and 2."""
    if not isinstance(node, Node) or node.target not in CONCATENATIONS:
        return [node], 2
    given: dict[str, Any] = {
        **dict(zip(("tensors", "dim"), node.args, strict=False)),
        **node.kwargs,
    }
    value, dim = value_of(node), given.get("dim", given.get("axis", 0))
    is_known = isinstance(value, Tensor) and isinstance(dim, int)
    return list(given["tensors"]), dim % value.dim() if is_known else dim


def conv_before_upsampling(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    sampling: Any,
    workspace_limit: int | None,
    *,
    pieces: Sequence[tuple[tuple[slice, ...], Mapping[str, Any]]],
    dim: int,
) -> Tensor:
    """Computes a convolution of size 1 of what nearest neighbours make larger, from the small
    image.

    Args:
        input: the small image, (N, C, *spatial).
        weight: (K, C / groups, 1, ...).
        bias: (K,), or None.
        groups, sampling, workspace_limit: as of :func:`cudnn_autotune.functional.conv2d`.
        pieces: the slices of the small image that are made larger, and the arguments of
            :func:`torch.nn.functional.interpolate`.
        dim: dimension along which the large pieces are concatenated.

    Returns:
        The convolved large image, (N, K, *spatial), in PyTorch's layout.
    """
    convolution = conv2d if input.dim() == 4 else conv3d
    output = convolution(
        input,
        weight,
        bias,
        groups=groups,
        sampling=sampling,
        workspace_limit=workspace_limit,
    )
    large = [interpolate(output[slices], **options) for slices, options in pieces]
    memory_format = conv_memory_format(input, weight)
    return laid_out(large[0] if len(large) == 1 else torch.cat(large, dim), memory_format)
