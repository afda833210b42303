"""Rewrites of the joint graph of a training step's forward and backward, and of its backward.

They keep the values that the forward saves for the backward small, and leave groups of the forward
without values that the backward reads.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from cudnn_autotune.compile.activations import Decompositions, find_activations
from cudnn_autotune.compile.gradients import OPERATIONS
from cudnn_autotune.compile.groups import add_call, is_same_shape, reads_in_place
from cudnn_autotune.compile.marks import MARKS
from cudnn_autotune.norms.reference import NORM_ACTIVATIONS

_batch_norm_act = torch.ops.cudnn_autotune.batch_norm_act.default
_backward = torch.ops.cudnn_autotune.batch_norm_act_backward.default
_conv_wgrad = torch.ops.cudnn_autotune.conv_wgrad.default
_aten = torch.ops.aten
_convert = torch.ops.prims.convert_element_type.default
# Elements of an output gradient from which the sum for a bias is worth a kernel of its own.
_LEAST_SUMMED = 2**18
_SPLITS = (_aten.split.Tensor, _aten.split_with_sizes.default)


def rewrite_joint(graph: Graph) -> None:
    """Rewrites the joint graph of forward and backward, so that less is saved between them."""
    from torch._inductor.decomposition import select_decomp_table

    decompositions = select_decomp_table()
    recompute_outputs(graph, decompositions)
    round_before_relu(graph)
    tell_by_outputs(graph, decompositions)
    copy_slices(graph)
    sum_in_memory_order(graph)
    realize_for_biases(graph)


def sum_in_memory_order(graph: Graph) -> None:
    """Lets a sum over channels and places read its operand in the order of the memory.

    Inductor divides a large sum among blocks by the order of the dimensions. In channels_last a
    block would read one channel's places, one here and one there: so it is with PReLU's gradient.

    Args:
        graph: as of :func:`recompute_outputs`.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.sum.dim_IntList):
        operand: Any = node.args[0]
        value, keeps = operand.meta["val"], len(node.args) > 2 and node.args[2]
        if not keeps or not all(isinstance(one, int) for one in (*value.shape, *value.stride())):
            continue
        summed = {dim % value.dim() for dim in node.args[1] or range(value.dim())}
        order = sorted(range(value.dim()), key=value.stride, reverse=True)
        if [dim for dim in order if dim in summed] == sorted(summed):
            continue
        places = [order.index(dim) for dim in range(value.dim())]
        with graph.inserting_before(node):
            in_order = add_call(graph, _aten.permute.default, operand, order)
            dims = sorted(places[dim] for dim in summed)
            total = add_call(graph, node.target, in_order, dims, *node.args[2:], **node.kwargs)
            result = add_call(graph, _aten.permute.default, total, places)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def realize_for_biases(graph: Graph) -> None:
    """Lets Inductor compute a convolution's output gradient in channels_last before the bias's
    gradient, the sum of that, is planned.

    The strides of the output gradient are open until then. Inductor takes them for contiguous, does
    not divide the sum among blocks, and computes the output gradient in its few ones.

    Args:
        graph: as of :func:`recompute_outputs`.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.sum.dim_IntList):
        operand: Any = node.args[0]
        value = operand.meta["val"]
        summed = {dim % value.dim() for dim in node.args[1] or ()}
        by_channels = summed == {*range(value.dim())} - {1}
        if not by_channels or not any(user.target in OPERATIONS for user in operand.users):
            continue
        source = operand
        while source.target in (_aten.squeeze.dim, _aten.unsqueeze.default):
            source = source.args[0]
        value = source.meta["val"]
        if not isinstance(value.numel(), int) or value.numel() < _LEAST_SUMMED:
            continue
        if value.dim() >= 3 and value.stride(1) == 1 and not value.is_contiguous():
            source.meta["inductor_realize_to_strides"] = True


def copy_slices(graph: Graph) -> None:
    """Copies slices that convolutions and the gradients of their weights read, once for both. The
    operators would copy a slice in each call.

    Args:
        graph: as of :func:`recompute_outputs`.
    """
    copies: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.target not in MARKS:
            continue
        read: Any = node.args[0]
        if not _is_slice(read.meta["val"]):
            continue
        if read not in copies:
            with graph.inserting_before(node):
                copies[read] = graph.call_function(_aten.clone.default, (read,))
            copies[read].meta = {**read.meta, "val": read.meta["val"].clone()}
        for reader in list(read.users):
            if reader is node or reader.target is _conv_wgrad:
                reader.replace_input_with(read, copies[read])


def _is_slice(value: Tensor) -> bool:
    """Returns whether a tensor is known to leave out elements between its own."""
    is_known = all(isinstance(one, int) for one in (*value.shape, *value.stride()))
    return is_known and value.clone().stride() != value.stride()


def round_before_relu(graph: Graph) -> None:
    """Rounds the argument of a ReLU and not its output, if all that reads the output is roundings
    to the same half type and the gradient's mask.

    So it is with torchvision's FrozenBatchNorm2d under autocast. The values are the same, but the
    mask can be told by the rounded output, which a convolution's gradient needs anyway.

    Args:
        graph: as of :func:`recompute_outputs`.
    """
    for relu in graph.find_nodes(op="call_function", target=_aten.relu.default):
        argument: Any = relu.args[0]
        aliases, readers = _readers(relu)
        rounded = [reader for reader in readers if _rounds(reader)]
        masks = [reader for reader in readers if reader.target is _aten.le.Scalar]
        dtypes = {reader.meta["val"].dtype for reader in rounded}
        is_rounded = (
            len(argument.users) == 1
            and relu.meta["val"].dtype == torch.float32
            and len(dtypes) == 1
            and len(rounded) + len(masks) == len(readers)
            and all(mask.args[1] == 0 for mask in masks)
        )
        if not is_rounded:
            continue
        with graph.inserting_before(relu):
            half = graph.call_function(_convert, (argument, *dtypes))
            output = graph.call_function(_aten.relu.default, (half,))
        for node in (half, output):
            node.meta = {**relu.meta, "val": rounded[0].meta["val"]}
        for mask in masks:
            mask.args = (output, 0)
        for one in rounded:
            one.replace_all_uses_with(output)
        for node in (*rounded, *reversed(aliases), relu):
            graph.erase_node(node)


def _rounds(node: Node) -> bool:
    """Returns whether a node rounds a value to a half type."""
    return node.target is _convert and node.args[1] in (torch.float16, torch.bfloat16)


def _widens(node: Node) -> bool:
    """Returns whether a node converts a value to a dtype that has all numbers of the value's: no
    integers, whose sign may be another one."""
    if node.target is not _convert:
        return False
    operand: Any
    dtype: Any
    operand, dtype = node.args
    return torch.promote_types(operand.meta["val"].dtype, dtype) == dtype


def _readers(node: Node) -> tuple[list[Node], list[Node]]:
    """Returns a value's aliases, in order, and the nodes that read it or one of them."""
    aliases: list[Node] = []
    readers: list[Node] = []
    left = [node]
    while left:
        for user in left.pop().users:
            if user.target in (_aten.alias.default, _aten.detach.default):
                aliases.append(user)
                left.append(user)
            else:
                readers.append(user)
    return aliases, readers


