"""Puts a graph of Dynamo into another layout than that of its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from cudnn_autotune.nn.models.frozen_weights import copied

OTHER = {"contiguous": "channels_last", "channels_last": "contiguous"}
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


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
    _check_outputs(placeholders, output)
    for node in placeholders:
        value = node.meta["example_value"]
        if not isinstance(value, Tensor) or value.dim() not in _LAST:
            continue
        readers = list(node.users)
        with graph.graph.inserting_after(node):
            laid_out = graph.graph.call_function(_laid_out, (node, memory_format))
        laid_out.meta = dict(node.meta)
        for reader in readers:
            reader.replace_input_with(node, laid_out)
    for node in list(output.all_input_nodes):
        value = node.meta["example_value"]
        if isinstance(value, Tensor):
            with graph.graph.inserting_before(output):
                restored = graph.graph.call_function(_in_strides, (node, value.stride()))
            restored.meta = dict(node.meta)
            output.replace_input_with(node, restored)
    graph.recompile()
    return graph


def _check_outputs(placeholders: Sequence[Node], output: Node) -> None:
    """Raises ValueError where a copy would not do, or the strides are not known."""
    inputs, outputs = (_tensors(nodes) for nodes in (placeholders, output.all_input_nodes))
    if any(isinstance(number, torch.SymInt) for value in outputs for number in value.stride()):
        raise ValueError("sizes are dynamic")
    memory = [value.untyped_storage()._cdata for value in outputs]
    others = {value.untyped_storage()._cdata for value in inputs}
    if len(set(memory)) < len(memory) or others.intersection(memory):
        raise ValueError("an output shares memory with an input or another output")


def _tensors(nodes: Sequence[Node]) -> list[Tensor]:
    values = (node.meta["example_value"] for node in nodes)
    return [value for value in values if isinstance(value, Tensor)]


# Inductor traces what these do with the tensors that it has for their inputs.


def _laid_out(x: Tensor, memory_format: str) -> Tensor:
    # contiguous() would keep the strides of a kernel of size 1, which fit both layouts.
    wanted = _LAST[x.dim()] if memory_format == "channels_last" else torch.contiguous_format
    return x.to(memory_format=wanted)


def _in_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
