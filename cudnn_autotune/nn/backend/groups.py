"""Finds groups of a convolution, residual addition and activation that one operator can compute,
and measures whether each is faster so.

They are looked for in a functional graph of ATen operators, as Inductor has it. A group becomes one
call of ``cudnn_autotune::conv_fused``, whose engines are searched like those of any convolution.

A graph does not say ``silu``: Inductor decomposes it into a handful of operators, other ones for
the half types, and other ones in another version of torch. So each activation is traced by the same
decompositions, and the traced operators are looked for in the graph.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from cudnn_autotune.engines.activations import (
    ACTIVATIONS,
    PARAMETERS,
    Activation,
    is_parameter,
)
from cudnn_autotune.engines.problem import (
    CHANNELS_LAST,
    DTYPES,
    ConvProblem,
    Operands,
    as_images,
)
from cudnn_autotune.nn.conv_layout import conv_memory_format, is_image_of_height_1
from cudnn_autotune.nn.inductor import _mark_input
from cudnn_autotune.timers.measuring import added_operands, cold_sets, operands
from cudnn_autotune.tuning import compiling_ahead

Decompositions = Mapping[Any, Callable[..., Any]]

_aten = torch.ops.aten
_convolution = _aten.convolution.default

# Operators besides the pointwise ones that Inductor computes in the kernel of what they read. By
# name, because some exist only when Inductor is imported.
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

# A number that stands for the parameter in what is traced, and that no model has by chance.
_PARAMETER = 0.6180339887498949
_ALL = [Activation(kind, _PARAMETER if kind in PARAMETERS else None) for kind in ACTIVATIONS]


def _elu(x: Tensor, alpha: float | None = None) -> Tensor:
    """Returns what Inductor makes of ELU: it removes multiplications by 1, as by ``alpha``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    below = torch.expm1(wide)
    return torch.where(wide > 0, wide, below if alpha is None else below * alpha).to(x.dtype)


# The activations by all ways to write them.
_SPELLINGS: Sequence[tuple[Activation, Callable[[Tensor], Tensor]]] = (
    *zip(_ALL, _ALL, strict=True),
    (Activation("silu"), lambda x: x * torch.sigmoid(x)),
    (Activation("hardswish"), lambda x: x * F.relu6(x + 3) / 6),
    (Activation("mish"), lambda x: x * torch.tanh(F.softplus(x))),
    (Activation("elu", _PARAMETER), lambda x: _elu(x, _PARAMETER)),
    (Activation("elu", 1.0), _elu),
)
_COMMUTATIVE = (_aten.add.Tensor, _aten.mul.Tensor)

# Calls of a form of a group in a CUDA graph, and the number of turns in which it is replayed.
_CALLS = 10
_ROUNDS = 9


