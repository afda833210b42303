"""A compiled graph with gradients: its programs, with this package's batch norms or PyTorch's, in
the layout that the model has or another one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from cudnn_autotune.compile.aliasing import value_of, written_among
from cudnn_autotune.compile.communication import communicates, nested_graphs
from cudnn_autotune.compile.compiled_graph import OURS, ComparedGraph, Compilation, is_capturing
from cudnn_autotune.compile.frozen_weights import weights_of
from cudnn_autotune.compile.graph_copies import (
    copied,
    drop_biases,
    use_formulas,
    with_our_convolutions,
)
from cudnn_autotune.compile.joint_graph import fold_gradient_sums, rewrite_joint
from cudnn_autotune.compile.judges import JUDGES, Judge
from cudnn_autotune.compile.layouts import (
    OTHER_LAYOUT,
    favours_channels_last,
    in_layout,
    layout_of,
)
from cudnn_autotune.compile.norms import (
    begins_transform,
    find_norms,
    running_statistics,
    serve_norms,
)
from cudnn_autotune.compile.programs import (
    FusingCompiler,
    Options,
    Program,
    compile_plain,
    compile_tagged,
    with_joint_pass,
)
from cudnn_autotune.timers.programs import Run

WITHOUT_NORMS = f"{OURS}, PyTorch's norms"

_log = logging.getLogger(__name__)


class TrainingGraph(ComparedGraph):
    """A compiled graph with gradients and this package's convolutions.

    Its batch norms are this package's operators too, and it is in another layout, if a step of the
    whole graph, forward and backward, is then faster: in plain calls by the time of a step, in
    captures of a CUDA graph by the GPU's part of it. Groups of the forward are fused where that is
    faster for the group alone: a graph with one program is not timed as a whole.
    """

    def __init__(
        self, graph: GraphModule, inputs: Sequence[Any], options: Options, record: Compilation
    ) -> None:
        super().__init__(graph, inputs, record)
        self._graph = graph
        self._options = options
        self._weights = weights_of(graph, inputs)
        # It judges equal groups of all programs once.
        self._judge = JUDGES[options.fuse]()
        self._written: list[int] = []
        """Places of the buffers that a step changes."""
        self._with_norms: set[str] = set()
        """Names of the programs with this package's norms."""
        norms = [] if options.norms == "never" else find_norms(graph.graph)
        record.norms = self._found = [norm.report() for norm in norms]
        is_serving = any(norm.obstacle is None for norm in norms)
        measures_norms = is_serving and options.norms == "measure" and options.compare
        layout = self._layout_to_try()
        if (measures_norms or (layout is not None and options.compare)) and (
            why := self._why_not_compared(graph, inputs)
        ) is not None:
            self._give_up(f"the graph {why}")
            is_serving = is_serving and not measures_norms
            measures_norms, layout = False, None
        other = None
        if layout is not None:
            name = f"{OURS}, {layout}"
            other = self._if_possible(name, inputs, is_serving, layout)
            if other is not None and not options.compare:
                self._use(name, other)
                return
        ours = None
        if is_serving and (
            other is None or not measures_norms or options.memory_format is not None
        ):
            ours = self._if_possible(OURS, inputs, True)
        base = OURS
        if ours is None or measures_norms:
            base = WITHOUT_NORMS if is_serving else OURS
            theirs = compile_training(graph, inputs, options, self._judge, with_norms=False)
            self._contenders[base] = theirs
        if ours is not None:
            self._contenders[OURS] = ours
        if other is not None:
            self._contenders[name] = other
        self._use(base, self._contenders[base])
        if len(self._contenders) == 1:
            self._contenders = {}
            return
        fused = [[g.is_fused for g in one.groups] for one in self._contenders.values()]
        self._find_kept(graph, inputs, options, fused)
        if measures_norms:
            self._report(False, "it waits to be compared")

    def _layout_to_try(self) -> str | None:
        """Returns the layout in which the graph may be faster; None if there is none."""
        if self._options.memory_format == "auto":
            return OTHER_LAYOUT[layout_of(self._graph)]
        favours = favours_channels_last(self._graph, for_training=True)
        return "channels_last" if favours else None

    def _if_possible(
        self, name: str, inputs: Sequence[Any], with_norms: bool, layout: str | None = None
    ) -> Program | None:
        """Returns a program; None, with a reason in the record's note, if it cannot be compiled."""
        options = self._options
        try:
            program = compile_training(
                *(self._graph, inputs, options, self._judge),
                with_norms=with_norms,
                memory_format=layout,
            )
        except torch._dynamo.exc.RestartAnalysis:  # Dynamo begins again
            raise
        except Exception as failure:
            lack = "norms" if layout is None else name
            self._record.note = f"no {lack}: {failure}".partition("\n")[0]
            if layout is None:
                _log.warning("a compiled graph has %s", self._record.note, exc_info=True)
                self._report(False, "the program with it could not be compiled")
            else:
                _log.info("a compiled graph has %s", self._record.note)
            return None
        if with_norms:
            self._with_norms.add(name)
        return program

    def _use(self, name: str, program: Program) -> None:
        """Makes this program run from now on."""
        self._current = self._captured = program
        self._record.chosen = self._record.chosen_in_captures = name
        self._record.groups = list(program.groups)
        if name in self._with_norms:
            is_asked = self._options.compare
            self._report(True, "it was asked for" if is_asked else "nothing is compared")

    def _why_not_compared(self, graph: GraphModule, inputs: Sequence[Any]) -> str | None:
        """Returns the reason why the graph cannot be run several times at the first call; None if
        it can. Notes the buffers that a step changes."""
        if communicates(graph):
            return "communicates between ranks"
        placeholders = graph.graph.find_nodes(op="placeholder")
        buffers = {placeholders[i]: i for i in self._weights if not inputs[i].requires_grad}
        written = written_among(graph.graph, placeholders)
        if not written <= buffers.keys():
            return "writes into its inputs"
        written |= running_statistics(graph.graph)
        self._written = [i for node, i in buffers.items() if node in written]
        return None

    def _report(self, is_served: bool, reason: str) -> None:
        """Reports the decision on each norm without an obstacle."""
        self._record.norms = [
            found if found.reason else replace(found, is_served=is_served, reason=reason)
            for found in self._found
        ]

    def _give_up(self, reason: str) -> None:
        super()._give_up(reason)
        if self._record.chosen not in self._with_norms:
            self._report(False, self._record.note)

    def __call__(self, *inputs: Any) -> Any:
        if is_capturing():
            return self._captured.run(*inputs)
        if self._contenders:
            self._choose_if_free(inputs)
        return self._current.run(*inputs)

    def _choose(self, contenders: Mapping[str, Program], inputs: Sequence[Any]) -> None:
        steps = {name: _step(program.run) for name, program in contenders.items()}
        kept = [(inputs[i], inputs[i].clone()) for i in self._written]
        record = self._record
        try:
            comparison = self._compared(steps, inputs, self._weights)
        finally:
            with torch.no_grad():
                for buffer, before in kept:
                    buffer.copy_(before)
        if comparison is None:
            self._give_up("there was not enough memory")
            return
        self._keep(comparison)
        for name, reason in comparison.wrong.items():
            record.note = f"{name}: {reason}"
            _log.warning("the compiled program %r is not used: %s", name, reason)
        chosen, captured = comparison.fastest, comparison.fastest_in_captures
        self._current, self._captured = contenders[chosen], contenders[captured]
        record.chosen, record.chosen_in_captures = chosen, captured
        record.groups = list(self._current.groups)
        times = record.gpu_times_ms or record.times_ms
        text = ", ".join(f"{ms:.3f} ms by {name}" for name, ms in times.items())
        _log.info("chose %s: a step takes %s", chosen, text)
        if WITHOUT_NORMS not in contenders:
            return
        text = record.note
        if with_norms := [times[name] for name in times if name in self._with_norms]:
            best, without = min(with_norms), times[WITHOUT_NORMS]
            text = f"a step takes {best:.3f} ms with norms, {without:.3f} without"
        self._report(chosen in self._with_norms, text)


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


