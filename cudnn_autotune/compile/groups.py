"""Groups of a convolution, residual addition and activation in a functional graph of ATen
operators, as Inductor has it. Each becomes one call of ``cudnn_autotune::conv_fused``.

The engines of that operator are searched like those of any convolution.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from cudnn_autotune.compile.activations import Decompositions, Match, find_activations
from cudnn_autotune.compile.marks import MARKS, Mark
from cudnn_autotune.engines.conv_layout import conv_memory_format, is_image_of_height_1
from cudnn_autotune.engines.problem import CHANNELS_LAST, DTYPES, ConvProblem, as_images

_aten = torch.ops.aten
_convolution = _aten.convolution.default

# Operators that Inductor computes in the kernel of their operands, besides the pointwise ones. They
# are named, because some exist only when Inductor is imported.
_READ_IN_PLACE = (
    "aten.cat.default",  # its parts are computed into it, or copied
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
class GroupReport:
    """A convolution of a graph, and whether it was fused with following nodes."""

    text: str
    """Computation in words: ``conv + bias + relu``."""
    output_shape: tuple[int, ...]
    is_fused: bool
    reason: str
    fused_ms: float | None = None
    """Milliseconds of one call for all; None if not measured."""
    several_ms: float | None = None
    """Milliseconds of the convolution by itself and of a kernel for the following nodes."""
    problem: ConvProblem | None = field(default=None, repr=False)
    """The group as a problem, with PyTorch's default flags; None if a size depends on data, or
    cuDNN does not take it."""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.output_shape))
        return f"{self.text} -> {shape}: {'fused' if self.is_fused else 'left'}, {self.reason}"


@dataclass(frozen=True)
class Group:
    """A convolution, and the nodes after it that ``conv_fused`` could compute with it."""

    convolution: Node
    output: Node
    """Node whose value the fused operator computes."""
    nodes: tuple[Node, ...]
    """Nodes that it replaces, in the graph's order, ``convolution`` first."""
    residual: Node | None = None
    activation: str = ""
    slope: Node | None = None
    """Node of PReLU's slopes, one for each channel; None for other activations."""
    is_stored: bool = False
    """Whether its value has to be written to memory, because other than pointwise operators read
    it. A compiler makes one kernel of these."""
    channels_last: bool = False
    """Whether the graph will run in channels_last, even if it has other strides."""
    obstacle: str | None = None
    """Reason why ``conv_fused`` does not take the convolution, which is then a group by itself;
    None if it does."""

    @property
    def marked(self) -> Node:
        """The convolution's input, which carries its policy if it is this package's."""
        return self.convolution.args[0]  # type: ignore[return-value]

    @property
    def input(self) -> Node:
        mark = Mark.of(self.marked)
        return self.marked if mark is None else mark.source

    @property
    def policy(self) -> tuple[str, int]:
        """The sampling and workspace limit of the convolution, as operators take them."""
        mark = Mark.of(self.marked)
        return ("", -1) if mark is None else mark.policy

    @property
    def device(self) -> torch.device:
        return self.input.meta["val"].device

    @property
    def weight(self) -> Node:
        return self.convolution.args[1]  # type: ignore[return-value]

    @property
    def bias(self) -> Node | None:
        return self.convolution.args[2]  # type: ignore[return-value]

    @property
    def geometry(self) -> tuple[Any, Any, Any, Any]:
        """Stride, padding, dilation, groups. An uneven padding has what is before each dimension,
        then what is after each."""
        _, _, _, stride, padding, dilation, _, _, groups = self.convolution.args
        mark = Mark.of(self.marked)
        if mark is not None and mark.extra:
            padding = mark.padding(padding)  # type: ignore[arg-type]
        return stride, padding, dilation, groups

    @property
    def text(self) -> str:
        """The computation in words: ``conv + bias + residual + relu``."""
        parts = ["conv"]
        parts += ["bias"] if self.bias is not None and self.obstacle is None else []
        parts += ["residual"] if self.residual is not None else []
        parts += [self.activation] if self.activation else []
        return " + ".join(parts)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of the output at the first call.

        Raises:
            ValueError: a size depends on data.
        """
        return tuple(hints(self.output.meta["val"].shape))

    @property
    def is_transposed(self) -> bool:
        return bool(self.convolution.args[6])

    def problem(self) -> ConvProblem:
        """Returns the group as a problem, with PyTorch's default flags. A 1-d one in channels_last
        has images of height 1. A transposed convolution is a gradient of the input; its bias is
        added later.

        Symbolic sizes have their values of the first call.

        Raises:
            ValueError: a size is too large for cuDNN, or depends on data.
        """
        x, w = self.input.meta["val"], self.weight.meta["val"]
        stride, padding, dilation, groups = self.geometry
        memory_format = conv_memory_format(x, w)
        spatial_dims = x.dim() - 2
        if self.channels_last and spatial_dims == 2 and x.dtype != torch.float64:
            memory_format = CHANNELS_LAST[spatial_dims]
        output = self.convolution.meta["val"]
        problem = ConvProblem(
            "dgrad" if self.is_transposed else "fprop",
            hints(output.shape if self.is_transposed else x.shape),
            hints(w.shape),
            hints(stride),
            hints(padding),
            hints(dilation),
            _hint(groups),
            x.dtype,
            memory_format,
            bias=self.bias is not None and not self.is_transposed,
            residual=self.residual is not None,
            activation=self.activation,
        )
        if not is_image_of_height_1(x, w, pads=len(padding) > len(stride)):
            return problem
        return replace(as_images(problem), memory_format=torch.channels_last)


def _hint(size: int | torch.SymInt) -> int:
    """Returns a size; of a symbolic one its value at the first call.

    Raises:
        ValueError: the size depends on data.
    """
    value = size.node.hint if isinstance(size, torch.SymInt) else size
    if value is None:
        raise ValueError(f"{size} is known at run time only")
    return int(value)


def hints(sizes: Sequence[int | torch.SymInt]) -> list[int]:
    """Returns sizes; of symbolic ones their values at the first call.

    Raises:
        ValueError: a size depends on data.
    """
    return [_hint(size) for size in sizes]


def find_groups(
    graph: Graph,
    decompositions: Decompositions,
    *,
    channels_last: bool = False,
    saved: Iterable[Any] = (),
) -> list[Group]:
    """Finds the groups of a functional graph: one for each convolution, in the graph's order.
    Groups have no common nodes.

    An addition of the outputs of two convolutions goes to the one that comes later in the graph,
    with the other as its residual.

    Args:
        graph: nodes call operators of ATen, and have their fake tensors in ``meta["val"]``.
        decompositions: the decompositions of the graph's trace.
        channels_last: whether the graph will run in channels_last, even if it has other strides.
        saved: the outputs that a backward reads. A group has none of them, but maybe its output.
    """
    activations = find_activations(graph, decompositions)
    order = {node: index for index, node in enumerate(graph.nodes)}
    saved = {value for value in saved if isinstance(value, Node)}
    claimed: set[Node] = set()
    found: list[Group] = []
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.target is not _convolution:
            continue
        obstacle = _obstacle(node)
        nodes, tail, residual = [node], node, None
        activation, slope = "", None
        if obstacle is None:
            if (addition := _residual_addition(tail)) is not None and addition[0] not in claimed:
                tail, residual = addition
                nodes.append(tail)
            if (applied := _only_use(tail, activations.get(tail, []), claimed)) is not None:
                nodes += applied.nodes
                tail, activation, slope = applied.output, applied.activation, applied.slope
            if len(nodes) == 1:
                obstacle = _why_alone(node, saved)
        if obstacle is not None:
            alone = Group(node, node, (node,), channels_last=channels_last, obstacle=obstacle)
            found.append(alone)
            continue
        claimed.update(nodes)
        in_order = tuple(sorted(nodes, key=order.__getitem__))
        # Other groups before this one in the graph are not its users.
        is_stored = any(user in claimed or not reads_in_place(user) for user in tail.users)
        # A kernel that saves a mask reads the value in any case, and could compute it.
        is_stored &= saved.isdisjoint(tail.users)
        after = (residual, activation, slope)
        found.append(Group(node, tail, in_order, *after, is_stored, channels_last))
    return found[::-1]


def reads_in_place(user: Node) -> bool:
    """Returns whether Inductor computes a node in the kernel of its operands."""
    operator = user.target
    return isinstance(operator, torch._ops.OpOverload) and (
        torch.Tag.pointwise in operator.tags or str(operator) in _READ_IN_PLACE
    )


def _obstacle(convolution: Node) -> str | None:
    """Returns the reason why ``conv_fused`` does not take a convolution; None if it does."""
    x, w, b, _, _, _, transposed, _, _ = convolution.args
    values = [node.meta["val"] for node in (x, w, b) if isinstance(node, Node)]
    if transposed:
        return "it is transposed"
    if values[0].dtype not in DTYPES or any(v.dtype != values[0].dtype for v in values):
        return f"it is in {', '.join(sorted({str(v.dtype) for v in values}))}"
    if values[0].dim() != values[1].dim():
        return "its input has no batch"
    if values[0].is_cuda and Mark.of(x) is None:
        return "it is PyTorch's own"
    return None


def _why_alone(convolution: Node, saved: Collection[Node]) -> str | None:
    """Returns the reason why ``conv_fused`` does not take a convolution that no residual or
    activation follows; None if it does, to add its bias."""
    has_bias = convolution.args[2] is not None
    if convolution in saved:
        readers = [user for user in convolution.users if user.op != "output"]
        # A kernel that reads the output anyway adds the bias as well.
        if not has_bias or (readers and all(map(reads_in_place, readers))):
            return "the backward reads its output"
    return None if has_bias else "no bias, residual or activation follows that it could compute"


def _residual_addition(convolution: Node) -> tuple[Node, Node] | None:
    """Returns the addition that is the only user of a convolution's output, and its other operand,
    if that is a tensor of the same shape and dtype."""
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
        and is_same_shape(other.shape, ours.shape)
    )
    return (addition, others[0]) if is_same else None


def is_same_shape(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Returns whether two shapes are the same for all values of symbolic sizes."""
    # Importing this takes half a second, and most programs compile nothing.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(one) == len(other) and all(
        statically_known_true(a == b) for a, b in zip(one, other, strict=True)
    )


