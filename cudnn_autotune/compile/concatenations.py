"""The search for concatenations, in a functional graph of ATen operators, whose parts convolutions
can write in place.

A concatenation copies its parts, and a dense block copies them again for each of its convolutions.
Here the largest one becomes a tensor of its own. Convolutions write their slices of its channels
and read slices of it (``conv_fused_into_``). The block's other concatenations are slices too, and
parts that no convolution writes are copied once. If norms read the concatenations, as in a
DenseNet, Inductor's kernels of these read slices, and not many parts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from cudnn_autotune.compile.groups import add_call, reads_in_place
from cudnn_autotune.compile.marks import MARKS, Mark
from cudnn_autotune.engines.conv_layout import conv_memory_format
from cudnn_autotune.engines.problem import DTYPES, MOST_ALIGNED, ConvProblem

_aten = torch.ops.aten
_cat = torch.ops.aten.cat.default
_convolution = torch.ops.aten.convolution.default
_fused = torch.ops.cudnn_autotune.conv_fused.default
# The defaults of its last arguments: activation, sampling, workspace limit, slope.
_DEFAULTS = ("", "", -1, None)


@dataclass(frozen=True)
class ConcatenationReport:
    """Concatenations of a graph with common parts, and whether convolutions write them."""

    parts: int
    """Number of parts of the largest one."""
    output_shape: tuple[int, ...]
    """Shape of the largest one."""
    is_in_place: bool
    reason: str
    in_place_ms: float | None = None
    """Milliseconds of its convolutions and copies in place, and of kernels that read the parts that
    no convolution reads; None if not measured."""
    several_ms: float | None = None
    """Milliseconds of its convolutions and of kernels that concatenate."""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.output_shape))
        what = "written in place" if self.is_in_place else "copied"
        return f"concatenation of {self.parts} -> {shape}: {what}, {self.reason}"


class ConvolutionCall(NamedTuple):
    """A call of this package's convolution in a graph."""

    node: Node
    operands: tuple[Any, Any, Any, Any, Any]
    """Nodes of the input and the weight, and of the bias, the residual and the slopes, which may be
    None."""
    options: tuple[Any, ...]
    """Arguments of ``conv_fused`` between the residual and the slopes."""

    @classmethod
    def of(cls, node: Node) -> ConvolutionCall | None:
        """Reads a call; returns None for other nodes, and for transposed convolutions."""
        arguments: Any = node.args
        if node.target is _fused:
            arguments = (*arguments, *_DEFAULTS[len(arguments) - 8 :])
            return cls(node, (*arguments[:4], arguments[11]), arguments[4:11])
        if node.target is not _convolution:
            return None
        marked, weight, bias, stride, padding, dilation, transposed, _, groups = arguments
        mark = Mark.of(marked)
        if transposed or mark is None:
            return None
        options = (stride, mark.padding(padding), dilation, groups, "", *mark.policy)
        return cls(node, (mark.source, weight, bias, None, None), options)

    @classmethod
    def reading(cls, user: Node) -> ConvolutionCall | None:
        """Returns the convolution that uses a value, directly or by a mark; None for other
        users."""
        if user.target in MARKS:
            found = [cls.of(convolution) for convolution in user.users]
            return found[0] if len(found) == 1 else None
        return cls.of(user)

    @property
    def input(self) -> Node:
        node: Node = self.operands[0]
        return node

    def arguments(self, operands: Iterable[Any]) -> tuple[Any, ...]:
        """Returns the arguments of ``conv_fused`` with these operands."""
        *first, slope = operands
        return (*first, *self.options, slope)

    def is_channels_last(self) -> bool:
        input, weight = (node.meta["val"] for node in self.operands[:2])
        return conv_memory_format(input, weight) == torch.channels_last


