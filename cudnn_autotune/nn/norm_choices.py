"""The choice between PyTorch's functions and this package's operators for a batch norm in eager
training, and for what ends in PyTorch's operators of norms.

At the first call of a signature (shape, layout, dtypes, activation, and what needs gradients) both
are measured (``norm_measuring``), and the fastest computes all later calls. Those of the process
find it in C++ (csrc/python_norm.h), and the next process on disk (``store/norm_file``), where it is
checked again and not timed. Of sizes that keep changing few are measured, and others are computed
as the nearest of these. Nothing is measured while a stream is captured, or in a mode that times
nothing.

Batch and instance norms that are no modules of this package's ask from the operators in which they
end (csrc/aten_norms.h), if a policy is in force: that of the process, or for an instance norm that
of a converted model's forward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cudnn_autotune import sampling
from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.nn import group_norms, norm_measuring
from cudnn_autotune.nn.norm_measuring import PYTORCH, NormChoice, Signature
from cudnn_autotune.tuning import remembering, settings

_log = logging.getLogger(__name__)

_choices: dict[tuple[bool, Signature], NormChoice] = {}
_of_modules: WeakKeyDictionary[nn.Module, dict[Signature, NormChoice]] = WeakKeyDictionary()
_of_functions: dict[int, dict[Signature, NormChoice]] = {}
"""The choices of calls that no module of this package's makes, by their number of channels."""


def choose(norm: Any, input: Tensor, activation: str) -> bool:
    """Chooses what computes calls like this one, which the operators can compute and nothing was
    chosen for. Returns whether it did; a call that cannot be measured now is PyTorch's.

    Args:
        norm: a batch norm module.
        input: (N, C, *spatial).
        activation: what follows the norm, a key of ``NORM_ACTIVATIONS``.
    """
    choice = first_choice(norm, input, activation)
    if choice is not None:
        _C.choose_norm(norm, input, activation, choice.is_served)
    return choice is not None


def norm_choices() -> tuple[NormChoice, ...]:
    """Returns how the batch, instance and group norms of this process are computed in eager mode,
    in the order of their first calls, group norms last, without the sizes that were not measured
    since others had been.

    Norms are served on a GPU (docs/reference/norms.md): training batch norms of a model that was
    converted, instance and group norms within its forward, and all three under :func:`enable`. An
    instance norm is told as the batch norm that PyTorch makes of it, with one image that has the
    channels of all. ``times_ms`` are those of a forward with the backward that the call needs; of a
    group norm those of a forward.
    """
    return (*_choices.values(), *group_norms.choices())


def choose_function(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    groups: int,
    eps: float,
    mode: str,
) -> bool | None:
    """Returns whether the kernels of this package compute calls like this one of PyTorch's
    operators; None if that cannot be measured now.

    Args:
        input: (N, C, *spatial).
        weight, bias, running_mean, running_var: (C,), or None. None of them is changed.
        groups: a divisor of C for a group norm; 0 for a batch norm with the statistics of the
            batch.
        mode: the sampling mode. Without one that times, PyTorch's kernels run.
    """
    if not sampling.traits(mode).times:
        return False
    if groups:
        return group_norms.choose(input, weight, bias, groups, eps)
    norm = SimpleNamespace(
        weight=weight,
        bias=bias,
        running_mean=running_mean,
        running_var=running_var,
        eps=eps,
        sampling=mode,
        training=True,
        track_running_stats=running_mean is not None,
    )
    known = _of_functions.setdefault(input.shape[1], {})
    choice = _choice_among(known, norm, input, "identity")
    return None if choice is None else choice.is_served


def choices_of(norm: nn.Module) -> tuple[NormChoice, ...]:
    """Returns how calls of a norm have been computed, in the order of their first calls, without
    the sizes that were not measured since others had been."""
    return tuple(_of_modules.get(norm, {}).values())


def forget() -> None:
    """Clears all choices: the next call of each signature is measured again."""
    _choices.clear()
    _of_modules.clear()
    _of_functions.clear()
    group_norms.forget()
    _C.forget_norms()
    if extension_available():
        _C.forget_aten_norms()


remembering.forget_with(forget)


def first_choice(norm: Any, input: Tensor, activation: str) -> NormChoice | None:
    """Returns how a call is computed; arguments are those of :func:`choose`. Returns None if it
    cannot be measured now."""
    return _choice_among(_of_modules.setdefault(norm, {}), norm, input, activation)


