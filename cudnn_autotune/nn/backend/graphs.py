"""Copies of a graph of Dynamo: with this package's convolutions, with constant weights, in another
layout.

Inductor folds batch norms into convolutions only if their parameters are constants of the graph. A
graph that was compiled so ignores what is written into the model's weights afterwards. Dynamo hands
the weights to the graph at each call, so the program looks whether they still are what was folded.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from cudnn_autotune.nn.models.routing import COUNTERPARTS

OTHER_LAYOUT = {"contiguous": "channels_last", "channels_last": "contiguous"}
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

_version = operator.attrgetter("_version")


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


class FrozenWeights:
    """The weights among the inputs of a graph, as they were when they became constants.

    Args:
        positions: those of the weights among the inputs.
        inputs: all inputs.
    """

    def __init__(self, positions: Sequence[int], inputs: Sequence[Any]) -> None:
        self._pick = [inputs[i] for i in positions]
        self._positions = list(positions)
        self._versions = list(map(_version, self._pick))
        self._addresses = list(map(Tensor.data_ptr, self._pick))

    def are_those_of(self, inputs: Sequence[Any]) -> bool:
        """Returns whether the same weights are given, and nothing was written into them since.

        A write that PyTorch itself does not count is not seen: one through ``.data``, or by a CUDA
        kernel that was not told of the tensor.
        """
        given = [inputs[i] for i in self._positions]
        return (
            all(map(operator.is_, given, self._pick))
            and list(map(_version, given)) == self._versions
            and list(map(Tensor.data_ptr, given)) == self._addresses
        )


def weights_of(graph: GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Returns the positions, among the inputs of a graph, of parameters and buffers of modules that
    can be watched. An input that Dynamo made symbolic sizes for is none."""
    positions = []
    placeholders = graph.graph.find_nodes(op="placeholder")
    for i, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
        source = getattr(node, "_dynamo_source", None)
        if source is None or not source.guard_source.is_unspecialized_nn_module():
            continue
        if type(value) in (Tensor, nn.Parameter) and not value.is_inference():
            positions.append(i)
    return positions


def with_constants(
    graph: GraphModule, inputs: Sequence[Any], positions: Sequence[int]
) -> GraphModule:
    """Returns a copy of a graph with the inputs at ``positions`` as attributes, which are the given
    tensors."""
    frozen = copied(graph)
    placeholders: list[Node] = frozen.graph.find_nodes(op="placeholder")
    for i in positions:
        node, name = placeholders[i], f"_frozen_{i}"
        value = inputs[i]
        if isinstance(value, nn.Parameter):
            frozen.register_parameter(name, value)
        else:
            frozen.register_buffer(name, value)
        with frozen.graph.inserting_before(node):
            constant = frozen.graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        frozen.graph.erase_node(node)
    # Dynamo's notes on where parameters come from do not fit any more.
    frozen.meta.pop("dynamo_compile_id", None)
    frozen.recompile()
    return frozen


def in_layout(graph: GraphModule, memory_format: str) -> GraphModule:
    """Returns a copy of a graph whose inputs and weights of 4 and 5 dimensions are copied into a
    layout first. Its outputs have the strides that those of the given graph have.

    Args:
        memory_format: ``"contiguous"`` or ``"channels_last"``.

    Raises:
        ValueError: an output of the graph shares memory with an input or another output, or its
            strides are not known ahead.
    """
    graph = copied(graph)
    placeholders: list[Node] = graph.graph.find_nodes(op="placeholder")
    output = graph.graph.output_node()
    inputs, outputs = _tensors(placeholders), _tensors(output.all_input_nodes)
    if any(isinstance(step, torch.SymInt) for x in outputs.values() for step in x.stride()):
        raise ValueError("sizes are dynamic")
    memory, others = (
        [value.untyped_storage()._cdata for value in values.values()]
        for values in (outputs, inputs)
    )
    if len(set(memory)) < len(memory) or not set(memory).isdisjoint(others):
        raise ValueError("an output shares memory with an input or another output")
    for node, value in inputs.items():
        if value.dim() not in _LAST:
            continue
        readers = list(node.users)
        with graph.graph.inserting_after(node):
            laid_out = graph.graph.call_function(_laid_out, (node, memory_format))
        laid_out.meta = dict(node.meta)
        for reader in readers:
            reader.replace_input_with(node, laid_out)
    for node, value in outputs.items():
        with graph.graph.inserting_before(output):
            restored = graph.graph.call_function(_in_strides, (node, value.stride()))
        restored.meta = dict(node.meta)
        output.replace_input_with(node, restored)
    graph.recompile()
    return graph


def _tensors(nodes: Iterable[Node]) -> dict[Node, Tensor]:
    """Returns the nodes that stand for tensors, each with its fake one."""
    values = {node: node.meta["example_value"] for node in nodes}
    return {node: value for node, value in values.items() if isinstance(value, Tensor)}


# Inductor traces what these two do with the tensors that it has for their inputs.


def _laid_out(x: Tensor, memory_format: str) -> Tensor:
    # contiguous() would keep the strides of a kernel of size 1, which fit both layouts.
    wanted = _LAST[x.dim()] if memory_format == "channels_last" else torch.contiguous_format
    return x.to(memory_format=wanted)


def _in_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
