"""The kernels that Inductor would launch on an H200 that is not there.

The model is traced on the CPU. Inductor then gets its graphs on fake CUDA tensors, and generates
code that is never loaded.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from cudnn_autotune.compile import entry, training_graph
from cudnn_autotune.engines import devices
from support.conv.served_on_cpu import served_on_cpu

_GIVEN = json.loads(devices.load("h200"))
H200 = SimpleNamespace(
    major=_GIVEN["deviceVer"] // 100,
    minor=_GIVEN["deviceVer"] // 10 % 10,
    multi_processor_count=_GIVEN["multiProcessorCount"],
    regs_per_multiprocessor=_GIVEN["maxRegistersPerSM"],
    max_threads_per_multi_processor=_GIVEN["maxThreadsPerSM"],
    max_threads_per_block=_GIVEN["maxThreadsPerBlock"],
    warp_size=_GIVEN["warpSize"],
)
"""The properties of a GPU that Inductor reads, as ``torch.cuda.get_device_properties`` has them."""

WARP = H200.warp_size


@dataclass(frozen=True)
class Read:
    """The elements of a buffer that a sum reads: one for each output and each step of the sum."""

    buffer: str
    along_steps: bool
    """Whether a warp that takes steps of one output reads neighbours in memory."""
    along_outputs: bool
    """Whether a warp that takes one step of outputs does."""


@dataclass(frozen=True)
class Sum:
    """A part of a kernel that sums elements of buffers."""

    outputs: int
    steps: int
    reads: Sequence[Read]


@dataclass(frozen=True)
class Launch:
    """A kernel that Inductor generates, or an operator that it calls."""

    operator: str | None
    """Its name; None for a kernel."""
    reads: frozenset[str]
    """Names of buffers."""
    writes: frozenset[str]
    written_bytes: int
    """Bytes of its outputs."""
    sums: Sequence[Sum]


def forward_launches(model: nn.Module, *inputs: Tensor) -> list[Launch]:
    """Returns the launches of an inference, whose convolutions are this package's. Nothing is
    run."""
    with torch.no_grad():
        return _launches(model, inputs, is_backward=False, fuse="always", norms="never")


def backward_launches(model: nn.Module, *inputs: Tensor) -> list[Launch]:
    """Returns the launches of a training step's backward, in channels_last with this package's
    norms. Nothing is run."""
    return _launches(model, inputs, is_backward=True, norms="always")


def _launches(
    model: nn.Module, inputs: Sequence[Tensor], is_backward: bool, **options: Any
) -> list[Launch]:
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx

    compile_inner = compile_fx.compile_fx_inner

    def lower(graph: GraphModule, given: Sequence[Any], **arguments: Any) -> Any:
        if bool(arguments.get("is_backward")) != is_backward:
            return graph.forward
        with _on_h200():
            compile_inner(*_moved(graph, given), **arguments)

    options["compare"] = False
    call = torch.compile(model, backend="cudnn_autotune", options=options, dynamic=False)
    with ExitStack() as stack:
        stack.enter_context(served_on_cpu())
        for place, name, value in (
            (entry, "_why_plain", lambda *_: None),
            (training_graph, "favours_channels_last", lambda *_, **__: True),
            (compile_fx, "compile_fx_inner", lower),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
        try:
            call(*inputs)
        except _Lowered as lowered:
            return lowered.launches
    raise AssertionError("nothing was compiled")


class _Lowered(BaseException):
    """Ends a compilation. No ``except Exception`` on its way takes it for a failure."""

    def __init__(self, launches: list[Launch]) -> None:
        self.launches = launches


def _moved(graph: GraphModule, inputs: Sequence[Any]) -> tuple[GraphModule, list[Any]]:
    """Returns a copy of a graph of a CPU, and its inputs, on the GPU."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    gpu = torch.device("cuda", 0)
    moved = copy.deepcopy(graph)
    for node in moved.graph.nodes:
        node.args = tuple(gpu if isinstance(one, torch.device) else one for one in node.args)
        node.kwargs = {
            name: gpu if isinstance(one, torch.device) else one for name, one in node.kwargs.items()
        }
    moved.recompile()
    mode = torch._guards.detect_fake_mode(inputs)
    assert mode is not None
    with mode:
        fake = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=gpu)
            if isinstance(one, Tensor)
            else one
            for one in inputs
        ]
    FakeTensorProp(moved, mode).propagate_dont_convert_inputs(*fake)
    return moved, fake


