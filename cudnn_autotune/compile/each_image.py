"""Convolutions whose groups are the images of a batch, replaced by convolutions of each image."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from cudnn_autotune.compile.aliasing import fake_tensors, written_among
from cudnn_autotune.compile.formulas import conv_each_image
from cudnn_autotune.functional import conv2d

# Groups of fewer channels have faster engines, of cuDNN or of this package.
_MANY_CHANNELS = 64
_HALF_TYPES = {torch.float16, torch.bfloat16}


def convolve_each_image(graph: GraphModule) -> None:
    """Replaces convolutions whose groups are the images of a batch, and the reshapes around them,
    by calls that convolve each image with its filters.

    StyleGAN2 and dynamic convolutions use groups so. In channels_last the images would be
    interleaved pixel by pixel. These calls compute in channels_last, so :func:`in_layout` has to
    put the graph into it afterwards.
    """
    for node in graph.graph.find_nodes(op="call_function", target=conv2d):
        _convolve_each_image(graph.graph, node)
    graph.recompile()


def _convolve_each_image(graph: Graph, node: Node) -> None:
    call = inspect.signature(conv2d).bind(*node.args, **node.kwargs)
    call.apply_defaults()
    joined, weight, bias, stride, padding, dilation, groups, *policy = call.arguments.values()
    users = list(node.users)
    if bias is not None or isinstance(padding, str) or not all(map(_reshapes, (joined, *users))):
        return
    if isinstance(padding, (tuple, list)) and len(padding) > 2:
        return  # one side more than the other
    images = joined.args[0] if joined.args else joined.kwargs["input"]
    tensors = fake_tensors([images, joined, weight, node, *users])
    dtypes = {value.dtype for value in tensors.values()}
    if len(tensors) < 4 + len(users) or len(dtypes) > 1 or not dtypes <= _HALF_TYPES:
        return
    apart, together, filters, output, *others = (tuple(one.shape) for one in tensors.values())
    sizes = (*apart, *together, *filters, *output)
    # A reshape may be a view of a tensor that is written into, or a copy of it.
    is_known = len(apart) == 4 and all(isinstance(size, int) for size in sizes)
    if not is_known or written_among(graph, (images, joined, node)):
        return
    n, channels, *size = apart
    is_of_images = 1 < n == groups and together == (1, n * channels, *size)
    if not is_of_images or channels < _MANY_CHANNELS:
        return
    if any(shape != (n, filters[0] // n, *output[2:]) for shape in others):
        return
    with graph.inserting_before(node):
        arguments = (images, weight, stride, padding, dilation, *policy)
        convolved = graph.call_function(conv_each_image, arguments)
    for user in users:
        convolved.meta = dict(user.meta)
        user.replace_all_uses_with(convolved)
        graph.erase_node(user)
    graph.erase_node(node)
    if not joined.users:
        graph.erase_node(joined)


def _reshapes(node: Any) -> bool:
    """Returns whether a node of a graph of Dynamo reshapes a tensor."""
    return isinstance(node, Node) and (
        (node.op == "call_method" and node.target in ("reshape", "view"))
        or (node.op == "call_function" and node.target is torch.reshape)
    )
