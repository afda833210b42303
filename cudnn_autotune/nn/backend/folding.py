"""Folds what scales and shifts the channels of a convolution's output into its weight and bias.

A batch norm in eval mode does that, and so do a layer scale and torchvision's FrozenBatchNorm2d. In
a functional graph of ATen operators they are additions, subtractions, multiplications and divisions
by one number for each channel, or for all of them. The program computes the folded weights at each
call, of what the parameters and buffers are then, so they are never stale.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from cudnn_autotune.engines.problem import DTYPES
from cudnn_autotune.nn.fake import is_channels_last_image
from cudnn_autotune.nn.inductor import _mark_input

_aten = torch.ops.aten
_convolution = _aten.convolution.default
_convert = torch.ops.prims.convert_element_type.default
_add, _sub, _mul, _div = (getattr(_aten, name).Tensor for name in ("add", "sub", "mul", "div"))
_round = torch.ops.cudnn_autotune.round_each.default
_lay_out = torch.ops.cudnn_autotune.lay_out_each.default


@dataclass(frozen=True)
class Folding:
    """A convolution with a folded weight and bias, which stands beside what it replaces."""

    convolution: Node
    """Convolution with the folded weight and bias."""
    result: Node
    """Convolution, or its conversion to the dtype of what it replaces."""
    original: tuple[Node, ...]
    """Convolution that is set aside, and the nodes after it that were folded, in order."""
    computed: tuple[Node, ...]
    """Nodes that compute the folded weight and bias, in order."""
    rounded: tuple[Node, ...]
    """Nodes in ``computed`` that round them to the convolution's dtype."""


@dataclass(frozen=True)
class _Chain:
    """A convolution, and the nodes after it that scale and shift its channels."""

    nodes: tuple[Node, ...]
    """Convolution, and those after it."""
    steps: tuple[tuple[Any, Node | float], ...]
    """Operator and its other operand, for each that scales or shifts."""


def fold(graph: Graph, weights: Iterable[Node]) -> list[Folding]:
    """Folds what follows convolutions into their weights and biases, wherever it can.

    The arithmetic is that of ``torch.nn.utils.fusion.fuse_conv_bn_weights``, in float32 (float64
    for float64), and is rounded once. :func:`settle` has to be called afterwards.

    Args:
        graph: nodes call operators of ATen, and have their fake tensors in ``meta["val"]``.
        weights: the placeholders that hold the model's parameters and buffers. Only what is
            computed of these alone is folded.
    """
    fixed = _computed_of(graph, weights)
    convolutions = graph.find_nodes(op="call_function", target=_convolution)
    chains = [chain for node in convolutions if (chain := _chain(node, fixed)) is not None]
    if not chains:
        return []
    first = chains[0].nodes[0]
    needed = [step for chain in chains for _, step in chain.steps if isinstance(step, Node)]
    for chain in chains:
        needed += [arg for arg in chain.nodes[0].args[1:3] if isinstance(arg, Node)]
    _hoist(graph, needed, first)
    return [_folded(graph, chain, first) for chain in chains]


def settle(graph: Graph, foldings: Sequence[Folding]) -> None:
    """Takes back the foldings whose convolution was not fused, and removes what the others replace.

    A compiler computes a batch norm in the kernel after an unfused convolution for nothing. The
    weights that stay folded are rounded by one operator, which makes few kernels of them all.
    """
    left = set(graph.nodes)
    kept = [folding for folding in foldings if folding.convolution not in left]
    rounded = [node for folding in kept for node in folding.rounded]
    if rounded:
        dtypes = {node.args[1] for node in rounded}
        with graph.inserting_before(foldings[0].original[0]):
            for dtype in sorted(dtypes, key=str):
                _round_together(graph, [node for node in rounded if node.args[1] == dtype])
    for folding in foldings:
        convolution, *_, last = folding.original
        if folding in kept:
            marked: Any = convolution.args[0]
            _erase(graph, folding.original)
            if marked.target is _mark_input and not marked.users:
                graph.erase_node(marked)
        else:
            convolution.target = _convolution
            folding.result.replace_all_uses_with(last)
            _erase(graph, dict.fromkeys((*folding.computed, folding.convolution, folding.result)))


