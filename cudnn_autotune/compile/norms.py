"""Batch norms of a training graph, with following nodes, as operators of this package.

They are looked for in Dynamo's graph, before autograd, so that the operator's own backward replaces
autograd's and Inductor's. That graph calls PyTorch's functions, and some write into their operands.
So an operator replaces only values with one reader each, whose operands are not written into in
between.

The statistics of all norms are updated together at the end of the graph, and so are their counters:
a kernel for each would cost more than its computation.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from cudnn_autotune.compile.aliasing import (
    BATCH_NORMS,
    CONCATENATIONS,
    PLAIN,
    RUNNING,
    arguments_of_norm,
    storages,
    value_of,
    written_by,
)
from cudnn_autotune.compile.groups import is_same_shape
from cudnn_autotune.engines.configs import is_gpu_here
from cudnn_autotune.nn.counterparts import CONVOLUTIONS
from cudnn_autotune.norms.loading import start_compiling
from cudnn_autotune.norms.operators import unsupported
from cudnn_autotune.norms.plan import NormProblem, problem_of
from cudnn_autotune.norms.reference import (
    LEAKY_RELUS,
    NORM_ACTIVATIONS,
    BackwardOperands,
    Operands,
)

_batch_norm_act = torch.ops.cudnn_autotune.batch_norm_act.default
_aten = torch.ops.aten

_DEFAULTS = {"training": False, "momentum": 0.1, "eps": 1e-5}

# An addition of two operands, and whether it writes into the first.
_ADDITIONS: Mapping[Any, bool] = {
    operator.add: False,
    torch.add: False,
    "add": False,
    "__add__": False,
    operator.iadd: True,
    "add_": True,
    "__iadd__": True,
}

# Activations by the graph's call, with the parameters after the first.
_ACTIVATIONS: Mapping[Any, tuple[str, Sequence[str]]] = {
    F.relu: ("relu", ("inplace",)),
    torch.relu: ("relu", ()),
    torch.relu_: ("relu", ()),
    "relu": ("relu", ()),
    "relu_": ("relu", ()),
    F.relu6: ("relu6", ("inplace",)),
    F.hardtanh: ("hardtanh", ("min_val", "max_val", "inplace")),
    F.silu: ("silu", ("inplace",)),
    F.hardswish: ("hardswish", ("inplace",)),
    F.leaky_relu: ("leaky_relu", ("negative_slope", "inplace")),
    F.gelu: ("gelu", ("approximate",)),
    F.sigmoid: ("sigmoid", ()),
    torch.sigmoid: ("sigmoid", ()),
    "sigmoid": ("sigmoid", ()),
    "sigmoid_": ("sigmoid", ()),
}


@dataclass(frozen=True)
class NormReport:
    """A batch norm of a training graph, and whether it became an operator of this package."""

    text: str
    """Computation in words: ``norm + residual + relu``."""
    input_shape: tuple[int, ...]
    """Shape at the first call; -1 stands for a size that depends on data."""
    is_served: bool
    reason: str

    def __str__(self) -> str:
        shape = "x".join(map(str, self.input_shape))
        return f"{self.text} of {shape}: {'served' if self.is_served else 'left'}, {self.reason}"


@dataclass(frozen=True)
class Norm:
    """A batch norm in training mode, and the following nodes that one operator computes with it."""

    node: Node
    """Call of PyTorch's function."""
    nodes: tuple[Node, ...]
    """Nodes that the operator replaces, in the graph's order, ``node`` first."""
    arguments: Mapping[str, Any]
    """Arguments of PyTorch's function, by its parameters."""
    residual: Node | None = None
    activation: str = "identity"
    obstacle: str | None = None
    """Reason why the norm is left to PyTorch; None if it is not."""

    @property
    def output(self) -> Node:
        """The node whose value the operator computes."""
        return self.nodes[-1]

    @property
    def text(self) -> str:
        """The computation in words: ``norm + residual + relu``."""
        parts = ["norm"]
        parts += ["residual"] if self.residual is not None else []
        parts += [self.activation] if self.activation != "identity" else []
        return " + ".join(parts)

    @property
    def running(self) -> tuple[Node, Node] | None:
        """The running mean and variance that the norm updates; None if it has none."""
        mean, variance = self.arguments["running_mean"], self.arguments["running_var"]
        return None if mean is None else (mean, variance)

    def report(self) -> NormReport:
        """Returns the report before a decision. Without an obstacle there is no reason."""
        sizes = value_of(self.arguments["input"]).shape
        known = (size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes)
        shape = tuple(-1 if size is None else int(size) for size in known)
        return NormReport(self.text, shape, False, self.obstacle or "")


