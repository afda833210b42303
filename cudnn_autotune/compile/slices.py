"""The replacement of concatenations by slices of one tensor, which convolutions write in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from cudnn_autotune.compile.concatenations import ConvolutionCall, Family
from cudnn_autotune.compile.marks import MARKS
from cudnn_autotune.engines.problem import strides_of

_aten = torch.ops.aten
_fused = torch.ops.cudnn_autotune.conv_fused.default
_fused_into = torch.ops.cudnn_autotune.conv_fused_into_.default


def replace_families(graph: Graph, families: Sequence[Family]) -> None:
    """Makes one tensor of each family of concatenations, whose slices are written in place.

    Args:
        families: families found in the graph, in its order. They are invalid afterwards.
    """
    if not families:
        return
    from torch._inductor.inductor_prims import force_stride_order  # slow to import

    strides = {node: node.meta["val"].stride() for node in _behind(graph, families)}
    replaced: dict[Node, Node] = {}
    for family in families:
        _replace(graph, family, replaced)
    # Inductor gives outputs the strides of the graph's tensors, which follow the slices' strides.
    for node, expected in strides.items():
        value = replaced.get(node, node)
        users = tuple(value.users)
        with graph.inserting_after(value):
            result = graph.call_function(force_stride_order, (value, expected))
        result.meta = dict(node.meta)
        value.replace_all_uses_with(result, users.__contains__)


def _behind(graph: Graph, families: Sequence[Family]) -> list[Node]:
    """Returns the values from families that a graph returns, itself or as views."""
    behind = {node for family in families for node in (*family.parts, *family.concatenations)}
    for node in graph.nodes:
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    found: dict[Node, None] = {}
    for node in graph.output_node().all_input_nodes:
        while _is_view(node):
            node = node.args[0]
        if node in behind and node.op == "call_function":
            value = node.meta["val"]
            if isinstance(value, Tensor) and all(isinstance(n, int) for n in value.stride()):
                found[node] = None
    return list(found)


def _is_view(node: Node) -> bool:
    """Returns whether a node's value shares memory with its first argument."""
    schema = getattr(node.target, "_schema", None)
    aliased = schema.arguments[0].alias_info if schema and schema.arguments else None
    return aliased is not None and not aliased.is_write


def _replace(graph: Graph, family: Family, replaced: dict[Node, Node]) -> None:
    """Makes one tensor of a family.

    Args:
        replaced: the family's node -> the new node; this family's ones are added.
    """

    def now(node: Node) -> Node:
        return replaced.get(node, node)

    order = {node: index for index, node in enumerate(graph.nodes)}

    def first_of(nodes: Iterable[Node]) -> Node:
        return min(map(now, nodes), key=order.__getitem__)

    value = family.value
    sizes, mode = list(value.shape), value.fake_mode  # type: ignore[attr-defined]
    strides = list(strides_of(sizes, channels_last=True))
    options: Any = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    with graph.inserting_before(first_of((*family.concatenations, *family.written))):
        whole = graph.call_function(_aten.empty_strided.default, (sizes, strides), options)
    with mode:
        whole.meta["val"] = torch.empty_strided(sizes, strides, **options)

    def sliced(node: Node) -> Node:
        first, count = family.slices[node]
        found = graph.call_function(_aten.slice.Tensor, (whole, 1, first, first + count))
        with mode:
            found.meta["val"] = whole.meta["val"].narrow(1, first, count)
        return found

    for part in family.copied:
        with graph.inserting_before(first_of(family.concatenations_of(part))):
            copy = graph.call_function(_aten.copy_.default, (sliced(part), now(part)))
        copy.meta["val"] = copy.args[0].meta["val"]  # type: ignore[union-attr]
    for node in (one.node for one in family.convolutions):
        one = ConvolutionCall.of(now(node))
        if one is None:  # it writes a part of another family
            continue
        arguments = one.arguments(one.operands)
        with graph.inserting_before(one.node):
            if node in family.written:
                call = graph.call_function(_fused_into, (sliced(node), *arguments))
                call.meta["val"] = None
                result = sliced(node)
            else:
                result = graph.call_function(_fused, arguments)
                result.meta = dict(one.node.meta)
        marked = one.node.args[0]
        one.node.replace_all_uses_with(result)
        graph.erase_node(one.node)
        replaced[node] = result
        if isinstance(marked, Node) and marked.target in MARKS and not marked.users:
            graph.erase_node(marked)
    for cat in family.concatenations:
        with graph.inserting_before(cat):
            replaced[cat] = sliced(cat)
        cat.replace_all_uses_with(replaced[cat])
        graph.erase_node(cat)
