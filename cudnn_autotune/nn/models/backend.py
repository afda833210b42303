"""The backend ``cudnn_autotune`` of ``torch.compile``: Inductor, with fused groups.

Inductor compiles the graph as it would, but convolutions are this package's operators, and where
no gradient is needed each group of a convolution, residual addition and activation is one call of
``conv_fused`` if that is faster. The whole program is then timed against plain Inductor's.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from cudnn_autotune.core.after_import import after_import
from cudnn_autotune.core.versions import version
from cudnn_autotune.nn.models.comparison import Program, compare
from cudnn_autotune.nn.models.frozen_weights import (
    FrozenWeights,
    copied,
    weights_of,
    with_constants,
)
from cudnn_autotune.nn.models.groups import GroupReport, find_groups
from cudnn_autotune.nn.models.judging import JUDGES, Judge, fuse_judged
from cudnn_autotune.nn.models.routing import ROUTED
from cudnn_autotune.tuning.settings import check_policy

NAME = "cudnn_autotune"

_log = logging.getLogger(__name__)

_MOST_RECORDS = 256
_MOST_REFREEZINGS = 3


@dataclass
class Compilation:
    """What the backend made of one graph."""

    mode: str
    """``"inference"``, ``"training"``, or ``"plain"``: Inductor's own, for a reason in ``note``."""
    groups: list[GroupReport] = field(default_factory=list)
    """The convolutions of an inference graph, in its order."""
    is_frozen: bool = False
    """Whether weights are constants of the program, with batch norms folded into convolutions."""
    times_ms: dict[str, float] = field(default_factory=dict)
    """Medians by program, if they were compared: ``"cudnn_autotune"``, ``"inductor"``,
    ``"inductor, frozen"``."""
    chosen: str = NAME
    """The program that runs."""
    note: str = ""

    @property
    def fused(self) -> list[GroupReport]:
        return [group for group in self.groups if group.is_fused]


_records: deque[Compilation] = deque(maxlen=_MOST_RECORDS)


def compilations() -> list[Compilation]:
    """Returns what the backend compiled in this process, the last 256 graphs, oldest first."""
    return list(_records)


@dataclass(frozen=True)
class _Options:
    sampling: str | None = None
    workspace_limit: int | None = None
    freezing: bool = True
    compare: bool = True
    fuse: str = "measure"
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, mode: str | None, options: Mapping[str, Any] | None) -> _Options:
        import torch._inductor

        ours: dict[str, Any] = {}
        theirs: dict[str, Any] = {}
        if mode not in (None, "default"):
            theirs.update(torch._inductor.list_mode_options(mode))
        known = set(torch._inductor.list_options())
        own = {field.name for field in fields(cls)} - {"inductor"}
        for key, value in (options or {}).items():
            name = key.replace("-", "_")
            if name not in own | known:
                raise ValueError(
                    f"options must be {', '.join(sorted(own))} or Inductor's "
                    f"(torch._inductor.list_options()), got {key!r}"
                )
            (ours if name in own else theirs)[name] = value
        for name in ("freezing", "compare"):
            if not isinstance(ours.get(name, True), bool):
                raise ValueError(f"options[{name!r}] must be True or False, got {ours[name]!r}")
        if ours.get("fuse", "measure") not in JUDGES:
            raise ValueError(
                f"options['fuse'] must be one of {', '.join(JUDGES)}, got {ours['fuse']!r}"
            )
        check_policy(ours.get("sampling"), ours.get("workspace_limit"))
        return cls(**ours, inductor=theirs)