@dataclass(frozen=True)
class Family:
    """Concatenations of a graph: the largest one can be a tensor of its own, and the others slices
    of its channels."""

    parts: tuple[Node, ...]
    """Parts of the largest one."""
    concatenations: tuple[Node, ...]
    """The concatenations, the largest one first."""
    slices: dict[Node, tuple[int, int]]
    """First channel and number of channels of each part and each concatenation."""
    written: frozenset[Node]
    """Parts that convolutions write in place."""
    convolutions: tuple[ConvolutionCall, ...]
    """Convolutions that write a part or read a slice, in the graph's order."""

    @property
    def value(self) -> Tensor:
        """The fake tensor of the largest one."""
        value: Tensor = self.concatenations[0].meta["val"]
        return value

    @property
    def device(self) -> torch.device:
        return self.value.device

    @property
    def copied(self) -> list[Node]:
        return [part for part in self.parts if part not in self.written]

    @property
    def unconvolved(self) -> list[Node]:
        """The concatenations that no convolution reads."""
        convolved = {one.input for one in self.convolutions}
        return [cat for cat in self.concatenations if cat not in convolved]

    def concatenations_of(self, part: Node) -> list[Node]:
        """Returns the concatenations that have a part."""
        place, _ = self.slices[part]
        slices = ((cat, *self.slices[cat]) for cat in self.concatenations)
        return [cat for cat, first, count in slices if first <= place < first + count]

    def parts_of(self, cat: Node) -> list[Node]:
        """Returns the parts of the largest concatenation that are in this one."""
        return [part for part in self.parts if cat in self.concatenations_of(part)]

    def is_slice(self, node: Node) -> bool:
        """Returns whether a value will be a slice of the family's tensor."""
        return node in self.written or node in self.concatenations

    def problems(self) -> list[ConvProblem]:
        """Returns the convolutions' problems in place.

        Raises:
            ValueError: the sizes of one are too large for cuDNN.
        """
        return [self._problem(one) for one in self.convolutions]

    def _problem(self, one: ConvolutionCall) -> ConvProblem:
        x, w, bias, residual, _ = (node and node.meta["val"] for node in one.operands)
        stride, padding, dilation, groups, activation = one.options[:5]
        channels = self.value.shape[1]
        return ConvProblem(
            *("fprop", x.shape, w.shape, stride, padding, dilation, groups, x.dtype),
            torch.channels_last,
            bias=bias is not None,
            residual=residual is not None,
            activation=activation,
            pixel_strides=(
                channels if self.is_slice(one.input) else x.shape[1],
                channels if one.node in self.written else w.shape[0],
            ),
        )


