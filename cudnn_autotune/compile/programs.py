"""Programs of a graph of Dynamo, compiled by Inductor: plain, with constant weights, with fused
groups.

Inductor folds batch norms into convolutions only if their parameters are constants of the graph.
Such a program ignores later writes into the model's weights.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from cudnn_autotune.compile.activations import call_silus
from cudnn_autotune.compile.communication import communicates
from cudnn_autotune.compile.concatenations import ConcatenationReport, lay_out_volumes
from cudnn_autotune.compile.each_image import convolve_each_image
from cudnn_autotune.compile.frozen_weights import (
    FrozenWeights,
    constants_of,
    weights_of,
    with_constants,
)
from cudnn_autotune.compile.gradients import start_gradients
from cudnn_autotune.compile.graph_copies import copied, use_formulas, with_our_convolutions
from cudnn_autotune.compile.groups import GroupReport, find_groups
from cudnn_autotune.compile.judges import (
    JUDGES,
    Judge,
    Measured,
    fuse_judged,
    never,
    write_in_place,
)
from cudnn_autotune.compile.layouts import favours_channels_last, in_layout
from cudnn_autotune.compile.output_strides import restore_strides, visible_strides
from cudnn_autotune.compile.shuffles import order_filters
from cudnn_autotune.compile.upsampling import convolve_before_upsampling
from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.core.json_node import did_you_mean
from cudnn_autotune.core.versions import version
from cudnn_autotune.engines.conv_layout import conv_memory_format, is_image_of_height_1
from cudnn_autotune.timers.programs import Run
from cudnn_autotune.tuning.settings import check_policy

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """The options of ``torch.compile(backend="cudnn_autotune")``, checked."""

    sampling: str | None = None
    workspace_limit: int | None = None
    freezing: bool = False
    compare: bool = True
    fuse: str = "measure"
    norms: str = "measure"
    memory_format: str | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Options of Inductor, with the mode's options."""

    @classmethod
    def read(cls, mode: str | None, options: Mapping[str, Any] | None) -> Options:
        """Returns the options of a call of ``torch.compile``.

        Raises:
            ValueError: an option is unknown, or its value not allowed.
        """
        import torch._inductor

        ours: dict[str, Any] = {}
        theirs: dict[str, Any] = {}
        if mode not in (None, "default"):
            theirs.update(torch._inductor.list_mode_options(mode))
        known = set(torch._inductor.list_options())
        own = {field.name for field in fields(cls)} - {"inductor"}
        for key, value in (options or {}).items():
            name = key.replace("-", "_") if isinstance(key, str) else None
            if name is None or name not in own | known:
                raise ValueError(
                    f"options must be {', '.join(sorted(own))} or Inductor's "
                    f"(torch._inductor.list_options()), got {key!r}"
                    f"{did_you_mean(key, sorted(own | known))}"
                )
            (ours if name in own else theirs)[name] = value
        read = cls(**ours, inductor=theirs)
        read._check()
        return read

    def _check(self) -> None:
        """Raises ValueError if a value is not allowed."""
        for name in ("freezing", "compare"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"options[{name!r}] must be True or False, got {value!r}")
        values: dict[str, tuple[str | None, ...]] = {
            "fuse": tuple(JUDGES),
            "norms": ("measure", "always", "never"),
            "memory_format": (None, "auto"),
        }
        for name, allowed in values.items():
            if (value := getattr(self, name)) not in allowed:
                text = ", ".join(map(repr, allowed))
                meant = did_you_mean(value, allowed)
                raise ValueError(f"options[{name!r}] must be one of {text}, got {value!r}{meant}")
        if self.memory_format == "auto" and not self.compare:
            raise ValueError(
                "options['memory_format'] must be None where options['compare'] is False: 'auto' "
                "compares programs in both layouts"
            )
        check_policy(self.sampling, self.workspace_limit)


