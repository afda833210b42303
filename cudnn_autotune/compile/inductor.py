"""Lowerings of marked convolutions to this package's operators in Inductor, for ``torch.compile``.

Inductor counts ``aten.convolution`` when it decides whether a graph runs in channels_last, and it
folds batch norms only into these. So a served call stays PyTorch's operator, with a mark
(``compile/marks.py``). When the layout is settled and ``aten.convolution`` is lowered, a call with
a marked input becomes ``conv_fprop`` or ``conv_transpose``. Under ``max-autotune`` it is one choice
beside Inductor's templates.

One operator, ``fold_weights`` of ``compile/weights/operators.py``, computes at each call all
weights and biases with folded batch norms, and weights in another layout.

Batch norms of the backend ``cudnn_autotune`` are operators with a backward of their own. They
compute in the layout of their input. ``aten.silu``, which Inductor decomposes, is left in its
graphs of inference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import Graph

from cudnn_autotune.compile.marks import (
    MARK_INPUT,
    MARK_OUTPUT,
    MARK_PADDED,
    MARKS,
    Mark,
    backward_of_marked,
    backward_of_padding,
)
from cudnn_autotune.compile.weights.operators import fold_weights
from cudnn_autotune.core.after_import import after_import
from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.engines.conv_layout import (
    conv_memory_format,
    is_channels_last_image,
    is_dgrad_of_height_1,
    is_image_of_height_1,
    is_wgrad_of_height_1,
)
from cudnn_autotune.engines.problem import in_pairs
from cudnn_autotune.norms import operators as operators  # it defines the norms' operators

_log = logging.getLogger(__name__)

_conv_fprop = torch.ops.cudnn_autotune.conv_fprop.default
_conv_transpose = torch.ops.cudnn_autotune.conv_transpose.default
_conv_dgrad = torch.ops.cudnn_autotune.conv_dgrad.default
_conv_wgrad = torch.ops.cudnn_autotune.conv_wgrad.default
_silu = torch.ops.aten.silu.default
_NORM_OPERANDS = ("grad_output", "grad_output_2", "input", "output", "residual")


class _MarkedConvolution:
    """The replacement of Inductor's ``ExternKernelChoice`` for ATen's convolution, and of its
    ``conv_layout`` and ``get_stride_order``."""

    def __init__(
        self,
        choices: dict[bool, Any],
        get_stride_order: Callable[..., Sequence[int]],
        sampling: str,
        workspace_limit: int,
    ) -> None:
        self._choices = choices  # by whether the convolution is transposed
        self._get_stride_order = get_stride_order
        self._policy = {"sampling": sampling, "workspace_limit": workspace_limit}
        self._order: list[int] = []
        """The operator's order of strides."""

    def layout(self, input: Any, weight: Any, _: None, **kwargs: Any) -> Any:
        """Returns the layout of the result. ATen's may differ, as in float64 on a CPU."""
        import torch._inductor.ir
        from torch._inductor.virtualized import V

        ir: Any = torch._inductor.ir
        choice = self._choices[bool(kwargs["transposed"])]
        with V.graph.fake_mode:
            x, w = (ir.ir_node_to_tensor(operand) for operand in (input, weight))
            output = choice.op_overload(x, w, bias=None, **self._geometry(kwargs))
        self._order = _order_of(x, w, _is_fprop_of_height_1(x, w))
        sizes = (ir.convert_shape_to_inductor(of) for of in (output.size(), output.stride()))
        return ir.FixedLayout(input.get_device_or_error(), input.get_dtype(), *sizes)

    def stride_order(self, strides: Sequence[Any], *others: Any) -> Sequence[int]:
        """Returns the order of strides: the operator's, where two fit. Inductor orders the operands
        as the result, whose single channel has the stride of its innermost dimension."""
        dims = sorted(range(len(self._order)), key=self._order.__getitem__)
        if len(strides) == len(dims) and all(isinstance(one, int) for one in strides):
            ordered = [strides[dim] for dim in dims]
            if ordered == sorted(ordered):
                return self._order
        return self._get_stride_order(strides, *others)

    def _geometry(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of the operator between the bias and the policy."""
        names = ["stride", "padding", "dilation"]
        if kwargs["transposed"]:
            names.append("output_padding")
        return {**{name: list(kwargs[name]) for name in names}, "groups": kwargs["groups"]}

    def bind(
        self, inputs: Sequence[Any], layout: Any, _kwargs_in_order: Sequence[str], **kwargs: Any
    ) -> Any:
        arguments = {**self._geometry(kwargs), **self._policy}
        if len(inputs) == 2:  # on a GPU Inductor adds the bias itself
            arguments["bias"] = None
        choice = self._choices[bool(kwargs["transposed"])]
        return choice.bind(inputs, layout, **arguments)


def _stride_order(rank: int, memory_format: torch.memory_format) -> list[int]:
    """Returns the order of strides in Inductor's form: the innermost dimension has 0."""
    if memory_format == torch.contiguous_format:
        return list(range(rank - 1, -1, -1))
    return [rank - 1, 0, *range(rank - 2, 0, -1)]


def _is_fprop_of_height_1(input: Tensor, weight: Tensor) -> bool:
    return is_image_of_height_1(input, weight, pads=False)


def _order_of(a: Tensor, b: Tensor, has_height_1: bool) -> list[int]:
    """Returns an operator's order of strides for operands ``a`` and ``b``.

    Args:
        has_height_1: whether they are a 1-d convolution's, computed as images of height 1.
    """
    memory_format = torch.channels_last if has_height_1 else conv_memory_format(a, b)
    return _stride_order(a.dim(), memory_format)


def _register(conv: Any) -> None:
    """Registers lowerings and decomposition; ``conv`` is ``torch._inductor.kernel.conv``."""
    from sympy import Ne
    from torch._inductor import config, decomposition, ir, lowering, select_algorithm
    from torch._inductor.virtualized import V, ops

    aten_convolution = torch.ops.aten.convolution.default
    lower_aten: Callable[..., Any] = lowering.lowerings[aten_convolution]

    class Choice(select_algorithm.ExternKernelChoice):  # type: ignore[misc, unused-ignore]
        def call_name(self) -> str:
            """Returns the name in generated code, which another process may load from a cache."""
            return f"torch.ops.{self.op_overload}"

    choices = {
        transposed: Choice(
            operator,
            name=f"cudnn_autotune_{operator.__name__.removesuffix('.default')}",
            has_out_variant=False,
            op_overload=operator,
        )
        for transposed, operator in ((False, _conv_fprop), (True, _conv_transpose))
    }

    # For each graph, the values in an order for one operator, which serve others.
    ordered: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    def in_order(argument: Any, value: Any, order: list[int], *, is_dense: bool = True) -> Any:
        """Returns the value of a node in an order of strides, the same one for each operator.

        Args:
            is_dense: whether a slice is copied, once for all; else an operator may copy it.
        """
        known = ordered.setdefault(V.graph, {})
        key = (argument, is_dense, *order)
        if key not in known:
            known[key] = ir.ExternKernel.require_stride_order(value, order)
            strides = ir.FlexibleLayout.stride_ordered(value.get_size(), order)
            if is_dense and has_other_strides(known[key], strides):
                known[key] = ir.ExternKernel.require_exact_strides(known[key], strides)
        return known[key]

    def has_other_strides(value: Any, strides: Sequence[Any]) -> bool:
        """Returns whether a value is known to have other strides where its size is not 1."""
        if value.get_numel() in (0, 1):
            return False  # Inductor gives it no strides yet
        evaluate = V.graph.sizevars.statically_known_true
        layout = zip(value.get_size(), value.get_stride(), strides, strict=True)
        return any(evaluate(Ne(own, wanted)) and evaluate(Ne(n, 1)) for n, own, wanted in layout)

    def lower_convolution(*args: Any, **kwargs: Any) -> Any:
        marked: Any = V.graph.current_node.args[0]
        mark = Mark.of(marked)
        if mark is None or is_left_to_inductor():
            return lower_aten(*args, **kwargs)
        if leaves_padding(marked):
            args = (*args[:4], mark.padding(args[4]), *args[5:])
        weight: Any = V.graph.current_node.args[1]
        value = weight.meta["val"]
        if value.dim() == 3 and value.dtype != torch.float64 and is_channels_last_image(value):
            # Without this a computed weight would be contiguous.
            order = _stride_order(3, torch.channels_last)
            args = (args[0], in_order(weight, args[1], order), *args[2:])
        for choice in choices.values():
            choice.use_fallback_kernel = V.graph.cpp_wrapper
        ours = _MarkedConvolution(choices, conv.ir.get_stride_order, *mark.policy)
        theirs = conv.aten_convolution, conv.conv_layout, conv.ir.get_stride_order
        conv.aten_convolution, conv.conv_layout = ours, ours.layout
        conv.ir.get_stride_order = ours.stride_order
        # Inductor's templates pad both sides alike.
        backends = "ATEN" if leaves_padding(marked) else config.max_autotune_conv_backends
        try:
            with config.patch(max_autotune_conv_backends=backends):
                return lower_aten(*args, **kwargs)
        finally:
            conv.aten_convolution, conv.conv_layout, conv.ir.get_stride_order = theirs

    def is_left_to_inductor() -> bool:
        """Returns whether marked convolutions are ATen's: under ``max-autotune`` Inductor may
        choose after the graph of a C++ call is gone."""
        return V.graph.cpp_wrapper and (config.max_autotune or config.max_autotune_gemm)

    def leaves_padding(marked: Any) -> bool:
        """Returns whether a marked node leaves a padding to the operators that read it."""
        return (
            marked.target is MARK_PADDED
            and Mark.of(marked) is not None
            and not is_left_to_inductor()
            and all(user.target is aten_convolution for user in marked.users)
        )

    def lower_padding(tensor: Any, padding: Sequence[Any], *_: Any) -> Any:
        if leaves_padding(V.graph.current_node):
            return tensor
        pad = lowering.lowerings[torch.ops.aten.constant_pad_nd.default]
        return pad(tensor, in_pairs(padding), 0)

    def lower_silu(x: Any) -> Any:
        dtype = x.get_dtype()
        wide = torch.promote_types(dtype, torch.float32)

        def silu(value: Any) -> Any:
            value = ops.to_dtype(value, wide)
            divisor = ops.add(ops.constant(1.0, wide), ops.exp(ops.neg(value)))
            return ops.to_dtype(ops.truediv(value, divisor), dtype)

        return lowering.make_pointwise(silu)(x)

    lowering.lowerings[aten_convolution] = lower_convolution
    for marker in (MARK_INPUT, MARK_OUTPUT):
        lowering.register_lowering(marker, type_promotion_kind=None)(lambda tensor, *_: tensor)
    lowering.register_lowering(MARK_PADDED, type_promotion_kind=None)(lower_padding)
    lowering.register_lowering(_silu, type_promotion_kind=None)(lower_silu)

    def lay_out(node: Any, *operands: Any) -> tuple[Any, dict[str, Any]]:
        """Puts the arguments of an operator of the backward into the layouts that it needs. Other
        operators read the same copy of a gradient, which is an input if the convolution is
        transposed."""
        values = [argument.meta["val"] for argument in node.args[:2]]
        of_height_1 = {_conv_dgrad: is_dgrad_of_height_1, _conv_wgrad: is_wgrad_of_height_1}
        has_height_1 = of_height_1.get(node.target, _is_fprop_of_height_1)
        order = _order_of(values[0], values[1], has_height_1(*values))
        count = 2 if node.target is _conv_wgrad else 1
        arranged = [in_order(node.args[i], operands[i], order) for i in range(count)]
        others, _ = lowering.constrain_to_fx_strides(node, *[None] * count, *operands[count:])
        return (*arranged, *others[count:]), {}

    def lay_out_fused(
        node: Any, input: Any, weight: Any, bias: Any, residual: Any, *others: Any, **slope: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Puts the operands of a fused convolution into its layout."""
        values = [argument.meta["val"] for argument in node.args[:2]]
        stride, padding = node.args[4:6]
        pads = len(padding) > len(stride)
        has_height_1 = is_image_of_height_1(values[0], values[1], pads=pads)
        order = _order_of(values[0], values[1], has_height_1)
        if V.graph.layout_opt and values[0].dim() == 4 and values[0].dtype != torch.float64:
            # Inductor's choice for aten.convolution, too
            order = _stride_order(4, torch.channels_last)
        # The operator reads slices of channels.
        input, weight, residual = (
            value if value is None else in_order(node.args[i], value, order, is_dense=i != 0)
            for i, value in ((0, input), (1, weight), (3, residual))
        )
        return (input, weight, bias, residual, *others), slope

    def lay_out_into(
        node: Any, output: Any, *operands: Any, **slope: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Puts the operands of a convolution into the layout of the tensor that it writes into."""
        order = _stride_order(4, torch.channels_last)
        arranged = list(operands)
        for i in (0, 1, 3):  # input, weight and residual
            if operands[i] is not None:
                value = in_order(node.args[i + 1], operands[i], order, is_dense=i != 0)
                arranged[i] = value
        return (output, *arranged), slope

    def lay_out_weights(node: Any, weights: Any, *others: Any) -> tuple[Any, dict[str, Any]]:
        """Lets weights be folded into their convolutions' layout."""
        *rest, dtype, channels_last = others
        # Inductor's choice for aten.convolution
        of_2d = all(len(weight.get_size()) == 4 for weight in weights)
        channels_last |= V.graph.layout_opt and of_2d and dtype != torch.float64
        return (weights, *rest, dtype, channels_last), {}

    def lay_out_norm(node: Any, *operands: Any) -> tuple[Any, dict[str, Any]]:
        """Puts the operands of a batch norm, or its backward, with the shape of its input into the
        input's layout, and begins to compile its kernels."""
        with IMPORTING:
            from cudnn_autotune.compile import norms  # not imported with the package

        names = [argument.name for argument in node.target._schema.arguments]
        input = node.args[names.index("input")].meta["val"]
        memory_format = torch._prims_common.suggest_memory_format(input)
        if V.graph.layout_opt and input.dim() == 4 and input.dtype != torch.float64:
            memory_format = torch.channels_last  # the layout of the convolution before it
        order = _stride_order(input.dim(), memory_format)
        arranged = list(operands)
        for i, (name, value) in enumerate(zip(names, operands, strict=False)):
            # A mask instead of the output has a layout of its own.
            if value is not None and name in _NORM_OPERANDS and len(value.get_size()) == len(order):
                arranged[i] = in_order(node.args[i], value, order)
        norms.start_norm(node, memory_format)
        return tuple(arranged), {}

    ours = torch.ops.cudnn_autotune
    lowering.make_fallback(ours.conv_fused.default, lay_out_fused, warn=False)
    lowering.make_fallback(ours.conv_fused_into_.default, lay_out_into, warn=False)
    lowering.make_fallback(fold_weights, lay_out_weights, warn=False)
    for norm in (ours.batch_norm_act, ours.batch_norm_act_backward):
        lowering.make_fallback(norm.default, lay_out_norm, warn=False)
    for operator in (_conv_fprop, _conv_dgrad, _conv_wgrad):
        lowering.make_fallback(operator, lay_out, warn=False)
    lowering.add_needs_realized_inputs(list(MARKS))
    aten_backward = torch.ops.aten.convolution_backward.default
    theirs: Callable[..., Any] = decomposition.decompositions[aten_backward]

    def backward(*args: Any, **kwargs: Any) -> Any:
        found = backward_of_marked(*args, **kwargs)
        return theirs(*args, **kwargs) if found is NotImplemented else found

    decomposition.decompositions[aten_backward] = backward
    decomposition.decompositions[torch.ops.aten.constant_pad_nd.default] = backward_of_padding
    decomposition.fast_random_decomps.cache_clear()


def _keep_dense(graph: Any) -> None:
    """Lets Inductor allocate what this package's operators read without padded strides, as it does
    for PyTorch's convolutions; ``graph`` is ``torch._inductor.graph``.

    Else activations that are saved for the backward are padded if the size of an image is odd. Each
    operator that reads one copies it.
    """
    mark: Callable[..., None] | None = getattr(graph, "mark_nodes_dislike_padding", None)
    if mark is None:
        return

    def mark_nodes_dislike_padding(nodes: Graph, *args: Any) -> None:
        for node in nodes.nodes:
            if getattr(node.target, "namespace", "") == "cudnn_autotune":
                for operand in node.all_input_nodes:
                    # Inductor pads the results of reductions for convolutions, too.
                    if torch.Tag.reduction not in getattr(operand.target, "tags", ()):
                        operand.meta["dislike_padding"] = True
        mark(nodes, *args)

    graph.mark_nodes_dislike_padding = mark_nodes_dislike_padding


def _register_if_known(conv: ModuleType) -> None:
    try:
        _register(conv)
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        _log.warning(
            "This torch's Inductor is not known to cudnn_autotune (%s): compiled models keep the "
            "tuned convolutions, but in the layout that the model has.",
            error,
        )


after_import("torch._inductor.kernel.conv", _register_if_known)
after_import("torch._inductor.graph", _keep_dense)