def find_norms(graph: Graph) -> list[Norm]:
    """Finds the batch norms in training mode of a graph of Dynamo, in the graph's order.

    An addition of two of them goes to the one that comes later in the graph, with the other as its
    residual.

    Args:
        graph: nodes call PyTorch's functions, and have their fake tensors in
            ``meta["example_value"]``.
    """
    if any(begins_transform(node) for node in graph.nodes):
        return []
    sharing = _sharing(graph)
    order = {node: index for index, node in enumerate(graph.nodes)}
    writes = {node: memory for node in graph.nodes if (memory := written_by(node))}
    claimed: set[Node] = set()
    found: list[Norm] = []
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.target not in BATCH_NORMS:
            continue
        arguments = _arguments(node)
        if arguments["training"] is not True:
            continue
        norm = Norm(node, (node,), arguments, obstacle=_obstacle(arguments, sharing))
        if norm.obstacle is None:
            for extend in (_with_residual, _with_activation):
                longer = extend(norm)
                if longer is None or not claimed.isdisjoint(longer.nodes):
                    continue
                later = (
                    memory
                    for writer, memory in writes.items()
                    if order[writer] > order[longer.output] and writer not in claimed
                )
                if _is_whole(longer) and _saved(longer).isdisjoint(set().union(*later)):
                    norm = longer
            claimed.update(norm.nodes)
        found.append(norm)
    return sorted(found, key=lambda norm: order[norm.node])


def _arguments(node: Node) -> dict[str, Any]:
    """Returns the arguments of a batch norm, by parameter, with the defaults."""
    names = (*RUNNING, "weight", "bias")
    arguments = {**dict.fromkeys(names), **_DEFAULTS, **arguments_of_norm(node)}
    for name in ("momentum", "eps"):
        if isinstance(value := arguments[name], Node) and isinstance(
            value_of(value), torch.SymFloat
        ):
            # Numbers are symbolic where sizes are dynamic. The graph is compiled for this one.
            arguments[name] = float(value_of(value))
    return arguments


def _sharing(graph: Graph) -> Counter[int]:
    """Returns the number of inputs of a graph in each memory."""
    inputs = graph.find_nodes(op="placeholder")
    return Counter(storage for node in inputs for storage in storages(node))


def _obstacle(arguments: Mapping[str, Any], sharing: Mapping[int, int]) -> str | None:
    """Returns the reason why a batch norm is left to PyTorch; None if it is not.

    Args:
        sharing: the number of inputs of the graph in each memory.
    """
    names = ("input", "weight", "bias", *RUNNING)
    tensors = [arguments[name] for name in names]
    x, weight, bias, *running = [value_of(n) if isinstance(n, Node) else n for n in tensors]
    if any(value is not None and type(value) not in PLAIN for value in (x, weight, bias)):
        return "it computes with tensors of a class with rules of its own"
    if not all(isinstance(arguments[name], (int, float)) for name in ("momentum", "eps")):
        return "its momentum or epsilon is computed"
    if x.dtype == torch.float64:
        return "it is in torch.float64"
    if arguments["input"].target in CONCATENATIONS:
        # Generated code need not hold the whole: it reads the parts, also in the backward.
        return "its input is a concatenation, which takes less memory in parts"
    if (reason := unsupported(x, weight, bias)) is not None:
        return reason
    if running == [None, None]:
        return None
    for node, value in zip(tensors[3:], running, strict=True):
        if not isinstance(node, Node) or node.op != "placeholder" or type(value) not in PLAIN:
            return "its running statistics are no buffers"
        if (value.dtype, value.device) != (torch.float32, x.device):
            return f"its running statistics are {value.dtype} on the device {value.device}"
        if len(node.users) > 1 or any(sharing[storage] > 1 for storage in storages(node)):
            return "its running statistics are used elsewhere too"
    return None