@dataclass(frozen=True)
class GroupReport:
    """A convolution of a graph, and whether it was fused with what follows it."""

    text: str
    """Computation in words: ``conv + bias + relu``."""
    output_shape: tuple[int, ...]
    is_fused: bool
    reason: str
    fused_ms: float | None = None
    """Milliseconds of a call that computes it at once; None if that was not measured."""
    several_ms: float | None = None
    """Milliseconds of the convolution by itself and of a kernel for what follows it."""

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
    is_stored: bool = False
    """Whether its value has to be written to memory, even where a compiler makes one kernel of
    pointwise operators: something else than those reads it."""
    channels_last: bool = False
    """Whether the graph will run in channels_last, also if the strides in it are others."""
    obstacle: str | None = None
    """Reason why ``conv_fused`` does not take the convolution, which is a group by itself then;
    None if it does."""

    @property
    def marked(self) -> Node:
        """The convolution's input, which carries its policy if it is this package's."""
        return self.convolution.args[0]  # type: ignore[return-value]

    @property
    def input(self) -> Node:
        node: Any = self.marked
        return node.args[0] if node.target is _mark_input else node

    @property
    def policy(self) -> tuple[str, int]:
        """The sampling and workspace limit of the convolution, as operators take them."""
        sampling, workspace_limit = "", -1
        if self.marked.target is _mark_input:
            _, sampling, workspace_limit = self.marked.args  # type: ignore[assignment]
        return sampling, workspace_limit

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
        """Stride, padding, dilation, groups."""
        _, _, _, stride, padding, dilation, _, _, groups = self.convolution.args
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
        return tuple(_hints(self.output.meta["val"].shape))

    def problem(self) -> ConvProblem:
        """Returns the group as a problem, with the flags of PyTorch's defaults: a 1-d one in
        channels_last as one of images of height 1.

        Sizes that are symbolic are taken by their hints, which are those of the first call.

        Raises:
            ValueError: cuDNN does not count as far as these sizes, or one depends on data.
        """
        x, w = self.input.meta["val"], self.weight.meta["val"]
        stride, padding, dilation, groups = self.geometry
        memory_format = conv_memory_format(x, w)
        spatial_dims = x.dim() - 2
        if self.channels_last and spatial_dims == 2 and x.dtype != torch.float64:
            memory_format = CHANNELS_LAST[spatial_dims]
        problem = ConvProblem(
            "fprop",
            _hints(x.shape),
            _hints(w.shape),
            _hints(stride),
            _hints(padding),
            _hints(dilation),
            _hint(groups),
            x.dtype,
            memory_format,
            bias=self.bias is not None,
            residual=self.residual is not None,
            activation=self.activation,
        )
        if not is_image_of_height_1(x, w, pads=False):
            return problem
        return replace(as_images(problem), memory_format=torch.channels_last)


def _hint(size: int | torch.SymInt) -> int:
    """Returns a size, or what a symbolic one is at the first call.

    Raises:
        ValueError: the size depends on data.
    """
    value = size.node.hint if isinstance(size, torch.SymInt) else size
    if value is None:
        raise ValueError(f"{size} is known at run time only")
    return int(value)


def _hints(sizes: Sequence[int | torch.SymInt]) -> list[int]:
    return [_hint(size) for size in sizes]


def find_groups(
    graph: Graph, decompositions: Decompositions, *, channels_last: bool = False
) -> list[Group]:
    """Finds the groups of a functional graph: one for each convolution, in the graph's order. No
    node is in two of them.

    An addition of the outputs of two convolutions goes to the one that comes later in the graph,
    with the other as its residual.

    Args:
        graph: nodes call operators of ATen, and have their fake tensors in ``meta["val"]``.
        decompositions: those that the graph was traced with.
        channels_last: whether the graph will run in channels_last, also if the strides in it are
            others.
    """
    activations = find_activations(graph, decompositions)
    order = {node: index for index, node in enumerate(graph.nodes)}
    claimed: set[Node] = set()
    found: list[Group] = []
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.target is not _convolution:
            continue
        obstacle = _obstacle(node)
        nodes, tail, residual = [node], node, None
        activation = ""
        if obstacle is None:
            if (addition := _residual_addition(tail)) is not None and addition[0] not in claimed:
                tail, residual = addition
                nodes.append(tail)
            if (applied := _only_use(tail, activations.get(tail, []), claimed)) is not None:
                nodes += applied.nodes
                tail, activation = applied.output, applied.activation
            if len(nodes) == 1 and node.args[2] is None:
                obstacle = "no bias, residual or activation follows that it could compute"
        if obstacle is not None:
            found.append(Group(node, node, (node,), obstacle=obstacle))
            continue
        claimed.update(nodes)
        in_order = tuple(sorted(nodes, key=order.__getitem__))
        # Other groups before this one in the graph are not its users.
        is_stored = any(user in claimed or not reads_in_place(user) for user in tail.users)
        group = Group(node, tail, in_order, residual, activation, is_stored, channels_last)
        found.append(group)
    return found[::-1]


