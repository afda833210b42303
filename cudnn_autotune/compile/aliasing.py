"""The memory of the values of a graph of Dynamo, and the calls that write into it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import disable_autocast_cache
from torch.utils._pytree import tree_leaves, tree_map_only

PLAIN = (FakeTensor, Tensor, nn.Parameter)
"""The classes of tensors without rules of their own."""

RUNNING = ("running_mean", "running_var")
"""The parameters of a norm's running statistics."""
BATCH_NORMS = (F.batch_norm, torch.batch_norm)
"""PyTorch's functions for a batch norm."""
NORMS: Mapping[Any, Sequence[str]] = {
    F.batch_norm: ("input", *RUNNING, "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", *RUNNING, "training", "momentum", "eps"),
    F.instance_norm: ("input", *RUNNING, "weight", "bias", "use_input_stats", "momentum", "eps"),
    torch.instance_norm: (
        *("input", "weight", "bias", *RUNNING, "use_input_stats", "momentum", "eps"),
    ),
}
"""PyTorch's norms with running statistics -> their parameters, in order."""
_FLAGS = {"training": False, "use_input_stats": True}
"""The parameters that tell whether a norm takes statistics of its input -> their defaults."""

CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)
"""PyTorch's names of one function."""

# Methods of Python that write into their first operand, as functions of `operator` do.
_IN_PLACE = "add and concat floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_WRITING = {"__setitem__", "__delitem__", *(f"__i{name}__" for name in _IN_PLACE.split())}
# Modes that a graph enters by one call and leaves by another one.
_MODES = (torch.autocast, torch.inference_mode)


def value_of(node: Node) -> Any:
    """Returns the value of a node in Dynamo: a fake tensor, or any other."""
    return node.meta.get("example_value")


def fake_tensors(nodes: Iterable[Node]) -> dict[Node, Tensor]:
    """Returns the nodes of tensors, each with its fake tensor."""
    values = {node: value_of(node) for node in nodes}
    return {node: value for node, value in values.items() if isinstance(value, Tensor)}


def storages(values: Any) -> set[int]:
    """Returns the storages of the tensors among values and among nodes' values."""
    leaves = map(_unwrapped, tree_leaves(tree_map_only(Node, value_of, values)))
    return {leaf.untyped_storage()._cdata for leaf in leaves if type(leaf) in PLAIN}


def _unwrapped(value: Any) -> Any:
    """Returns the tensor within those of transforms of ``torch.func``, which show no storage."""
    functorch = torch._C._functorch
    while isinstance(value, Tensor) and functorch.is_functorch_wrapped_tensor(value):
        value = functorch.get_unwrapped(value)
    return value


def storages_when_run(graph: GraphModule) -> dict[Node, set[int]]:
    """Returns the storages of each value of a graph that runs with Dynamo's fake inputs."""
    inputs = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    modes = (value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    interpreter = torch.fx.Interpreter(graph, garbage_collect_values=False)
    with ExitStack() as stack:
        if (mode := next(modes, None)) is not None:
            stack.enter_context(mode)
            if mode.shape_env is not None:  # sizes that depend on data have symbols already
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(torch.no_grad())
        stack.enter_context(disable_autocast_cache())
        try:
            interpreter.run(*inputs)
        finally:
            values = interpreter.env
            for node, value in reversed(values.items()):
                if isinstance(value, _MODES) and values.keys().isdisjoint(node.users):
                    value.__exit__(None, None, None)
    return {node: storages(value) for node, value in values.items()}


def written_by(node: Node) -> set[int]:
    """Returns the storages into which a call may write."""
    return storages(written_operands(node))


def written_operands(node: Node) -> Sequence[Node]:
    """Returns the operands into which a call may write; all of them if unknown."""
    target, operands = node.target, node.all_input_nodes
    if not node.op.startswith("call"):
        return ()
    if target in NORMS:
        return _nodes(arguments_of_norm(node), RUNNING) if takes_statistics(node) else ()
    is_operator = getattr(target, "__module__", "") == "_operator"
    if isinstance(target, str) or is_operator:
        name = target if isinstance(target, str) else f"__{target.__name__}__"
        is_in_place = name.endswith("_") and not name.endswith("__")
        return operands[:1] if is_in_place or name in _WRITING else ()
    if "out" in node.kwargs:
        return operands
    if isinstance(target, FunctionType):
        try:
            given = inspect.signature(target).bind(*node.args, **node.kwargs).arguments
        except TypeError:
            return operands
        # An embedding renormalises its weight.
        if given.get("max_norm") is not None:
            return operands
        return operands[:1] if given.get("inplace") else ()
    schemas = _schemas_of(target)
    if schemas is None:  # Dynamo also puts operators with graphs of their own into a graph
        return operands
    return [one for schema in schemas for one in _written_in(schema, node)]


def _schemas_of(target: Any) -> Sequence[Any] | None:
    """Returns the schemas of an operator of PyTorch, or those of a function in C, which has none if
    it is not ATen's; None if a call of the target may write into anything."""
    if isinstance(target, torch._ops.OpOverload):
        return [target._schema]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name)._schema for name in target.overloads()]
    is_function = isinstance(target, (BuiltinFunctionType, MethodDescriptorType))
    if not is_function or target.__name__.endswith("_"):
        return None
    return torch._C._jit_get_schemas_for_operator(f"aten::{target.__name__}")


def _written_in(schema: Any, node: Node) -> list[Node]:
    """Returns the operands into which a call writes by a schema. A schema does not tell of running
    statistics."""
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    written = [
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ]
    takes = not any(given.get(flag) is False for flag in _FLAGS)
    return _nodes(given, (*written, *RUNNING) if takes else written)


def _nodes(given: Mapping[str, Any], names: Iterable[str]) -> list[Node]:
    """Returns the nodes in arguments of these names."""
    values = tree_leaves([given[name] for name in names if name in given])
    return [value for value in values if isinstance(value, Node)]


def written_among(graph: Graph, nodes: Iterable[Node]) -> set[Node]:
    """Returns the nodes into whose memory a call in a graph of Dynamo may write."""
    written = {storage for node in graph.nodes for storage in written_by(node)}
    return {node for node in nodes if not written.isdisjoint(storages(node))}


def arguments_of_norm(node: Node) -> dict[str, Any]:
    """Returns the given arguments of one of ``NORMS``, by parameter."""
    return {**dict(zip(NORMS[node.target], node.args, strict=False)), **node.kwargs}


def takes_statistics(node: Node) -> Any:
    """Returns whether one of ``NORMS`` takes statistics of its input; a node if that varies."""
    flag = "training" if node.target in BATCH_NORMS else "use_input_stats"
    return arguments_of_norm(node).get(flag, _FLAGS[flag])
