"""Copies of a graph of Dynamo, in which this package's functions replace PyTorch's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from cudnn_autotune.compile.aliasing import value_of
from cudnn_autotune.compile.formulas import FORMULAS
from cudnn_autotune.nn.counterparts import COUNTERPARTS


def copied(graph: GraphModule) -> GraphModule:
    """Returns a copy of a graph with the same tensors; a compiler may change the copy."""
    nodes = torch.fx.Graph()
    renamed: dict[Node, Node] = {}
    output = nodes.graph_copy(graph.graph, renamed)
    nodes.output(output)
    nodes.output_node().meta = dict(graph.graph.output_node().meta)
    copy = GraphModule(graph, nodes)
    copy.meta = dict(graph.meta)
    for old, new in renamed.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    for name in ("_param_name_to_source", "_source_to_user_stacks", "_backend_id"):
        if hasattr(graph, name):
            setattr(copy, name, getattr(graph, name))
    return copy


def with_our_convolutions(
    graph: GraphModule, sampling: str | None, workspace_limit: int | None
) -> GraphModule:
    """Returns a copy of a graph in which PyTorch's convolutions are this package's."""
    graph = copied(graph)
    policy = {"sampling": sampling, "workspace_limit": workspace_limit}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in COUNTERPARTS:
            node.target = COUNTERPARTS[node.target]
            node.kwargs = {**node.kwargs, **policy}
    graph.recompile()
    return graph


def use_formulas(graph: GraphModule, *, keeps_layout: bool = False) -> None:
    """Replaces norms and upsampling in a graph of Dynamo by formulas for channels_last.

    Args:
        keeps_layout: whether results of norms are in their inputs' layout, and not in PyTorch's.
    """
    for target, formula in FORMULAS.items():
        for node in graph.graph.find_nodes(op="call_function", target=target):
            node.target = formula
            output = value_of(node)
            if target is not F.interpolate and isinstance(output, Tensor):
                options = {"dtype": output.dtype, "keeps_layout": keeps_layout}
                node.kwargs = {**node.kwargs, **options}
    graph.recompile()
