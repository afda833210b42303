"""The order of filters in front of pixel shuffles, in a functional graph of ATen operators.

A shuffle makes pixels of a channel's phases, and the phases are the channel's neighbours. So a
kernel that writes pixels in channels_last reads one number of each channel. If the filters of a
phase are together, it reads neighbours.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from cudnn_autotune.compile.concatenations import ConvolutionCall
from cudnn_autotune.compile.groups import add_call, hints, is_same_shape
from cudnn_autotune.engines.conv_layout import conv_memory_format

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default)  # the second one in graphs with constants
# A sector of DRAM holds 16 numbers of a half type.
_LEAST_CHANNELS = 16
# The least numbers of an output: for each number of the filters, and in all. For a smaller output
# the order of reads saves less than the copy of the filters costs at each call.
_LEAST_RATIO = 4
_LEAST_NUMBERS = 2**22


def order_filters(graph: Graph, *, channels_last: bool) -> None:
    """Puts filters phase by phase where a pixel shuffle alone reads a convolution's output.

    The shuffled pixels stay the same. Each call copies the filters, so only convolutions with large
    outputs are changed.

    Args:
        graph, channels_last: as of :func:`find_families`.
    """
    for node in list(graph.nodes):
        one = ConvolutionCall.of(node)
        found = None if one is None else _shuffle_of(one, channels_last)
        if one is not None and found is not None:
            view, permute = found
            _order_filters(graph, one, view.meta["val"].shape[1])
            _read_phases_first(view, permute)


def _shuffle_of(one: ConvolutionCall, channels_last: bool) -> tuple[Node, Node] | None:
    """Returns the view and the permutation by which a pixel shuffle alone reads a convolution's
    output; None if another node reads it, or neighbouring reads would save nothing."""
    input, weight = (node.meta["val"] for node in one.operands[:2])
    value, (*_, residual, slope) = one.node.meta["val"], one.operands
    is_last = conv_memory_format(input, weight) != torch.contiguous_format
    is_last |= channels_last and value.dim() == 4 and value.dtype != torch.float64
    if not is_last or one.options[3] != 1 or (residual, slope) != (None, None):
        return None
    view = _only_user(one.node, _VIEWS)
    permute = None if view is None else _only_user(view, (_aten.permute.default,))
    if view is None or permute is None or not all(map(_makes_pixels, permute.users)):
        return None
    sizes, dims = view.meta["val"].shape, _dims_of(permute)
    space = len(sizes) - value.dim() + 2
    phases = range(2, space)
    # Each phase follows a dimension of space.
    is_shuffle = dims[:2] == [0, 1] and all(
        before >= space for before, dim in itertools.pairwise(dims) if dim in phases
    )
    is_shuffle &= is_same_shape((sizes[0], *sizes[space:]), (value.shape[0], *value.shape[2:]))
    if not is_shuffle or sizes[1] < _LEAST_CHANNELS or math.prod(sizes[2:space]) == 1:
        return None
    try:
        numbers, of_filters = (math.prod(hints(of.shape)) for of in (value, weight))
    except ValueError:  # a size depends on data
        return None
    is_large = numbers >= max(_LEAST_RATIO * of_filters, _LEAST_NUMBERS)
    return (view, permute) if is_large else None


def _only_user(node: Node, targets: Collection[Any]) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target in targets else None


def _makes_pixels(copy: Node) -> bool:
    """Returns whether a node copies its operand, whose strides then make no difference, and each
    reader joins the last dimension of the copy with another one."""
    memory_format: Any = copy.kwargs.get("memory_format")
    if copy.target is not _aten.clone.default or memory_format != torch.contiguous_format:
        return False
    last = copy.meta["val"].shape[-1:]
    return all(
        user.target in _VIEWS and not is_same_shape(user.meta["val"].shape[-1:], last)
        for user in copy.users
    )


def _dims_of(permute: Node) -> list[int]:
    dims: Any = permute.args[1]
    return [dim % len(dims) for dim in dims]


def _order_filters(graph: Graph, one: ConvolutionCall, channels: int) -> None:
    """Puts the filters and the biases of each phase together."""
    weight = one.operands[1].meta["val"]
    call = functools.partial(add_call, graph)
    options = {"dtype": torch.int64, "device": weight.device, "requires_grad": False}
    iota = torch.ops.prims.iota.default
    with weight.fake_mode, graph.inserting_before(one.node):
        places = call(iota, weight.shape[0], start=0, step=1, **options)
        places = call(_aten.view.default, places, [channels, weight.shape[0] // channels])
        places = call(_aten.reshape.default, call(_aten.permute.default, places, [1, 0]), [-1])
        for argument, operand in enumerate(one.operands[1:3], 1):
            if operand is not None:
                one.node.update_arg(argument, call(_aten.index.Tensor, operand, [places]))


def _read_phases_first(view: Node, permute: Node) -> None:
    """Lets a pixel shuffle read the output of ordered filters."""
    value, sizes = (one.meta["val"] for one in (view.args[0], view))  # type: ignore[union-attr]
    space = sizes.dim() - value.dim() + 2
    order = [0, *range(2, space), 1, *range(space, sizes.dim())]
    given: Any = view.args[1]
    view.update_arg(1, [given[dim] for dim in order])
    permute.update_arg(1, [order.index(dim) for dim in _dims_of(permute)])
    with value.fake_mode:
        view.meta["val"] = value.reshape([sizes.shape[dim] for dim in order])
        permute.meta["val"] = view.meta["val"].permute(permute.args[1])
