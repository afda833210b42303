"""Finds 1x1 convolutions whose input is a norm and a ReLU of another tensor, and measures whether
one kernel computes both faster.

A batch norm in eval mode is folded into the convolution before it, unless there is none: that of a
pre-activation network, or of a dense block, reads a sum or a concatenation that others read too.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes

from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.norms.pointwise import norm_pointwise, normalised
from cudnn_autotune.engines.weights.operators import SCALE, SHIFT
from cudnn_autotune.nn.backend.folding import (
    ARITHMETIC,
    Chain,
    batch_norm,
    channelwise_operand,
    computed_of,
)
from cudnn_autotune.nn.backend.groups import (
    Convolution,
    GroupReport,
    Judge,
    Measured,
    Verdict,
    reads_in_place,
    times_ms,
)
from cudnn_autotune.nn.inductor import _mark_input

if TYPE_CHECKING:
    from cudnn_autotune.engines.norms.pointwise_plan import PointwiseProblem

_log = logging.getLogger(__name__)

_aten = torch.ops.aten
_cat = _aten.cat.default
_relu = _aten.relu.default
_convert = torch.ops.prims.convert_element_type.default
_fused = torch.ops.cudnn_autotune.conv_fused.default
_DTYPES = (torch.float16, torch.bfloat16)
_TOLERANCES = {torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""The relative error (of the norm) that both forms may have, by rounding."""


@dataclass(frozen=True)
class Prologue:
    """A 1x1 convolution, and the norm and the ReLU before it."""

    node: Node
    """Call of the convolution."""
    nodes: tuple[Node, ...]
    """Nodes of the norm and the ReLU, in order."""
    place: int
    """Place of the norm's input among the arguments of the first one."""
    vectors: Mapping[int, Node | Tensor]
    """The norm's vectors by their bits, as of ``norm_pointwise``, in the order of these."""
    eps: float

    @property
    def convolution(self) -> Convolution:
        found = Convolution.of(self.node)
        assert found is not None
        return found

    @property
    def input(self) -> Node:
        """The norm's input."""
        return self.nodes[0].args[self.place]  # type: ignore[return-value]

    @property
    def operands(self) -> tuple[Node, Node, Node | None, Node | None]:
        """Nodes of the norm's input, and of the convolution's weight, bias and residual."""
        _, weight, bias, residual = self.convolution.operands
        return self.input, weight, bias, residual

    @property
    def text(self) -> str:
        """The computation in words: ``norm + relu + conv + bias + relu``."""
        _, _, bias, residual = self.convolution.operands
        activation = self.convolution.options[4]
        named = (("bias", bias is not None), ("residual", residual is not None))
        parts = ["norm", "relu", "conv", *(name for name, is_there in named if is_there)]
        return " + ".join([*parts, *([activation] if activation else [])])

    def fused(
        self,
        operands: Iterable[Any],
        vectors: Sequence[Any],
        plan: int,
        call: Callable[..., Any] = norm_pointwise,
    ) -> Any:
        """Calls ``norm_pointwise`` for an input, a weight, a bias and a residual."""
        *_, activation, sampling, limit = self.convolution.options
        norm = (vectors, sum(self.vectors), self.eps)
        return call(*operands, *norm, activation, plan, sampling, limit)

    def random_vectors(self) -> list[Tensor]:
        """Returns vectors like the norm's, of positive numbers."""
        values = map(_value_of, self.vectors.values())
        device = self.node.meta["val"].device
        return [torch.rand(len(v), dtype=v.dtype, device=device) + 0.5 for v in values]


def find_prologues(graph: Graph, weights: Iterable[Node], *, channels_last: bool) -> list[Prologue]:
    """Finds the 1x1 convolutions of a graph that one kernel could compute with the norm and the
    ReLU before them.

    Args:
        graph: nodes call operators of ATen and of this package, and have their fake tensors in
            ``meta["val"]``. Groups are fused already.
        weights: the placeholders that hold the model's parameters and buffers. Constants of the
            graph count as such.
        channels_last: whether 2-d convolutions will run in channels_last, also if the strides in
            the graph are others.
    """
    constants = graph.find_nodes(op="get_attr")
    fixed = computed_of(graph, (*weights, *constants))
    found = [_prologue(node, fixed, channels_last) for node in graph.nodes]
    return [one for one in found if one is not None]