def find_families(graph: Graph, *, channels_last: bool) -> list[Family]:
    """Finds concatenations of channels with parts that convolutions can write, or with common
    parts.

    Args:
        graph: nodes call operators of ATen and of this package, write into no operand, and have
            their fake tensors in ``meta["val"]``. Groups are fused already.
        channels_last: whether 2-d convolutions will run in channels_last, even if the graph has
            other strides.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    parts_of: dict[Node, tuple[Node, ...]] = {}
    for cat in graph.find_nodes(op="call_function", target=_cat):
        if _is_of_images(cat):
            parts_of[cat] = _flat_parts(cat, parts_of)
    found: list[Family] = []
    taken: set[Node] = set()
    for whole in sorted(parts_of, key=lambda cat: len(parts_of[cat]), reverse=True):
        parts = parts_of[whole]
        if len({*parts}) < len(parts) or not taken.isdisjoint((whole, *parts)):
            continue
        slices = _slices_of(parts)
        cats = [whole, *(cat for cat in parts_of if cat is not whole and cat not in taken)]
        for cat in cats:
            # A concatenation that is a part has a slice, and its own parts may have others, too.
            if cat not in parts and (place := _place_of(parts_of[cat], parts)) is not None:
                slices[cat] = (slices[parts[place]][0], cat.meta["val"].shape[1])
        family = _family(parts, slices, channels_last, order)
        if family is not None:
            found.append(family)
            taken.update(family.slices)
    return sorted(found, key=lambda family: order[family.concatenations[0]])


def lay_out_volumes(graph: Graph) -> None:
    """Puts concatenations of volumes into channels_last if a convolution reads them so, and no
    output shares their memory.

    Inductor writes a concatenation contiguously if a part of it is contiguous in memory, such as
    the last frames of an earlier call, and copies it for the convolution. Here channels are the
    parts' last dimension. One dimension more keeps Inductor from taking the frames for channels,
    where a part has one frame.

    Args:
        graph: as of :func:`find_families`.
    """
    from torch._inductor.fx_utils import get_node_storage  # slow to import

    returned = {get_node_storage(node) for node in graph.output_node().all_input_nodes}
    cats = [
        cat
        for cat in graph.find_nodes(op="call_function", target=_cat)
        if cat.meta["val"].dim() == 5
        and _is_read_in_channels_last(cat)
        and get_node_storage(cat) not in returned
    ]
    for cat in cats:
        _lay_out_volume(graph, cat)


def _is_read_in_channels_last(cat: Node) -> bool:
    calls = (ConvolutionCall.reading(user) for user in cat.users)
    return any(
        one is not None
        and one.input is cat
        and conv_memory_format(cat.meta["val"], one.operands[1].meta["val"])
        == torch.channels_last_3d
        for one in calls
    )


def _lay_out_volume(graph: Graph, cat: Node) -> None:
    given: Any = cat.args[0]
    dim: Any = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    call = functools.partial(add_call, graph)
    with cat.meta["val"].fake_mode, graph.inserting_before(cat):
        last = [call(_aten.permute.default, part, [0, *range(2, 5), 1]) for part in given]
        last = [call(_aten.unsqueeze.default, part, 0) for part in last]
        joined = call(_cat, last, (1, 5, 2, 3, 4)[dim])
        found = call(_aten.permute.default, call(_aten.squeeze.dim, joined, 0), [0, 4, 1, 2, 3])
    cat.replace_all_uses_with(found)
    graph.erase_node(cat)


def _is_of_images(cat: Node) -> bool:
    """Returns whether a node concatenates channels of images of known sizes, in a served dtype."""
    parts: Any = cat.args[0]
    value, dim = cat.meta["val"], cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    return (
        value.dim() == 4
        and dim in (1, -3)
        and value.dtype in DTYPES
        and value.dtype != torch.float64
        and value.numel() > 0
        and all(isinstance(size, int) for size in value.shape)
        and all(
            (part.meta["val"].dim(), part.meta["val"].dtype) == (4, value.dtype) for part in parts
        )
    )


def _flat_parts(cat: Node, parts_of: dict[Node, tuple[Node, ...]]) -> tuple[Node, ...]:
    """Returns the parts of a concatenation. A part that is a concatenation is replaced by its own
    parts, as in a block that appends: ``x = cat([x, y])``.

    Args:
        parts_of: the parts of earlier concatenations.
    """
    given: Any = cat.args[0]
    parts = [part for one in given for part in parts_of.get(one, (one,))]
    return tuple(parts if len({*parts}) == len(parts) else given)


def _slices_of(parts: Sequence[Node]) -> dict[Node, tuple[int, int]]:
    """Returns the first channel and the number of channels of each part of a concatenation."""
    slices, first = {}, 0
    for part in parts:
        slices[part] = (first, part.meta["val"].shape[1])
        first += slices[part][1]
    return slices


def _place_of(some: Sequence[Node], parts: Sequence[Node]) -> int | None:
    """Returns the index of a sequence of parts in a longer one; None if it is not there."""
    place = parts.index(some[0]) if some[0] in parts else len(parts)
    return place if tuple(parts[place : place + len(some)]) == tuple(some) else None


def _family(
    parts: tuple[Node, ...],
    slices: dict[Node, tuple[int, int]],
    channels_last: bool,
    order: dict[Node, int],
) -> Family | None:
    """Returns concatenations as a family, without those needed as a dense tensor. None if the
    largest one is needed so, its pixels are not aligned, or there is no saving.

    A concatenation that convolutions read is a tensor that must be written. Others are computed in
    the kernels that read them. These save something only if a part written by a convolution would
    otherwise be read for another concatenation, too.
    """
    cats = tuple(node for node in slices if node not in parts)
    whole = cats[0].meta["val"]
    step = MOST_ALIGNED // whole.element_size()
    if whole.shape[1] % step:
        return None

    def fits(node: Node, one: ConvolutionCall) -> bool:
        """Returns whether a convolution can read or write a slice."""
        return slices[node][0] % step == 0 and (channels_last or one.is_channels_last())

    def readers(node: Node) -> list[ConvolutionCall] | None:
        """Returns the convolutions that read a node; None if a user cannot read slices."""
        found = []
        for user in node.users:
            one = ConvolutionCall.reading(user)
            if one is not None and node not in one.operands[1:] and fits(node, one):
                found.append(one)
            elif one is not None or not (user in cats or reads_in_place(user)):
                return None
        return found

    convolutions: dict[Node, ConvolutionCall] = {}
    for cat in cats:
        reading = readers(cat)
        if reading is None and cat is cats[0]:
            return None
        if reading is None or all(user in cats for user in cat.users):
            # It stays a concatenation of slices, or has no readers any more.
            del slices[cat]
        else:
            convolutions.update((one.node, one) for one in reading)
    cats = tuple(cat for cat in cats if cat in slices)
    is_convolved = bool(convolutions)
    written = set()
    for part in parts:
        one, reading = ConvolutionCall.of(part), readers(part)
        if one is not None and reading is not None and fits(part, one):
            written.add(part)
            convolutions.update((each.node, each) for each in (one, *reading))
    in_order = sorted(convolutions.values(), key=lambda one: order[one.node])
    family = Family(parts, cats, slices, frozenset(written), tuple(in_order))
    if is_convolved:
        return family if written or len(cats) > 1 else None
    is_shared = any(len(family.concatenations_of(part)) > 1 for part in written)
    return family if is_shared else None
