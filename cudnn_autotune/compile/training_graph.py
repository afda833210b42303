"""A compiled graph with gradients: its programs, with this package's batch norms or PyTorch's, in
the layout that the model has or another one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._guards import TracingContext
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_autocast_cache

from cudnn_autotune.compile.aliasing import written_among
from cudnn_autotune.compile.communication import communicates
from cudnn_autotune.compile.comparison import Comparison, convolutions_ms, step
from cudnn_autotune.compile.compilation import EAGER, OURS, Compilation
from cudnn_autotune.compile.compiled_graph import ComparedGraph, is_capturing
from cudnn_autotune.compile.frozen_weights import weights_of
from cudnn_autotune.compile.gradients import start_gradients
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
    serve_norms,
)
from cudnn_autotune.compile.programs import (
    IN_LAYOUT,
    FusingCompiler,
    Options,
    Program,
    compile_plain,
    compile_tagged,
    with_joint_pass,
)
from cudnn_autotune.nn.untouched import generators_kept
from cudnn_autotune.timers.programs import Run

WITHOUT_NORMS = f"{OURS}, PyTorch's norms"

# A step cannot win if its convolutions alone take longer than this multiple of another whole step.
_CLEAR_TIME = 1.1

_log = logging.getLogger(__name__)


class _Way(NamedTuple):
    """A way to compile a graph with gradients."""

    name: str
    """Name of the program."""
    with_norms: bool
    """Whether batch norms are this package's operators."""
    layout: str | None = None
    """Another layout than the graph's; None if it keeps its own."""


