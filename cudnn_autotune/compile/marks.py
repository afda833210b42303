"""Marks of convolutions in graphs, and the backward of marked convolutions.

A served call stays PyTorch's operator, with a marked input (``functional.marked``):

    aten.convolution(mark_input(input, sampling, workspace_limit), weight, ...)

The marker has no computation. It carries the call's policy through Inductor's passes, and it
distinguishes the graph, and so the key of Inductor's caches, from PyTorch's own layer.

A convolution that pads one side more has the marker ``mark_padded``, which pads by the difference.
Its lowering (``compile/inductor.py``) and its backward leave the padding to the operators, and no
padded tensor exists.

The output of a transposed convolution has a marker too. Without one Inductor would fold following
operators into the weight. That is wrong for equal numbers of input and output channels: it scales
the input channels (torch 2.11).

The backward of a marked convolution decomposes into this package's operators when the joint graph
is traced, because Inductor decides by the forward. They take the input itself, so that the mark is
not saved for the backward. Their gradient is written directly into their layout, once for both.
(``aten.convolution_backward`` gets it in eager mode's order of strides, and then copies it: 3 % of
a training step of ConvNeXt.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_autotune.engines.conv_layout import (
    conv_memory_format,
    is_image_of_height_1,
    laid_out,
)
from cudnn_autotune.engines.problem import in_pairs

_library = torch.library.Library("cudnn_autotune", "FRAGMENT")
MARK_INPUT = torch.ops.cudnn_autotune.mark_input.default
MARK_PADDED = torch.ops.cudnn_autotune.mark_padded.default
MARK_OUTPUT = torch.ops.cudnn_autotune.mark_output.default
MARKS = (MARK_INPUT, MARK_PADDED)
"""Targets of the nodes that mark an input."""
_conv_fprop = torch.ops.cudnn_autotune.conv_fprop.default
_conv_dgrad = torch.ops.cudnn_autotune.conv_dgrad.default
_conv_wgrad = torch.ops.cudnn_autotune.conv_wgrad.default


def _fake_copy(tensor: Tensor, *_: object) -> Tensor:
    return torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


for _name in ("mark_input", "mark_output"):
    torch.library.register_fake(f"cudnn_autotune::{_name}", _fake_copy, lib=_library)


@torch.library.register_fake("cudnn_autotune::mark_padded", lib=_library)
def _(input: Tensor, padding: Sequence[int], *policy: object) -> Tensor:
    return torch.constant_pad_nd(input, in_pairs(padding))


class Mark(NamedTuple):
    """The mark of a convolution's input."""

    source: Any
    """Node of the input."""
    extra: Sequence[int]
    """Padding beyond the convolution's own, first before each dimension and then after each; empty
    if both sides are even."""
    policy: tuple[str, int]
    """Sampling and workspace limit, as operators take them."""

    @classmethod
    def of(cls, node: Any) -> Mark | None:
        """Returns a node's mark; None of any other node, and of one that pads by unknown sizes."""
        target = getattr(node, "target", None)
        if target is MARK_INPUT:
            source, sampling, workspace_limit = node.args
            return cls(source, (), (sampling, workspace_limit))
        if target is MARK_PADDED and all(isinstance(size, int) for size in node.args[1]):
            source, extra, sampling, workspace_limit = node.args
            return cls(source, extra, (sampling, workspace_limit))
        return None

    def padding(self, both: Sequence[int]) -> list[int]:
        """Returns the padding for an operator of this package, given the convolution's."""
        if not self.extra:
            return list(both)
        pairs = zip((*both, *both), self.extra, strict=True)
        return [least + more for least, more in pairs]


def backward_of_marked(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Decomposes ``aten.convolution_backward`` of a marked input into this package's operators.

    Returns NotImplemented if the input is not marked, and for an output padding of a stride or
    more, which is no gradient of a convolution.
    """
    if transposed and any(p >= s for p, s in zip(output_padding, stride, strict=True)):
        return NotImplemented
    mark = Mark.of(_traced(input))
    if mark is None:
        return NotImplemented
    x = _value_of(mark.source)
    is_known = all(isinstance(size, int) for size in grad_output.shape)
    if is_known and (
        is_image_of_height_1(x, weight, pads=bool(mark.extra))
        or conv_memory_format(x, weight) != torch.contiguous_format
    ):
        # All operators of the backward read it so.
        grad_output = laid_out(grad_output, torch.channels_last)
    rest = (stride, mark.padding(padding), dilation, groups, *mark.policy)
    of_input = of_weight = of_bias = None
    if output_mask[0] and transposed:
        of_input = _conv_fprop(grad_output, weight, None, *rest)
    elif output_mask[0]:
        of_input = _conv_dgrad(grad_output, weight, x.shape, *rest)
        if mark.extra:  # the mark's own backward takes it away: see backward_of_padding
            of_input = torch.constant_pad_nd(of_input, in_pairs(mark.extra))
    if output_mask[1]:
        pair = (x, grad_output) if transposed else (grad_output, x)
        of_weight = _conv_wgrad(*pair, weight.shape, *rest)
    if output_mask[2]:
        of_bias = torch.ops.aten.sum(grad_output, [0, *range(2, grad_output.dim())])
    return of_input, of_weight, of_bias


def backward_of_padding(tensor: Tensor, pad: Sequence[int], value: float = 0.0) -> Any:
    """Decomposes ``aten.constant_pad_nd`` where it takes away what ``backward_of_marked`` pads.

    Returns NotImplemented for all others.
    """
    if not all(isinstance(size, int) and size <= 0 for size in pad):
        return NotImplemented
    node = _traced(tensor)
    if getattr(node, "target", None) is not torch.ops.aten.constant_pad_nd.default:
        return NotImplemented
    source, padded, *_ = node.args
    is_ours = getattr(source, "target", None) is _conv_dgrad
    is_inverse = is_ours and list(padded) == [-size for size in pad]
    return _value_of(source) if is_inverse else NotImplemented


def _traced(tensor: Tensor) -> Any:
    """Returns the node of a tensor in the graph being traced; None if there is none."""
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    traced = None if mode is None else proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
    return None if traced is None else traced.proxy.node


def _value_of(node: Any) -> Tensor:
    """Returns the tensor of a node in the graph being traced."""
    from torch.fx import Proxy
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    assert mode is not None
    with proxy_tensor.disable_proxy_modes_tracing():
        value = _fake_copy(node.meta["val"])
    proxy = Proxy(node, mode.tracer)
    proxy_tensor.track_tensor_tree(value, proxy, constant=None, tracer=mode.tracer)
    return value