def _prologue(node: Node, fixed: Collection[Node], channels_last: bool) -> Prologue | None:
    one = Convolution.of(node)
    if one is None or not _is_pointwise(one) or not (channels_last or one.is_channels_last()):
        return None
    users = [*one.input.users]
    if len(users) == 1 and users[0].target is _mark_input:
        users = [*users[0].users]
    if users != [node] or one.input in one.operands[1:]:
        return None
    if (found := _norm_before(one.input, fixed)) is None:
        return None
    chain, value = found
    channels = value.meta["val"].shape[1]
    vectors: Mapping[int, Node | Tensor]
    if (given := batch_norm(chain, None, channels)) is not None:
        vectors, eps = {**given.vectors}, given.eps
    elif all(not isinstance(of, Node) or of.op == "get_attr" for _, of in chain.steps):
        vectors, eps = _constant_vectors(chain, channels), 0.0
    else:
        return None
    if len({vector.dtype for vector in map(_value_of, vectors.values())}) > 1:
        return None
    return Prologue(node, chain.nodes, chain.nodes[0].args.index(value), vectors, eps)


def _is_pointwise(one: Convolution) -> bool:
    """Returns whether the kernel may compute a convolution on a GPU that has its instructions."""
    x, w = (node.meta["val"] for node in one.operands[:2])
    stride, padding, _, groups = one.options[:4]
    return (
        x.dim() == w.dim() == 4
        and w.dtype == x.dtype
        and x.dtype in _DTYPES
        and all(isinstance(size, int) for size in (*x.shape, *w.shape))
        and tuple(w.shape[2:]) == (1, 1)
        and x.shape[1] % 8 == w.shape[0] % 8 == 0
        and groups == 1
        and all(size == 1 for size in stride)
        and all(size == 0 for size in padding)
    )


def _norm_before(relu: Node, fixed: Collection[Node]) -> tuple[Chain, Node] | None:
    """Returns the norm, with the ReLU, that a value ends in, and its input; None if there is none.
    The input has the value's dtype."""
    nodes: list[Node] = []
    steps: list[tuple[Any, Node | float]] = []
    output: Tensor = relu.meta["val"]
    has_relu, value, found = False, relu, None
    while value.op == "call_function" and (value is relu or len(value.users) == 1):
        if value.target is _convert:
            before: Any = value.args[0]
        elif value.target is _relu and not has_relu:
            has_relu, before = True, value.args[0]
        elif has_relu and (step := _step(value, output, fixed)) is not None:
            before, other = step
            steps.append((value.target, other))
        else:
            break
        nodes.append(value)
        value = before
        given = value.meta["val"]
        if steps and (given.shape, given.dtype) == (output.shape, output.dtype):
            found = Chain(tuple(nodes[::-1]), tuple(steps[::-1])), value
    return found


def _step(node: Node, output: Tensor, fixed: Collection[Node]) -> tuple[Node, Node | float] | None:
    """Returns a value and what its channels are scaled or shifted by, if a node does that."""
    for value in node.args[:2]:
        if not isinstance(value, Node) or value in fixed:
            continue
        if (other := channelwise_operand(node, value, output, fixed)) is not None:
            return value, other
    return None


def _value_of(vector: Node | Tensor) -> Tensor:
    value: Tensor = vector.meta["val"] if isinstance(vector, Node) else vector
    return value


def _constant_vectors(chain: Chain, channels: int) -> dict[int, Node | Tensor]:
    """Returns the scale and the shift of a norm whose operands are constants of the graph."""
    module: Any = chain.nodes[0].graph.owning_module
    with _disable_current_modes():
        scale, shift = torch.ones(channels), torch.zeros(channels)
        for target, operand in chain.steps:
            other: Any = operand
            if isinstance(operand, Node):
                constant: Tensor = operator.attrgetter(str(operand.target))(module)
                other = constant.detach().float().flatten()
                scale, shift = scale.to(other.device), shift.to(other.device)
            shift = ARITHMETIC[target](shift, other)
            if target in (_aten.mul.Tensor, _aten.div.Tensor):
                scale = ARITHMETIC[target](scale, other)
    return {SCALE: scale, SHIFT: shift}