@contextmanager
def _on_h200() -> Iterator[None]:
    """Lets Inductor find an H200, and end with the kernels of a graph."""
    from torch._dynamo.device_interface import get_interface_for_device
    from torch._inductor import scheduler
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    def generate(graph: Any) -> Any:
        graph.codegen()
        raise _Lowered([_launch(node) for node in graph.scheduler.nodes])

    interface = get_interface_for_device("cuda")
    answers: list[tuple[Any, str, Any]] = [
        (interface, "get_device_properties", H200),
        (interface, "is_bf16_supported", True),
        (torch.cuda, "get_device_capability", (H200.major, H200.minor)),
        (scheduler, "has_triton", True),
        (_triton, "triton_hash_with_backend", "none"),
    ]
    with ExitStack() as stack:
        for place, name, answer in answers:
            patch = mock.patch.object(place, name, lambda *_, answer=answer, **__: answer)
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", generate))
        DeviceProperties.create.cache_clear()
        stack.callback(DeviceProperties.create.cache_clear)
        yield


def _launch(node: Any) -> Launch:
    """Returns a node of Inductor's scheduler."""
    reads, writes = (
        frozenset(one.name for one in found)
        for found in (node.read_writes.reads, node.read_writes.writes)
    )
    written = [one.node for one in node.get_outputs() if one.node.has_tensor_output()]
    sizes = [int(one.get_numel()) * one.get_dtype().itemsize for one in written]
    if node.is_extern() or not all(hasattr(part, "get_ranges") for part in node.get_nodes()):
        name = getattr(node.node, "python_kernel_name", None)
        return Launch(name or type(node.node).__name__, reads, writes, sum(sizes), [])
    sums = [_sum(part) for part in node.get_nodes() if part.is_reduction()]
    return Launch(None, reads, writes, sum(sizes), sums)


def _sum(node: Any) -> Sum:
    """Returns a sum of Inductor's scheduler."""
    outputs, steps = (math.prod(int(one) for one in sizes) for sizes in node.get_ranges())
    elements = outputs * steps
    whole = [
        one
        for one in node.read_writes.reads
        if hasattr(one, "index") and math.prod(int(size) for size in one.size) == elements
    ]
    # Neighbours are looked at in three places.
    firsts = [(outputs * i // 3 // WARP * WARP, steps * i // 3 // WARP * WARP) for i in range(3)]
    reads = [
        Read(
            one.name,
            along_steps=all(
                _are_neighbours(one, range(output * steps + first, output * steps + last))
                for output, first in firsts
                for last in [min(first + WARP, steps)]
            ),
            along_outputs=all(
                _are_neighbours(one, range(first * steps + step, last * steps, steps))
                for first, step in firsts
                for last in [min(first + WARP, outputs)]
            ),
        )
        for one in whole
    ]
    return Sum(outputs, steps, reads)


def _are_neighbours(read: Any, places: Sequence[int]) -> bool:
    """Returns whether elements are one after the other in memory.

    Args:
        read: a dependency of Inductor's, whose loops go through outputs and then steps.
        places: numbers of iterations.
    """
    addresses = []
    for place in places:
        values = {}
        for name, size in zip(reversed(read.var_names), reversed(read.size), strict=True):
            place, values[name] = divmod(place, int(size))
        addresses.append(int(read.index.subs(values)))
    return addresses == list(range(addresses[0], addresses[0] + len(addresses)))
