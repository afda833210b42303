"""The gradients of convolutions in a training graph. Their engines are compiled while Inductor
compiles the graph, and so before the first backward searches them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from cudnn_autotune.compile.groups import hints
from cudnn_autotune.engines.configs import is_gpu_here
from cudnn_autotune.engines.conv_layout import (
    conv_memory_format,
    is_dgrad_of_height_1,
    is_image_of_height_1,
    is_wgrad_of_height_1,
)
from cudnn_autotune.engines.problem import ConvProblem, Operation, as_images
from cudnn_autotune.tuning import compiling_ahead
from cudnn_autotune.tuning.compiling_ahead import Search

_ours = torch.ops.cudnn_autotune
OPERATIONS: dict[Any, Operation] = {
    _ours.conv_fprop.default: "fprop",  # a transposed convolution has it
    _ours.conv_dgrad.default: "dgrad",
    _ours.conv_wgrad.default: "wgrad",
}
"""The operation of each of this package's operators for convolutions in a training graph."""


def start_gradients(graph: Graph) -> None:
    """Begins to compile the engines of the gradients in a joint or backward graph of ATen
    operators, in its order. A value is expected in the strides that the graph says. None begin for
    a GPU that is not here, as that of fake tensors."""
    compiling_ahead.start_all(_searches(graph))


def _searches(graph: Graph) -> Iterator[Search]:
    for node in graph.nodes:
        if node.target not in OPERATIONS:
            continue
        given = _values(node)
        device = next(value.device for value in given.values() if isinstance(value, Tensor))
        if not is_gpu_here(device):
            continue
        try:
            problem = problem_of(node)
        except ValueError:  # the first call reports the fault
            continue
        limit = given.get("workspace_limit", -1)
        yield problem, device, given.get("sampling", ""), None if limit < 0 else limit


def problem_of(node: Node) -> ConvProblem:
    """Returns a call of ``conv_fprop``, ``conv_dgrad`` or ``conv_wgrad`` as a problem, with
    PyTorch's default flags. A 1-d one in channels_last has images of height 1.

    Symbolic sizes have their values of the first call.

    Raises:
        ValueError: a size is too large for cuDNN, or depends on data.
    """
    given, operation = _values(node), OPERATIONS[node.target]
    x, w = (
        given[f"{name}_size"] if f"{name}_size" in given else given[name].shape
        for name in ("input", "weight")
    )
    a, b = [value for value in given.values() if isinstance(value, Tensor)][:2]
    stride, padding, dilation = (hints(given[name]) for name in ("stride", "padding", "dilation"))
    problem = ConvProblem(
        *(operation, hints(x), hints(w), stride, padding, dilation),
        groups=hints([given["groups"]])[0],
        dtype=a.dtype,
        memory_format=conv_memory_format(a, b),
    )
    if operation == "fprop":
        has_height_1 = is_image_of_height_1(a, b, pads=False)
    else:
        is_of_height_1 = is_dgrad_of_height_1 if operation == "dgrad" else is_wgrad_of_height_1
        has_height_1 = is_of_height_1(a, b)
    if not has_height_1:
        return problem
    return replace(as_images(problem), memory_format=torch.channels_last)


def _values(node: Node) -> dict[str, Any]:
    """Returns the values of a call's arguments, fake tensors among them, by their names. Defaults
    may be left out."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    values: Any = map_arg(node.args, lambda operand: operand.meta["val"])
    return dict(zip(names, values, strict=False))