def _with_residual(norm: Norm) -> Norm | None:
    """Returns the norm with the addition that is its only use; None if there is none."""
    tail = norm.output
    addition = _only_user(tail)
    if addition is None or addition.target not in _ADDITIONS or addition.kwargs:
        return None
    if len(addition.args) != 2 or addition.args.count(tail) != 1:
        return None
    first, second = addition.args
    other: Any = second if first is tail else first
    if not isinstance(other, Node) or type(value_of(other)) not in PLAIN:
        return None
    # No other node may see that it writes into its first operand.
    if _ADDITIONS[addition.target] and first is not tail and not _is_new(other):
        return None
    ours, theirs = value_of(tail), value_of(other)
    if (ours.dtype, ours.device) != (theirs.dtype, theirs.device):
        return None
    if not is_same_shape(ours.shape, theirs.shape):
        return None
    return replace(norm, nodes=(*norm.nodes, addition), residual=other)


def _is_new(node: Node) -> bool:
    """Returns whether a node makes a tensor that only one other node reads."""
    return len(node.users) == 1 and (node.target in BATCH_NORMS or node.target in CONVOLUTIONS)


def _with_activation(norm: Norm) -> Norm | None:
    """Returns the norm with the activation that is its only use; None if there is none."""
    node = _only_user(norm.output)
    if node is None or node.target not in _ACTIVATIONS or node.args[:1] != (norm.output,):
        return None
    name, parameters = _ACTIVATIONS[node.target]
    given = {**dict(zip(parameters, node.args[1:], strict=False)), **node.kwargs}
    given.pop("inplace", None)
    if name == "hardtanh":
        name = "relu6"
        if (given.pop("min_val", -1), given.pop("max_val", 1)) != (0, 6):
            return None
    if name == "gelu" and given.pop("approximate", "none") == "tanh":
        name = "gelu_tanh"
    if name == "leaky_relu":
        slope: Any = given.pop("negative_slope", 0.01)
        name = LEAKY_RELUS.get(slope, "")
    if given or name not in NORM_ACTIVATIONS:
        return None
    return replace(norm, nodes=(*norm.nodes, node), activation=name)


def _only_user(node: Node) -> Node | None:
    """Returns the node that uses a value, if there is only one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_whole(norm: Norm) -> bool:
    """Returns whether the norm may be computed at its last node: no other node in between writes
    into an operand, or changes a mode such as autograd's."""
    operands = [norm.arguments[name] for name in ("input", "weight", "bias")] + [norm.residual]
    memory = storages(operands)
    node = norm.node
    while node is not norm.output:
        node = node.next
        if not node.op.startswith("call") or node in norm.nodes:
            continue
        if value_of(node) is None or not memory.isdisjoint(written_by(node)):
            return False
    return True


def _saved(norm: Norm) -> set[int]:
    """Returns the memory that the operator, but maybe not PyTorch's functions, saves for its
    backward: a later call may write into it."""
    if norm.activation == "identity":
        return set()
    saved = [norm.arguments["bias"], norm.residual]
    if norm.residual is not None and NORM_ACTIVATIONS[norm.activation].by_output:
        saved = [norm.output]
    return storages(saved)


def begins_transform(node: Node) -> bool:
    """Returns whether a call begins a transform of ``torch.func`` or forward-mode autograd, under
    which tensors have parts unknown to the graph."""
    name = getattr(node.target, "__name__", "")
    return name.endswith("_increment_nesting") or name in ("enter_dual_level", "_enter_dual_level")


