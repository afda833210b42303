"""A compiled graph with gradients: its programs, with this package's batch norms or PyTorch's, in
the layout that the model has or another one."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from cudnn_autotune.compile.activations import Decompositions, find_activations
from cudnn_autotune.compile.aliasing import value_of, written_among
from cudnn_autotune.compile.communication import communicates, nested_graphs
from cudnn_autotune.compile.compiled_graph import OURS, ComparedGraph, Compilation, is_capturing
from cudnn_autotune.compile.frozen_weights import weights_of
from cudnn_autotune.compile.graph_copies import copied, use_formulas, with_our_convolutions
from cudnn_autotune.compile.groups import is_same_shape, reads_in_place
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
from cudnn_autotune.norms.reference import NORM_ACTIVATIONS
from cudnn_autotune.timers.programs import Run

WITHOUT_NORMS = f"{OURS}, PyTorch's norms"

_batch_norm_act = torch.ops.cudnn_autotune.batch_norm_act.default
_backward = torch.ops.cudnn_autotune.batch_norm_act_backward.default
_aten = torch.ops.aten
_convert = torch.ops.prims.convert_element_type.default

_log = logging.getLogger(__name__)


class TrainingGraph(ComparedGraph):
    """A compiled graph with gradients and this package's convolutions.

    Its batch norms are this package's operators too, and it is in another layout, if a step of the
    whole graph, forward and backward, is then faster: in plain calls by the time of a step, in
    captures of a CUDA graph by the GPU's part of it.
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
    patches = with_joint_pass(patches, _rewrite_joint)
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


def _rewrite_joint(graph: Graph) -> None:
    """Rewrites the joint graph of forward and backward, so that less is saved between them."""
    from torch._inductor.decomposition import select_decomp_table

    decompositions = select_decomp_table()
    recompute_outputs(graph, decompositions)
    round_before_relu(graph)
    tell_by_outputs(graph, decompositions)


def round_before_relu(graph: Graph) -> None:
    """Rounds the argument of a ReLU and not its output, if all that reads the output is roundings
    to the same half type and the gradient's mask.

    So it is with torchvision's FrozenBatchNorm2d under autocast. The values are the same, but the
    mask can be told by the rounded output, which a convolution's gradient needs anyway.

    Args:
        graph: as of :func:`recompute_outputs`.
    """
    for relu in graph.find_nodes(op="call_function", target=_aten.relu.default):
        argument: Any = relu.args[0]
        aliases, readers = _readers(relu)
        rounded = [reader for reader in readers if _rounds(reader)]
        masks = [reader for reader in readers if reader.target is _aten.le.Scalar]
        dtypes = {reader.meta["val"].dtype for reader in rounded}
        is_rounded = (
            len(argument.users) == 1
            and relu.meta["val"].dtype == torch.float32
            and len(dtypes) == 1
            and len(rounded) + len(masks) == len(readers)
            and all(mask.args[1] == 0 for mask in masks)
        )
        if not is_rounded:
            continue
        with graph.inserting_before(relu):
            half = graph.call_function(_convert, (argument, *dtypes))
            output = graph.call_function(_aten.relu.default, (half,))
        for node in (half, output):
            node.meta = {**relu.meta, "val": rounded[0].meta["val"]}
        for mask in masks:
            mask.args = (output, 0)
        for one in rounded:
            one.replace_all_uses_with(output)
        for node in (*rounded, *reversed(aliases), relu):
            graph.erase_node(node)


def _rounds(node: Node) -> bool:
    """Returns whether a node rounds a value to a half type."""
    return node.target is _convert and node.args[1] in (torch.float16, torch.bfloat16)


def _readers(node: Node) -> tuple[list[Node], list[Node]]:
    """Returns a value's aliases, in order, and the nodes that read it or one of them."""
    aliases: list[Node] = []
    readers: list[Node] = []
    left = [node]
    while left:
        for user in left.pop().users:
            if user.target in (_aten.alias.default, _aten.detach.default):
                aliases.append(user)
                left.append(user)
            else:
                readers.append(user)
    return aliases, readers