def reads_in_place(user: Node) -> bool:
    """Returns whether Inductor computes a node in the kernel of what it reads."""
    operator = user.target
    return isinstance(operator, torch._ops.OpOverload) and (
        torch.Tag.pointwise in operator.tags or str(operator) in _READ_IN_PLACE
    )


def _obstacle(convolution: Node) -> str | None:
    """Returns why ``conv_fused`` does not take a convolution; None if it does."""
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
    """Returns the addition that is the only use of a convolution's output, and its other operand,
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


def _only_use(tail: Node, found: Sequence[Found], claimed: set[Node]) -> Found | None:
    """Returns the activation that is all that uses the value of ``tail``, in its dtype."""
    dtype = tail.meta["val"].dtype
    for one in found:
        is_only = set(tail.users) <= one.nodes and not one.nodes & claimed
        if is_only and one.output.meta["val"].dtype == dtype:
            return one
    return None


def fuse_groups(graph: Graph, groups: Sequence[Group]) -> None:
    """Replaces the nodes of each group by one call of ``conv_fused``.

    Args:
        groups: some of those found in the graph, in its order. They do not hold afterwards.
    """
    # From the last one: an output may be an operand of a later call, which is updated then.
    for group in reversed(groups):
        operands = (group.input, group.weight, group.bias, group.residual)
        options = (*group.geometry, group.activation, *group.policy)
        marked = group.marked
        with graph.inserting_before(group.output):
            fused = graph.call_function(
                torch.ops.cudnn_autotune.conv_fused.default, (*operands, *options)
            )
        fused.meta = dict(group.output.meta)
        group.output.replace_all_uses_with(fused)
        for node in reversed(group.nodes):
            graph.erase_node(node)
        if marked.target is _mark_input and not marked.users:
            graph.erase_node(marked)


@dataclass(frozen=True)
class Found:
    """An activation in a graph: ``output`` is ``activation(input)``."""

    activation: str
    """Name, with the parameter if there is one."""
    input: Node
    output: Node
    nodes: frozenset[Node]
    """Nodes that compute it, ``output`` among them."""


def find_activations(graph: Graph, decompositions: Decompositions) -> dict[Node, list[Found]]:
    """Finds the activations of a functional graph, by the node that they are applied to.

    Only those are found whose intermediate values nothing else uses. Where two overlap, as the
    sigmoid within ``x * sigmoid(x)``, both are listed, the one of more nodes first.

    Args:
        graph: nodes call operators of ATen, and have their fake tensors in ``meta["val"]``.
        decompositions: those that the graph was traced with.
    """
    patterns: dict[torch.dtype, list[tuple[Activation, Node]]] = {}
    found: dict[Node, list[Found]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor):
            continue
        if value.dtype not in DTYPES:
            continue
        if value.dtype not in patterns:
            patterns[value.dtype] = _traced(value.dtype, decompositions)
        for activation, pattern in patterns[value.dtype]:
            bound = _match(pattern, node, _Bound({}))
            if bound is None:
                continue
            if bound.parameter is not None:
                activation = replace(activation, parameter=bound.parameter)
            if not is_parameter(activation.kind, activation.parameter):
                continue
            input = next(given for of, given in bound.nodes.items() if of.op == "placeholder")
            nodes = frozenset(bound.nodes.values()) - {input}
            if _is_closed(nodes, node):
                found.setdefault(input, []).append(Found(activation.name, input, node, nodes))
    for several in found.values():
        several.sort(key=lambda one: len(one.nodes), reverse=True)
    return found


def _traced(dtype: torch.dtype, decompositions: Decompositions) -> list[tuple[Activation, Node]]:
    """Returns the activation of each spelling, and the node of its result."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    def spelled(x: Tensor) -> list[Tensor]:
        return [function(x) for _, function in _SPELLINGS]

    trace = make_fx(spelled, decomposition_table=dict(decompositions))
    with FakeTensorMode(), torch.no_grad():
        traced = trace(torch.empty(2, 3, dtype=dtype))
    traced.graph.eliminate_dead_code()
    results: Any = traced.graph.output_node().args[0]
    return [(activation, node) for (activation, _), node in zip(_SPELLINGS, results, strict=True)]


