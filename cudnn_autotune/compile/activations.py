"""The search for activations in a functional graph of ATen operators, as Inductor has it.

A graph has no ``silu``: Inductor decomposes it into a handful of operators, which differ for the
half types and between versions of torch. So each activation is traced by the same decompositions,
and the traced operators are looked for in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from cudnn_autotune.engines.activations import ACTIVATIONS, PARAMETERS, Activation, is_parameter
from cudnn_autotune.engines.problem import DTYPES

Decompositions = Mapping[Any, Callable[..., Any]]

_aten = torch.ops.aten

SILU = _aten.silu.default
"""Operator of a SiLU, which Inductor decomposes, in a graph that is decomposed already."""
# A number for the parameter in traces, which no model has by chance.
_PARAMETER = 0.6180339887498949
_PRELU = Activation("prelu")
_KINDS = [kind for kind in ACTIVATIONS if kind != _PRELU.kind]
_ALL = [Activation(kind, _PARAMETER if kind in PARAMETERS else None) for kind in _KINDS]


def _elu(x: Tensor, alpha: float | None = None) -> Tensor:
    """Returns ELU in Inductor's form, without multiplications by 1, as by ``alpha``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    below = torch.expm1(wide)
    return torch.where(wide > 0, wide, below if alpha is None else below * alpha).to(x.dtype)


# The activations of one tensor in all spellings.
_SPELLINGS: Sequence[tuple[Activation, Callable[[Tensor], Tensor]]] = (
    *zip(_ALL, _ALL, strict=True),
    (Activation("silu"), lambda x: x * torch.sigmoid(x)),
    (Activation("hardswish"), lambda x: x * F.relu6(x + 3) / 6),
    (Activation("mish"), lambda x: x * torch.tanh(F.softplus(x))),
    (Activation("elu", _PARAMETER), lambda x: _elu(x, _PARAMETER)),
    (Activation("elu", 1.0), _elu),
)
_COMMUTATIVE = (_aten.add.Tensor, _aten.mul.Tensor)


@dataclass(frozen=True)
class Match:
    """The nodes of a graph that compute an activation."""

    activation: str
    """Name, with the parameter if there is one."""
    output: Node
    """Node whose value is the activation of the input."""
    nodes: frozenset[Node]
    """Nodes that compute it, ``output`` among them."""
    slope: Node | None = None
    """Node of PReLU's slopes, one for each channel; None for other activations."""


def find_activations(graph: Graph, decompositions: Decompositions) -> dict[Node, list[Match]]:
    """Finds the activations of a functional graph, by their input's node.

    Activations with intermediate values that other nodes use, or of another dtype than their input,
    are not found. If two overlap, as the
    sigmoid within ``x * sigmoid(x)``, both are listed, the one of more nodes first.

    Args:
        graph: nodes call operators of ATen, and have their fake tensors in ``meta["val"]``.
        decompositions: the decompositions of the graph's trace.
    """
    patterns: dict[torch.dtype, list[_Pattern]] = {}
    found: dict[Node, list[Match]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor):
            continue
        if value.dtype not in DTYPES:
            continue
        if value.dtype not in patterns:
            patterns[value.dtype] = _patterns(value.dtype, decompositions)
        for pattern in patterns[value.dtype]:
            bound = _match(pattern.output, node, _Bound({}))
            if bound is None:
                continue
            activation = pattern.activation
            if bound.parameter is not None:
                activation = replace(activation, parameter=bound.parameter)
            if not is_parameter(activation.kind, activation.parameter):
                continue
            input, slope = bound.nodes[pattern.input], bound.nodes.get(pattern.slope)
            if getattr(input.meta.get("val"), "dtype", None) != value.dtype:
                continue
            if slope is not None and (slope is input or not _is_per_channel(slope, input)):
                continue
            nodes = frozenset(bound.nodes.values()) - {input, slope}
            if _is_closed(nodes, node):
                found.setdefault(input, []).append(Match(activation.name, node, nodes, slope))
    for several in found.values():
        several.sort(key=lambda one: len(one.nodes), reverse=True)
    return found


