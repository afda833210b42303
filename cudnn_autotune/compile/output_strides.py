"""Strides of a graph's outputs, which rewrites of the graph do not change.

Inductor reads them from the values of the graph of ATen operators. In torch 2.11 it does so after
this package's rewrites, in torch 2.14 before them. With torch 2.11 an output would be in the layout
of a rewrite. In channels_last the last frames of one volume are dense, and Inductor takes a copy of
them for the same tensor: such an output would keep the whole volume in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from cudnn_autotune.compile.groups import add_call, is_same_shape
from cudnn_autotune.engines.problem import strides_of

_aten = torch.ops.aten
Strides = tuple[int | torch.SymInt, ...]


def visible_strides(graph: GraphModule) -> dict[int, Strides]:
    """Returns the strides of a graph's outputs that the caller sees, by their places; none if
    Inductor knows them already."""
    output = graph.graph.output_node()
    if "original_output_strides" in output.meta:
        return {}
    nodes: Any = output.args[0]
    values = {i: nodes[i].meta.get("val") for i in output.meta.get("user_visible_output_idxs", ())}
    return {i: value.stride() for i, value in values.items() if isinstance(value, Tensor)}


def restore_strides(
    graph: GraphModule, inputs: Sequence[Any], strides: Mapping[int, Strides]
) -> None:
    """Copies outputs into their earlier strides, directly behind the nodes that compute them.

    An output that shares memory with another one stays as it is. So does one of symbolic sizes,
    unless its earlier strides are contiguous.

    Args:
        graph: the values of its nodes are computed anew.
        inputs: fake tensors, and other values.
        strides: as of :func:`visible_strides` before the rewrites.
    """
    from torch._inductor.compile_fx import fake_tensor_prop  # slow to import
    from torch._inductor.fx_utils import get_node_storage

    if not strides:
        return
    with torch.no_grad():
        fake_mode = fake_tensor_prop(graph, inputs)
    output = graph.graph.output_node()
    nodes: Any = output.args[0]
    wanted = {nodes[i]: given for i, given in strides.items()}
    sharing = Counter(get_node_storage(node) for node in output.all_input_nodes)
    for node, given in wanted.items():
        if is_same_shape(node.meta["val"].stride(), given) or sharing[get_node_storage(node)] > 1:
            continue
        with fake_mode, graph.graph.inserting_after(node):
            output.replace_input_with(node, _copy(node, given))


def _copy(node: Node, strides: Strides) -> Node:
    """Adds a copy of a node's value in these strides to its graph, and returns it. For strides or
    sizes that are symbolic, and not contiguous, it returns the node itself."""
    value, graph = node.meta["val"], node.graph
    if is_same_shape(strides, strides_of(value.shape, channels_last=False)):
        return add_call(graph, _aten.clone.default, node, memory_format=torch.contiguous_format)
    if not all(isinstance(size, int) for size in (*value.shape, *strides)):
        return node
    options = {"dtype": value.dtype, "device": value.device}
    empty = add_call(
        graph, _aten.empty_strided.default, list(value.shape), list(strides), **options
    )
    with graph.inserting_after(empty):
        return add_call(graph, _aten.copy.default, empty, node)