def tell_by_outputs(graph: Graph, decompositions: Decompositions) -> None:
    """Lets the gradient of a leaky ReLU tell the argument's sign by the output, which often is kept
    as the input of a convolution.

    Args:
        graph, decompositions: as of :func:`recompute_outputs`.
    """
    if not graph.find_nodes(op="call_function", target=_aten.gt.Scalar):
        return
    order = {node: index for index, node in enumerate(graph.nodes)}
    for argument, matches in find_activations(graph, decompositions).items():
        for match in matches:
            if not match.activation.startswith("leaky_relu"):
                continue
            rounded = (user for user in match.output.users if _rounds(user))
            output = next(rounded, match.output)
            outside = [user for user in argument.users if user not in match.nodes]
            widened = [user for user in outside if user.target is _convert]
            signs = [sign for user in widened for sign in user.users]
            signs += [user for user in outside if user not in widened]
            for sign in signs:
                is_sign = sign.target is _aten.gt.Scalar and sign.args[1] == 0
                if is_sign and order[sign] > order[output]:
                    sign.args = (output, 0)


def recompute_outputs(graph: Graph, decompositions: Decompositions) -> None:
    """Lets a backward compute the output of a norm again if only kernels generated by Inductor read
    it there. They read the norm's input instead, which is kept anyway.

    Args:
        graph: the joint graph of forward and backward, of ATen operators, with fake tensors in
            ``meta["val"]``.
        decompositions: the decompositions of the graph's trace.
    """
    behind: set[Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in node.name
        if is_tangent or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    for call in graph.find_nodes(op="call_function", target=_batch_norm_act):
        x, weight, bias, residual, activation, _ = call.args
        results = {user.args[1]: user for user in call.users}
        if residual is not None or 0 not in results:
            continue
        readers = [user for user in results[0].users if user in behind]
        if not readers or not all(reads_in_place(reader) for reader in readers):
            continue
        for i in (1, 2):
            if i not in results:
                with graph.inserting_after(call):
                    results[i] = graph.call_function(operator.getitem, (call, i))
                results[i].meta["val"] = call.meta["val"][i]
        operands = [x, results[1], results[2], weight, bias]
        with graph.inserting_before(readers[0]):
            again = _recomputed(graph, operands, activation, decompositions)
        for reader in readers:
            reader.replace_input_with(results[0], again)


def _recomputed(
    graph: Graph,
    operands: Sequence[Node | None],
    activation: str,
    decompositions: Decompositions,
) -> Node:
    """Adds to a graph the nodes that compute a norm's output from its input, mean, inverse standard
    deviation, weight and bias."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    def output(x: Tensor, *vectors: Tensor) -> Tensor:
        left = iter(vector.view(-1, *(1,) * (x.dim() - 2)) for vector in vectors)
        mean, inv_std, weight, bias = (None if o is None else next(left) for o in operands[1:])
        assert mean is not None
        assert inv_std is not None
        z = (x.to(mean.dtype) - mean) * inv_std
        if weight is not None:
            z = z * weight
        if bias is not None:
            z = z + bias
        return NORM_ACTIVATIONS[activation].forward(z).to(x.dtype)

    nodes = [operand for operand in operands if operand is not None]
    trace = make_fx(output, decomposition_table=dict(decompositions))
    with torch.no_grad():
        traced = trace(*(node.meta["val"] for node in nodes))
    placeholders = traced.graph.find_nodes(op="placeholder")
    again = graph.graph_copy(traced.graph, dict(zip(placeholders, nodes, strict=True)))
    assert isinstance(again, Node)
    return again


def fold_gradient_sums(graph: Graph) -> None:
    """Lets the backward of a norm add two gradients, if no other node reads their sum.

    Args:
        graph: a backward graph of ATen operators, with fake tensors in ``meta["val"]``.
    """
    for node in graph.find_nodes(op="call_function", target=_backward):
        total: Any = node.args[0]
        if node.args[1] is not None or total.target is not _aten.add.Tensor:
            continue
        if len(total.users) > 1 or total.kwargs or not all(isinstance(a, Node) for a in total.args):
            continue
        values = [one.meta["val"] for one in (total, *total.args)]
        if all(
            v.dtype == values[0].dtype and is_same_shape(v.shape, values[0].shape) for v in values
        ):
            node.args = (*total.args, *node.args[2:])
            graph.erase_node(total)
