"""The folding of operators that scale and shift the channels of a convolution's output into its
weight and bias.

Such are a batch norm in eval mode, a layer scale and torchvision's FrozenBatchNorm2d. In a
functional graph of ATen operators they are additions, subtractions, multiplications and divisions
by one number for each channel, or for all. The program computes the folded weights at each call
from the current parameters and buffers, so they are never stale. One operator, ``fold_weights``,
computes them all.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from sympy import Add, Dummy, Expr, Float, Integer, Mul, Pow, Rational, expand
from torch import Tensor
from torch.fx import Graph, Node

from cudnn_autotune.compile.groups import add_call
from cudnn_autotune.compile.marks import MARKS
from cudnn_autotune.compile.weights.operators import (
    BIAS,
    MEAN,
    SCALE,
    SHIFT,
    VARIANCE,
    fold_weights,
)
from cudnn_autotune.engines.problem import DTYPES, strides_of

_aten = torch.ops.aten
_convolution = _aten.convolution.default
_convert = torch.ops.prims.convert_element_type.default
_add, _sub, _mul, _div = (getattr(_aten, name).Tensor for name in ("add", "sub", "mul", "div"))
_RESHAPED = tuple(
    getattr(_aten, name).default
    for name in ("reshape", "view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "clone")
)
_ARITHMETIC: dict[Any, Callable[..., Any]] = {
    _add: operator.add,
    _sub: operator.sub,
    _mul: operator.mul,
    _div: operator.truediv,
    _aten.neg.default: operator.neg,
    _aten.reciprocal.default: lambda x: 1 / x,
    _aten.sqrt.default: lambda x: x ** Rational(1, 2),
    _aten.rsqrt.default: lambda x: x ** Rational(-1, 2),
}
# Constants beyond these limits could take a weight or a bias out of float16's range.
_LEAST_FACTOR, _MOST_NUMBER = 2.0**-10, 2.0**10


@dataclass(frozen=True)
class Folding:
    """A convolution with a folded weight and bias, beside the nodes that it replaces."""

    convolution: Node
    """Convolution with the folded weight and bias."""
    result: Node
    """Convolution, or its conversion to the replaced nodes' dtype."""
    original: tuple[Node, ...]
    """The original convolution, and the folded nodes after it, in order."""
    computed: tuple[Node, ...]
    """Nodes that compute the folded weight and bias, in order."""
    operator: Node | None
    """Call of ``fold_weights`` among ``computed``; None if the weight does not change."""


@dataclass(frozen=True)
class _Chain:
    """A convolution, and the nodes after it that scale and shift its channels."""

    nodes: tuple[Node, ...]
    """The convolution, and the nodes after it."""
    steps: tuple[tuple[Any, Node | float], ...]
    """Operator and its other operand, for each step that scales or shifts."""


def fold(graph: Graph, weights: Iterable[Node]) -> list[Folding]:
    """Folds the operators behind convolutions into their weights and biases where possible.

    The arithmetic is as in ``torch.nn.utils.fusion.fuse_conv_bn_weights``, in float32 (float64 for
    float64), and rounded once. :func:`settle` has to be called afterwards.

    Args:
        graph: nodes call operators of ATen, and have their fake tensors in ``meta["val"]``.
        weights: the placeholders of the model's parameters and buffers. Only values computed from
            these alone are folded.
    """
    fixed = _computed_of(graph, weights)
    convolutions = graph.find_nodes(op="call_function", target=_convolution)
    chains = [chain for node in convolutions if (chain := _chain(node, fixed)) is not None]
    if not chains:
        return []
    first = chains[0].nodes[0]
    needed = [step for chain in chains for _, step in chain.steps if isinstance(step, Node)]
    for chain in chains:
        needed += [arg for arg in chain.nodes[0].args[1:3] if isinstance(arg, Node)]
    _hoist(graph, needed, first)
    return [_folded(graph, chain, first) for chain in chains]


def settle(graph: Graph, foldings: Sequence[Folding]) -> None:
    """Takes back the foldings of unfused convolutions, and removes the nodes that the others
    replace.

    A compiler computes a batch norm in the kernel after an unfused convolution at no cost. One
    operator computes the weights that stay folded.
    """
    left = set(graph.nodes)
    kept = [folding for folding in foldings if folding.convolution not in left]
    together: dict[Any, list[Node]] = {}
    for folding in kept:
        if folding.operator is not None:
            *_, dtype, is_last = folding.operator.args
            together.setdefault((dtype, is_last), []).append(folding.operator)
    if together:
        with graph.inserting_before(foldings[0].original[0]):
            for calls in together.values():
                _fold_together(graph, calls)
    for folding in foldings:
        convolution, *_, last = folding.original
        if folding in kept:
            marked: Any = convolution.args[0]
            _erase(graph, folding.original)
            if marked.target in MARKS and not marked.users:
                graph.erase_node(marked)
        else:
            convolution.target = _convolution
            folding.result.replace_all_uses_with(last)
            _erase(graph, dict.fromkeys((*folding.computed, folding.convolution, folding.result)))


