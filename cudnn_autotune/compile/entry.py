"""The entry of the backend ``cudnn_autotune`` of ``torch.compile``.

Inductor compiles the graph as usual, but convolutions are this package's operators. Without
gradients, a group of a convolution, residual addition and activation is one call of ``conv_fused``
if that is faster. The whole program is then timed against plain Inductor's.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import CompileContext, TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from cudnn_autotune.compile import cache_artifacts
from cudnn_autotune.compile.aliasing import value_of
from cudnn_autotune.compile.compilation import PLAIN, Compilation
from cudnn_autotune.compile.compiled_graph import CompiledGraph, is_capturing
from cudnn_autotune.compile.programs import Options, compile_plain
from cudnn_autotune.compile.traces import tell
from cudnn_autotune.compile.training_graph import TrainingGraph
from cudnn_autotune.core.display import Listed
from cudnn_autotune.nn.counterparts import COUNTERPARTS
from cudnn_autotune.timers.programs import Run

_MOST_RECORDS = 256
_COLUMNS = ("graph", "parts", "runs", "times, ms", "note")

_records: deque[Compilation] = deque(maxlen=_MOST_RECORDS)


def compilations() -> list[Compilation]:
    """Returns this process's records of compiled graphs, the last 256, oldest first. A notebook
    shows the list as a table."""
    return Listed(_records, "compilation", _COLUMNS, Compilation._row)


def backend(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Run:
    """Compiles a graph of Dynamo. ``torch.compile(model, backend="cudnn_autotune")`` calls this.

    Args:
        mode: a mode of ``torch.compile``.
        options: the following; all others are Inductor's.
            ``sampling``, ``workspace_limit``: of the convolutions, as a layer takes them.
            ``freezing`` (False): whether weights become constants if no gradient is needed, for a
            model whose weights do not change any more.
            ``fuse`` for groups, ``norms`` for batch norms in training: ``"measure"``, ``"always"``
            or ``"never"``.
            ``compare`` (True): whether to time the program against plain Inductor's at the first
            call, and to keep the faster one.
            ``memory_format``: ``"auto"`` compares a program in the other layout too.

    Raises:
        ValueError: an option is unknown, or its value not allowed.
    """
    settings = Options.read(mode, options)
    cache_artifacts.begin()
    context = TracingContext.try_get()
    if context is None or context.ddp_optimizer_ctx is None:
        return _compile(graph, example_inputs, settings)
    return _compile_part(graph, example_inputs, settings, context)


def _compile_part(
    graph: GraphModule, inputs: Sequence[Any], settings: Options, context: TracingContext
) -> Run:
    """Compiles a part of a graph that PyTorch splits for ``DistributedDataParallel``.

    PyTorch counts on one program of each part: it names the metadata of its backward by the part's
    number, and lets a program's first call return fake tensors. Programs that are compared have a
    context of their own, and the graph itself returns the fake tensors.
    """
    import torch._functorch.config
    from torch._dispatch.python import enable_python_dispatcher

    own = copy.copy(context)
    own.ddp_optimizer_ctx, own.fakify_first_call, own.fw_metadata = None, False, None
    # A program that is found in AOTAutograd's cache leaves no metadata, which PyTorch asks for.
    with tracing(own), torch._functorch.config.patch(enable_autograd_cache=False):
        run = _compile(graph, inputs, settings)
    context.fw_metadata = own.fw_metadata
    has_run = False

    def run_part(*inputs: Any) -> Any:
        nonlocal has_run
        if not has_run and any(isinstance(value, FakeTensor) for value in inputs):
            with enable_python_dispatcher():  # kernels in C++ would fix symbolic sizes
                return graph(*inputs)
        has_run = True
        return run(*inputs)

    return run_part


def _compile(graph: GraphModule, example_inputs: Sequence[Any], settings: Options) -> Run:
    """Compiles a graph, and records how."""
    tensors = [value for value in example_inputs if isinstance(value, Tensor)]
    tensors += [*graph.parameters(), *graph.buffers()]
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    record = Compilation("training" if needs_gradient else "inference")
    _records.append(record)
    if (reason := _why_plain(graph, tensors, settings, needs_gradient)) is not None:
        record.mode, record.chosen, record.note = "plain", PLAIN, reason
        record.chosen_in_captures = PLAIN
        tell(record, CompileContext.try_get())
        return compile_plain(graph, example_inputs, settings.inductor)
    if needs_gradient:
        return TrainingGraph(graph, example_inputs, settings, record).__call__
    # Dynamo copies the attributes of its argument, and so would keep all first programs.
    return CompiledGraph(graph, example_inputs, settings, record).__call__


def _why_plain(
    graph: GraphModule, tensors: Sequence[Tensor], settings: Options, needs_gradient: bool
) -> str | None:
    """Returns the reason why this backend leaves a graph to Inductor; None if it does not."""
    ours = torch.ops.cudnn_autotune
    marks = [t for mark in (ours.mark_input, ours.mark_padded) for t in (mark, mark.default)]
    targets = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    if not targets & {*marks, *COUNTERPARTS}:
        return "the graph has no convolution"
    if "always" not in (settings.fuse, settings.norms) and not any(
        tensor.is_cuda for tensor in tensors
    ):
        return "no tensor is on a CUDA device"
    if not needs_gradient and is_capturing():
        return "it was compiled while a CUDA graph was captured"
    placeholders = graph.graph.find_nodes(op="placeholder")
    if any(isinstance(value_of(node), list) for node in placeholders):
        # Programs cannot be compared: the first run empties the list.
        return "its inputs are a list, as in a backward of compiled autograd"
    return None