def fuse_prologue(prologue: Prologue, plan: int) -> Node:
    """Replaces a convolution, and the norm and the ReLU before it, by a call of ``norm_pointwise``,
    which is returned.

    Args:
        prologue: one of those found in a graph; the others hold afterwards.
        plan: the place of the launch, as of that operator.
    """
    node, graph = prologue.node, prologue.node.graph
    vectors = []
    with graph.inserting_before(node):
        for bit, vector in prologue.vectors.items():
            if isinstance(vector, Tensor):
                vectors.append(_constant(node, bit, vector))
            elif vector.meta["val"].dim() == 1:
                vectors.append(vector)
            else:
                value = vector.meta["val"].flatten()
                flat = graph.call_function(_aten.reshape.default, (vector, [value.numel()]))
                flat.meta["val"] = value
                vectors.append(flat)
        create = partial(graph.call_function, norm_pointwise)
        call: Node = prologue.fused(
            prologue.operands, vectors, plan, lambda *arguments: create(arguments)
        )
    call.meta = dict(node.meta)
    marked = node.args[0]
    node.replace_all_uses_with(call)
    graph.erase_node(node)
    if isinstance(marked, Node) and marked.target is _mark_input:
        graph.erase_node(marked)
    for of_norm in reversed(prologue.nodes):
        graph.erase_node(of_norm)
    return call


def _constant(node: Node, bit: int, value: Tensor) -> Node:
    """Makes a vector of a convolution's norm a constant of the graph."""
    graph, mode = node.graph, node.meta["val"].fake_mode
    name = f"{node.name}_norm_{bit}"
    module: Any = graph.owning_module
    module.register_buffer(name, value)
    constant = graph.get_attr(name)
    constant.meta["val"] = mode.from_tensor(value, static_shapes=True)
    return constant


# Whether a prologue is fused


@dataclass(frozen=True)
class Judged:
    """A prologue, and what a judge says of it."""

    prologue: Prologue
    verdict: Verdict
    plan: int
    """Place of the launch, as of ``norm_pointwise``."""
    reads_concatenation: bool
    text: str
    """The computation in words: ``norm + relu + conv + bias + relu``."""
    output_shape: tuple[int, ...]

    @property
    def report(self) -> GroupReport:
        return GroupReport(self.text, self.output_shape, *self.verdict)


def judge_prologues(judge: Judge, prologues: Sequence[Prologue]) -> list[Judged]:
    """Asks a judge for each prologue of a graph whether to fuse it, if its input is in memory."""
    if isinstance(judge, Measured):
        _compile_kernels(prologues)
    return [_judged(judge, one) for one in prologues]


def _judged(judge: Judge, prologue: Prologue) -> Judged:
    output: Tensor = prologue.node.meta["val"]
    device, plan = output.device, 0
    if device.type == "cuda" and not _plans(prologue):
        verdict = Verdict(False, "no kernel of this GPU computes it")
    elif not isinstance(judge, Measured):
        verdict = judge(prologue)
    elif device.type != "cuda":
        verdict = Verdict(False, f"it is on the device {device}")
    else:
        operands = [node for node in prologue.operands if node is not None]
        sizes = [(node.meta["val"].shape, node.meta["val"].dtype) for node in operands]
        options, before = prologue.convolution.options, _work_before(prologue.input)
        key = repr((prologue.text, sizes, list(prologue.vectors), options, before))
        verdict, plan = judge.remembered(key, device, lambda: _measure(prologue))
    reads_concatenation = prologue.input.target is _cat
    return Judged(prologue, verdict, plan, reads_concatenation, prologue.text, (*output.shape,))


def _problem(prologue: Prologue) -> PointwiseProblem:
    # Programs without a GPU need not import the kernels.
    from cudnn_autotune.engines.norms.pointwise_plan import PointwiseProblem

    input, weight, bias, residual = prologue.operands
    x: Tensor = input.meta["val"]
    return PointwiseProblem(
        dtype=x.dtype,
        vectors=_value_of(next(iter(prologue.vectors.values()))).dtype,
        pixels=x.numel() // x.shape[1],
        channels=x.shape[1],
        out_channels=weight.meta["val"].shape[0],
        bias=bias is not None,
        residual=residual is not None,
        activation=prologue.convolution.options[4],
    )