class _Bound(NamedTuple):
    """The parts of a graph that stand for those of a pattern."""

    nodes: Mapping[Node, Node]
    """Nodes by those of the pattern."""
    parameter: float | None = None
    """Number in the place of ``_PARAMETER``, once it is known."""

    def plus(self, pattern: Node, value: Node) -> _Bound:
        return self._replace(nodes={**self.nodes, pattern: value})


def _match(pattern: Any, value: Any, bound: _Bound) -> _Bound | None:
    """Returns what stands for the pattern if ``value`` computes it, or None.

    ``bound`` is what is known already.
    """
    if isinstance(pattern, Node):
        if pattern in bound.nodes:
            return bound if bound.nodes[pattern] is value else None
        if not isinstance(value, Node):
            return None
        if pattern.op == "placeholder":
            return bound.plus(pattern, value)
        if pattern.target != value.target or pattern.kwargs != value.kwargs:
            return None
        if len(pattern.args) != len(value.args):
            return None
        orders = [value.args]
        if pattern.target in _COMMUTATIVE:
            orders.append(value.args[::-1])
        for args in orders:
            result: _Bound | None = bound.plus(pattern, value)
            for one, other in zip(pattern.args, args, strict=True):
                result = result if result is None else _match(one, other, result)
            if result is not None:
                return result
        return None
    if pattern == _PARAMETER and isinstance(value, (int, float)):
        is_same = bound.parameter in (None, value)
        return bound._replace(parameter=float(value)) if is_same else None
    if isinstance(value, Node) or type(value) is not type(pattern):
        # One version writes 6, another 6.0.
        is_number = isinstance(value, (int, float)) and isinstance(pattern, (int, float))
        return bound if is_number and value == pattern else None
    return bound if value == pattern else None


def _is_closed(nodes: frozenset[Node], output: Node) -> bool:
    """Returns whether nothing but ``output`` is used outside of ``nodes``."""
    return all(user in nodes for node in nodes if node is not output for user in node.users)


# Whether a group is fused


class Verdict(NamedTuple):
    fuse: bool
    reason: str
    fused_ms: float | None = None
    several_ms: float | None = None


Judge = Callable[[Any], Verdict]
"""Says whether to fuse a group, or to write a family of concatenations in place."""


def always(_: object) -> Verdict:
    return Verdict(True, "it was asked for")


def never(reason: str) -> Judge:
    """Returns a judge that fuses nothing, for a reason."""
    return lambda _: Verdict(False, reason)