def serve_norms(graph: Graph, norms: Sequence[Norm]) -> None:
    """Replaces norms by calls of ``batch_norm_act``. Few operators at the graph's end update all
    their running statistics, and the graph's counters.

    Args:
        norms: norms found in the graph, in its order; norms with an obstacle do not change. They
            are invalid afterwards.
    """
    replaced: dict[Node, Node] = {}

    def now(node: Any) -> Any:
        return replaced.get(node, node) if isinstance(node, Node) else node

    updates: dict[Any, list[tuple[Node, Node]]] = {}
    for norm in norms:
        if norm.obstacle is not None:
            continue
        operands = [norm.arguments[name] for name in ("input", "weight", "bias")]
        operands = [now(operand) for operand in (*operands, norm.residual)]
        output, epsilon = norm.output, float(norm.arguments["eps"])
        with graph.inserting_before(output):
            call = graph.call_function(_batch_norm_act, (*operands, norm.activation, epsilon))
            results = [graph.call_function(operator.getitem, (call, i)) for i in (0, 1, 3)]
        served, mean, variance = results
        call.meta = {k: v for k, v in output.meta.items() if k != "example_value"}
        served.meta = dict(output.meta)
        replaced[output] = served
        output.replace_all_uses_with(served)
        for node in reversed(norm.nodes):
            graph.erase_node(node)
        if norm.running is not None:
            key = (float(norm.arguments["momentum"]), value_of(norm.running[0]).device)
            updates.setdefault(key, []).extend(zip(norm.running, (mean, variance), strict=True))
    with graph.inserting_before(graph.output_node()):
        for (momentum, _), pairs in updates.items():
            running, new = (list(nodes) for nodes in zip(*pairs, strict=True))
            graph.call_function(_aten._foreach_lerp_.Scalar, (running, new, momentum))
        _count_together(graph)


def _count_together(graph: Graph) -> None:
    """Adds 1 to all counters of a graph, such as those of its batch norms, by one operator."""
    counters: dict[torch.device, list[Node]] = {}
    sharing = _sharing(graph)
    for node in graph.find_nodes(op="call_method", target="add_"):
        counter = node.args[0]
        is_counted = (
            node.args[1:] == (1,)
            and not node.kwargs
            and not node.users
            and isinstance(counter, Node)
            and counter.op == "placeholder"
            and len(counter.users) == 1
            and type(value_of(counter)) in PLAIN
            and value_of(counter).dtype == torch.int64
            and all(sharing[storage] == 1 for storage in storages(counter))
        )
        if is_counted:
            counters.setdefault(value_of(counter).device, []).append(counter)
            graph.erase_node(node)
    for together in counters.values():
        graph.call_function(_aten._foreach_add_.Scalar, (together, 1))


def start_norm(node: Node, memory_format: torch.memory_format) -> None:
    """Begins to compile the kernels of a batch norm, or of its backward, while Inductor compiles
    its graph. None begin for a GPU that is not here, as that of fake tensors.

    Args:
        node, memory_format: as of :func:`problem_of_node`.
    """
    device = node.all_input_nodes[0].meta["val"].device
    if not is_gpu_here(device):
        return
    problem = problem_of_node(node, memory_format)
    if problem is not None:
        start_compiling(problem, device.index)


def problem_of_node(node: Node, memory_format: torch.memory_format) -> NormProblem | None:
    """Returns the problem of a batch norm or of its backward; None if a size is symbolic. Tensors
    are expected to be aligned.

    Args:
        node: a call of the operator, with fake tensors in ``meta["val"]``.
        memory_format: the format of its input in the compiled program.
    """
    operands: Any = Operands if node.target is _batch_norm_act else BackwardOperands
    given = operands(*map_arg(node.args, lambda operand: operand.meta["val"]))
    sizes, dtype = given.input.shape, given.input.dtype
    if not all(isinstance(size, int) for size in sizes):
        return None
    input = torch.empty(sizes, dtype=dtype, device="meta", memory_format=memory_format)
    return problem_of(given._replace(input=input))
