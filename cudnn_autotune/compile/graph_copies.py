"""Copies of a graph of Dynamo, in which this package's functions replace PyTorch's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from cudnn_autotune.compile.aliasing import (
    BATCH_NORMS,
    NORMS,
    arguments_of_norm,
    fake_tensors,
    takes_statistics,
    value_of,
)
from cudnn_autotune.compile.formulas import FORMULAS
from cudnn_autotune.compile.pads import fold_pads
from cudnn_autotune.nn.counterparts import CONVOLUTIONS, COUNTERPARTS


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
    """Returns a copy of a graph in which PyTorch's convolutions are this package's, and pad what is
    padded with zeros in front of them."""
    graph = copied(graph)
    policy = {"sampling": sampling, "workspace_limit": workspace_limit}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in COUNTERPARTS:
            node.target = COUNTERPARTS[node.target]
            node.kwargs = {**node.kwargs, **policy}
    fold_pads(graph)
    graph.recompile()
    return graph


def use_formulas(graph: GraphModule, *, keeps_layout: bool = False) -> None:
    """Replaces norms, upsampling and poolings in a graph of Dynamo by formulas for channels_last.

    Args:
        keeps_layout: whether results of norms are in their inputs' layout, and not in PyTorch's.
    """
    for target, formula in FORMULAS.items():
        for node in graph.graph.find_nodes(op="call_function", target=target):
            node.target = formula
            output = value_of(node)
            if target in (F.group_norm, F.instance_norm) and isinstance(output, Tensor):
                options = {"dtype": output.dtype, "keeps_layout": keeps_layout}
                node.kwargs = {**node.kwargs, **options}
    graph.recompile()


def drop_biases(graph: GraphModule) -> None:
    """Drops the biases of convolutions in a graph of Dynamo where an instance norm alone reads the
    output. Before a batch norm in training mode, whose running mean counts a bias, it drops the
    bias's gradient.

    Such a norm subtracts the mean of each channel, and the bias with it. So the output does not
    depend on the bias, whose gradient is zero. PyTorch's differs from zero by what is rounded. The
    bias minus itself is added to the norm's own: a NaN or an infinity goes on into the output, and
    the bias gets its gradient. A convolution without gradients keeps its bias, which gets none.
    """
    for norm in list(graph.graph.nodes):
        if norm.op != "call_function" or norm.target not in NORMS:
            continue
        given = arguments_of_norm(norm)
        convolution: Any = given.get("input")
        is_only = (
            isinstance(convolution, Node)
            and convolution.op == "call_function"
            and convolution.target in CONVOLUTIONS
            and set(convolution.users) == {norm}
            and _has_batch(convolution)
            and _has_gradient(convolution)
        )
        bias = argument_of(convolution, 2, "bias") if is_only else None
        shift = given.get("bias")
        subtracts = takes_statistics(norm) is True
        if not (subtracts and isinstance(bias, Node) and isinstance(shift, Node)):
            continue
        with graph.graph.inserting_before(norm):
            shifted = graph.graph.call_function(_with_not_finite_of, (shift, bias))
        shifted.meta = dict(shift.meta)
        _set_argument(norm, NORMS[norm.target].index("bias"), "bias", shifted)
        constant = None
        if norm.target in BATCH_NORMS or given.get("running_mean") is not None:
            with graph.graph.inserting_before(convolution):
                constant = graph.graph.call_function(torch.Tensor.detach, (bias,))
            constant.meta = dict(bias.meta)
        _set_argument(convolution, 2, "bias", constant)
    graph.recompile()


def _has_batch(convolution: Node) -> bool:
    """Returns whether a convolution's channels are its output's second dimension, as a norm's are.
    Those of a single image are its first."""
    weight = argument_of(convolution, 1, "weight")
    dims = [value.dim() for value in fake_tensors([convolution, weight]).values()]
    return len(dims) == 2 and dims[0] == dims[1]


def _has_gradient(node: Node) -> bool:
    """Returns whether autograd records a call: not within ``torch.no_grad()``."""
    return any(value.requires_grad for value in fake_tensors([node]).values())


def _set_argument(node: Node, position: int, name: str, value: Node | None) -> None:
    if len(node.args) > position:
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)


def _with_not_finite_of(shift: Tensor, bias: Tensor) -> Tensor:
    """Returns the shift of each channel, or NaN where the channel's bias is not finite."""
    # Inductor of torch 2.11 takes a product with zero for zero.
    return shift + (bias - bias).to(shift.dtype)


def argument_of(node: Node, position: int, name: str, default: Any = None) -> Any:
    """Returns an argument of a call; the default if it is not given."""
    return node.kwargs.get(name, node.args[position] if len(node.args) > position else default)