@dataclass(frozen=True)
class Program:
    """A compiled graph and its properties."""

    run: Run
    weights: FrozenWeights | None = None
    """Weights that are constants of the program; None if there are none."""
    groups: Sequence[GroupReport] = ()
    concatenations: Sequence[ConcatenationReport] = ()
    writes: bool = False
    """Whether it writes into its inputs."""
    memory_format: str | None = None
    """Layout of its convolutions, ``"channels_last"`` or ``"contiguous"``; None if they have no
    choice, or it is unknown."""
    communicates: bool = False
    """Whether it communicates with other processes."""
    is_laid_out: bool = False
    """Whether it is in channels_last because of :func:`favours_channels_last`; plain Inductor keeps
    the layout."""


def compile_plain(
    graph: GraphModule,
    inputs: Sequence[Any],
    patches: Mapping[str, Any],
    inner_compile: Callable[..., Any] | None = None,
) -> Run:
    """Compiles a graph by Inductor, which may change it.

    Args:
        patches: of Inductor's configuration.
        inner_compile: Inductor's compiler of ATen graphs, or a wrapper of it.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    inner = inner_compile or compile_fx_inner
    run: Any = compile_fx(graph, list(inputs), inner, config_patches=dict(patches))
    return run


def compile_frozen(graph: GraphModule, inputs: Sequence[Any], options: Options) -> Program:
    """Compiles a graph, without changing it, with its weights as constants."""
    positions = constants_of(graph, inputs)
    run = _with_weights_frozen(graph, inputs, positions, options.inductor)
    return Program(run, FrozenWeights(positions, inputs))


def compile_fused(
    graph: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    judge: Judge,
    memory_format: str | None = None,
) -> Program:
    """Compiles a graph, without changing it, with this package's convolutions and fused groups.

    Batch norms are folded: once, if weights become constants, else by the program at each call.

    Args:
        judge: decides on the groups.
        memory_format: as of :func:`in_layout`; None leaves the layout to Inductor, or makes it
            channels_last by :func:`favours_channels_last` if possible.

    Raises:
        Exception: the graph's in another layout.
    """
    if memory_format is None and favours_channels_last(graph):
        try:
            program = _compile_fused(graph, inputs, options, judge, "channels_last")
            return replace(program, is_laid_out=True)
        except torch._dynamo.exc.RestartAnalysis:  # Dynamo begins again
            raise
        except Exception as failure:
            _log.info("a graph is not laid out in channels_last: %s", failure)
    return _compile_fused(graph, inputs, options, judge, memory_format)


def _compile_fused(
    graph: GraphModule,
    inputs: Sequence[Any],
    options: Options,
    judge: Judge,
    memory_format: str | None,
) -> Program:
    ours = with_our_convolutions(graph, options.sampling, options.workspace_limit)
    patches = dict(options.inductor)
    if memory_format == "channels_last":
        convolve_each_image(ours)
    if memory_format is not None:
        ours = in_layout(ours, memory_format, with_constants=options.freezing)
        patches |= IN_LAYOUT
        if len(graph.graph.output_node().all_input_nodes) > 1:
            # Each output would be computed at the end, and what it is made of be held until then.
            patches.setdefault("reorder_for_locality", False)
    convolve_before_upsampling(ours)
    if memory_format != "contiguous":
        use_formulas(ours)
    weights = weights_of(graph, inputs)
    positions = constants_of(graph, inputs) if options.freezing else []
    while True:
        compiler = FusingCompiler(judge, [] if positions else weights, len(inputs))
        run = _with_weights_frozen(ours, inputs, positions, patches, compiler)
        if not any(compiler.written[: len(positions)]):
            break
        positions = []  # it writes into a weight, as a batch norm does in training mode
    return Program(
        run,
        FrozenWeights(positions, inputs) if positions else None,
        compiler.groups,
        compiler.concatenations,
        any(compiler.written),
        compiler.memory_format,
        compiler.communicates,
    )


def compile_tagged(graph: GraphModule, inputs: Sequence[Any], **arguments: Any) -> Any:
    """Compiles an ATen graph by Inductor, with this package's version in the keys of its caches.
    Another version may lower its operators in another way."""
    from torch._inductor.compile_fx import compile_fx_inner

    tag = f"{torch.compiler.config.cache_key_tag} cudnn_autotune {version()}"
    with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        return compile_fx_inner(graph, inputs, **arguments)


IN_LAYOUT = {"layout_optimization": False, "comprehensive_padding": False}
"""Inductor's settings for a graph in a layout. With padding, a view reads padded strides of a value
whose strides are open, and a convolution behind it may choose others for the same memory."""


class FusingCompiler:
    """Inductor's compiler of ATen graphs, with fusion of groups before it. A backward has none, but
    engines of its gradients are compiled meanwhile.

    In the forward of a training graph a group is fused only where the backward needs no value
    within it. Its concatenations stay.

    Args:
        judge: decides on the groups.
        weights: the positions of parameters and buffers among the inputs of the graph of Dynamo.
        inputs: the number of these inputs.
    """

    def __init__(self, judge: Judge, weights: Sequence[int], inputs: int) -> None:
        self._judge = judge
        self._weights = weights
        self._inputs = inputs
        self.groups: list[GroupReport] = []
        self.concatenations: list[ConcatenationReport] = []
        self.written: tuple[bool, ...] = ()
        """Whether it writes into each input of the graph, constant weights first."""
        self.memory_format: str | None = None
        self.communicates = False

    def __call__(self, graph: GraphModule, inputs: Sequence[Any], **arguments: Any) -> Any:
        from torch._inductor import config
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.graph import GraphLowering

        with IMPORTING:  # it imports sympy, as Inductor does
            from cudnn_autotune.compile.folding import fold, settle

        if arguments.get("is_backward"):
            start_gradients(graph.graph)
            return compile_tagged(graph, inputs, **arguments)
        is_inference = arguments.get("is_inference", False)
        metadata = torch._guards.TracingContext.get().fw_metadata
        assert metadata is not None
        self.written = tuple(info.mutates_data for info in metadata.input_info)
        channels_last = GraphLowering.decide_layout_opt(graph, is_inference=is_inference)
        self.memory_format = _memory_format(graph, channels_last)
        self.communicates = communicates(graph)
        # Each rank would measure for itself, but all have to run the same program.
        judge = self._judge
        if self.communicates and isinstance(judge, Measured):
            judge = never("it is in a graph that communicates between ranks")
        strides = visible_strides(graph)
        foldings = fold(graph.graph, self._weights_in(graph))
        outputs: Any = graph.graph.output_node().args[0]
        saved = () if is_inference else outputs[metadata.num_forward :]
        groups = find_groups(
            graph.graph, select_decomp_table(), channels_last=channels_last, saved=saved
        )
        self.groups = fuse_judged(graph, groups, judge)
        settle(graph.graph, foldings)
        if is_inference:
            order_filters(graph.graph, channels_last=channels_last)
            self.concatenations = write_in_place(graph.graph, judge, channels_last=channels_last)
            lay_out_volumes(graph.graph)
            call_silus(graph.graph, select_decomp_table())
        restore_strides(graph, inputs, strides)
        graph.graph.lint()
        graph.recompile()
        with ExitStack() as stack:
            is_changed = any(one.is_in_place for one in self.concatenations)
            if is_changed or any(group.is_fused for group in self.groups):
                # Inductor would decide again on the layout, by the remaining ATen's convolutions.
                decision = config.patch(
                    layout_optimization=channels_last, force_layout_optimization=channels_last
                )
                stack.enter_context(decision)
            return compile_tagged(graph, inputs, **arguments)

    def _weights_in(self, graph: GraphModule) -> list[Node]:
        """Returns the placeholders of an ATen graph for weights; none if it has other inputs than
        Dynamo's graph, as for the parts of a tensor subclass."""
        placeholders = graph.graph.find_nodes(op="placeholder")
        if len(placeholders) != self._inputs:
            return []
        return [placeholders[i] for i in self._weights]


