"""Whether a program communicates with other processes. All of them have to run it equally often,
or one waits for the others for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

_COMMUNICATING = {
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d_functional",
    "_dtensor",
    "symm_mem",
}
_LOCAL = {
    "aten",
    "cudnn_autotune",
    "inductor",
    "inductor_prims",
    "mkl",
    "mkldnn",
    "onednn",
    "prim",
    "prims",
    "quantized",
    "quantized_decomposed",
    "rngprims",
    "torchvision",
}


def is_among_ranks() -> bool:
    """Whether this process has a process group of torch.distributed with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def communicates(graph: GraphModule) -> bool:
    """Whether a graph of ATen operators, or one that is nested in it, has a collective operation.

    Among ranks, an operator that is neither PyTorch's nor this package's counts as one, because
    nobody knows what it does.
    """
    graphs = [module.graph for module in graph.modules() if isinstance(module, GraphModule)]
    # An operator with an effect is an argument of `with_effects`.
    targets = [target for g in graphs for node in g.nodes for target in (node.target, *node.args)]
    namespaces = {t.namespace for t in targets if isinstance(t, torch._ops.OpOverload)}
    if is_among_ranks() and namespaces - _LOCAL:
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