def _set_aside(*_: object) -> None:
    """Replaces the original convolution until it is settled, so that no other pass takes it."""


def _computed_of(graph: Graph, weights: Iterable[Node]) -> set[Node]:
    """Returns the nodes whose values depend only on ``weights``."""
    fixed = set(weights)
    for node in graph.nodes:
        if _is_pure(node) and all(arg in fixed for arg in node.all_input_nodes):
            fixed.add(node)
    return fixed


def _is_pure(node: Node) -> bool:
    """Returns whether a node's place in the graph makes no difference."""
    target: Any = node.target
    if target in (fold_weights, operator.getitem):
        return True
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace in ("aten", "prims")
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
    )


def _chain(convolution: Node, fixed: Collection[Node]) -> _Chain | None:
    _, weight, bias, _, _, _, transposed, _, _ = convolution.args
    output, shape = convolution.meta["val"], weight.meta["val"].shape  # type: ignore[union-attr]
    if transposed or output.dtype not in DTYPES or output.dim() != len(shape):
        return None
    if weight not in fixed or not (bias is None or bias in fixed):
        return None
    nodes, steps = [convolution], []
    found = None
    while len(nodes[-1].users) == 1:
        (user,) = nodes[-1].users
        if user.target is _convert:
            if user.meta["val"].dtype not in DTYPES:
                break
        elif (other := _channelwise_operand(user, nodes[-1], output, fixed)) is not None:
            steps.append((user.target, other))
        else:
            break
        nodes.append(user)
        if steps and user.meta["val"].dtype == output.dtype:
            found = _Chain(tuple(nodes), tuple(steps))
    # Some versions of Inductor omit the rounding of a result to 16 bits before computations in
    # float32, such as an activation.
    is_longer = len(steps) > (0 if found is None else len(found.steps))
    last = nodes[-1]
    if is_longer and last.meta["val"].dtype == torch.float32 and _is_rounded(last, output.dtype):
        found = _Chain(tuple(nodes), tuple(steps))
    return found


def _is_rounded(node: Node, dtype: torch.dtype) -> bool:
    """Returns whether all computations from a value are pointwise until a rounding to a dtype."""
    left, seen = [node], {node}
    while left:
        users = left.pop().users
        if not users:
            return False
        for user in users:
            if (user.target is _convert and user.meta["val"].dtype == dtype) or user in seen:
                continue
            target: Any = user.target
            if torch.Tag.pointwise not in getattr(target, "tags", ()):
                return False
            seen.add(user)
            left.append(user)
    return True


def _channelwise_operand(
    user: Node, value: Node, output: Tensor, fixed: Collection[Node]
) -> Node | float | None:
    """Returns the operand, a number or one of ``fixed``, that scales or shifts the channels of a
    value; None if none does."""
    if user.target not in (_add, _sub, _mul, _div) or user.kwargs:
        return None
    one, other = user.args
    if other is value and user.target in (_add, _mul):
        one, other = other, one
    if one is value and isinstance(other, (int, float)):
        least = _LEAST_FACTOR if user.target in (_mul, _div) else 0
        return other if least <= abs(other) <= _MOST_NUMBER else None
    if one is not value or not isinstance(other, Node) or other not in fixed:
        return None
    operand = other.meta["val"]
    if not isinstance(operand, Tensor) or operand.device != output.device:
        return None
    sizes = [1] * (output.dim() - operand.dim()) + list(operand.shape)
    is_channelwise = (
        len(sizes) == output.dim()
        and all(isinstance(size, int) for size in sizes)
        and sizes[1] in (1, output.shape[1])
        and all(size == 1 for i, size in enumerate(sizes) if i != 1)
    )
    return other if is_channelwise else None


def _hoist(graph: Graph, needed: Iterable[Node], before: Node) -> None:
    """Moves nodes, and their operands' nodes, before a node that they do not need."""
    moved: set[Node] = set()
    left = list(needed)
    while left:
        node = left.pop()
        if node not in moved:
            moved.add(node)
            left += node.all_input_nodes
    is_behind = False
    for node in list(graph.nodes):
        is_behind |= node is before
        if is_behind and node in moved:
            before.prepend(node)


