"""A compiled graph that needs gradients: whether its batch norms are this package's operators."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from cudnn_autotune.nn.backend.comparison import Run, communicates, compare
from cudnn_autotune.nn.backend.compiled_graph import (
    MOST_DEFERRALS,
    OURS,
    Compilation,
    is_capturing,
    is_within_step,
)
from cudnn_autotune.nn.backend.graphs import weights_of
from cudnn_autotune.nn.backend.norms import find_norms, running_statistics, written_inputs
from cudnn_autotune.nn.backend.programs import Options, compile_training

WITHOUT_NORMS = f"{OURS}, PyTorch's norms"

_log = logging.getLogger(__name__)


class TrainingGraph:
    """A compiled graph that needs gradients, with this package's convolutions.

    Its batch norms are this package's operators too where a step of the whole graph, forward and
    backward, takes less time then: in plain calls by the time of a step, while a CUDA graph is
    captured by the GPU's part of it.
    """

    def __init__(
        self, graph: GraphModule, inputs: Sequence[Any], options: Options, record: Compilation
    ) -> None:
        self._record = record
        self._deferrals = 0
        self._contenders: dict[str, Run] = {}
        """Programs to compare at the next call outside of captures and of the caller's steps."""
        on_gpu = (v.device for v in inputs if isinstance(v, Tensor) and v.is_cuda)
        self._device: torch.device | None = next(on_gpu, None)
        self._weights = weights_of(graph, inputs)
        self._written: list[int] = []
        """Places of the buffers that a step changes."""
        norms = [] if options.norms == "never" else find_norms(graph.graph)
        record.norms = self._found = [norm.report() for norm in norms]
        is_serving = any(norm.obstacle is None for norm in norms)
        is_measured = is_serving and options.norms == "measure" and options.compare
        if is_measured and (why := self._why_not_compared(graph, inputs)) is not None:
            self._give_up(f"the graph {why}")
            is_serving = is_measured = False
        ours = None
        if is_serving:
            try:
                ours = compile_training(graph, inputs, options, with_norms=True)
            except torch._dynamo.exc.RestartAnalysis:  # Dynamo begins again
                raise
            except Exception as failure:
                record.note = f"no norms: {failure}".partition("\n")[0]
                _log.warning("a compiled graph has %s", record.note, exc_info=True)
                self._report(False, "the program with it could not be compiled")
        if ours is not None and not is_measured:
            self._current = self._captured = ours
            self._report(True, "it was asked for" if options.compare else "nothing is compared")
            return
        theirs = compile_training(graph, inputs, options, with_norms=False)
        self._current = self._captured = theirs
        if ours is None:
            return
        self._contenders = {WITHOUT_NORMS: theirs, OURS: ours}
        record.chosen = record.chosen_in_captures = WITHOUT_NORMS
        self._report(False, "it waits to be compared")

    def _why_not_compared(self, graph: GraphModule, inputs: Sequence[Any]) -> str | None:
        """Returns why the graph cannot be run several times at the first call; None if it can.
        Notes the buffers that a step changes."""
        if communicates(graph):
            return "communicates between ranks"
        placeholders = graph.graph.find_nodes(op="placeholder")
        buffers = {placeholders[i]: i for i in self._weights if not inputs[i].requires_grad}
        written = written_inputs(graph.graph)
        if not written <= buffers.keys():
            return "writes into its inputs"
        written |= running_statistics(graph.graph)
        self._written = [i for node, i in buffers.items() if node in written]
        return None

    def _report(self, is_served: bool, reason: str) -> None:
        """Says of each norm without an obstacle what became of it."""
        self._record.norms = [
            found if found.reason else replace(found, is_served=is_served, reason=reason)
            for found in self._found
        ]

    def _give_up(self, reason: str) -> None:
        """Keeps the program without norms, for a reason why nothing is compared."""
        self._contenders = {}
        self._record.note = f"not compared: {reason}"
        self._report(False, self._record.note)
        _log.info("the norms of a compiled graph were %s", self._record.note)

    def __call__(self, *inputs: Any) -> Any:
        if is_capturing():
            return self._captured(*inputs)
        if self._contenders:
            with self._on_device():
                is_free = not is_within_step()
            if is_free:
                self._choose(inputs)
            else:
                self._defer()
        return self._current(*inputs)

    def _on_device(self) -> AbstractContextManager[object]:
        """Makes the program's device the current one, which is synchronised to time programs."""
        return nullcontext() if self._device is None else torch.cuda.device(self._device)

    def _defer(self) -> None:
        """Gives the comparison up in the end."""
        self._deferrals += 1
        if self._deferrals == MOST_DEFERRALS:
            self._give_up("each call is within a step of Inductor's CUDA graphs")

    def _choose(self, inputs: Sequence[Any]) -> None:
        """Keeps the faster of the programs."""
        contenders, self._contenders = self._contenders, {}
        steps = {name: _step(program) for name, program in contenders.items()}
        kept = [(inputs[i], inputs[i].clone()) for i in self._written]
        record = self._record
        try:
            with self._on_device():
                comparison = compare(steps, inputs, self._weights)
        except torch.OutOfMemoryError:
            self._give_up("there was not enough memory")
            return
        finally:
            with torch.no_grad():
                for buffer, before in kept:
                    buffer.copy_(before)
        record.times_ms = dict(comparison.times_ms)
        record.gpu_times_ms = dict(comparison.gpu_times_ms)
        if (reason := comparison.wrong.get(OURS)) is not None:
            record.note = f"{OURS}: {reason}"
            self._report(False, reason)
            _log.warning("the norms of a compiled graph are PyTorch's: %s", reason)
            return
        record.chosen, record.chosen_in_captures = (
            comparison.fastest,
            comparison.fastest_in_captures,
        )
        self._current = contenders[record.chosen]
        self._captured = contenders[record.chosen_in_captures]
        times = record.gpu_times_ms or record.times_ms
        text = f"a step takes {times[OURS]:.3f} ms with norms, {times[WITHOUT_NORMS]:.3f} without"
        self._report(record.chosen == OURS, text)
        _log.info("chose %s: %s", record.chosen, text)


def _step(program: Run) -> Run:
    """Returns a function that runs the forward and backward of a program, and returns its outputs.

    Neither gradients of the caller's tensors nor their hooks take part.
    """

    def step(*inputs: Any) -> list[Tensor]:
        with torch.enable_grad():
            given = [
                value.detach().requires_grad_(value.requires_grad)
                if isinstance(value, Tensor)
                else value
                for value in inputs
            ]
            outputs = [leaf for leaf in tree_leaves(program(*given)) if isinstance(leaf, Tensor)]
            ends = [output for output in outputs if output.requires_grad]
            starts = [one for one in given if isinstance(one, Tensor) and one.requires_grad]
            ones = [torch.ones_like(end) for end in ends]
            torch.autograd.grad(ends, starts, ones, allow_unused=True)
        return [output.detach() for output in outputs]

    return step
