"""The choice between PyTorch's functions and this package's kernels for norms in eager mode.

The first call of a signature (shape, layout, dtypes, activation, and needed gradients) measures
both (``measuring``), and the fastest computes all later calls. This process finds it in C++
(csrc/norm/norm_choices.h). The next process finds it on disk (``store/verdicts``), and checks it
again without timing. Sizes that keep changing are measured later, or never (``memory``). There is
no measurement during a stream's capture, or in a mode without timing.

The caller is an operator of PyTorch's norms (csrc/norm/aten_norms.h), for a converted module or by
a policy: the process's, or for instance and group norms a converted model's forward's. Only a
converted module with an activation calls earlier (csrc/bind/python_norm.cpp).
"""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from cudnn_autotune import sampling
from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.norms.batch_norm_calls import BatchNormCall
from cudnn_autotune.norms.group_norms import GroupNormCall, GroupNormInRows
from cudnn_autotune.norms.memory import NormChoice, NormMemory
from cudnn_autotune.tuning import remembering, settings

_memory = NormMemory()
_of_modules: WeakKeyDictionary[nn.Module, dict[Hashable, NormChoice]] = WeakKeyDictionary()
"""The choices for the calls of converted modules, without those for sizes that keep changing."""


def norm_choices() -> tuple[NormChoice, ...]:
    """Returns the choices for this process's batch, instance and group norms in eager mode, in the
    order of their first calls. Sizes served by a neighbour's choice are not listed.

    Norms are served on a GPU (docs/reference/norms.md): training batch norms of a converted model,
    instance and group norms within its forward, and all three under :func:`enable`. An instance
    norm is listed as the batch norm that PyTorch makes of it, with one image that has the channels
    of all; in a model in channels_last as a group norm. ``times_ms`` are of a forward, with its
    backward if it needs one; of a contiguous group norm only the forward.
    """
    return _memory.choices()


def choose_function(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    activation: str,
    groups: int,
    norm: nn.Module | None,
    mode: str,
) -> tuple[bool, int] | None:
    """Returns whether this package's kernels compute calls like this one, and the number of calls
    for which that holds (0: all); None if that cannot be measured now.

    Args:
        input: (N, C, *spatial).
        weight, bias, running_mean, running_var: (C,), or None. None of them is changed.
        activation: the activation behind the norm, a key of ``NORM_ACTIVATIONS``.
        groups: a divisor of C for a group norm; 0 for a batch norm with the statistics of the
            batch.
        norm: the calling converted module; None for a function or a module of PyTorch's.
        mode: the sampling mode, unless a module calls. In a mode without timing a converted module
            is served, and else PyTorch's kernels run.
    """
    if norm is not None:
        mode = getattr(norm, "sampling", None) or settings.get_sampling()
    is_timed = sampling.traits(settings.registered_mode(mode)).times
    if norm is None and not is_timed:
        return False, 0
    call: BatchNormCall | GroupNormCall
    if groups and input.is_contiguous():
        call = GroupNormCall(input, weight, bias, groups, eps)
    elif groups:
        tensors = (input, weight, bias)
        call = GroupNormInRows(*tensors, False, eps, activation, is_timed, groups)
    else:
        tracks = running_mean is not None
        call = BatchNormCall(input, weight, bias, tracks, eps, activation, is_timed)
    verdict = _memory.verdict(call, None if norm is None else id(norm))
    if verdict is None:
        return None
    choice = verdict.choice
    if norm is not None and (not verdict.most_calls or choice.is_provisional):
        _of_modules.setdefault(norm, {})[call.key] = choice
    return choice.is_served, verdict.most_calls


def choices_of(norm: nn.Module) -> tuple[NormChoice, ...]:
    """Returns the choices for calls of a norm, in the order of their first calls. Sizes served by a
    neighbour's choice are not listed."""
    return tuple(_of_modules.get(norm, {}).values())


def forget() -> None:
    """Clears all choices: the next call of each signature is measured again."""
    _memory.clear()
    _of_modules.clear()
    if extension_available():
        _C.forget_aten_norms()


remembering.forget_with(forget)
