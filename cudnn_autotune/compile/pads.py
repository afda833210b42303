"""Zeros padded in front of convolutions, which become the convolutions' own padding.

The graph is Dynamo's, before autograd, so that gradients need no padded tensor either.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from cudnn_autotune.compile.aliasing import fake_tensors, storages, written_by
from cudnn_autotune.engines.problem import DTYPES, split_sides
from cudnn_autotune.nn.counterparts import COUNTERPARTS

_PAD = torch._C._nn.pad
_CONSTANT_PAD = torch.ops.aten.constant_pad_nd
_PADS = (_PAD, torch.constant_pad_nd, _CONSTANT_PAD, _CONSTANT_PAD.default)
_DIMS = {
    ours: int(ours.__name__[-2])
    for ours in COUNTERPARTS.values()
    if "transpose" not in ours.__name__
}
"""This package's convolutions -> numbers of spatial dimensions."""
_OPERATORS = {
    target: dims
    for dims in (1, 2, 3)
    for packet in (getattr(torch.ops.aten, f"conv{dims}d"),)
    for target in (packet, packet.default)
}
"""PyTorch's operators of marked convolutions -> numbers of spatial dimensions."""
_MARKS = {
    target
    for packet in (torch.ops.cudnn_autotune.mark_input, torch.ops.cudnn_autotune.mark_padded)
    for target in (packet, packet.default)
}
_Change = tuple[Node, Any, tuple[Any, ...], dict[str, Any]]
"""A node, and its new target and arguments."""


def fold_pads(graph: GraphModule) -> None:
    """Lets convolutions pad what is padded with zeros in front of them, if only they read it.

    Pads of channels and of unknown or negative sizes stay, and those of a tensor that is written
    into later.

    Args:
        graph: of Dynamo, with this package's convolutions. It is changed: a convolution that pads
            one side more gets twice as many numbers.
    """
    pads = [n for n in graph.graph.nodes if n.op == "call_function" and n.target in _PADS]
    for pad in reversed(pads):  # the one next to the convolution comes first
        _fold(graph.graph, pad)
    if pads:
        graph.recompile()


def _fold(graph: Graph, pad: Node) -> None:
    source, sizes = _read(pad)
    if source is None or not pad.users or not _is_the_same_later(graph, pad, source):
        return
    found = [_padded(reader, pad, source, sizes) for reader in pad.users]
    if None in found:
        return
    for changes in found:
        for node, target, args, kwargs in changes or ():
            node.target, node.args, node.kwargs = target, args, kwargs
    graph.erase_node(pad)


def _read(pad: Node) -> tuple[Node | None, Sequence[int]]:
    """Returns what a node pads with zeros, and by how much, the last dimension first; no node if
    the convolutions behind it cannot pad so."""
    names = ("input", "pad", "mode", "value") if pad.target is _PAD else ("input", "pad", "value")
    given: dict[str, Any] = dict(zip(names, pad.args, strict=False)) | dict(pad.kwargs)
    source, sizes = given.get("input", given.get("self")), given.get("pad", ())
    value = given.get("value", 0)
    is_zero = value is None or (isinstance(value, (int, float)) and value == 0)
    if given.get("mode", "constant") != "constant" or not is_zero or not isinstance(source, Node):
        return None, ()
    is_known = isinstance(sizes, (tuple, list)) and all(isinstance(size, int) for size in sizes)
    if not is_known or min(sizes, default=-1) < 0:
        return None, ()
    tensors = fake_tensors([source, pad])
    is_right = (
        len(tensors) == 2
        and tensors[source].dtype in DTYPES
        and _has_elements(tensors[source].shape)
    )
    return (source, sizes) if is_right else (None, ())


def _has_elements(shape: Sequence[Any]) -> bool:
    """Returns whether no size is 0 at any call; PyTorch refuses some of these."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return all(statically_known_true(size > 0) for size in shape)


def _is_the_same_later(graph: Graph, pad: Node, source: Node) -> bool:
    """Returns whether the readers of a pad can pad themselves: until the last one no gradients are
    switched on or off, and nothing behind the pad writes into what is padded. Autograd, too, keeps
    that instead of the padded tensor."""
    memory, left = storages(source), set(pad.users)
    behind = iter(graph.nodes)
    for node in behind:
        if node is pad:
            break
    for node in behind:
        if (left and _switches_gradients(node)) or not memory.isdisjoint(written_by(node)):
            return False
        left.discard(node)
    return True


def _switches_gradients(node: Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return "grad_enabled" in name or "inference_mode" in name


def _padded(reader: Node, pad: Node, source: Node, sizes: Sequence[int]) -> list[_Change] | None:
    """Returns the changes by which the convolution that reads a pad, by a mark or not, pads by
    ``sizes`` more; None if the reader is another node, or cannot."""
    if reader.op != "call_function":
        return None
    if reader.target in _MARKS:
        return _padded_marked(reader, source, sizes)
    target: Any = reader.target
    if (dims := _DIMS.get(target)) is None:
        return None
    call = inspect.signature(target).bind(*reader.args, **reader.kwargs)
    call.apply_defaults()
    if [name for name, value in call.arguments.items() if value is pad] != ["input"]:
        return None
    total = _total(call.arguments["padding"], sizes, dims)
    if total is None:
        return None
    even = total[:dims] == total[dims:]
    call.arguments.update(input=source, padding=total[:dims] if even else total)
    return [(reader, target, call.args, call.kwargs)]


def _padded_marked(mark: Node, source: Node, sizes: Sequence[int]) -> list[_Change] | None:
    """Returns the changes of a mark and of its convolution, PyTorch's operator, as a converted
    layer calls it."""
    convolution = next(iter(mark.users), None)
    target: Any = getattr(convolution, "target", None)
    if convolution is None or len(mark.users) > 1 or target not in _OPERATORS:
        return None
    *first, padding, dilation, groups = convolution.args
    dims, policy = _OPERATORS[target], mark.args[-2:]
    total = None if len(first) != 4 else _total(padding, sizes, dims)
    if total is not None and len(mark.args) == 4:
        extra: Any = mark.args[1]
        total = [one + more for one, more in zip(total, extra, strict=True)]
    if total is None:
        return None
    both, rest = split_sides(total)
    ours = torch.ops.cudnn_autotune
    of_mark: _Change = (mark, ours.mark_input, (source, *policy), {})
    if any(rest):
        of_mark = (mark, ours.mark_padded, (source, rest, *policy), {})
    return [of_mark, (convolution, target, (*first, both, dilation, groups), {})]


def _total(own: Any, sizes: Sequence[int], dims: int) -> list[int] | None:
    """Returns a convolution's own padding and ``sizes`` together, first before each dimension and
    then after each; None if they do not fit together."""
    if own == "valid":
        own = 0
    own = [own] * dims if isinstance(own, int) else own
    if not isinstance(own, (tuple, list)) or not all(isinstance(size, int) for size in own):
        return None
    own = list(own) * dims if len(own) == 1 else list(own)
    own = own * 2 if len(own) == dims else own
    if len(own) != 2 * dims or min(own) < 0 or any(sizes[2 * dims :]):
        return None
    added = [*sizes, *[0] * (2 * dims - len(sizes))][: 2 * dims]
    before, after = added[::2][::-1], added[1::2][::-1]
    return [one + more for one, more in zip(own, before + after, strict=True)]