class TrainingGraph(ComparedGraph):
    """A compiled graph with gradients and this package's convolutions.

    Its batch norms are this package's operators too, and it is in another layout, if a step of the
    whole graph, forward and backward, is then faster: in plain calls by the time of a step, in
    captures of a CUDA graph by the GPU's part of it. Groups of the forward are fused where that is
    faster for the group alone: a graph with one program is not timed as a whole.

    A program in another layout is compiled first. The others are compiled at the first call, unless
    PyTorch's convolutions in the graph's layout alone take longer than a whole step of it. Nor are
    they compiled if an earlier process found the first one the fastest: its outputs are compared
    with PyTorch's.
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
        self._programs: dict[_Way, Program] = {}
        norms = [] if options.norms == "never" else find_norms(graph.graph)
        record.norms = self._found = [norm.report() for norm in norms]
        serves = any(norm.obstacle is None for norm in norms)
        self._measures_norms = serves and options.norms == "measure" and options.compare
        layout = self._layout_to_try()
        if (self._measures_norms or (layout is not None and options.compare)) and (
            why := self._why_not_compared(graph, inputs)
        ) is not None:
            self._give_up(f"the graph {why}")
            serves = serves and not self._measures_norms
            self._measures_norms, layout = False, None
        self._left = _ways(serves, layout)
        """Ways that may still be compiled, in this order. The last one always works."""
        self._may_compare = options.compare and (self._measures_norms or layout is not None)
        """Whether programs may be compared, by steps that retain nothing for another backward."""
        self._compile_next(inputs)
        (first,) = self._programs
        if any(self._may_win(way) for way in self._left):
            self._find_kept(graph, inputs, options, _fused(self._programs.values()))
            if self._is_missing():
                self._compile_undecided(inputs)
                return
            is_likely = first.layout is not None and options.memory_format is None
            if self._may_be_clear(first.name, is_likely):
                self._use(first, self._programs[first])
                self._wait({EAGER: Program(_eager(graph)), **self._named()})
                return
        self._compile_all(inputs)

    def _layout_to_try(self) -> str | None:
        """Returns the layout in which the graph may be faster; None if there is none."""
        if self._options.memory_format == "auto":
            return OTHER_LAYOUT[layout_of(self._graph)]
        favours = favours_channels_last(self._graph, for_training=True)
        return "channels_last" if favours else None

    def _may_win(self, way: _Way) -> bool:
        """Returns whether a program may be faster than those that are compiled."""
        compiled = self._programs
        if not compiled or not self._options.compare:
            return not compiled
        if way.with_norms:
            return not self._measures_norms or self._options.memory_format is not None
        return self._measures_norms or all(one.layout is not None for one in compiled)

    def _compile_next(self, inputs: Sequence[Any]) -> None:
        """Compiles the next programs, until there is one more or no way is left."""
        count = len(self._programs)
        while self._left and len(self._programs) == count:
            way = self._left.pop(0)
            if not self._may_win(way):
                continue
            try:
                self._programs[way] = compile_training(
                    *(self._graph, inputs, self._options, self._judge),
                    with_norms=way.with_norms,
                    memory_format=way.layout,
                    overwrites=not self._may_compare,
                )
            except torch._dynamo.exc.RestartAnalysis:  # Dynamo begins again
                raise
            except Exception as failure:
                if not self._left and not self._programs:
                    raise
                self._note_failure(way, failure)

    def _compile_all(self, inputs: Sequence[Any]) -> None:
        """Compiles all programs that may win. The last one, with the fewest changes, runs until
        they are compared, or for ever if it is the only one."""
        while self._left:
            self._compile_next(inputs)
        way, program = [*self._programs.items()][-1]
        self._use(way, program)
        if len(self._programs) > 1:
            self._wait(self._named())

    def _compile_undecided(self, inputs: Sequence[Any]) -> None:
        """Compiles the program that runs without a comparison: with the fewest changes."""
        self._programs.clear()
        if self._measures_norms:
            del self._left[:-1]
        self._compile_all(inputs)
        self._give_up(self._obstacle)

    def _named(self) -> dict[str, Program]:
        """Returns the programs by name, those with the fewest changes first: the first one is the
        reference for the outputs."""
        return {way.name: program for way, program in reversed(self._programs.items())}

    def _wait(self, contenders: Mapping[str, Program]) -> None:
        """Lets programs wait for their comparison."""
        self._contenders = dict(contenders)
        if self._measures_norms:
            self._report(self._record.chosen in self._with_norms, "it waits to be compared")

    @property
    def _with_norms(self) -> set[str]:
        """Names of the programs with this package's norms."""
        return {way.name for way in self._programs if way.with_norms}

    def _note_failure(self, way: _Way, failure: Exception) -> None:
        """Notes that a program could not be compiled."""
        lack = "norms" if way.with_norms and way.layout is None else way.name
        self._record.note = f"no {lack}: {failure}".partition("\n")[0]
        if way.layout is None:
            _log.warning("a compiled graph has %s", self._record.note, exc_info=True)
            self._report(False, "the program with it could not be compiled")
        else:
            _log.info("a compiled graph has %s", self._record.note)

    def _use(self, way: _Way, program: Program) -> None:
        """Makes this program run from now on."""
        self._current = self._captured = program
        self._record.chosen = self._record.chosen_in_captures = way.name
        self._record.groups = list(program.groups)
        if way.with_norms:
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
        outputs = self._current.run(*inputs)
        if not self._is_told:
            self._tell()
        return outputs

    def _choose_if_free(self, inputs: Sequence[Any]) -> None:
        super()._choose_if_free(inputs)
        if self._contenders and _sees_saved_tensors():
            self._give_up("a checkpoint has to run the same program again")
        if not self._contenders and self._left:  # it was given up
            note = self._record.note
            with generators_kept(self._devices):
                self._compile_all(inputs)
            self._give_up(note.removeprefix("not compared: "))

    def _choose(self, contenders: Mapping[str, Program], inputs: Sequence[Any]) -> None:
        programs = {name: program.run for name, program in contenders.items()}
        with self._buffers_kept(inputs), _saved_tensors_unseen():
            comparison = self._compared(programs, inputs, self._weights, for_training=True)
            is_clear = EAGER in contenders and self._is_clear(comparison, programs[EAGER], inputs)
        if EAGER in contenders and not is_clear:
            self._compile_all(inputs)
            contenders, self._contenders = self._contenders, {}
            if contenders:
                self._choose(contenders, inputs)
            return
        if comparison is None:
            self._give_up(self._obstacle)
            return
        self._left = []
        self._keep(comparison)
        record = self._record
        for name, reason in comparison.wrong.items():
            record.note = f"{name}: {reason}"
            _log.warning("the compiled program %r is not used: %s", name, reason)
        chosen, captured = comparison.fastest, comparison.fastest_in_captures
        self._current, self._captured = contenders[chosen], contenders[captured]
        record.chosen, record.chosen_in_captures = chosen, captured
        record.groups = list(self._current.groups)
        times = record.gpu_times_ms or record.times_ms
        if not self._measures_norms:
            return
        text = record.note
        with_norms = [times[name] for name in times if name in self._with_norms]
        others = [times[name] for name in (WITHOUT_NORMS, EAGER) if name in times]
        if with_norms and others:
            best, without = min(with_norms), others[0]
            text = f"a step takes {best:.3f} ms with norms, {without:.3f} without"
        self._report(chosen in self._with_norms, text)

    @contextmanager
    def _buffers_kept(self, inputs: Sequence[Any]) -> Iterator[None]:
        """Takes back, at the end, what steps write into the model's buffers."""
        kept = [(inputs[i], inputs[i].clone()) for i in self._written]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in kept:
                    buffer.copy_(before)

    def _is_clear(self, comparison: Comparison | None, eager: Run, inputs: Sequence[Any]) -> bool:
        """Returns whether a step of the graph's layout is slower than the one that was compared
        with PyTorch's: its convolutions alone take longer. They are PyTorch's, as in plain
        Inductor's program.

        Args:
            eager: PyTorch's forward.
        """
        if comparison is None or EAGER in (comparison.fastest, comparison.fastest_in_captures):
            return False
        if comparison.is_kept or not comparison.gpu_times_ms:
            return comparison.is_kept
        try:
            with self._on_device():
                least_ms = convolutions_ms(step(eager, len(inputs)), inputs)
        except torch.OutOfMemoryError:
            return False
        name = comparison.fastest
        step_ms = max(comparison.gpu_times_ms[name], comparison.times_ms[name])
        return least_ms > _CLEAR_TIME * step_ms


