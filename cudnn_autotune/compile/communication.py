"""The test whether a program communicates with other processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

# Namespaces of operators that communicate with other processes, and of PyTorch's and this package's
# operators, which do not.
_COMMUNICATING = {
    *("c10d", "_c10d_functional", "_c10d_functional_autograd"),
    *("c10d_functional", "_dtensor", "symm_mem"),
}
LOCAL = {
    *("aten", "cudnn_autotune", "inductor", "inductor_prims", "mkl", "mkldnn", "onednn", "prim"),
    *("prims", "quantized", "quantized_decomposed", "rngprims", "torchvision"),
}


def is_among_ranks() -> bool:
    """Returns whether this process has a process group of torch.distributed with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def nested_graphs(graph: GraphModule) -> list[GraphModule]:
    """Returns a graph and its nested graphs."""
    return [module for module in graph.modules() if isinstance(module, GraphModule)]


def all_nodes(graph: GraphModule) -> list[Node]:
    """Returns the nodes of a graph and of its nested graphs."""
    return [node for one in nested_graphs(graph) for node in one.graph.nodes]


def namespaces_of(graph: GraphModule) -> set[str]:
    """Returns the namespaces of the operators of a graph and of its nested graphs."""
    # An operator with an effect is an argument of `with_effects`.
    targets = [target for node in all_nodes(graph) for target in (node.target, *node.args)]
    packets = (
        target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
        for target in targets
    )
    return {
        packet._qualified_op_name.partition("::")[0]
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
    }


def communicates(graph: GraphModule) -> bool:
    """Returns whether a graph of operators, or a nested one, has a collective operation.

    Among ranks, an operator that is neither PyTorch's nor this package's counts as one, because its
    effects are unknown.
    """
    namespaces = namespaces_of(graph)
    if is_among_ranks() and namespaces - LOCAL:
        return True
    return bool(namespaces & _COMMUNICATING)


@contextmanager
def watched() -> Iterator[set[str]]:
    """Collects the names of the collective operations that run in the ``with`` block."""
    seen: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace in _COMMUNICATING:
                seen.add(func._schema.name.replace("::", "."))
            return func(*args, **(kwargs or {}))

    with Watch():
        yield seen
