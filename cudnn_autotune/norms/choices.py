"""The choice between PyTorch's functions and this package's kernels for norms in eager mode.

At the first call of a signature (shape, layout, dtypes, activation, and what needs gradients) both
are measured (``measuring``), and the fastest computes all later calls. Those of the process
find it in C++ (csrc/norm/norm_choices.h), and the next process on disk (``store/verdicts``), where
it is checked again and not timed. Sizes that keep changing are measured later, or never
(``memory``). Nothing is measured while a stream is captured, or in a mode that times nothing.

What asks is an operator of PyTorch's norms (csrc/norm/aten_norms.h), for a converted module or by a
policy: that of the process, or for instance and group norms that of a converted model's forward.
Only a converted module with an activation asks before (csrc/bind/python_norm.cpp).
"""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from cudnn_autotune import sampling
from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.norms.batch_norm_calls import BatchNormCall
from cudnn_autotune.norms.group_norms import GroupNormCall
from cudnn_autotune.norms.memory import NormChoice, NormMemory
from cudnn_autotune.tuning import remembering, settings

_memory = NormMemory()
_of_modules: WeakKeyDictionary[nn.Module, dict[Hashable, NormChoice]] = WeakKeyDictionary()
"""The choices for the calls of converted modules, without those for sizes that keep changing."""


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
    eps: float,
    activation: str,
    groups: int,
    norm: nn.Module | None,
    mode: str,
) -> tuple[bool, int] | None:
    """Returns whether the kernels of this package compute calls like this one, and for how many
    calls that holds, 0 standing for all; None if that cannot be measured now.

    Args:
        input: (N, C, *spatial).
        weight, bias, running_mean, running_var: (C,), or None. None of them is changed.
        activation: what follows the norm, a key of ``NORM_ACTIVATIONS``.
        groups: a divisor of C for a group norm; 0 for a batch norm with the statistics of the
            batch.
        norm: the converted module that asks; None for a function or a module of PyTorch's.
        mode: the sampling mode, unless a module asks. Without one that times, a converted module is
            served, and else PyTorch's kernels run.
    """
    if norm is not None:
        mode = getattr(norm, "sampling", None) or settings.get_sampling()
    is_timed = sampling.traits(settings.registered_mode(mode)).times
    if norm is None and not is_timed:
        return False, 0
    call: BatchNormCall | GroupNormCall
    if groups:
        call = GroupNormCall(input, weight, bias, groups, eps)
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
    """Returns how calls of a norm have been computed, in the order of their first calls, without
    the sizes that were not measured since others had been."""
    return tuple(_of_modules.get(norm, {}).values())


def forget() -> None:
    """Clears all choices: the next call of each signature is measured again."""
    _memory.clear()
    _of_modules.clear()
    if extension_available():
        _C.forget_aten_norms()


remembering.forget_with(forget)