def _set_aside(*_: object) -> None:
    """Stands for the original convolution until it is settled, so that nothing else takes it."""


def _computed_of(graph: Graph, weights: Iterable[Node]) -> set[Node]:
    """Returns the nodes whose values depend on nothing but ``weights``."""
    fixed = set(weights)
    for node in graph.nodes:
        if _is_pure(node) and all(arg in fixed for arg in node.all_input_nodes):
            fixed.add(node)
    return fixed


def _is_pure(node: Node) -> bool:
    """Returns whether it makes no difference where in the graph a node is."""
    target: Any = node.target
    if target in (_lay_out, operator.getitem):
        return True
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace in ("aten", "prims")
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
    )


def _chain(convolution: Node, fixed: Collection[Node]) -> _Chain | None:
    _, weight, bias, _, _, _, transposed, _, _ = convolution.args
    output, shape = convolution.meta["val"], weight.meta["val"].shape  # type: ignore[union-attr]
    if transposed or output.dtype not in DTYPES or output.dim() != len(shape):
        return None
    if weight not in fixed or not (bias is None or bias in fixed):
        return None
    nodes, steps = [convolution], []
    found = None
    while len(nodes[-1].users) == 1:
        (user,) = nodes[-1].users
        if user.target is _convert:
            if not user.meta["val"].dtype.is_floating_point:
                break
        elif (other := _channelwise_operand(user, nodes[-1], output, fixed)) is not None:
            steps.append((user.target, other))
        else:
            break
        nodes.append(user)
        if steps and user.meta["val"].dtype == output.dtype:
            found = _Chain(tuple(nodes), tuple(steps))
    # Some versions of Inductor leave out that a result is rounded to 16 bits before what is
    # computed in float32, such as an activation.
    is_longer = len(steps) > (0 if found is None else len(found.steps))
    if is_longer and nodes[-1].meta["val"].dtype == torch.float32:
        found = _Chain(tuple(nodes), tuple(steps))
    return found


def _channelwise_operand(
    user: Node, value: Node, output: Tensor, fixed: Collection[Node]
) -> Node | float | None:
    """Returns the operand, a number or one of ``fixed``, that scales or shifts the channels of a
    value; None if there is none."""
    if user.target not in (_add, _sub, _mul, _div) or user.kwargs:
        return None
    one, other = user.args
    if other is value and user.target in (_add, _mul):
        one, other = other, one
    if one is value and isinstance(other, (int, float)):
        return other
    if one is not value or not isinstance(other, Node) or other not in fixed:
        return None
    operand = other.meta["val"]
    sizes = [1] * (output.dim() - operand.dim()) + list(operand.shape)
    is_channelwise = (
        len(sizes) == output.dim()
        and all(isinstance(size, int) for size in sizes)
        and sizes[1] in (1, output.shape[1])
        and all(size == 1 for i, size in enumerate(sizes) if i != 1)
    )
    return other if is_channelwise else None


def _hoist(graph: Graph, needed: Iterable[Node], before: Node) -> None:
    """Moves nodes, and those that they are computed of, before a node that they do not need."""
    moved: set[Node] = set()
    left = list(needed)
    while left:
        node = left.pop()
        if node not in moved:
            moved.add(node)
            left += node.all_input_nodes
    is_behind = False
    for node in list(graph.nodes):
        is_behind |= node is before
        if is_behind and node in moved:
            before.prepend(node)


