"""Finds the activations that a fused convolution can compute in a graph of ATen operators.

A graph does not say ``silu``: Inductor decomposes it into a handful of operators, other ones for
the half types, and other ones in another version of torch. So each activation is traced by the same
decompositions, and the traced operators are looked for in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from cudnn_autotune.engines.problem import ACTIVATIONS, ActivationName

Activation = Callable[[Tensor], Tensor]
Decompositions = Mapping[Any, Callable[..., Any]]

# Other ways to write some of the ACTIVATIONS.
_OTHER_SPELLINGS: Mapping[ActivationName, Activation] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "hardswish": lambda x: x * F.relu6(x + 3) / 6,
}
_COMMUTATIVE = (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)


@dataclass(frozen=True)
class Found:
    """An activation in a graph: ``output`` is ``activation(input)``."""

    activation: ActivationName
    input: Node
    output: Node
    nodes: frozenset[Node]
    """All nodes that compute it, ``output`` among them."""


def find_activations(graph: Graph, decompositions: Decompositions) -> dict[Node, list[Found]]:
    """Finds the activations of a functional graph, by the node that they are applied to.

    Only those are found whose intermediate values nothing else uses. Where two overlap, as the
    sigmoid within ``x * sigmoid(x)``, both are listed, the one of more nodes first.

    Args:
        graph: nodes call operators of ATen, and have their fake tensors in ``meta["val"]``.
        decompositions: those that the graph was traced with.
    """
    patterns: dict[torch.dtype, list[tuple[ActivationName, Node]]] = {}
    found: dict[Node, list[Found]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor):
            continue
        if not value.dtype.is_floating_point:
            continue
        if value.dtype not in patterns:
            patterns[value.dtype] = list(_traced(value.dtype, decompositions))
        for name, pattern in patterns[value.dtype]:
            bound = _match(pattern, node, {})
            if bound is None:
                continue
            input = next(given for of, given in bound.items() if of.op == "placeholder")
            nodes = frozenset(bound.values()) - {input}
            if _is_closed(nodes, node):
                found.setdefault(input, []).append(Found(name, input, node, nodes))
    for several in found.values():
        several.sort(key=lambda one: len(one.nodes), reverse=True)
    return found


def _traced(
    dtype: torch.dtype, decompositions: Decompositions
) -> Iterable[tuple[ActivationName, Node]]:
    """The node that returns the result of each spelling of an activation, by its name."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    for name, function in (*ACTIVATIONS.items(), *_OTHER_SPELLINGS.items()):
        trace = make_fx(_of_one_argument(function), decomposition_table=dict(decompositions))
        with FakeTensorMode(), torch.no_grad():
            traced = trace(torch.empty(2, 3, dtype=dtype))
        traced.graph.eliminate_dead_code()
        result = traced.graph.output_node().args[0]
        assert isinstance(result, Node)
        yield name, result


def _of_one_argument(function: Activation) -> Activation:
    """The function without its options, which would be traced as well."""
    return lambda x: function(x)


def _match(pattern: Any, value: Any, bound: dict[Node, Node]) -> dict[Node, Node] | None:
    """The nodes that stand for those of the pattern if ``value`` computes it, or None.

    ``bound`` are those that are known already; it is not changed.
    """
    if isinstance(pattern, Node):
        if pattern in bound:
            return bound if bound[pattern] is value else None
        if not isinstance(value, Node):
            return None
        if pattern.op == "placeholder":
            return {**bound, pattern: value}
        if pattern.target != value.target or pattern.kwargs != value.kwargs:
            return None
        if len(pattern.args) != len(value.args):
            return None
        orders = [value.args]
        if pattern.target in _COMMUTATIVE:
            orders.append(value.args[::-1])
        for args in orders:
            result: dict[Node, Node] | None = {**bound, pattern: value}
            for one, other in zip(pattern.args, args, strict=True):
                result = result if result is None else _match(one, other, result)
            if result is not None:
                return result
        return None
    if isinstance(value, Node) or type(value) is not type(pattern):
        # One version writes 6, another 6.0.
        is_number = isinstance(value, (int, float)) and isinstance(pattern, (int, float))
        return bound if is_number and value == pattern else None
    return bound if value == pattern else None


def _is_closed(nodes: frozenset[Node], output: Node) -> bool:
    """Whether nothing but ``output`` is used outside of ``nodes``."""
    return all(user in nodes for node in nodes if node is not output for user in node.users)