def _folded(graph: Graph, chain: _Chain, before: Node) -> Folding:
    """Puts a convolution with a folded weight and bias beside a chain.

    Args:
        before: the node behind the new ones.
    """
    original = chain.nodes[0]
    output: Tensor = original.meta["val"]
    weight: Any
    bias: Any
    weight, bias = original.args[1:3]
    dtype = torch.float64 if output.dtype == torch.float64 else torch.float32
    computed: list[Node] = []

    def call(target: Any, *args: Any) -> Node:
        computed.append(add_call(graph, target, *args))
        return computed[-1]

    def vector(node: Any) -> Node:
        if node.meta["val"].dim() == 1:
            return cast(Node, node)
        return call(_aten.reshape.default, node, [node.meta["val"].numel()])

    def wide(node: Any) -> Node:
        if not isinstance(node, Node):
            options: dict[str, Any] = {"dtype": dtype, "device": output.device}
            number = graph.call_function(_aten.full.default, ([1], node), options)
            number.meta["val"] = output.new_full([1], node, dtype=dtype)
            computed.append(number)
            return number
        node = vector(_unrounded(node, dtype))
        return node if node.meta["val"].dtype == dtype else call(_convert, node, dtype)

    called = None
    with graph.inserting_before(before):
        given = _batch_norm(chain, bias, output.shape[1])
        if given is None:
            given = _Given(_scale_and_shift(chain, bias, call, wide, output.shape[1]))
        if given.scales:
            source = _unrounded(weight, dtype)
            value: Tensor = weight.meta["val"]
            is_last = value.stride() == strides_of(value.shape, channels_last=True)
            if source.target is operator.getitem and source.args[0].target is fold_weights:
                laid_out, place = source.args
                if laid_out.args[1] == []:  # it was laid out only
                    source = laid_out.args[0][place]
            vectors = [vector(node) for node in given.vectors.values()]
            operands = ([source], vectors, [sum(given.vectors)], [given.eps])
            called = call(fold_weights, *operands, output.dtype, is_last)
            weight = call(operator.getitem, called, 0)
            if given.shifts:
                bias = call(operator.getitem, called, 1)
        elif given.shifts:
            bias = call(_convert, given.vectors[SHIFT], output.dtype)
    with graph.inserting_after(original):
        arguments = (original.args[0], weight, bias, *original.args[3:])
        convolution = graph.call_function(_convolution, arguments)
    convolution.meta = dict(original.meta)
    last, result = chain.nodes[-1], convolution
    if last.meta["val"].dtype != output.dtype:
        with graph.inserting_after(convolution):
            result = graph.call_function(_convert, (convolution, last.meta["val"].dtype))
        result.meta = dict(last.meta)
    last.replace_all_uses_with(result)
    original.target = _set_aside
    return Folding(convolution, result, chain.nodes, tuple(computed), called)


@dataclass(frozen=True)
class _Given:
    """Operands of ``fold_weights`` for a weight and a bias."""

    vectors: dict[int, Node]
    """Vectors by their bits, in the order of these."""
    eps: float = 0.0

    @property
    def scales(self) -> bool:
        return SCALE in self.vectors or VARIANCE in self.vectors

    @property
    def shifts(self) -> bool:
        return any(bit in self.vectors for bit in (MEAN, BIAS, SHIFT))


def _unrounded(node: Any, dtype: torch.dtype) -> Any:
    """Returns a tensor before its rounding from a dtype, as of a weight under autocast. A folded
    weight is rounded only once."""
    is_rounded = node.target is _convert and node.meta["val"].dtype in DTYPES
    if is_rounded and node.args[0].meta["val"].dtype == dtype:
        return node.args[0]
    return node