def _memory_format(graph: GraphModule, channels_last: bool) -> str | None:
    """Returns the layout of an ATen graph's convolutions, as in ``Program``.

    Args:
        channels_last: Inductor makes the 2-d ones channels_last.
    """
    nodes = graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten.convolution.default, sort=False
    )
    operands = [[node.args[i].meta["val"] for i in (0, 1)] for node in nodes]
    free = [(x, w) for x, w in operands if x.dim() == w.dim() and x.dtype != torch.float64]
    if not free:
        return None
    is_last = any(
        (channels_last and w.dim() == 4)
        or conv_memory_format(x, w) != torch.contiguous_format
        or is_image_of_height_1(x, w, pads=False)
        for x, w in free
    )
    return "channels_last" if is_last else "contiguous"


def _with_weights_frozen(
    graph: GraphModule,
    inputs: Sequence[Any],
    positions: Sequence[int],
    patches: Mapping[str, Any],
    inner_compile: Callable[..., Any] | None = None,
) -> Run:
    """Compiles a graph with constants instead of the inputs at ``positions``."""
    import torch._functorch.config
    from torch._inductor.codecache import PyCodeCache

    patches = {**patches, "freezing": bool(positions)}
    if positions:
        patches = with_joint_pass(patches, mark_transposed)
    with ExitStack() as stack:
        # No tensor requires a gradient. Inductor makes weights constants only without gradients.
        stack.enter_context(torch.no_grad())
        if inner_compile is not None:
            # The cache's key does not show that groups are fused.
            uncached = torch._functorch.config.patch(enable_autograd_cache=False)
            stack.enter_context(uncached)
        if not positions:
            return compile_plain(copied(graph), inputs, patches, inner_compile)
        frozen = with_constants(graph, inputs, positions)
        constant = set(positions)
        others = [i for i in range(len(inputs)) if i not in constant]
        loaded = len(PyCodeCache.modules)
        program = compile_plain(frozen, [inputs[i] for i in others], patches, inner_compile)

    def run(*given: Any) -> Any:
        return program(*[given[i] for i in others])

    weakref.finalize(run, _drop_constants, PyCodeCache.modules[loaded:])
    return run