def _folded(graph: Graph, chain: _Chain, before: Node) -> Folding:
    """Puts a convolution with a folded weight and bias beside a chain.

    Args:
        before: the node before which these are computed.
    """
    original = chain.nodes[0]
    output, weight, bias = original.meta["val"], *original.args[1:3]
    dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
    computed: list[Node] = []

    def call(target: Any, *args: Any) -> Node:
        node = graph.call_function(target, args)
        values = (arg.meta["val"] if isinstance(arg, Node) else arg for arg in args)
        node.meta["val"] = target(*values)
        computed.append(node)
        return node

    def wide(node: Any) -> Node:
        # Autocast rounds a weight, which is to be rounded once, when it is folded.
        if node.target is _convert and node.args[0].meta["val"].dtype == dtype:
            node = node.args[0]
        return node if node.meta["val"].dtype == dtype else call(_convert, node, dtype)

    def vector(node: Any) -> Node:
        if not isinstance(node, Node):
            options = {"dtype": dtype, "device": output.device}
            number = graph.call_function(_aten.full.default, ([1], node), options)
            number.meta["val"] = output.new_full([1], node, dtype=dtype)
            computed.append(number)
            return number
        return call(_aten.reshape.default, wide(node), [node.meta["val"].numel()])

    with graph.inserting_before(before):
        scale = None
        shift = None if bias is None else vector(bias)
        for target, operand in chain.steps:
            other = vector(operand)
            if target in (_mul, _div):
                if scale is None and target is _mul:
                    scale = other
                elif scale is None:
                    scale = call(_aten.reciprocal.default, other)
                else:
                    scale = call(target, scale, other)
                shift = None if shift is None else call(target, shift, other)
            elif shift is not None:
                shift = call(target, shift, other)
            else:
                shift = other if target is _add else call(_aten.neg.default, other)
        rounded = []
        if scale is not None:
            scale = call(_aten.reshape.default, scale, [-1, *[1] * (output.dim() - 1)])
            strides = weight.meta["val"].stride()  # type: ignore[union-attr]
            weight = call(_convert, call(_mul, wide(weight), scale), output.dtype)
            rounded.append(weight)
            if output.dim() == 3 and weight.meta["val"].stride() != strides:
                # The strides of a kernel of size 1 fit both layouts, and tell which one it is in.
                shape = list(weight.meta["val"].shape)
                if is_channels_last_image(weight.meta["val"].as_strided(shape, strides)):
                    weight = call(_aten.as_strided.default, weight, shape, list(strides))
        if shift is not None:
            if shift.meta["val"].numel() != output.shape[1]:
                expanded = call(_aten.expand.default, shift, [output.shape[1]])
                shift = call(_aten.clone.default, expanded)
            bias = call(_convert, shift, output.dtype)
            rounded.append(bias)
    with graph.inserting_after(original):
        arguments = (original.args[0], weight, bias, *original.args[3:])
        convolution = graph.call_function(_convolution, arguments)
    convolution.meta = dict(original.meta)
    last, result = chain.nodes[-1], convolution
    if last.meta["val"].dtype != output.dtype:
        with graph.inserting_after(convolution):
            result = graph.call_function(_convert, (convolution, last.meta["val"].dtype))
        result.meta = dict(last.meta)
    last.replace_all_uses_with(result)
    original.target = _set_aside
    return Folding(convolution, result, chain.nodes, tuple(computed), tuple(rounded))


def _round_together(graph: Graph, nodes: Sequence[Node]) -> None:
    """Replaces nodes that round to one dtype by one operator, before which their operands are."""
    values, dtypes = zip(*(node.args for node in nodes), strict=True)
    together = graph.call_function(_round, (list(values), dtypes[0]))
    together.meta["val"] = [node.meta["val"] for node in nodes]
    for i, node in enumerate(nodes):
        item = graph.call_function(operator.getitem, (together, i))
        item.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(item)
        graph.erase_node(node)


def _erase(graph: Graph, nodes: Iterable[Node]) -> None:
    for node in reversed(list(nodes)):
        graph.erase_node(node)