def _batch_norm(chain: _Chain, bias: Node | None, channels: int) -> _Given | None:
    """Returns the vectors of a chain's computation; None unless it is, in any spelling,
    ``(y + bias - mean) * scale / sqrt(variance + eps) + shift``.

    A vector that occurs twice could cancel out, but not where it is zero or infinite.
    """
    leaves: dict[Expr, Node] = {}
    read: list[Expr] = []

    def symbol(node: Node) -> Expr:
        leaf = next((leaf for leaf, known in leaves.items() if known is node), None)
        if leaf is None:
            leaf = Dummy()
            leaves[leaf] = node
        read.append(leaf)
        return leaf

    def expression(node: Any) -> Expr:
        """Returns the arithmetic behind a vector; reshapes and conversions do not count."""
        if not isinstance(node, Node):
            return Integer(node) if isinstance(node, int) else Float(node)
        target: Any = node.target
        if node.meta["val"].dtype not in DTYPES:
            return symbol(node)
        if target is _convert or target in _RESHAPED:
            source: Any = node.args[0]
            is_same = source.meta["val"].numel() == node.meta["val"].numel()
            if is_same and source.meta["val"].dtype in DTYPES:
                return expression(source)
        if target in _ARITHMETIC and not node.kwargs:
            operands = [arg for arg in node.args if isinstance(arg, Node)]
            if all(one.meta["val"].numel() == channels for one in operands):
                return _ARITHMETIC[target](*map(expression, node.args))
        return symbol(node)

    scale, shift = Integer(1), Integer(0) if bias is None else expression(bias)
    in_scale: list[Expr] = []
    in_shift = list(read)
    for target, operand in chain.steps:
        read.clear()
        apply, other = _ARITHMETIC[target], expression(operand)
        if target in (_mul, _div):
            scale = apply(scale, other)
            in_scale += read
        if target in (_add, _sub) or shift != 0:
            in_shift += read
        shift = apply(shift, other)
    if any(len(set(several)) < len(several) for several in (in_scale, in_shift)):
        return None
    found: dict[int, Expr] = {}
    eps = 0.0
    for factor in Mul.make_args(scale):
        if factor in leaves and SCALE not in found:
            found[SCALE] = factor
        elif isinstance(factor, Pow) and factor.exp == Rational(-1, 2) and VARIANCE not in found:
            numbers = [term for term in Add.make_args(factor.base) if term.is_number]
            found[VARIANCE] = factor.base - Add(*numbers)
            eps = float(Add(*numbers))
        elif factor != 1:
            return None
    for term in Add.make_args(expand(shift)):
        centred = term / scale
        if centred in leaves and BIAS not in found:
            found[BIAS] = centred
        elif -centred in leaves and MEAN not in found:
            found[MEAN] = -centred
        elif term in leaves and SHIFT not in found:
            found[SHIFT] = term
        elif term != 0:
            return None
    vectors = {bit: leaves.get(found[bit]) for bit in sorted(found)}
    known = {bit: node for bit, node in vectors.items() if node is not None}
    is_whole = set(known.values()) == set(leaves.values()) and all(
        node.meta["val"].numel() == channels for node in known.values()
    )
    given = _Given(known, eps)
    return given if is_whole and given.scales else None


def _scale_and_shift(
    chain: _Chain,
    bias: Node | None,
    call: Callable[..., Node],
    wide: Callable[[Any], Node],
    channels: int,
) -> dict[int, Node]:
    """Adds nodes to the graph that compute the scale and the shift of a chain, if any, and returns
    them by their bits.

    Args:
        call: makes a node of a target and its arguments.
        wide: returns a node's value as a vector in the dtype of the computation.
        channels: the length of these vectors.
    """
    scale = None
    shift = None if bias is None else wide(bias)
    for target, operand in chain.steps:
        other = wide(operand)
        if target in (_mul, _div):
            if scale is None and target is _mul:
                scale = other
            elif scale is None:
                scale = call(_aten.reciprocal.default, other)
            else:
                scale = call(target, scale, other)
            shift = None if shift is None else call(target, shift, other)
        elif shift is not None:
            shift = call(target, shift, other)
        else:
            shift = other if target is _add else call(_aten.neg.default, other)
    vectors = {}
    for bit, value in ((SCALE, scale), (SHIFT, shift)):
        if value is not None and value.meta["val"].numel() != channels:
            expanded = call(_aten.expand.default, value, [channels])
            value = call(_aten.clone.default, expanded)
        if value is not None:
            vectors[bit] = value
    return vectors


def _fold_together(graph: Graph, calls: Sequence[Node]) -> None:
    """Replaces calls of ``fold_weights`` by one, behind all their operands."""
    of_each: list[Any] = [call.args[:4] for call in calls]
    operands = [[*itertools.chain(*column)] for column in zip(*of_each, strict=True)]
    together = graph.call_function(fold_weights, (*operands, *calls[0].args[4:]))
    values = [call.meta["val"] for call in calls]
    biases = [call for call in calls if len(call.meta["val"]) > 1]
    together.meta["val"] = [folded for folded, *_ in values] + [b for _, *bs in values for b in bs]
    for i, call in enumerate(calls):
        for item in list(call.users):
            place = i if item.args[1] == 0 else len(calls) + biases.index(call)
            item.args = (together, place)
            together.append(item)
        graph.erase_node(call)


def _erase(graph: Graph, nodes: Iterable[Node]) -> None:
    for node in reversed(list(nodes)):
        graph.erase_node(node)
