"""Copies of a graph of Dynamo in another memory format, if only strides change.

The graph is the one before autograd. Gradients go back through the copies of inputs and weights,
and what autograd saves is in the layout.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cudnn_autotune.compile.aliasing import (
    fake_tensors,
    storages,
    storages_when_run,
    value_of,
    written_among,
    written_operands,
)
from cudnn_autotune.compile.communication import LOCAL, all_nodes, namespaces_of, nested_graphs
from cudnn_autotune.compile.formulas import conv_each_image
from cudnn_autotune.compile.graph_copies import argument_of, copied
from cudnn_autotune.compile.norms import begins_transform
from cudnn_autotune.compile.weights import operators as weight_operators
from cudnn_autotune.engines.conv_layout import is_channels_last_image, laid_out
from cudnn_autotune.engines.problem import strides_of
from cudnn_autotune.nn.counterparts import CONVOLUTIONS

OTHER_LAYOUT = {"contiguous": "channels_last", "channels_last": "contiguous"}
_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# A convolution of fewer channels a group has engines for contiguous tensors without transpositions.
_FEW_CHANNELS = 16
_HALF_TYPES = {torch.float16, torch.bfloat16}
_CASTS = {torch.float32, *_HALF_TYPES}  # between which autocast casts weights
_GROUPS = 6  # the position of ``groups`` among the arguments of every convolution
# Calls that read memory by the strides which a tensor has in PyTorch.
_BY_STRIDES = {
    *("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"),
    *("resize_", "resize_as_", "set_"),
    *("triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation"),
}


def favours_channels_last(graph: GraphModule, *, for_training: bool = False) -> bool:
    """Returns whether a graph of Dynamo is likely to be faster in channels_last, if Inductor keeps
    its layout. It does so where grouped convolutions are, or most work is not 2-d, and in any
    backward.

    Engines for half types compute in channels_last. Except for depthwise convolutions and few
    channels, they transpose contiguous tensors before and after.

    Args:
        for_training: whether the graph has a backward.
    """
    work = {True: 0.0, False: 0.0}
    of_2d = 0.0
    has_groups = False
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target not in CONVOLUTIONS:
            continue
        weight = argument_of(node, 1, "weight")
        value, output = (getattr(one, "meta", {}).get("example_value") for one in (weight, node))
        if not isinstance(value, Tensor) or not isinstance(output, Tensor):
            return False
        sizes = (*value.shape, *output.shape)
        if not all(isinstance(size, int) for size in sizes):
            return False
        groups = node.kwargs.get("groups", node.args[_GROUPS] if len(node.args) > _GROUPS else 1)
        has_groups |= value.dim() == 4 and groups > 1 and value.shape[1] > 1
        is_half = output.dtype in _HALF_TYPES
        channels = output.shape[1] if output.dim() == value.dim() else 0
        suits = is_half and min(channels, *value.shape[:2]) >= _FEW_CHANNELS
        suits &= not (for_training and _is_channels_last(value))
        numbers = output.numel() * value.numel() / max(1, channels)
        work[suits] += numbers
        of_2d += numbers if value.dim() == 4 else 0
    is_kept = for_training or has_groups or of_2d < sum(work.values()) / 2
    return is_kept and work[True] > work[False]


def _is_channels_last(weight: Tensor) -> bool:
    """Returns whether a weight is in channels_last already, 1-d ones as images of height 1."""
    if weight.dim() == 3:
        return is_channels_last_image(weight)
    return weight.stride() == strides_of(weight.shape, True)


def layout_of(graph: GraphModule) -> str:
    """Returns the layout that most weights of a graph of Dynamo have."""
    weights = [node.meta["example_value"] for node in _weights_of_convolutions(graph.graph)]
    is_last = sum(map(_is_channels_last, weights)) > len(weights) / 2
    return "channels_last" if is_last else "contiguous"


def in_layout(
    graph: GraphModule,
    memory_format: str,
    *,
    with_constants: bool = False,
    for_training: bool = False,
) -> GraphModule:
    """Returns a copy of a graph that first copies weights of convolutions into a layout, and inputs
    with the same number of dimensions if that is 4 or 5. Its outputs have the given graph's
    strides.

    Args:
        memory_format: ``"contiguous"`` or ``"channels_last"``.
        with_constants: whether weights become constants, so that Inductor copies each only once.
        for_training: whether gradients go back through it. Each convolution's input is then laid
            out too, because autograd saves it, and copies of weights have the dtype to which
            autocast would cast them.

    Raises:
        ValueError: an output of the graph shares memory with an input or another output, or has
            unknown strides; a call writes into a tensor to copy, or into memory that other tensors
            share in one layout only; a call may read memory by strides; a tensor wraps others. With
            gradients also: a size is dynamic; the graph has a graph of its own kind in it, or a
            transform of ``torch.func``.
        Exception: an error of a call that does not allow another layout.
    """
    _check_calls(graph, for_training)
    given, graph = graph, copied(graph)
    nodes = list(graph.graph.nodes)
    placeholders: list[Node] = graph.graph.find_nodes(op="placeholder")
    output = graph.graph.output_node()
    inputs, outputs = fake_tensors(placeholders), fake_tensors(output.all_input_nodes)
    if any("example_value" not in node.meta for node in (*placeholders, *output.all_input_nodes)):
        raise ValueError("its inputs and outputs are not all known")
    sizes = [step for x in outputs.values() for step in x.stride()]
    if for_training:
        sizes += [size for x in inputs.values() for size in x.shape]
        sizes += [value_of(node) for node in placeholders]
    if any(isinstance(size, torch.SymInt) for size in sizes):
        raise ValueError("sizes are dynamic")
    memory, others = (
        [value.untyped_storage()._cdata for value in values.values()]
        for values in (outputs, inputs)
    )
    if len(set(memory)) < len(memory) or not set(memory).isdisjoint(others):
        raise ValueError("an output shares memory with an input or another output")
    weights = _weights_of_convolutions(graph.graph)
    dims = {weight.meta["example_value"].dim() for weight in weights}
    repeated = [node for node in _repeated(weights) if node not in weights]
    weights.update((node, list(node.users)) for node in repeated)
    copied_inputs = [
        node
        for node, value in inputs.items()
        if node not in weights and value.dim() in dims and value.dim() != 3
    ]
    if written_among(graph.graph, (*weights, *copied_inputs)):
        raise ValueError("it writes into an input or a weight")
    copies: dict[Node, Node] = {}
    for node in copied_inputs:
        readers = list(node.users)
        with graph.graph.inserting_after(node):
            copy = graph.graph.call_function(_input_laid_out, (node, memory_format))
        copy.meta = dict(node.meta)
        for reader in readers:
            reader.replace_input_with(node, copy)
        copies[node] = copy
    lay_out = _each_laid_out if with_constants else _laid_out_together
    of_weights = _lay_out_weights(graph.graph, weights, lay_out, memory_format, for_training)
    # Only convolutions read the copies of other weights.
    copies.update((node, of_weights[node]) for node in repeated)
    if for_training:
        _lay_out_inputs(graph.graph, memory_format)
    # The caches of a decoder's layers are copied at once, so that nothing is held for them later.
    last = set(outputs) if for_training else written_among(graph.graph, outputs)
    for node, value in outputs.items():
        behind = output if node in last else node.next
        with graph.graph.inserting_before(behind):
            restored = graph.graph.call_function(_in_strides, (node, value.stride()))
        restored.meta = dict(node.meta)
        output.replace_input_with(node, restored)
    graph.recompile()
    read = [copies.get(node, node) for node in nodes]
    _check_memory(given, graph, dict(zip(given.graph.nodes, read, strict=True)))
    return graph


def _check_calls(graph: GraphModule, for_training: bool) -> None:
    """Raises ValueError if a call in a graph of Dynamo keeps the graph's layout, as of
    :func:`in_layout`."""
    if _reads_by_strides(graph):
        raise ValueError("one of its operators may read memory by strides")
    if any(is_traceable_wrapper_subclass(value_of(node)) for node in graph.graph.nodes):
        raise ValueError("a tensor is of a class that wraps others")
    if for_training and len(nested_graphs(graph)) > 1:
        raise ValueError("a part of it is a graph, such as a checkpoint")
    if for_training and any(begins_transform(node) for node in graph.graph.nodes):
        raise ValueError("it has a transform of torch.func")


def _check_memory(given: GraphModule, graph: GraphModule, laid_out: Mapping[Node, Node]) -> None:
    """Raises ValueError if the layout decides which values of a graph of Dynamo share memory that
    is written into or returned. For example, a reshape is a view in one layout and a copy in the
    other.

    Args:
        given: the graph.
        graph: a copy of it in another layout.
        laid_out: the graph's node -> the copy's node that is read in its place.
    """
    found = storages_when_run(graph)
    taken = {one for node in graph.graph.find_nodes(op="placeholder") for one in found[node]}
    for node in graph.graph.output_node().all_input_nodes:
        if not taken.isdisjoint(found[node]):
            raise ValueError("an output shares memory in this layout")
        taken |= found[node]
    before, after = {}, {}
    for node, copy in laid_out.items():
        if node.op != "output":
            before[node], after[node] = storages(node), found[copy]
    for operand in {one for node in given.graph.nodes for one in written_operands(node)}:
        sharing = (
            {node for node, memory in each.items() if not memory.isdisjoint(each[operand])}
            for each in (before, after)
        )
        if next(sharing) != next(sharing):
            raise ValueError("it writes into memory that is shared in one layout only")


def _reads_by_strides(graph: GraphModule) -> bool:
    """Returns whether a call in a graph of Dynamo may read memory by its operands' strides in
    PyTorch, as a foreign operator may."""
    targets = [node.target for node in all_nodes(graph) if node.op.startswith("call")]
    names = {str(getattr(target, "__name__", target)).partition(".")[0] for target in targets}
    return bool(names & _BY_STRIDES or namespaces_of(graph) - LOCAL)


def _weights_of_convolutions(graph: Graph) -> dict[Node, list[Node]]:
    """Returns the weights of convolutions in a graph of Dynamo, each with its convolutions."""
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in (*CONVOLUTIONS, conv_each_image):
            weight = argument_of(node, 1, "weight")
            if isinstance(weight, Node) and "example_value" in weight.meta:
                found.setdefault(weight, []).append(node)
    return found


def _repeated(weights: Iterable[Node]) -> list[Node]:
    """Returns the inputs of a graph whose filters are repeated in larger weights of convolutions:
    StyleGAN2 scales the same filters for each image, and so reads them many times."""
    found = []
    for weight in weights:
        shape = weight.meta["example_value"].shape
        waiting, seen = [weight], {weight}
        while waiting:
            others = [node for node in waiting.pop().all_input_nodes if node not in seen]
            waiting += others
            seen.update(others)
            for node, value in fake_tensors(others).items():
                if node.op == "placeholder" and _is_part(value.shape, shape):
                    found.append(node)
    return found


def _is_part(filters: Sequence[Any], all_filters: Sequence[Any]) -> bool:
    is_known = all(isinstance(size, int) for size in (*filters, *all_filters))
    return is_known and filters[1:] == all_filters[1:] and filters[0] < all_filters[0]


def _lay_out_weights(
    graph: Graph,
    readers: Mapping[Node, Sequence[Node]],
    lay_out: Callable[[Sequence[Tensor], str, torch.dtype], list[Tensor]],
    memory_format: str,
    for_training: bool,
) -> dict[Node, Node]:
    """Puts weights of convolutions into the convolutions' layout, and returns each one's copy; the
    last one, if the nodes read it in several dtypes.

    One call of ``lay_out`` for each pair of dtypes lays out the graph's inputs among them. A weight
    that the graph computes is laid out by itself, so that Inductor writes it in this layout.

    Args:
        readers: the nodes that read each weight so.
        for_training: as of :func:`in_layout`.
    """
    behind = graph.find_nodes(op="placeholder")[-1].next
    copies: dict[Node, Node] = {}
    alike: dict[Any, dict[Node, list[Node]]] = {}
    for weight, nodes in readers.items():
        of_weight = weight.meta["example_value"].dtype
        for reader in nodes:
            dtype = _dtype_read(reader, of_weight) if for_training else of_weight
            of_reader = (of_weight, dtype, weight if weight.op != "placeholder" else None)
            alike.setdefault(of_reader, {}).setdefault(weight, []).append(reader)
    for (_, dtype, computed), weights in alike.items():
        function = lay_out if computed is None else _each_laid_out
        with graph.inserting_before(behind if computed is None else computed.next):
            together = graph.call_function(function, (list(weights), memory_format, dtype))
            for i, (weight, nodes) in enumerate(weights.items()):
                copy = graph.call_function(operator.getitem, (together, i))
                copy.meta = dict(weight.meta)
                for reader in nodes:
                    reader.replace_input_with(weight, copy)
                copies[weight] = copy
    return copies


def _lay_out_inputs(graph: Graph, memory_format: str) -> None:
    """Puts the inputs of convolutions into the convolutions' layout."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in CONVOLUTIONS:
            continue
        read, weight = (argument_of(node, i, name) for i, name in enumerate(("input", "weight")))
        dims = [value.dim() for value in fake_tensors([read, weight]).values()]
        if len(dims) < 2 or dims[0] != dims[1]:
            continue
        with graph.inserting_before(node):
            copy = graph.call_function(_laid_out, (read, memory_format))
        copy.meta = dict(read.meta)
        node.replace_input_with(read, copy)