def compile_training(
    graph: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    judge: Judge,
    *,
    with_norms: bool,
    memory_format: str | None = None,
) -> Program:
    """Compiles a graph with gradients, without changing it, with this package's convolutions and,
    if possible, with fused groups in the forward.

    Args:
        judge: decides on the groups.
        with_norms: whether batch norms become this package's operators as well.
        memory_format: as of :func:`in_layout`; None leaves the layout to Inductor.

    Raises:
        Exception: the graph's in another layout.
    """
    ours = with_our_convolutions(graph, options.sampling, options.workspace_limit)
    if not any(begins_transform(node) for node in graph.graph.nodes):
        drop_biases(ours)
    patches = dict(options.inductor)
    if memory_format is not None:
        _check_layout(graph)
        if memory_format == "channels_last":
            use_formulas(ours, keeps_layout=True)
        ours = in_layout(ours, memory_format, for_training=True)
        patches["layout_optimization"] = False
    if with_norms:
        serve_norms(ours.graph, find_norms(ours.graph))
        ours.graph.lint()
        ours.recompile()
    patches = with_joint_pass(patches, rewrite_joint)
    fusing = FusingCompiler(judge, weights_of(graph, inputs), len(inputs))
    # The key of AOTAutograd's cache does not show that groups are fused.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        try:
            run = compile_plain(copied(ours), inputs, patches, _adding_in_norms(fusing))
            return Program(run, groups=fusing.groups)
        except torch._dynamo.exc.RestartAnalysis:  # Dynamo begins again
            raise
        except Exception as failure:
            _log.warning("a training graph has no fused groups: %s", failure, exc_info=True)
        return Program(compile_plain(ours, inputs, patches, _adding_in_norms(compile_tagged)))


def _adding_in_norms(compile_inner: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a compiler of ATen graphs that lets norms add gradients in a backward."""

    def compile_added(graph: GraphModule, inputs: Sequence[Any], **arguments: Any) -> Any:
        fold_gradient_sums(graph.graph)
        graph.recompile()
        return compile_inner(graph, inputs, **arguments)

    return compile_added


def _check_layout(graph: GraphModule) -> None:
    """Raises ValueError if a graph with gradients keeps its layout: beside what
    :func:`in_layout` names, if sizes are dynamic, or if it has a graph of its own kind in it or a
    transform of ``torch.func``."""
    values = [value_of(node) for node in graph.graph.find_nodes(op="placeholder")]
    sizes = [size for value in values if isinstance(value, Tensor) for size in value.shape]
    if any(isinstance(one, torch.SymInt) for one in (*values, *sizes)):
        raise ValueError("sizes are dynamic")
    if len(nested_graphs(graph)) > 1:
        raise ValueError("a part of it is a graph, such as a checkpoint")
    if any(begins_transform(node) for node in graph.graph.nodes):
        raise ValueError("it has a transform of torch.func")