def _only_use(tail: Node, found: Sequence[Match], claimed: set[Node]) -> Match | None:
    """Returns the activation that is the only user of ``tail``, in its dtype."""
    dtype = tail.meta["val"].dtype
    for one in found:
        is_only = set(tail.users) <= one.nodes and not one.nodes & claimed
        if is_only and one.output.meta["val"].dtype == dtype:
            return one
    return None


def fuse_groups(graph: Graph, groups: Sequence[Group]) -> None:
    """Replaces the nodes of each group by one call of ``conv_fused``.

    Args:
        groups: groups found in the graph, in its order. They are invalid afterwards.
    """
    fused_of: dict[Node | None, Node] = {}
    # The last one comes first: an output may be an operand of a later call, which is updated then.
    # It may also be the residual or the slopes of a convolution before it.
    for group in reversed(groups):
        residual, slope = (fused_of.get(node, node) for node in (group.residual, group.slope))
        operands = (group.input, group.weight, group.bias, residual)
        options = (*group.geometry, group.activation, *group.policy)
        marked = group.marked
        with graph.inserting_before(group.output):
            slopes = () if slope is None else (_flat(graph, slope),)
            fused = graph.call_function(
                torch.ops.cudnn_autotune.conv_fused.default, (*operands, *options, *slopes)
            )
        fused.meta = dict(group.output.meta)
        fused_of[group.output] = fused
        group.output.replace_all_uses_with(fused)
        for node in reversed(group.nodes):
            graph.erase_node(node)
        if marked.target in MARKS and not marked.users:
            graph.erase_node(marked)


def add_call(graph: Graph, target: Any, *args: Any, **options: Any) -> Node:
    """Adds a call of an operator to a graph, with its value."""
    node = graph.call_function(target, args, options)
    node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda arg: arg.meta["val"]), **options)
    return node


def _flat(graph: Graph, node: Node) -> Node:
    """Returns another node flattened to one dimension."""
    if node.target is _aten.view.default and node.args[0].meta["val"].dim() == 1:  # type: ignore[union-attr]
        return node.args[0]  # type: ignore[return-value]
    return add_call(graph, _aten.reshape.default, node, [-1])