def tell_by_outputs(graph: Graph, decompositions: Decompositions) -> None:
    """Lets the gradient of a leaky ReLU tell the argument's sign by the output, which often is kept
    as the input of a convolution.

    Args:
        graph, decompositions: as of :func:`recompute_outputs`.
    """
    if not graph.find_nodes(op="call_function", target=_aten.gt.Scalar):
        return
    order = {node: index for index, node in enumerate(graph.nodes)}
    for argument, matches in find_activations(graph, decompositions).items():
        for match in matches:
            if not match.activation.startswith("leaky_relu"):
                continue
            rounded = (user for user in match.output.users if _rounds(user))
            output = next(rounded, match.output)
            outside = [user for user in argument.users if user not in match.nodes]
            widened = [user for user in outside if _widens(user)]
            signs = [sign for user in widened for sign in user.users]
            signs += [user for user in outside if user not in widened]
            for sign in signs:
                is_sign = sign.target is _aten.gt.Scalar and sign.args[1] == 0
                if is_sign and order[sign] > order[output]:
                    sign.args = (output, 0)


def recompute_outputs(graph: Graph, decompositions: Decompositions) -> None:
    """Lets a backward compute the output of a norm again if only kernels generated by Inductor read
    it there, or others read parts of it, which are copied anyway. They read the norm's input
    instead, which is kept anyway.

    Args:
        graph: the joint graph of forward and backward, of ATen operators, with fake tensors in
            ``meta["val"]``.
        decompositions: the decompositions of the graph's trace.
    """
    behind: set[Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in node.name
        if is_tangent or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    for call in graph.find_nodes(op="call_function", target=_batch_norm_act):
        x, weight, bias, residual, activation, _ = call.args
        results = {user.args[1]: user for user in call.users}
        if residual is not None or 0 not in results:
            continue
        readers = [user for user in results[0].users if user in behind]
        parts = _parts_read(results[0], behind)
        if not all(reads_in_place(reader) for reader in readers) or not (readers or parts):
            continue
        for i in (1, 2):
            if i not in results:
                with graph.inserting_after(call):
                    results[i] = graph.call_function(operator.getitem, (call, i))
                results[i].meta["val"] = call.meta["val"][i]
        operands = [x, results[1], results[2], weight, bias]
        first = min([*readers, *(user for users in parts.values() for user in users)])
        with graph.inserting_before(first):
            again = _recomputed(graph, operands, activation, decompositions)
            for part, users in parts.items():
                copy = _with_operand(graph, part, results[0], again)
                for user in users:
                    user.replace_input_with(part, copy)
        for reader in readers:
            reader.replace_input_with(results[0], again)


def _parts_read(output: Node, behind: set[Node]) -> dict[Node, list[Node]]:
    """Returns the parts of an output, as of a split along the channels, that a backward reads, each
    with its readers. To save one would keep the memory of the whole output."""
    parts = [user for user in output.users if user.target is _aten.slice.Tensor]
    for user in output.users:
        parts += [*user.users] if user.target in _SPLITS else []
    readers = {part: [user for user in part.users if user in behind] for part in parts}
    return {part: users for part, users in readers.items() if users and part not in behind}


def _with_operand(graph: Graph, part: Node, old: Node, new: Node) -> Node:
    """Adds to a graph the nodes of a part of a value, of another value."""
    of_part: Any = part.args[0]
    copies = {old: new}
    for node in (part,) if of_part is old else (of_part, part):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return copies[part]


def _recomputed(
    graph: Graph,
    operands: Sequence[Node | None],
    activation: str,
    decompositions: Decompositions,
) -> Node:
    """Adds to a graph the nodes that compute a norm's output from its input, mean, inverse standard
    deviation, weight and bias."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    def output(x: Tensor, *vectors: Tensor) -> Tensor:
        left = iter(vector.view(-1, *(1,) * (x.dim() - 2)) for vector in vectors)
        mean, inv_std, weight, bias = (None if o is None else next(left) for o in operands[1:])
        assert mean is not None
        assert inv_std is not None
        z = (x.to(mean.dtype) - mean) * inv_std
        if weight is not None:
            z = z * weight
        if bias is not None:
            z = z + bias
        return NORM_ACTIVATIONS[activation].forward(z).to(x.dtype)

    nodes = [operand for operand in operands if operand is not None]
    trace = make_fx(output, decomposition_table=dict(decompositions))
    with torch.no_grad():
        traced = trace(*(node.meta["val"] for node in nodes))
    placeholders = traced.graph.find_nodes(op="placeholder")
    again = graph.graph_copy(traced.graph, dict(zip(placeholders, nodes, strict=True)))
    assert isinstance(again, Node)
    return again


def fold_gradient_sums(graph: Graph) -> None:
    """Lets the backward of a norm add two gradients, if no other node reads their sum.

    Inductor adds a slice, which the norm would copy, and what its own kernel computes anyway.

    Args:
        graph: a backward graph of ATen operators, with fake tensors in ``meta["val"]``.
    """
    for node in graph.find_nodes(op="call_function", target=_backward):
        total: Any = node.args[0]
        if node.args[1] is not None or total.target is not _aten.add.Tensor:
            continue
        if len(total.users) > 1 or total.kwargs or not all(isinstance(a, Node) for a in total.args):
            continue
        values = [one.meta["val"] for one in (total, *total.args)]
        if any(map(_is_slice, values)) or any(_is_computed_for(one, total) for one in total.args):
            continue
        if all(
            v.dtype == values[0].dtype and is_same_shape(v.shape, values[0].shape) for v in values
        ):
            node.args = (*total.args, *node.args[2:])
            graph.erase_node(total)


def _is_computed_for(node: Node, reader: Node) -> bool:
    """Returns whether Inductor computes a value in a kernel of its own, for one reader."""
    return reads_in_place(node) and set(node.users) == {reader}