def _plans(prologue: Prologue) -> int:
    """Returns in how many ways the kernel may be launched; 0 if it does not compute this."""
    from cudnn_autotune.engines.norms.pointwise_plan import plans
    from cudnn_autotune.engines.offers import gpu_of

    return len(plans(_problem(prologue), gpu_of(prologue.node.meta["val"].device)))


def _compile_kernels(prologues: Sequence[Prologue]) -> None:
    """Compiles what is measured of prologues, many kernels at a time."""
    problems: dict[int, list[PointwiseProblem]] = {}
    for one in prologues:
        device = one.node.meta["val"].device
        if device.type == "cuda":
            problems.setdefault(device.index, []).append(_problem(one))
    for index, several in problems.items():
        from cudnn_autotune.engines.norms.pointwise_plan import compile_plans

        try:
            compile_plans(several, index)
        except _C.PlanError as error:
            _log.info("%s", error)  # the operator's fallback says so, too


def _work_before(input: Node) -> str:
    """Returns what the norm and the ReLU cost where they are not fused: "a kernel", or "a write"
    where Inductor computes them in the kernel of their input, or "" where it then need not write
    that."""
    producer: Any = input.args[0] if input.target is operator.getitem else input
    if producer.target is _cat or not reads_in_place(producer):
        return "a kernel"
    return "a write" if len(input.users) > 1 else ""


def _measure(prologue: Prologue) -> tuple[Verdict, int]:
    """Measures both forms of a prologue; returns the place of the fastest launch, too."""
    device = prologue.input.meta["val"].device
    options, work = prologue.convolution.options, _work_before(prologue.input)

    def random(node: Node | None) -> Any:
        if node is None:
            return None
        value = node.meta["val"]
        made = torch.randn(value.shape, dtype=value.dtype, device=device)
        return made.contiguous(memory_format=torch.channels_last) if made.dim() == 4 else made

    try:
        # Autocast would make other problems of these.
        with torch.autocast("cuda", enabled=False), torch.random.fork_rng([device]):
            x, w, *added = map(random, prologue.operands)
            w *= w.shape[1] ** -0.5
            vectors = prologue.random_vectors()

            def fused(plan: int, _: object = None) -> Any:
                return prologue.fused((x, w, *added), vectors, plan)

            def several(_: object) -> None:
                z = x
                # These read and write what a generated kernel would, at the speed of the memory.
                if work == "a kernel":
                    z = torch.relu(x)
                elif work == "a write":
                    z = torch.ones_like(x)
                _fused(z, w, *added, *options)

            z = normalised(x, vectors, sum(prologue.vectors), prologue.eps)
            expected = _fused(z, w, *added, *options).float()
            right = []
            for plan in range(_plans(prologue)):
                error = ((fused(plan).float() - expected).norm() / expected.norm()).item()
                if error <= _TOLERANCES[x.dtype]:
                    right.append(plan)
                else:
                    _log.warning("%s: its plan %d is %.3g wrong", prologue.text, plan, error)
            if not right:
                return Verdict(False, "its kernel computes something else"), 0
            several_ms, *times = times_ms([several, *[partial(fused, i) for i in right]], [()])
    except torch.OutOfMemoryError:
        return Verdict(False, "there was not enough memory to measure it"), 0
    fused_ms = min(times)
    text = f"{1e3 * fused_ms:.1f} us fused, {1e3 * several_ms:.1f} us in several kernels"
    verdict = Verdict(fused_ms < several_ms, text, fused_ms, several_ms)
    return verdict, right[times.index(fused_ms)]


def fuse_prologues(graph: Graph, judged: Sequence[Judged]) -> list[GroupReport]:
    """Fuses the prologues of a graph that a judge is for, but those that read concatenations. These
    are fused already, if their concatenation is in memory.

    Returns:
        What became of each prologue, in their order.
    """
    left = set(graph.nodes)
    reports = []
    for one in judged:
        if one.verdict.fuse and one.prologue.node in left:
            if one.reads_concatenation:
                verdict = one.verdict._replace(fuse=False, reason="its input would be a copy")
                one = replace(one, verdict=verdict)
            else:
                fuse_prologue(one.prologue, one.plan)
        reports.append(one.report)
    return reports
