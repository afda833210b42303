"""The choice between PyTorch's functions and this package's operators for a batch norm in eager
training, and for what ends in PyTorch's operators of norms.

At the first call of a signature (shape, layout, dtypes, activation, and what needs gradients) both
are measured (``norm_measuring``), and the fastest computes all later calls. Those of the process
find it in C++ (csrc/python_norm.h), and the next process on disk (``norms/file``), where it is
checked again and not timed. Sizes that keep changing are measured later, or never
(``norm_memory``). Nothing is measured while a stream is captured, or in a mode that times nothing.

Batch and instance norms that are no modules of this package's ask from the operators in which they
end (csrc/aten_norms.h), if a policy is in force: that of the process, or for an instance norm that
of a converted model's forward.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cudnn_autotune import sampling
from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.norms.group_norms import GroupNormCall
from cudnn_autotune.norms.measuring import BatchNormCall, Signature, alignment_of
from cudnn_autotune.norms.memory import NormChoice, NormMemory
from cudnn_autotune.tuning import remembering, settings

_memory = NormMemory()
_of_modules: WeakKeyDictionary[nn.Module, dict[Hashable, NormChoice]] = WeakKeyDictionary()
"""The choices for the calls of converted modules, without those for sizes that keep changing."""


def choose(norm: Any, input: Tensor, activation: str) -> bool:
    """Chooses what computes calls like this one, which the operators can compute and nothing was
    chosen for. Returns whether it did; a call that cannot be measured now is PyTorch's.

    Args:
        norm: a batch norm module.
        input: (N, C, *spatial).
        activation: what follows the norm, a key of ``NORM_ACTIVATIONS``.
    """
    call = _batch_norm_call(norm, input, activation, getattr(norm, "sampling", None), True)
    verdict = _memory.verdict(call, id(norm))
    if verdict is None:
        return False
    choice = verdict.choice
    if not verdict.most_calls or choice.is_provisional:
        _of_modules.setdefault(norm, {})[call.key] = choice
    _C.choose_norm(norm, input, activation, choice.is_served, verdict.most_calls)
    return True


def norm_choices() -> tuple[NormChoice, ...]:
    """Returns how the batch, instance and group norms of this process are computed in eager mode,
    in the order of their first calls, without the sizes that were not measured since others had
    been.

    Norms are served on a GPU (docs/reference/norms.md): training batch norms of a model that was
    converted, instance and group norms within its forward, and all three under :func:`enable`. An
    instance norm is told as the batch norm that PyTorch makes of it, with one image that has the
    channels of all. ``times_ms`` are those of a forward with the backward that the call needs; of a
    group norm those of a forward.
    """
    return _memory.choices()


def choose_function(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    groups: int,
    eps: float,
    mode: str,
) -> tuple[bool, int] | None:
    """Returns whether the kernels of this package compute calls like this one of PyTorch's
    operators, and for how many calls that holds, 0 standing for all; None if that cannot be
    measured now.

    Args:
        input: (N, C, *spatial).
        weight, bias, running_mean, running_var: (C,), or None. None of them is changed.
        groups: a divisor of C for a group norm; 0 for a batch norm with the statistics of the
            batch.
        mode: the sampling mode. Without one that times, PyTorch's kernels run.
    """
    mode = settings.registered_mode(mode)
    if not sampling.traits(mode).times:
        return False, 0
    call: BatchNormCall | GroupNormCall
    if groups:
        call = GroupNormCall(input, weight, bias, groups, eps)
    else:
        norm = SimpleNamespace(
            weight=weight,
            bias=bias,
            running_mean=running_mean,
            running_var=running_var,
            eps=eps,
            training=True,
            track_running_stats=running_mean is not None,
        )
        call = _batch_norm_call(norm, input, "identity", mode, by_module=False)
    verdict = _memory.verdict(call, None)
    return None if verdict is None else (verdict.choice.is_served, verdict.most_calls)


def choices_of(norm: nn.Module) -> tuple[NormChoice, ...]:
    """Returns how calls of a norm have been computed, in the order of their first calls, without
    the sizes that were not measured since others had been."""
    return tuple(_of_modules.get(norm, {}).values())


def forget() -> None:
    """Clears all choices: the next call of each signature is measured again."""
    _memory.clear()
    _of_modules.clear()
    _C.forget_norms()
    if extension_available():
        _C.forget_aten_norms()


remembering.forget_with(forget)


def _batch_norm_call(
    norm: Any, input: Tensor, activation: str, mode: str | None, by_module: bool
) -> BatchNormCall:
    """Returns a call with the facts that a choice holds for. The hit path has the same in
    csrc/norm_call.cpp."""
    weight, bias = norm.weight, norm.bias
    needs = None
    if torch.is_grad_enabled():
        needs = (
            input.requires_grad,
            weight is not None and weight.requires_grad,
            bias is not None and bias.requires_grad,
        )
    signature = Signature(
        shape=input.shape,
        stride=input.stride(),
        dtype=input.dtype,
        device=input.get_device(),
        weight=None if weight is None else weight.dtype,
        bias=None if bias is None else bias.dtype,
        needs=needs,
        activation=activation,
        tracks=norm.training and norm.track_running_stats,
        alignment=alignment_of(input),
    )
    mode = mode or settings.registered_mode(settings.get_sampling())
    is_timed = sampling.traits(mode).times
    return BatchNormCall(norm, input, signature, by_module, is_timed)