def _dtype_read(reader: Node, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a node reads a weight of a dtype; it differs under autocast."""
    output = reader.meta.get("example_value")
    if reader.target in CONVOLUTIONS and isinstance(output, Tensor):
        return output.dtype if {dtype, output.dtype} <= _CASTS else dtype
    return dtype


# Inductor traces these functions with its tensors for their inputs.


def _laid_out(x: Tensor, memory_format: str) -> Tensor:
    return x if _is_laid_out(x, memory_format) else laid_out(x, _FORMATS[memory_format])


def _is_laid_out(x: Tensor, memory_format: str) -> bool:
    """Returns whether a tensor is in a layout, with sizes that are known. A trace needs no copy."""
    is_static = all(isinstance(size, int) for size in (*x.shape, *x.stride()))
    return is_static and x.stride() == strides_of(x.shape, memory_format == "channels_last")


def _input_laid_out(x: Tensor, memory_format: str) -> Tensor:
    """Returns an input in a layout. The gradient of a copy has the input's strides, or dense ones
    in their order: hooks may read them."""
    if not x.requires_grad or _is_laid_out(x, memory_format):
        return _laid_out(x, memory_format)
    strides = torch.empty_like(x).stride()
    (copy,) = weight_operators.copied(
        [x],
        lambda given: [_laid_out(one, memory_format) for one in given],
        lambda gradients: [None if one is None else _in_strides(one, strides) for one in gradients],
    )
    return copy


def _each_laid_out(
    weights: Sequence[Tensor], memory_format: str, dtype: torch.dtype
) -> list[Tensor]:
    """Returns weights of convolutions in a layout and a dtype, each for itself, 1-d ones as images
    of height 1."""
    return [_laid_out(weight.to(dtype), memory_format) for weight in weights]


def _laid_out_together(
    weights: Sequence[Tensor], memory_format: str, dtype: torch.dtype
) -> list[Tensor]:
    """Returns weights of convolutions in a layout and a dtype, 1-d ones as images of height 1. One
    operator copies all weights whose elements change or move, and one more those that require no
    gradient in a graph that has gradients."""
    is_last = memory_format == "channels_last"
    has_gradients = torch.is_grad_enabled()
    found: dict[int, Tensor] = {}
    copied: dict[bool, list[int]] = {}
    for i, weight in enumerate(weights):
        if weight.dtype != dtype:
            copied.setdefault(weight.requires_grad and has_gradients, []).append(i)
        elif weight.stride() == strides_of(weight.shape, is_last):
            found[i] = weight
        elif weight.is_contiguous() and 1 in (weight.shape[1], weight[0, 0].numel()):
            found[i] = _with_order(weight, is_last)
        else:
            copied.setdefault(weight.requires_grad and has_gradients, []).append(i)
    for places in copied.values():
        copies = weight_operators.laid_out([weights[i] for i in places], is_last, dtype)
        found.update(zip(places, copies, strict=True))
    return [found[i] for i in range(len(weights))]


def _with_order(weight: Tensor, is_last: bool) -> Tensor:
    """Returns a view of a weight whose elements have the same order in both layouts."""
    if not is_last:
        return weight.movedim(1, -1).view(weight.shape)
    rows, columns, *kernel = weight.shape
    return weight.view(rows, *kernel, columns).movedim(-1, 1)


def _in_strides(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
