"""A compiled graph, and a graph without gradients, with the choice of its program."""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._guards import CompileContext
from torch.fx import GraphModule

from cudnn_autotune.compile import computation
from cudnn_autotune.compile.comparison import (
    Comparison,
    compare,
    convolutions_ms,
    cuda_devices_of,
    dtypes_of,
)
from cudnn_autotune.compile.compilation import EAGER, FROZEN, OURS, PLAIN, Compilation
from cudnn_autotune.compile.frozen_weights import weights_of
from cudnn_autotune.compile.graph_copies import copied
from cudnn_autotune.compile.judges import JUDGES, gain
from cudnn_autotune.compile.layouts import OTHER_LAYOUT
from cudnn_autotune.compile.programs import (
    Options,
    Program,
    compile_frozen,
    compile_fused,
    compile_plain,
)
from cudnn_autotune.compile.traces import tell
from cudnn_autotune.nn.untouched import generators_kept
from cudnn_autotune.store import locked, settings, verdicts
from cudnn_autotune.timers.programs import CUDA_GRAPH_TREES, Run

RULE = 1
"""The version of the rule of comparisons. Times of another one on disk are measured again."""

_log = logging.getLogger(__name__)

_MOST_REFREEZINGS = 3
# The number of times that a comparison is deferred, because results of the caller's step are in
# use.
_MOST_DEFERRALS = 10
# The relative gain of a graph's fused groups from which plain Inductor cannot win, and is not
# compiled. Its only other difference is that it does not fold weights, which takes less.
_CLEAR_GAIN = 0.25
# Nor can it if it keeps the layout, and PyTorch's convolutions alone take longer in that than this
# multiple of the time of this package's whole program.
_CLEAR_TIME = 1.25


class ComparedGraph(ABC):
    """A compiled graph whose programs are compared at a call, once no results of the caller's step
    are in use."""

    def __init__(self, graph: GraphModule, inputs: Sequence[Any], record: Compilation) -> None:
        self._record = record
        self._context = CompileContext.try_get()
        self._is_told = False
        self._devices = cuda_devices_of(graph, inputs)
        self._dtypes = dtypes_of(graph)
        on_gpu = (v.device for v in inputs if isinstance(v, Tensor) and v.is_cuda)
        self._device: torch.device | None = next(on_gpu, None)
        self._index = None if self._device is None else self._device.index
        self._name = ""
        """Name of the programs' comparison in the store; empty if it is not kept."""
        self._kept: Comparison | None = None
        self._obstacle = "there was not enough memory"
        """Reason why the last programs were not compared."""
        self._deferrals = 0
        self._contenders: dict[str, Any] = {}
        """Programs to compare at the next call outside of captures and of the caller's steps."""

    def _find_kept(
        self, graph: GraphModule, inputs: Sequence[Any], options: Options, *parts: object
    ) -> None:
        """Looks for an earlier process's comparison of equal programs.

        Args:
            parts: a program's parts of this package, beside its convolutions.
        """
        if not computation.is_kept({options.sampling, *computation.modes_of(graph)}):
            return
        kind = "cpu" if self._device is None else self._device.type
        of_graph = computation.of_graph(graph, inputs)
        of_inductor = computation.of_inductor(options.inductor)
        if of_graph is None or of_inductor is None:
            return
        facts = (of_graph, of_inductor, computation.conditions(kind))
        of_options = computation.text_of((vars(options), weights_of(graph, inputs), parts))
        self._name = verdicts.name_of("programs", RULE, *facts, of_options)
        self._kept = verdicts.find_kept(self._index, self._name, Comparison)

    def _is_missing(self) -> bool:
        """Returns whether a locked store lacks the comparison, which is counted once."""
        if self._kept is not None or not settings.is_locked():
            return False
        if self._obstacle != locked.REASON:
            self._obstacle = locked.REASON
            count = len(self._record.groups)
            locked.missed("programs", f"that of a graph with {count} convolutions")
        return True

    def _may_be_clear(self, program: str, is_likely: bool) -> bool:
        """Returns whether a program may run without a comparison with others but PyTorch's: an
        earlier process found it the fastest, or, if none has compared them, that is likely."""
        return is_likely if self._kept is None else self._kept.decides_for(program)

    def _keep(self, comparison: Comparison) -> None:
        """Keeps a comparison for the next process, once: further ones have fewer programs."""
        is_new = self._name and not (comparison.is_kept or comparison.wrong)
        if is_new and computation.is_settled():
            verdicts.keep(self._index, self._name, comparison)
        self._name, self._kept = "", None

    @abstractmethod
    def _choose(self, contenders: Mapping[str, Any], inputs: Sequence[Any]) -> None:
        """Compares programs, and keeps the fastest right one."""

    def _choose_if_free(self, inputs: Sequence[Any]) -> None:
        """Chooses now or defers the choice, but not for ever: the programs hold memory."""
        with self._on_device():
            is_free = not is_within_step()
        if is_free:
            contenders, self._contenders = self._contenders, {}
            # Compiling a program meanwhile draws numbers too, for trials of kernels.
            with generators_kept(self._devices):
                self._choose(contenders, inputs)
            return
        self._deferrals += 1
        if self._deferrals == _MOST_DEFERRALS:
            self._give_up("each call is within a step of Inductor's CUDA graphs")

    def _give_up(self, reason: str) -> None:
        """Keeps the running program without a comparison, for a reason."""
        self._contenders = {}
        self._record.note = f"not compared: {reason}"

    def _tell(self) -> None:
        """Writes the record into PyTorch's logs, unless programs wait for their comparison. The
        first call has chosen the engines."""
        if not self._contenders:
            self._is_told = True
            tell(self._record, self._context)

    def _compared(
        self,
        programs: Mapping[str, Run],
        inputs: Sequence[Any],
        weights: Sequence[int],
        for_training: bool = False,
    ) -> Comparison | None:
        """Compares programs as of :func:`compare`; returns None if there is not enough memory, or a
        locked store does not have their times."""
        try:
            # Timing synchronises the current device.
            with self._on_device():
                comparison = compare(
                    *(programs, inputs, weights, self._devices, self._kept, for_training),
                    self._dtypes if for_training else (),
                )
        except torch.OutOfMemoryError:
            return None
        except verdicts.LockedError:
            self._kept = None
            self._is_missing()
            return None
        self._record.times_ms = dict(comparison.times_ms)
        self._record.gpu_times_ms = dict(comparison.gpu_times_ms)
        self._record.source = "store" if comparison.is_kept else "tuned"
        return comparison

    def _on_device(self) -> AbstractContextManager[object]:
        """Makes the program's device the current one."""
        return nullcontext() if self._device is None else torch.cuda.device(self._device)