def call_silus(graph: Graph, decompositions: Decompositions) -> None:
    """Makes each SiLU of a graph one call, which Inductor computes wherever its output is read.

    Inductor writes a value with two readers to memory if it reads many tensors itself. That is the
    argument of a decomposed SiLU, in float32 for a half type, and a kernel of another shape, as
    that of a concatenation, would read it there.

    Args:
        graph, decompositions: as of :func:`find_activations`.
    """
    found = find_activations(graph, decompositions)
    silus = [
        (x, one) for x, matches in found.items() for one in matches if one.activation == "silu"
    ]
    replaced: set[Node] = set()
    calls: dict[Node, Node] = {}
    # In a half type the operators in between are a SiLU in float32.
    for argument, match in sorted(silus, key=lambda silu: -len(silu[1].nodes)):
        if not replaced.isdisjoint(match.nodes):
            continue
        replaced |= match.nodes
        with graph.inserting_before(match.output):
            call = graph.call_function(SILU, (calls.get(argument, argument),))
        call.meta = dict(match.output.meta)
        calls[match.output] = call
        match.output.replace_all_uses_with(call)
        for node in sorted(match.nodes, reverse=True):
            graph.erase_node(node)


class _Pattern(NamedTuple):
    """A spelling of an activation in a traced graph."""

    activation: Activation
    output: Node
    input: Node
    slope: Node
    """Node of PReLU's slopes, which other activations do not read."""


def _patterns(dtype: torch.dtype, decompositions: Decompositions) -> list[_Pattern]:
    """Returns the activations in all spellings."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    def spelled(x: Tensor, slope: Tensor) -> list[Tensor]:
        prelu = torch.where(x > 0, x, slope * x)
        return [*(function(x) for _, function in _SPELLINGS), prelu]

    trace = make_fx(spelled, decomposition_table=dict(decompositions))
    with FakeTensorMode(), torch.no_grad():
        traced = trace(torch.empty(2, 3, dtype=dtype), torch.empty(1, 3, dtype=dtype))
    traced.graph.eliminate_dead_code()
    input, slope = traced.graph.find_nodes(op="placeholder")
    results: Any = traced.graph.output_node().args[0]
    activations = [*(activation for activation, _ in _SPELLINGS), _PRELU]
    return [
        _Pattern(activation, node, input, slope)
        for activation, node in zip(activations, results, strict=True)
    ]


def _is_per_channel(slope: Node, input: Node) -> bool:
    """Returns whether a tensor has a number for each channel (dimension 1) of another one, in its
    dtype and on its device."""
    value, numbers = input.meta.get("val"), slope.meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(numbers, Tensor):
        return False
    channels = (1, value.shape[1], *(1,) * (value.dim() - 2)) if value.dim() > 1 else ()
    is_alike = (numbers.dtype, numbers.device) == (value.dtype, value.device)
    return (
        is_alike
        and all(isinstance(size, int) for size in (*numbers.shape, *channels))
        and (tuple(numbers.shape) in (channels, channels[1:]))
    )


class _Bound(NamedTuple):
    """The parts of a graph that correspond to a pattern's."""

    nodes: Mapping[Node, Node]
    """Pattern's node -> graph's node."""
    parameter: float | None = None
    """Number instead of ``_PARAMETER``, once it is known."""

    def plus(self, pattern: Node, value: Node) -> _Bound:
        return self._replace(nodes={**self.nodes, pattern: value})


def _match(pattern: Any, value: Any, bound: _Bound) -> _Bound | None:
    """Returns the binding of the pattern if ``value`` computes it, or None.

    ``bound`` is the binding so far.
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
    """Returns whether only ``output`` is used outside of ``nodes``."""
    return all(user in nodes for node in nodes if node is not output for user in node.users)