def _choice_among(
    of_norm: dict[Signature, NormChoice], norm: Any, input: Tensor, activation: str
) -> NormChoice | None:
    """Returns how a call is computed, and adds that to the choices that are known of its norm."""
    signature = _signature_of(norm, input, activation)
    if (known := of_norm.get(signature)) is not None:
        return known
    times = sampling.traits(getattr(norm, "sampling", None) or settings.get_sampling()).times
    found = _choices.get((times, signature))
    if found is None and (near := _nearest(of_norm, signature)) is not None:
        # The operators' plan for a size that no form was adopted for is that of the first one.
        chosen = _first_form() if near.is_served else PYTORCH
        note = f"its sizes change; it is computed as {near.signature}"
        return NormChoice(chosen, note=note, signature=_text(input, signature))
    if found is None:
        choose = partial(_chosen, norm, input, signature, times)
        found = norm_measuring.chosen_now(input, choose) if times else choose()
        if found is None:
            return None
        _choices[times, signature] = found
        _log.info("batch norm %s", found)
    of_norm[signature] = found
    return found


def _signature_of(norm: Any, input: Tensor, activation: str) -> Signature:
    """Returns what a choice holds for. The hit path has the same in csrc/norm_call.cpp."""
    weight, bias = norm.weight, norm.bias
    needs = None
    if torch.is_grad_enabled():
        needs = (
            input.requires_grad,
            weight is not None and weight.requires_grad,
            bias is not None and bias.requires_grad,
        )
    return Signature(
        shape=input.shape,
        stride=input.stride(),
        dtype=input.dtype,
        device=input.get_device(),
        weight=None if weight is None else weight.dtype,
        bias=None if bias is None else bias.dtype,
        needs=needs,
        activation=activation,
        tracks=norm.training and norm.track_running_stats,
    )


def _nearest(known: Mapping[Signature, NormChoice], signature: Signature) -> NormChoice | None:
    """Returns the choice for the nearest size of a norm, if enough of its sizes are known in this
    layout and with the rest of a signature."""

    def rest(of: Signature) -> tuple[Any, ...]:
        return len(of.shape), of.stride[1] == 1, *of[2:]

    alike = [other for other in known if rest(other) == rest(signature)]
    sizes = [(other.shape.numel(), known[other]) for other in alike]
    return norm_measuring.nearest(sizes, signature.shape.numel())


def _text(input: Tensor, signature: Signature) -> str:
    needs = zip(("input", "weight", "bias"), signature.needs or (), strict=False)
    wanted = [name for name, needed in needs if needed]
    weight = signature.weight
    parameters = "no parameters" if weight is None else str(weight).removeprefix("torch.")
    return " ".join(
        (
            str(input.dtype).removeprefix("torch."),
            "x".join(map(str, input.shape)),
            _layout(input),
            f"{parameters}, {signature.activation},",
            f"gradients of {', '.join(wanted)}" if wanted else "no gradients",
        )
    )


def _chosen(norm: Any, input: Tensor, signature: Signature, times: bool) -> NormChoice:
    start_s = time.perf_counter()
    text = _text(input, signature)
    if not times:
        note = "the sampling mode times nothing"
        return NormChoice(_first_form(), note=note, signature=text)
    step = (text, norm, input, signature)
    found = norm_measuring.kept_or_measured(
        input,
        _stored_name(signature),
        lambda chosen: norm_measuring.holds(chosen, *step),
        lambda: norm_measuring.measured(*step),
    )
    took_ms = 1e3 * (time.perf_counter() - start_s)
    return replace(found, signature=text, tuning_ms=took_ms)


def _first_form() -> str:
    """Returns the form of kernels that is expected to be the fastest."""
    with IMPORTING:
        from cudnn_autotune.engines.norms.plan import FORMS

    return FORMS[0]


def _stored_name(signature: Signature) -> str:
    """Returns the name of a signature's choice on disk, which holds for a release of torch, whether
    that uses cuDNN, and a version of the kernels."""
    with IMPORTING:
        from cudnn_autotune.engines.norms import plan

    of = signature
    fields = {
        "input": f"{of.dtype}{[*of.shape]}{[*of.stride]}",
        "weight": of.weight,
        "bias": of.bias,
        "gradients": None if of.needs is None else [*map(int, of.needs)],
        "activation": of.activation,
        "statistics": int(of.tracks),
        "torch": torch.__version__,
        "cudnn": int(torch.backends.cudnn.enabled),
        "kernels": plan.VERSION,
    }
    named = (f"{name}={value}" for name, value in fields.items())
    return f"batch_norm {' '.join(named)}".replace("torch.", "").replace(", ", ",")


def _layout(input: Tensor) -> str:
    if input.is_contiguous():
        return "contiguous"
    return "channels_last" if input.movedim(1, -1).is_contiguous() else "strided"
