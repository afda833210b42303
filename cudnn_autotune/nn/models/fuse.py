"""``fuse``: a model for inference in eager mode, with fused groups."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from cudnn_autotune.engines.problem import same_padding
from cudnn_autotune.nn.fake import pad, split_padding
from cudnn_autotune.nn.models.comparison import difference
from cudnn_autotune.nn.models.example_input import call_arguments
from cudnn_autotune.nn.models.groups import GroupReport, find_groups
from cudnn_autotune.nn.models.judging import Judge, Measured, always, fuse_judged, never
from cudnn_autotune.tuning.settings import check_policy

_log = logging.getLogger(__name__)

Ints = int | Sequence[int]

_aten = torch.ops.aten
_convolution = _aten.convolution.default
_batch_norm = _aten._native_batch_norm_legit_no_training.default

_JUDGES: Mapping[str, Callable[[], Judge]] = {
    "measure": lambda: Measured(compiled=False),
    "always": lambda: always,
    "never": lambda: never,
}


class FusedModel(nn.Module):
    """What :func:`fuse` returns. It is called as the model that it was made of."""

    def __init__(self, program: nn.Module, groups: Sequence[GroupReport]) -> None:
        super().__init__()
        self.program = program
        self.groups = list(groups)
        """What became of each convolution, in the order of the model's calls."""
        self.training = False

    @property
    def unfused(self) -> list[GroupReport]:
        """The convolutions that were not fused with what follows, each with the reason."""
        return [group for group in self.groups if not group.is_fused]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.program(*args, **kwargs)

    def train(self, mode: bool = True) -> FusedModel:
        """Raises ValueError for ``mode=True``: batch norms are folded for good."""
        if mode:
            raise ValueError("a fused model is for inference only; train the one it was made of")
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a fused model cannot be pickled. Save what torch.export.export makes of it by "
            "torch.export.save, or pickle the model that it was made of, and fuse that again"
        )

    def __copy__(self) -> FusedModel:
        return self._with(vars(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedModel:
        return self._with(copy.deepcopy(vars(self), memo))

    def _with(self, attributes: Mapping[str, Any]) -> FusedModel:
        made = type(self).__new__(type(self))
        vars(made).update(attributes)
        return made

    def extra_repr(self) -> str:
        return f"{len(self.groups) - len(self.unfused)} of {len(self.groups)} convolutions fused"


def fuse(
    model: nn.Module,
    example_input: Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    sampling: str | None = None,
    workspace_limit: int | None = None,
    dynamic_shapes: Any = None,
    groups: str = "measure",
) -> FusedModel:
    """Returns a model for inference in which convolutions are one operator with what follows them.

    The model is exported by ``torch.export``. Batch norms are folded into the convolutions before
    them. Each group of a convolution, its bias, the addition of a residual and an activation (ReLU,
    SiLU, GELU, sigmoid, hard-swish) becomes one operator, whose engine is searched like that of any
    convolution, if that is faster than the group's kernels one after another. Other convolutions
    are tuned by themselves. The result computes what the model does on ``example_input``.

    The given model is not changed. Parameters that were not folded are shared with it; what is
    written into the others later is not seen, so fuse again after loading weights.

    Args:
        model: a module in eval mode that ``torch.export`` takes, on a CUDA device. On another
            device batch norms are folded, and nothing is fused.
        example_input: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
            The result takes inputs of the same sizes and dtypes.
        sampling: the mode of its convolutions, as of ``cudnn_autotune.Conv2d``.
        workspace_limit: the most bytes of workspace of their engines, as there.
        dynamic_shapes: sizes that may differ, as ``torch.export.export`` takes them; the groups are
            judged on the example's.
        groups: ``"measure"`` fuses what is faster, ``"always"`` what can be fused, ``"never"``
            nothing.

    Raises:
        TypeError: ``model`` is not a module, or ``example_input`` none of the above.
        ValueError: the model is in training mode or compiled by torch.jit; the mode is unknown, the
            limit negative, or ``groups`` none of the above.
        RuntimeError: the result's outputs differ from the model's on ``example_input`` by more than
            rounding explains.
        Exception: whatever ``torch.export.export`` raises.
    """
    _check(model, groups)
    args, kwargs = call_arguments(example_input)
    check_policy(sampling, workspace_limit)
    policy = (sampling or "", -1 if workspace_limit is None else workspace_limit)
    with torch.no_grad():
        exported = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
        graph: GraphModule = exported.run_decompositions(_decompositions()).module()
        _fold_batch_norms(graph)
        found = find_groups(graph.graph, _decompositions(), policy)
        reports = fuse_judged(graph, found, _JUDGES[groups]())
        _tune_others(graph, policy)
        fused = FusedModel(_only_what_is_read(graph), reports)
        inputs = (args, kwargs)
        expected, actual = (_outputs(one, inputs) for one in (model, fused))
        text = difference(expected, actual, lambda inputs: _outputs(model, inputs), inputs)
    if text is not None:
        raise RuntimeError(f"the fused model is not right: {text}")
    for report in reports:
        _log.info("%s", report)
    return fused


def _check(model: object, groups: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("model must not be compiled by torch.jit: fuse the model before")
    if any(module.training for module in model.modules()):
        raise ValueError("model must be in eval mode: call model.eval() before")
    if groups not in _JUDGES:
        raise ValueError(f"groups must be one of {', '.join(_JUDGES)}, got {groups!r}")


def _outputs(model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
    args, kwargs = inputs
    return [leaf for leaf in tree_leaves(model(*args, **kwargs)) if isinstance(leaf, Tensor)]


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Those that make ``aten.convolution`` of all that computes one."""
    table: dict[Any, Callable[..., Any]] = {
        _aten.conv_transpose1d.default: _transposed,
        _aten.conv_transpose2d.input: _transposed,
        _aten.conv_transpose3d.input: _transposed,
    }
    for operator in (_aten.conv1d, _aten.conv2d, _aten.conv3d):
        table[operator.default] = _plain
        table[operator.padding] = _with_named_padding
    return table


def _plain(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    n = weight.dim() - 2
    geometry = (_each(stride, n), _each(padding, n), _each(dilation, n))
    return _batched(input, weight, bias, *geometry, False, [0] * n, groups)


def _with_named_padding(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: str = "valid",
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    n = weight.dim() - 2
    sides = same_padding(_each(dilation, n), weight.shape[2:]) if padding == "same" else [0] * n
    both, extra = split_padding(sides, n)
    return _plain(pad(input, extra), weight, bias, stride, both, dilation, groups)


def _transposed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    n = weight.dim() - 2
    geometry = (_each(stride, n), _each(padding, n), _each(dilation, n))
    return _batched(input, weight, bias, *geometry, True, _each(output_padding, n), groups)


def _each(value: Ints, n: int) -> list[int]:
    """One number for each of n dimensions."""
    if not isinstance(value, Sequence):
        return [value] * n
    return list(value) * (n if len(value) == 1 else 1)


def _batched(input: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    if input.dim() == weight.dim():
        return _aten.convolution(input, weight, *rest)
    return _aten.convolution(input.unsqueeze(0), weight, *rest).squeeze(0)


def _fold_batch_norms(graph: GraphModule) -> None:
    """Folds a batch norm into the convolution before it, if that has no other use."""
    for index, norm in enumerate(graph.graph.find_nodes(op="call_function", target=_batch_norm)):
        convolution: Any = norm.args[0]
        if convolution.target is not _convolution or len(convolution.users) > 1:
            continue
        constants: list[Any] = [*convolution.args[1:3], *norm.args[1:5]]
        is_transposed = convolution.args[6]
        if is_transposed or any(isinstance(n, Node) and n.op != "get_attr" for n in constants):
            continue
        values: list[Any] = [None if n is None else attrgetter(n.target)(graph) for n in constants]
        with graph.graph.inserting_before(convolution):
            for position, value in enumerate(_folded(*values, epsilon=norm.args[6]), start=1):
                name = f"_folded_{'weight' if position == 1 else 'bias'}_{index}"
                graph.register_parameter(name, nn.Parameter(value, requires_grad=False))
                node = graph.graph.get_attr(name)
                like = constants[0].meta["val"]
                node.meta["val"] = like.new_empty_strided(value.shape, value.stride())
                convolution.update_arg(position, node)
        for result in list(norm.users):  # of three, only the first is of use in eval mode
            result.replace_all_uses_with(convolution)
            graph.graph.erase_node(result)
        graph.graph.erase_node(norm)


def _folded(
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    *,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Weight and bias of a convolution with the batch norm after it; computed in float64."""
    factor = torch.rsqrt(variance.double() + epsilon)
    if scale is not None:
        factor = factor * scale.double()
    offset = -mean.double() if bias is None else bias.double() - mean.double()
    offset = offset * factor
    if shift is not None:
        offset = offset + shift.double()
    factor = factor.reshape(-1, *[1] * (weight.dim() - 1))
    return (weight.double() * factor).to(weight.dtype), offset.to(weight.dtype)


def _tune_others(graph: GraphModule, policy: tuple[str, int]) -> None:
    """Makes the convolutions that are left calls of this package's operators."""
    operators = torch.ops.cudnn_autotune
    for node in graph.graph.find_nodes(op="call_function", target=_convolution):
        x, w, b, stride, padding, dilation, transposed, output_padding, groups = node.args
        if transposed:
            node.target = operators.conv_transpose.default
            node.args = (x, w, b, stride, padding, output_padding, dilation, groups, *policy)
        else:
            node.target = operators.conv_fprop.default
            node.args = (x, w, b, stride, padding, dilation, groups, *policy)


def _only_what_is_read(graph: GraphModule) -> GraphModule:
    """Returns the graph with no parameters and buffers but those that it reads."""
    for node in graph.graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.graph.erase_node(node)
    return GraphModule(graph, graph.graph)