def with_joint_pass(patches: Mapping[str, Any], rewrite: Callable[[Graph], None]) -> dict[str, Any]:
    """Returns patches of Inductor's configuration with a pass over the graph of ATen operators, the
    joint one if there is a backward. It comes after the user's passes.

    Args:
        rewrite: the pass, a function of this package.
    """
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    given = patches.get("joint_custom_pre_pass", config.joint_custom_pre_pass)
    before = list(given) if isinstance(given, (list, tuple)) else [given] if given else []

    class JointPass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            for one in before:
                one(graph)
            rewrite(graph)

        def uuid(self) -> Any:
            """Returns the key of Inductor's caches; None if a pass of the user's has none."""
            keys = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in before]
            return None if None in keys else ("cudnn_autotune", version(), rewrite.__name__, *keys)

    return {**patches, "joint_custom_pre_pass": JointPass()}


def mark_transposed(graph: Graph) -> None:
    """Marks the outputs of transposed convolutions against Inductor's folding into their weights.
    Inductor assumes output channels in the first dimension of a weight, but here they are in the
    second one."""
    mark_output = torch.ops.cudnn_autotune.mark_output.default
    convolution = torch.ops.aten.convolution.default
    for node in graph.find_nodes(op="call_function", target=convolution):
        users = [user for user in node.users if user.target is not mark_output]
        if node.args[6] and users:  # it is transposed
            with graph.inserting_after(node):
                marked = graph.call_function(mark_output, (node,))
            marked.meta = dict(node.meta)
            for user in users:
                user.replace_input_with(node, marked)


def _drop_constants(modules: Sequence[ModuleType]) -> None:
    """Frees the folded weights of an unused program. Inductor keeps its generated modules, which
    have them as attributes, as long as the process lives."""
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                delattr(module, name)
