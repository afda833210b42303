"""Finds groups of a convolution, residual addition and activation that one operator can compute.

They are looked for in a functional graph of ATen operators, as Inductor has it. A group becomes one
call of ``cudnn_autotune::conv_fused``, whose engines are searched like those of any convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from cudnn_autotune.engines.problem import CHANNELS_LAST, DTYPES, ActivationName, ConvProblem
from cudnn_autotune.nn.fake import conv_memory_format
from cudnn_autotune.nn.inductor import _mark_input
from cudnn_autotune.nn.models.activations import Decompositions, Found, find_activations

_aten = torch.ops.aten
_convolution = _aten.convolution.default

# Operators besides the pointwise ones that Inductor computes in the kernel of what they read. By
# name, because some exist only when Inductor is imported.
_READ_IN_PLACE = (
    "aten.mean.dim",
    "aten.sum.dim_IntList",
    "aten.amax.default",
    "aten.avg_pool2d.default",
    "aten.max_pool2d_with_indices.default",
    "aten._adaptive_avg_pool2d.default",
    "prims._low_memory_max_pool_with_offsets.default",
    "prims.convert_element_type.default",
)


@dataclass(frozen=True)
class Group:
    """A convolution, and the nodes after it that ``conv_fused`` could compute with it."""

    convolution: Node
    output: Node
    """The node whose value the fused operator computes."""
    nodes: tuple[Node, ...]
    """The nodes that it replaces, in the graph's order, ``convolution`` first."""
    bias: Node | None
    residual: Node | None
    activation: ActivationName
    sampling: str
    workspace_limit: int
    is_stored: bool
    """Whether its value has to be written to memory, even where a compiler makes one kernel of
    pointwise operators: something else than those reads it."""

    @property
    def input(self) -> Node:
        node: Any = self.convolution.args[0]
        return node.args[0] if node.target is _mark_input else node

    @property
    def device(self) -> torch.device:
        return self.input.meta["val"].device

    @property
    def weight(self) -> Node:
        return self.convolution.args[1]  # type: ignore[return-value]

    @property
    def geometry(self) -> tuple[Any, Any, Any, Any]:
        """Stride, padding, dilation, groups."""
        _, _, _, stride, padding, dilation, _, _, groups = self.convolution.args
        return stride, padding, dilation, groups

    @property
    def text(self) -> str:
        """What is computed, in words: ``conv + bias + residual + relu``."""
        parts = ["conv"]
        parts += ["bias"] if self.bias is not None else []
        parts += ["residual"] if self.residual is not None else []
        parts += [self.activation] if self.activation else []
        return " + ".join(parts)

    def problem(self, *, channels_last: bool = False) -> ConvProblem:
        """The group as a problem, with the flags of PyTorch's defaults.

        Sizes that are symbolic are taken by their hints, which are those of the first call.

        Args:
            channels_last: the graph will run in channels_last, whatever the strides in it.

        Raises:
            ValueError: cuDNN does not count as far as these sizes, or one depends on data.
        """
        x, w = self.input.meta["val"], self.weight.meta["val"]
        stride, padding, dilation, groups = self.geometry
        memory_format = conv_memory_format(x, w)
        spatial_dims = x.dim() - 2
        if channels_last and spatial_dims == 2 and x.dtype != torch.float64:
            memory_format = CHANNELS_LAST[spatial_dims]
        return ConvProblem(
            "fprop",
            [hint(size) for size in x.shape],
            [hint(size) for size in w.shape],
            [hint(value) for value in stride],
            [hint(value) for value in padding],
            [hint(value) for value in dilation],
            hint(groups),
            x.dtype,
            memory_format,
            bias=self.bias is not None,
            residual=self.residual is not None,
            activation=self.activation,
        )


def hint(size: int | torch.SymInt) -> int:
    """A size, or what a symbolic one is at the first call.

    Raises:
        ValueError: the size depends on data.
    """
    value = size.node.hint if isinstance(size, torch.SymInt) else size
    if value is None:
        raise ValueError(f"{size} is known at run time only")
    return int(value)


@dataclass(frozen=True)
class GroupReport:
    """A convolution of a graph, and whether it was fused with what follows it."""

    text: str
    """What is computed: ``conv + bias + relu``."""
    output_shape: tuple[int, ...]
    is_fused: bool
    reason: str

    def __str__(self) -> str:
        shape = "x".join(map(str, self.output_shape))
        return f"{self.text} -> {shape}: {'fused' if self.is_fused else 'left'}, {self.reason}"


@dataclass(frozen=True)
class Groups:
    found: tuple[Group, ...]
    alone: tuple[tuple[Node, str], ...]
    """The convolutions that are in no group, each with the reason."""


