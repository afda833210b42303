"""Weights of a graph of Dynamo as constants, and the detection of their changes.

Dynamo hands the weights to the graph at each call. A program with constant weights first checks
that the same ones are given, without writes into them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from cudnn_autotune.compile.aliasing import PLAIN
from cudnn_autotune.compile.graph_copies import copied

_version = operator.attrgetter("_version")
_is_freed = UntypedStorage._expired


class FrozenWeights:
    """The weights among the inputs of a graph, in their state when they became constants.

    Args:
        positions: the weights' positions among the inputs.
        inputs: all inputs.
    """

    def __init__(self, positions: Sequence[int], inputs: Sequence[Any]) -> None:
        self._pick = [inputs[i] for i in positions]
        self._positions = list(positions)
        self._versions = list(map(_version, self._pick))
        self._addresses = list(map(Tensor.data_ptr, self._pick))
        # Other weights may lie at the addresses of storages that are freed.
        self._references = [StorageWeakRef(weight.untyped_storage()) for weight in self._pick]
        self._storages = [reference.cdata for reference in self._references]

    def are_those_of(self, inputs: Sequence[Any]) -> bool:
        """Returns whether the same weights are given, without a write into them since.

        Writes that PyTorch itself does not count are not seen: through ``.data``, or by a CUDA
        kernel unknown to PyTorch.
        """
        given = [inputs[i] for i in self._positions]
        return (
            all(map(operator.is_, given, self._pick))
            and list(map(_version, given)) == self._versions
            and list(map(Tensor.data_ptr, given)) == self._addresses
            and not any(map(_is_freed, self._storages))
        )


def weights_of(graph: GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Returns the positions, among the inputs of a graph, of parameters and buffers of modules.
    Inputs with symbolic sizes are left out."""
    positions = []
    placeholders = graph.graph.find_nodes(op="placeholder")
    for i, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
        source = getattr(node, "_dynamo_source", None)
        if source is None or not source.guard_source.is_unspecialized_nn_module():
            continue
        if type(value) in PLAIN and not (value.is_inference() or value._has_symbolic_sizes_strides):
            positions.append(i)
    return positions


def constants_of(graph: GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Returns the positions of the weights that can become constants: those with values. The parts
    into which PyTorch splits a graph for ``DistributedDataParallel`` are compiled without values.
    """
    return [i for i in weights_of(graph, inputs) if not isinstance(inputs[i], FakeTensor)]


def with_constants(
    graph: GraphModule, inputs: Sequence[Any], positions: Sequence[int]
) -> GraphModule:
    """Returns a copy of a graph in which the inputs at ``positions`` are attributes, with these
    tensors."""
    frozen = copied(graph)
    placeholders: list[Node] = frozen.graph.find_nodes(op="placeholder")
    for i in positions:
        node, name = placeholders[i], f"_frozen_{i}"
        value = inputs[i]
        if isinstance(value, nn.Parameter):
            frozen.register_parameter(name, value)
        else:
            frozen.register_buffer(name, value)
        with frozen.graph.inserting_before(node):
            constant = frozen.graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        frozen.graph.erase_node(node)
    # Dynamo's notes on where parameters come from do not fit any more.
    frozen.meta.pop("dynamo_compile_id", None)
    frozen.recompile()
    return frozen