def _sees_saved_tensors() -> bool:
    """Returns whether hooks see what is saved for a backward, as a checkpoint's do."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _saved_tensors_unseen() -> AbstractContextManager[Any]:
    """Lets no hook of the caller see what is saved for a backward: a checkpoint counts it."""
    if not _sees_saved_tensors():
        return nullcontext()
    return saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


def _ways(serves: bool, layout: str | None) -> list[_Way]:
    """Returns the ways to compile a graph, in the order of compilation.

    Args:
        serves: whether norms may be this package's operators.
        layout: another layout that may be faster; None if there is none.
    """
    ways = [] if layout is None else [_Way(f"{OURS}, {layout}", serves, layout)]
    ways += [_Way(OURS, True)] * serves
    return [*ways, _Way(WITHOUT_NORMS if serves else OURS, False)]


def _fused(programs: Iterable[Program]) -> list[list[bool]]:
    """Returns the decision on each group of each program."""
    return [[group.is_fused for group in program.groups] for program in programs]


def _eager(graph: GraphModule) -> Run:
    """Returns a graph without a compiler. Autocast keeps no weights: each step has others."""

    def run(*inputs: Any) -> Any:
        with disable_autocast_cache():
            return graph(*inputs)

    return run


def compile_training(
    graph: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    judge: Judge,
    *,
    with_norms: bool,
    memory_format: str | None = None,
    overwrites: bool = True,
) -> Program:
    """Compiles a graph with gradients, without changing it, with this package's convolutions and,
    if possible, with fused groups in the forward.

    Args:
        judge: decides on the groups.
        with_norms: whether batch norms become this package's operators as well.
        memory_format: as of :func:`in_layout`; None leaves the layout to Inductor.
        overwrites: whether a backward may overwrite what its forward has saved. If the first one
            may, no later one can retain it. Nor may one of several programs of a context:
            AOTAutograd compiles a backward at its first run, and would let it overwrite what the
            context's last forward names.

    Raises:
        Exception: the graph's in another layout.
    """
    ours = with_our_convolutions(graph, options.sampling, options.workspace_limit)
    if not any(begins_transform(node) for node in graph.graph.nodes):
        drop_biases(ours)
    patches = dict(options.inductor)
    if memory_format is not None:
        if memory_format == "channels_last":
            use_formulas(ours, keeps_layout=True)
        ours = in_layout(ours, memory_format, for_training=True)
        patches |= IN_LAYOUT
    if with_norms:
        serve_norms(ours.graph, find_norms(ours.graph))
        ours.graph.lint()
        ours.recompile()
    patches = with_joint_pass(patches, rewrite_joint)
    if memory_format is not None:  # Inductor keeps the strides of the trace
        patches = with_joint_pass(patches, start_gradients)
    fusing = FusingCompiler(judge, weights_of(graph, inputs), len(inputs))
    # The key of AOTAutograd's cache does not show that groups are fused.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        try:
            run = compile_plain(copied(ours), inputs, patches, _compiler(fusing, overwrites))
            return Program(run, groups=fusing.groups)
        except torch._dynamo.exc.RestartAnalysis:  # Dynamo begins again
            raise
        except Exception as failure:
            _log.warning("a training graph has no fused groups: %s", failure, exc_info=True)
        return Program(compile_plain(ours, inputs, patches, _compiler(compile_tagged, overwrites)))


def _compiler(compile_inner: Callable[..., Any], overwrites: bool) -> Callable[..., Any]:
    """Returns a compiler of a program's forward and backward, ATen graphs. It lets norms add
    gradients in a backward.

    Args:
        overwrites: whether a backward may overwrite what the forward has saved.
    """

    def compile_added(graph: GraphModule, inputs: Sequence[Any], **arguments: Any) -> Any:
        if not overwrites and not arguments.get("is_backward"):
            metadata = TracingContext.get().fw_metadata
            # The list is that of AOTAutograd too.
            if metadata is not None and metadata.bw_donated_idxs:
                metadata.bw_donated_idxs.clear()
        fold_gradient_sums(graph.graph)
        graph.recompile()
        return compile_inner(graph, inputs, **arguments)

    return compile_added