class CompiledGraph(ComparedGraph):
    """A compiled graph without gradients. It runs the fastest of its programs: in plain calls by
    the time of a call, in captures of a CUDA graph by the GPU's part of it."""

    def __init__(
        self, graph: GraphModule, inputs: Sequence[Any], options: Options, record: Compilation
    ) -> None:
        super().__init__(graph, inputs, record)
        self._graph = graph
        self._options = options
        self._has_symbols = any(isinstance(value, torch.SymInt) for value in inputs)
        self._refreezings = 0
        self._plain: Program | None = None
        self._is_clear = False
        # It judges equal groups once, even after a change of weights.
        self._judge = JUDGES[options.fuse]()
        if (ours := self._if_possible(OURS, inputs)) is None:
            self._use_plain(inputs, record.note)
            return
        self._use(OURS, ours)
        if ours.weights is not None and self._has_symbols:
            # The values of symbols are known only while Dynamo compiles.
            self._plain_program(inputs)
        if not options.compare:
            return
        if ours.communicates or ours.writes:
            # Ranks count calls by their own clocks: they would wait for each other for ever.
            why = "communicates between ranks" if ours.communicates else "writes into its inputs"
            self._give_up(f"the graph {why}")
            return
        self._is_clear = gain(ours.groups) >= _CLEAR_GAIN
        fused = [group.is_fused for group in ours.groups]
        in_place = [one.is_in_place for one in ours.concatenations]
        self._find_kept(graph, inputs, options, fused, in_place, ours.memory_format)
        if self._is_missing():
            self._use_plain(inputs, f"not compared: {self._obstacle}")
            return
        may_be_clear = self._may_be_clear(OURS, self._is_clear or ours.is_laid_out)
        is_free = options.memory_format is None and ours.weights is None and not self._has_symbols
        if may_be_clear and is_free:
            # Only the outputs are compared.
            self._contenders = {EAGER: Program(copied(self._graph)), OURS: ours}
            return
        self._contenders = {PLAIN: self._plain_program(inputs), OURS: ours}
        if ours.weights is not None:
            self._add(FROZEN, inputs)
        if options.memory_format == "auto" and ours.memory_format is not None:
            self._add(f"{OURS}, {OTHER_LAYOUT[ours.memory_format]}", inputs)

    def _use(self, name: str, program: Program) -> None:
        """Makes this program run from now on."""
        self._current, self._is_told = program, False
        self._record.chosen, self._record.is_frozen = name, program.weights is not None
        if program.groups:
            self._record.groups = list(program.groups)
            self._record.concatenations = list(program.concatenations)
        self._use_in_captures(name, program)

    def _use_in_captures(self, name: str, program: Program) -> None:
        """Makes this program run in captures of CUDA graphs from now on."""
        self._captured = program
        self._record.chosen_in_captures = name

    def _plain_program(self, inputs: Sequence[Any]) -> Program:
        if self._plain is None:
            patches = {**self._options.inductor, "freezing": False}
            self._plain = Program(compile_plain(copied(self._graph), inputs, patches))
        return self._plain

    def _if_possible(self, name: str, inputs: Sequence[Any]) -> Program | None:
        """Returns a program; None, with a reason in the record's note, if it cannot be compiled."""
        graph, options = self._graph, self._options
        try:
            if name == PLAIN:
                return self._plain_program(inputs)
            if name == FROZEN:
                return compile_frozen(graph, inputs, options)
            _, _, memory_format = name.partition(", ")
            return compile_fused(graph, inputs, options, self._judge, memory_format or None)
        except torch._dynamo.exc.RestartAnalysis:  # Dynamo begins again
            raise
        except Exception as failure:
            self._record.note = f"no {name}: {failure}".partition("\n")[0]
            _log.info("a compiled graph has %s", self._record.note, exc_info=True)
            return None

    def _add(self, name: str, inputs: Sequence[Any]) -> None:
        """Adds a contender, if it can be compiled."""
        if (program := self._if_possible(name, inputs)) is not None:
            self._contenders[name] = program

    def _use_plain(self, inputs: Sequence[Any], reason: str) -> None:
        """Makes Inductor's own program run from now on, as of ``torch.compile(model)``."""
        self._contenders = {}
        self._use(PLAIN, self._plain_program(inputs))
        self._record.note = reason
        level = logging.INFO if self._obstacle == locked.REASON else logging.WARNING
        _log.log(level, "a compiled graph runs as Inductor makes it: %s", reason)

    def __call__(self, *inputs: Any) -> Any:
        if is_capturing():
            weights = self._captured.weights
            if weights is not None and not weights.are_those_of(inputs):
                # Weights folded in a capture have values only after a replay, and a capture forbids
                # compilation. The first run of a program may compile kernels.
                has_run = PLAIN in self._record.times_ms
                return (self._plain_program(inputs).run if has_run else self._graph)(*inputs)
            return self._captured.run(*inputs)
        weights = self._current.weights
        if weights is not None and not weights.are_those_of(inputs):
            with generators_kept(self._devices):
                self._follow_weights(inputs)
        if self._contenders:
            self._choose_if_free(inputs)
        outputs = self._current.run(*inputs)
        if not self._is_told:
            self._tell()
        return outputs

    def _choose(self, contenders: Mapping[str, Program], inputs: Sequence[Any]) -> None:
        record, weights = self._record, weights_of(self._graph, inputs)
        programs = {name: program.run for name, program in contenders.items()}
        comparison = self._compared(programs, inputs, weights)
        if EAGER in contenders and (
            comparison is None
            or EAGER in (comparison.fastest, comparison.fastest_in_captures)
            or not (
                self._is_clear
                or comparison.is_kept
                or self._plain_is_slower(contenders[EAGER], comparison, inputs)
            )
        ):
            # A compiler's outputs differ from PyTorch's, for example by random numbers, or PyTorch
            # needs more memory, or plain Inductor may be the fastest.
            self._choose({PLAIN: self._plain_program(inputs), OURS: contenders[OURS]}, inputs)
            return
        if comparison is None:
            self._use_plain(inputs, f"not compared: {self._obstacle}")
            return
        self._keep(comparison)
        for name, reason in comparison.wrong.items():
            _log.warning("the compiled program %r is not used: %s", name, reason)
            record.note = f"{name}: {reason}"
        captured = comparison.fastest_in_captures
        self._use(comparison.fastest, contenders[comparison.fastest])
        self._use_in_captures(captured, contenders[captured])

    def _plain_is_slower(
        self, eager: Program, comparison: Comparison, inputs: Sequence[Any]
    ) -> bool:
        """Returns whether plain Inductor's convolutions, which are PyTorch's, alone take longer
        than this package's program."""
        if not comparison.gpu_times_ms:
            return False
        try:
            with self._on_device():
                least_ms = convolutions_ms(eager.run, inputs)
        except torch.OutOfMemoryError:
            return False
        return least_ms > _CLEAR_TIME * max(
            comparison.gpu_times_ms[OURS], comparison.times_ms[OURS]
        )

    def _follow_weights(self, inputs: Sequence[Any]) -> None:
        """Compiles the program again if its weights have changed, or makes them variable."""
        self._refreezings += 1
        if self._refreezings <= _MOST_REFREEZINGS and not self._has_symbols:
            _log.info("the weights of a compiled graph have changed: it is compiled again")
            chosen, captured = self._record.chosen, self._record.chosen_in_captures
            names = list(self._contenders) or [chosen]
            if not (self._contenders or settings.is_locked()) and self._record.times_ms:
                names = list(dict.fromkeys((PLAIN, chosen, captured)))
            self._contenders = {}
            for name in names:
                self._add(name, inputs)
            if chosen in self._contenders:
                self._use(chosen, self._contenders[chosen])
                if len(names) == 1:
                    self._contenders = {}
            else:
                self._use_plain(inputs, self._record.note)
            return
        times = "" if self._has_symbols else f" more than {_MOST_REFREEZINGS} times"
        self._use_plain(inputs, f"its weights have changed{times}")


def is_capturing() -> bool:
    """Returns whether the current stream is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_within_step() -> bool:
    """Returns whether Inductor's CUDA graphs of the current device hold results of the current
    step, such as of the graph before a graph break. Other steps would overwrite them."""
    trees = sys.modules.get(CUDA_GRAPH_TREES)
    if trees is None or not torch.cuda.is_initialized():
        return False
    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    if manager is None or manager.current_node is None or manager.can_start_new_generation():
        return False
    return not manager.current_node.all_outputs_are_dead()