def backend(
    graph: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Program:
    """Compiles a graph of Dynamo. ``torch.compile(model, backend="cudnn_autotune")`` calls this.

    Args:
        mode: one of ``torch.compile``'s.
        options: ``sampling`` and ``workspace_limit`` of the convolutions, as a layer takes them;
            ``freezing`` (True): whether weights become constants, so that batch norms can be folded
            into convolutions, where no gradient is needed; ``fuse``: ``"measure"``, ``"always"`` or
            ``"never"``; ``compare`` (True): whether to time the program against plain Inductor's at
            the first call, and to keep the faster one. All others are Inductor's.

    Raises:
        ValueError: an option is unknown, or its value not allowed.
    """
    settings = _Options.read(mode, options)
    tensors = [value for value in example_inputs if isinstance(value, Tensor)]
    tensors += [*graph.parameters(), *graph.buffers()]
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    record = Compilation("training" if needs_gradient else "inference")
    _records.append(record)
    if (reason := _why_plain(graph, tensors, settings, needs_gradient)) is not None:
        record.mode, record.chosen, record.note = "plain", "inductor", reason
        return _compile(graph, example_inputs, settings.inductor)
    if needs_gradient:
        return _compile(_with_our_convolutions(graph, settings), example_inputs, settings.inductor)
    # Dynamo copies the attributes of what it is given, and so would keep all first programs.
    return _Inference(graph, example_inputs, settings, record).__call__


def _why_plain(
    graph: GraphModule, tensors: Sequence[Tensor], settings: _Options, needs_gradient: bool
) -> str | None:
    """Why this backend has nothing to do for a graph; None if it has."""
    operators = torch.ops.cudnn_autotune
    ours = {
        operators.conv_fprop,
        operators.conv_fprop.default,
        operators.conv_transpose,
        operators.conv_transpose.default,
    }
    targets = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    if not targets & {*ours, *ROUTED}:
        return "the graph has no convolution"
    if settings.fuse != "always" and not any(tensor.is_cuda for tensor in tensors):
        return "no tensor is on a CUDA device"
    if not needs_gradient and _is_capturing():
        return "it was compiled while a CUDA graph was captured"
    return None


def _with_our_convolutions(graph: GraphModule, settings: _Options) -> GraphModule:
    """Returns a copy of a graph of Dynamo in which PyTorch's convolutions are this package's."""
    graph = copied(graph)
    policy = {"sampling": settings.sampling, "workspace_limit": settings.workspace_limit}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in ROUTED:
            node.target = ROUTED[node.target]
            node.kwargs = {**node.kwargs, **policy}
    graph.recompile()
    return graph


def _compile(
    graph: GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    inner_compile: Callable[..., Any] | None = None,
) -> Program:
    """Compiles a graph, which Inductor may change, by Inductor."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    inner = inner_compile or compile_fx_inner
    program: Any = compile_fx(graph, list(inputs), inner, config_patches=dict(patches))
    return program


class _FusingCompiler:
    """Inductor's compiler of inference graphs, which fuses groups before."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.groups: list[GroupReport] = []
        self.written: tuple[bool, ...] = ()
        """Which inputs of the graph, weights that are constants first, the graph writes into."""

    def __call__(self, graph: GraphModule, inputs: Sequence[Any], **arguments: Any) -> Any:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.graph import GraphLowering

        metadata = torch._guards.TracingContext.get().fw_metadata
        assert metadata is not None
        self.written = tuple(info.mutates_data for info in metadata.input_info)
        channels_last = GraphLowering.decide_layout_opt(graph, is_inference=True)
        groups = find_groups(graph.graph, select_decomp_table())
        self.groups = fuse_judged(graph, groups, self._judge, channels_last=channels_last)
        with ExitStack() as stack:
            # Another version of this package may lower the operator in another way.
            tag = f"{torch.compiler.config.cache_key_tag} {NAME} {version()}"
            tagged = torch.compiler.config.patch(cache_key_tag=tag)  # type: ignore[attr-defined]
            stack.enter_context(tagged)
            if any(group.is_fused for group in self.groups):
                # Inductor would decide again on the layout, by what is left of ATen's convolutions.
                decision = config.patch(
                    layout_optimization=channels_last, force_layout_optimization=channels_last
                )
                stack.enter_context(decision)
            return compile_fx_inner(graph, inputs, **arguments)


class _Inference:
    """A compiled graph that needs no gradient. It runs the fastest of its programs."""

    def __init__(
        self,
        graph: GraphModule,
        inputs: Sequence[Any],
        settings: _Options,
        record: Compilation,
    ) -> None:
        self._graph = graph
        self._settings = settings
        self._record = record
        on_gpu = (v.device for v in inputs if isinstance(v, Tensor) and v.is_cuda)
        self._device: torch.device | None = next(on_gpu, None)
        self._has_symbols = any(isinstance(value, torch.SymInt) for value in inputs)
        self._refreezings = 0
        self._weights: FrozenWeights | None = None
        self._contenders: dict[str, Program] | None = None
        self._plain: Program | None = None
        self._run = self._compile_ours(inputs)
        if settings.compare:
            self._compile_contenders(inputs)
        elif self._weights is not None and self._has_symbols:
            # What symbols stand for is known while Dynamo compiles only.
            self._plain = _compile(copied(graph), inputs, self._unfrozen)

    @property
    def _unfrozen(self) -> dict[str, Any]:
        return {**self._settings.inductor, "freezing": False}

    def _compile_ours(self, inputs: Sequence[Any]) -> Program:
        judge = JUDGES[self._settings.fuse]()
        ours = _with_our_convolutions(self._graph, self._settings)
        positions = weights_of(self._graph, inputs) if self._settings.freezing else []
        compiler = _FusingCompiler(judge)
        program = self._compile_frozen(ours, inputs, positions, compiler)
        if any(compiler.written[: len(positions)]):
            # A batch norm in training mode, for example.
            positions, compiler = [], _FusingCompiler(judge)
            program = self._compile_frozen(ours, inputs, positions, compiler)
        self._record.groups = compiler.groups
        self._record.is_frozen = bool(positions)
        self._writes = any(compiler.written)
        self._weights = FrozenWeights(positions, inputs) if positions else None
        return program

    def _compile_frozen(
        self,
        graph: GraphModule,
        inputs: Sequence[Any],
        positions: Sequence[int],
        inner_compile: Callable[..., Any] | None = None,
    ) -> Program:
        """Compiles a graph with constants in place of the inputs at ``positions``."""
        import torch._functorch.config
        from torch._inductor.codecache import PyCodeCache

        patches = {**self._settings.inductor, "freezing": bool(positions)}
        with ExitStack() as stack:
            # Nothing requires a gradient. Inductor makes weights constants only without gradients.
            stack.enter_context(torch.no_grad())
            if inner_compile is not None:
                # The cache's key does not say that groups are fused.
                uncached = torch._functorch.config.patch(enable_autograd_cache=False)
                stack.enter_context(uncached)
            if not positions:
                return _compile(copied(graph), inputs, patches, inner_compile)
            frozen = with_constants(graph, inputs, positions)
            constant = set(positions)
            others = [i for i in range(len(inputs)) if i not in constant]
            loaded = len(PyCodeCache.modules)
            program = _compile(frozen, [inputs[i] for i in others], patches, inner_compile)

        def run(*given: Any) -> Any:
            return program(*[given[i] for i in others])

        weakref.finalize(run, _drop_constants, PyCodeCache.modules[loaded:])
        return run

    def _compile_contenders(self, inputs: Sequence[Any]) -> None:
        self._plain = _compile(copied(self._graph), inputs, self._unfrozen)
        if self._writes:
            self._record.note = "not compared: the graph writes into its inputs"
            _log.info("a compiled graph was %s", self._record.note)
            return
        self._contenders = {"inductor": self._plain, NAME: self._run}
        if self._weights is not None:
            positions = weights_of(self._graph, inputs)
            frozen = self._compile_frozen(self._graph, inputs, positions)
            self._contenders["inductor, frozen"] = frozen

    def __call__(self, *inputs: Any) -> Any:
        if self._weights is not None and not self._weights.are_those_of(inputs):
            if _is_capturing():
                # Weights that are folded in a capture have values after a replay only.
                return self._with_variable_weights(inputs)(*inputs)
            self._follow_weights(inputs)
        if self._contenders is not None and not _is_capturing():
            with self._on_device():
                is_within_step = _holds_results()
            if not is_within_step:
                self._choose(self._contenders, inputs)
        return self._run(*inputs)

    def _on_device(self) -> AbstractContextManager[object]:
        """The program's device is the current one, which is synchronised to time programs."""
        return nullcontext() if self._device is None else torch.cuda.device(self._device)

    def _choose(self, contenders: dict[str, Program], inputs: Sequence[Any]) -> None:
        """Keeps the fastest of the programs that are right."""
        self._contenders = None
        record = self._record
        try:
            with self._on_device(), _own_steps():
                comparison = compare(contenders, inputs, weights_of(self._graph, inputs))
        except torch.OutOfMemoryError:
            record.note = "not compared: there was not enough memory"
            _log.warning("a compiled graph was %s; it runs as Inductor makes it", record.note)
            self._run, self._weights = contenders["inductor"], None
            record.chosen, record.is_frozen = "inductor", False
            return
        record.times_ms = dict(comparison.times_ms)
        record.chosen = comparison.fastest
        for name, reason in comparison.wrong.items():
            _log.warning("the compiled program %r is not used: %s", name, reason)
            record.note = f"{name}: {reason}"
        self._run = contenders[record.chosen]
        if record.chosen == "inductor":
            self._weights, record.is_frozen = None, False
        times = ", ".join(f"{name} {ms:.3f} ms" for name, ms in record.times_ms.items())
        fused = len(record.fused)
        _log.info("chose %s (%s; %d groups fused)", record.chosen, times, fused)

    def _follow_weights(self, inputs: Sequence[Any]) -> None:
        """Compiles the program again where its weights have changed, or leaves them variable."""
        self._refreezings += 1
        if self._refreezings <= _MOST_REFREEZINGS and not self._has_symbols:
            _log.info("the weights of a compiled graph have changed: it is compiled again")
            self._run = self._compile_ours(inputs)
            if self._settings.compare:
                self._compile_contenders(inputs)
            return
        _log.warning(
            "the weights of a compiled graph have changed%s: from now on it runs without folded "
            "batch norms and fused groups",
            "" if self._has_symbols else f" more than {_MOST_REFREEZINGS} times",
        )
        self._run = self._with_variable_weights(inputs)
        self._weights, self._contenders = None, None
        self._record.chosen, self._record.is_frozen = "inductor", False

    def _with_variable_weights(self, inputs: Sequence[Any]) -> Program:
        if self._plain is None:
            self._plain = _compile(copied(self._graph), inputs, self._unfrozen)
        return self._plain


def _drop_constants(modules: Sequence[ModuleType]) -> None:
    """Frees the folded weights of a program that is not used any more. Inductor keeps the modules
    that it generates, which have them as attributes, as long as the process lives."""
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                delattr(module, name)


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _holds_results() -> bool:
    """Whether Inductor's CUDA graphs hold results of the current step, such as those of the graph
    before a graph break. Steps of a comparison would overwrite them."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not torch.cuda.is_initialized():
        return False
    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    if manager is None or manager.current_node is None or manager.can_start_new_generation():
        return False
    return not manager.current_node.all_outputs_are_dead()


@contextmanager
def _own_steps() -> Iterator[None]:
    """Takes back that a step was marked as begun. After the first mark Inductor's CUDA graphs begin
    no step of their own accord any more: a program without marks would be recorded at each call."""
    name = "torch._inductor.cudagraph_trees"  # importing it takes seconds
    before = sys.modules[name].MarkStepBox.mark_step_counter if name in sys.modules else 0
    try:
        yield
    finally:
        if name in sys.modules:
            sys.modules[name].MarkStepBox.mark_step_counter = before


def _register(registry: Any) -> None:
    """Makes the name known where no entry point of an installed package does."""
    from importlib.metadata import entry_points

    if NAME not in entry_points(group="torch_dynamo_backends").names:
        registry.register_backend(backend, name=NAME)


after_import("torch._dynamo.backends.registry", _register)