def find_groups(graph: Graph, decompositions: Decompositions) -> Groups:
    """Finds the groups of a functional graph. No node is in two of them.

    An addition of the outputs of two convolutions goes to the one that comes later in the graph,
    with the other as its residual.

    Args:
        graph: nodes call operators of ATen, and have their fake tensors in ``meta["val"]``.
        decompositions: those that the graph was traced with.
    """
    activations = find_activations(graph, decompositions)
    order = {node: index for index, node in enumerate(graph.nodes)}
    claimed: set[Node] = set()
    found: list[Group] = []
    alone: list[tuple[Node, str]] = []
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.target is not _convolution:
            continue
        if (reason := _unsuitable(node)) is not None:
            alone.append((node, reason))
            continue
        nodes, tail, residual = [node], node, None
        if (addition := _residual_addition(tail)) is not None and addition[0] not in claimed:
            tail, residual = addition
            nodes.append(tail)
        applied = _only_use(tail, activations.get(tail, []), claimed)
        if applied is not None:
            nodes += applied.nodes
            tail = applied.output
        bias: Any = node.args[2]
        if len(nodes) == 1 and bias is None:
            alone.append((node, "no bias, residual or activation follows that it could compute"))
            continue
        claimed.update(nodes)
        sampling, workspace_limit = "", -1
        marked: Any = node.args[0]
        if marked.target is _mark_input:
            sampling, workspace_limit = marked.args[1:]
        found.append(
            Group(
                node,
                tail,
                tuple(sorted(nodes, key=order.__getitem__)),
                bias,
                residual,
                "" if applied is None else applied.activation,
                sampling,
                workspace_limit,
                # Other groups before this one in the graph are not its users.
                any(user in claimed or not _reads_in_place(user) for user in tail.users),
            )
        )
    return Groups(tuple(reversed(found)), tuple(reversed(alone)))


def _reads_in_place(user: Node) -> bool:
    operator = user.target
    return isinstance(operator, torch._ops.OpOverload) and (
        torch.Tag.pointwise in operator.tags or str(operator) in _READ_IN_PLACE
    )


def _unsuitable(convolution: Node) -> str | None:
    """Why ``conv_fused`` does not take a convolution; None if it does."""
    x, w, b, _, _, _, transposed, _, _ = convolution.args
    values = [node.meta["val"] for node in (x, w, b) if isinstance(node, Node)]
    if transposed:
        return "it is transposed"
    if values[0].dtype not in DTYPES or any(v.dtype != values[0].dtype for v in values):
        return f"it is in {', '.join(sorted({str(v.dtype) for v in values}))}"
    if values[0].dim() != values[1].dim():
        return "its input has no batch"
    is_marked = x.target is _mark_input  # type: ignore[union-attr]
    if values[0].is_cuda and not is_marked:
        return "it is PyTorch's own"
    return None


def _residual_addition(convolution: Node) -> tuple[Node, Node] | None:
    """The addition that is the only use of a convolution's output, and its other operand, if that
    is a tensor of the same shape and dtype."""
    if len(convolution.users) != 1:
        return None
    (addition,) = convolution.users
    if addition.target is not _aten.add.Tensor or addition.kwargs.get("alpha", 1) != 1:
        return None
    others = [arg for arg in addition.args if arg is not convolution]
    if len(others) != 1 or not isinstance(others[0], Node):
        return None
    ours, other = convolution.meta["val"], others[0].meta.get("val")
    is_same = (
        isinstance(other, Tensor)
        and (other.dtype, other.device) == (ours.dtype, ours.device)
        and _is_same_shape(other.shape, ours.shape)
    )
    return (addition, others[0]) if is_same else None


def _is_same_shape(one: Sequence[Any], other: Sequence[Any]) -> bool:
    # Importing this takes half a second, and most programs compile nothing.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )


def _only_use(tail: Node, found: Sequence[Found], claimed: set[Node]) -> Found | None:
    """The activation that is all that uses the value of ``tail``."""
    for one in found:
        if set(tail.users) <= one.nodes and not one.nodes & claimed:
            same_dtype = one.output.meta["val"].dtype == tail.meta["val"].dtype
            if same_dtype:
                return one
    return None


def fuse_groups(graph: Graph, groups: Sequence[Group]) -> None:
    """Replaces the nodes of each group by one call of ``conv_fused``.

    Args:
        groups: some of those found in the graph, in its order. They do not hold afterwards.
    """
    # One may be an operand of those after it, which are calls by then, so that they are told.
    for group in reversed(groups):
        _fuse(graph, group)


def _fuse(graph: Graph, group: Group) -> None:
    marked: Any = group.convolution.args[0]
    with graph.inserting_before(group.output):
        fused = graph.call_function(
            torch.ops.cudnn_autotune.conv_fused.default,
            (
                group.input,
                group.weight,
                group.bias,
                group.residual,
                *group.geometry,
                group.activation,
                group.sampling,
                group.workspace_limit,
            ),
        )
    fused.meta = dict(group.output.meta)
    group.output.replace_all_uses_with(fused)
    for node in reversed(group.nodes):
        graph.erase_node(node)
    if marked.target is _mark_input and not marked.users:
        graph.erase_node(marked)