class Measured:
    """Fuses what is faster fused, on the GPU that the group is on.

    If the group is not fused, the compiler makes one kernel of all that follows the convolution, or
    none if the next kernel reads the convolution's output anyway.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Verdict] = {}

    def __call__(self, group: Group) -> Verdict:
        device = group.device
        if device.type != "cuda":
            return Verdict(False, f"it is on the device {device}")
        try:
            problem = group.problem()
        except ValueError as error:
            return Verdict(False, str(error))
        key = (problem, group.is_stored, *group.policy)
        return self.remembered(key, device, lambda: self._measure(group, problem, device))

    def remembered(
        self, key: Hashable, device: torch.device, measure: Callable[[], Verdict]
    ) -> Verdict:
        """Returns what is known of a key, or else what is measured on a GPU."""
        if key not in self._known:
            # While a graph is being compiled, calls on tensors may be recorded.
            with _disable_current_modes(), torch.no_grad(), torch.cuda.device(device):
                self._known[key] = measure()
        return self._known[key]

    def problems(self, group: Group) -> list[ConvProblem]:
        """Returns the problems that are searched to measure a group: its own, and that of its
        convolution."""
        try:
            problem = group.problem()
        except ValueError:
            return []
        if group.device.type != "cuda":
            return []
        # Inductor adds the bias later.
        return [problem, replace(problem, bias=False, residual=False, activation="")]

    def _measure(self, group: Group, problem: ConvProblem, device: torch.device) -> Verdict:
        policy = group.policy
        geometry = (problem.stride, problem.padding, problem.dilation, problem.groups)

        def one_operator(data: Operands) -> None:
            x, w, _, *added = data
            bias, residual = added_operands(problem, added)
            torch.ops.cudnn_autotune.conv_fused(
                x, w, bias, residual, *geometry, problem.activation, *policy
            )

        def several(data: Operands) -> None:
            x, w, _, *added = data
            _, residual = added_operands(problem, added)
            y = torch.ops.cudnn_autotune.conv_fprop(x, w, None, *geometry, *policy)
            # This reads and writes what a generated kernel would, at the speed of the memory.
            if group.is_stored and residual is not None:
                torch.add(y, residual, out=y)
            elif group.is_stored:
                torch.relu_(y)

        try:
            # Autocast would make other problems of these.
            with torch.autocast("cuda", enabled=False), torch.random.fork_rng([device]):
                sets = cold_sets(problem, operands(problem, device), _CALLS)
                times = times_ms([one_operator, several], sets)
        except torch.OutOfMemoryError:
            return Verdict(False, "there was not enough memory to measure it")
        text = f"{1e3 * times[0]:.1f} us fused, {1e3 * times[1]:.1f} us in several kernels"
        return Verdict(times[0] < times[1], text, *times)


def times_ms(
    programs: Sequence[Callable[[Operands], None]], sets: Sequence[Operands]
) -> list[float]:
    """Returns the median time of a call of each program, in milliseconds. They take turns, in CUDA
    graphs, and rotate over the sets of operands. The first call of each chooses its engine."""
    graphs = []
    for program in programs:
        program(sets[0])
        graph = torch.cuda.CUDAGraph()
        # Without a stream PyTorch takes one that it keeps, on the GPU of the first capture. Other
        # threads may compile and load kernels during the capture.
        stream = torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(_CALLS):
                program(sets[i % len(sets)])
        graphs.append(graph)
    samples: list[list[float]] = [[] for _ in graphs]
    for _ in range(_ROUNDS + 1):
        for graph, times in zip(graphs, samples, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / _CALLS)
    return [statistics.median(times[1:]) for times in samples]


def fuse_judged(graph: GraphModule, groups: Sequence[Group], judge: Judge) -> list[GroupReport]:
    """Fuses the groups of a graph that a judge is for.

    Returns:
        What became of each group, in their order.
    """
    needed = []
    if isinstance(judge, Measured):
        for group in groups:
            if group.obstacle is None:
                sampling, limit = group.policy
                policy = (group.device, sampling, None if limit < 0 else limit)
                needed += [(problem, *policy) for problem in judge.problems(group)]
    with compiling_ahead.compiling(needed):
        verdicts = [
            judge(group) if group.obstacle is None else Verdict(False, group.obstacle)
            for group in groups
        ]
    reports = [
        GroupReport(group.text, group.output_shape, *verdict)
        for group, verdict in zip(groups, verdicts, strict=True)
    ]
    pairs = zip(groups, verdicts, strict=True)
    fuse_groups(graph.graph, [group for group, verdict in pairs if verdict.fuse])
    return reports


def gain(groups: Iterable[GroupReport]) -> float:
    """Returns by how much longer a program takes for groups without any fusion, as a part of the
    time that it takes with those that are fused; 0 if nothing was measured."""
    taken = without = 0.0
    for one in groups:
        if one.fused_ms is not None and one.several_ms is not None:
            taken += one.fused_ms if one.is_fused else one.several_ms
            without += one.several_ms
    return without / taken - 1 if taken else 0.0


JUDGES: Mapping[str, Callable[[], Judge]] = {
    "measure": Measured,
    "always": lambda: always,
    "never": lambda: never("it was asked for"),
}
"""Makes the judge of a graph, by the option ``fuse``."""
