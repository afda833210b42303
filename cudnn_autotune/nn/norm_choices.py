"""The choice between PyTorch's functions and this package's operators for a batch norm in eager
training.

At the first call of a signature (shape, layout, dtypes, activation, and what needs gradients) both
are measured (``norm_measuring``), and the fastest computes all later calls. Those of the process
find it in C++ (csrc/python_norm.h), and the next process on disk (``store/norm_file``), where it is
checked again and not timed. Of sizes that keep changing few are measured, and others are computed
as the nearest of these. Nothing is measured while a stream is captured, or in a mode that times
nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cudnn_autotune import sampling
from cudnn_autotune.core import json_dataclass
from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.fork_safe_lock import ForkSafeLock
from cudnn_autotune.nn import norm_measuring
from cudnn_autotune.nn.norm_measuring import PYTORCH, Measured
from cudnn_autotune.store import norm_file
from cudnn_autotune.tuning import remembering, settings

# Sizes of a norm that are measured.
_MOST_MEASURED = 4

_log = logging.getLogger(__name__)

Signature = tuple[Any, ...]


@dataclass(frozen=True)
class NormChoice:
    """The way to compute the batch norms of a signature in eager training on a GPU, with the times
    by which it was chosen."""

    signature: str
    """The dtype, shape and layout of the input, the dtype of weight and bias, the activation, and
    what needs gradients."""
    chosen: str
    """``"pytorch"``, or the form of this package's kernels: ``"kept"``, ``"half kept"`` or
    ``"two passes"`` (docs/norms.md)."""
    times_ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds of the GPU for a forward with its backward, by ``"pytorch"`` and by each form;
    empty if nothing was timed."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Reason why a form was not timed: it fails, or its results are wrong."""
    note: str = ""
    """Reason why nothing was timed; empty if it was."""
    tuning_ms: float = 0.0
    """Milliseconds that the choice took, compiling included."""
    source: str = "tuned"
    """The source of the choice: ``tuned`` (by this process), or ``store`` (by an earlier one)."""

    @property
    def is_served(self) -> bool:
        """Whether this package's operators compute it."""
        return self.chosen != PYTORCH

    def __str__(self) -> str:
        times = ", ".join(f"{name} {ms:.4f} ms" for name, ms in self.times_ms.items())
        if self.source == "store":
            times = f"from the store: {times}"
        why = [self.note or times, *(f"{name} {why}" for name, why in self.rejected.items())]
        return f"{self.signature}: {self.chosen} ({'; '.join(why)})"


_choices: dict[tuple[bool, Signature], NormChoice] = {}
_of_modules: WeakKeyDictionary[nn.Module, dict[Signature, NormChoice]] = WeakKeyDictionary()
_measuring = ForkSafeLock()


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


def choices_of(norm: nn.Module) -> tuple[NormChoice, ...]:
    """Returns how calls of a norm have been computed, in the order of their first calls, without
    the sizes that were not measured since others had been."""
    return tuple(_of_modules.get(norm, {}).values())


def forget() -> None:
    """Clears all choices: the next call of each signature is measured again."""
    _choices.clear()
    _of_modules.clear()
    _C.forget_norms()


remembering.forget_with(forget)


def first_choice(norm: Any, input: Tensor, activation: str) -> NormChoice | None:
    """Returns how a call is computed; arguments are those of :func:`choose`. Returns None if it
    cannot be measured now."""
    signature = _signature_of(norm, input, activation)
    of_norm = _of_modules.setdefault(norm, {})
    if (known := of_norm.get(signature)) is not None:
        return known
    times = sampling.traits(getattr(norm, "sampling", None) or settings.get_sampling()).times
    found = _choices.get((times, signature))
    if found is None and (near := _nearest(of_norm, signature)) is not None:
        # The operators' plan for a size that no form was adopted for is that of the first one.
        chosen = _first_form() if near.is_served else PYTORCH
        note = f"its sizes change; it is computed as {near.signature}"
        return NormChoice(_text(input, signature), chosen, note=note)
    if found is None:
        if times and input.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        # Another thread that waited could hold up autograd's thread, which this one waits for.
        if not _measuring.acquire_now():
            return None
        try:
            found = _chosen(norm, input, signature, times)
            _choices[times, signature] = found
        finally:
            _measuring.release()
        _log.info("batch norm %s", found)
    of_norm[signature] = found
    return found


def _signature_of(norm: Any, input: Tensor, activation: str) -> Signature:
    """Returns what a choice holds for. The hit path has the same in csrc/python_norm.cpp."""
    weight, bias = norm.weight, norm.bias
    needs = None
    if torch.is_grad_enabled():
        needs = (
            input.requires_grad,
            weight is not None and weight.requires_grad,
            bias is not None and bias.requires_grad,
        )
    return (
        input.shape,
        input.stride(),
        input.dtype,
        input.get_device(),
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        needs,
        activation,
        norm.training and norm.track_running_stats,
    )


def _nearest(known: Mapping[Signature, NormChoice], signature: Signature) -> NormChoice | None:
    """Returns the choice for the nearest size of a norm, if enough of its sizes are known in this
    layout and with the rest of a signature."""

    def rest(of: Signature) -> tuple[Any, ...]:
        shape, stride, *others = of
        return len(shape), stride[1] == 1, *others

    def distance(other: Signature) -> float:
        return abs(math.log(max(1, other[0].numel()) / max(1, signature[0].numel())))

    alike = [other for other in known if rest(other) == rest(signature)]
    return known[min(alike, key=distance)] if len(alike) >= _MOST_MEASURED else None


def _text(input: Tensor, signature: Signature) -> str:
    *_, weight, _, needs, activation, _ = signature
    names = ("input", "weight", "bias")
    wanted = [name for name, needed in zip(names, needs or (), strict=False) if needed]
    parameters = "no parameters" if weight is None else str(weight).removeprefix("torch.")
    return " ".join(
        (
            str(input.dtype).removeprefix("torch."),
            "x".join(map(str, input.shape)),
            _layout(input),
            f"{parameters}, {activation},",
            f"gradients of {', '.join(wanted)}" if wanted else "no gradients",
        )
    )


def _chosen(norm: Any, input: Tensor, signature: Signature, times: bool) -> NormChoice:
    start_s = time.perf_counter()
    *_, needs, activation, tracks = signature
    text = _text(input, signature)
    if not times:
        return NormChoice(text, _first_form(), note="the sampling mode times nothing")
    step = (text, norm, input, activation, needs, tracks)
    name, source = _stored_name(signature), "store"
    device = input.get_device() if input.is_cuda else None
    found = _remembered(norm_file.find(device, name))
    if found is None or not norm_measuring.holds(found.chosen, *step):
        found, source = norm_measuring.measured(*step), "tuned"
        if found.times_ms:  # without memory, say, nothing was learnt
            norm_file.keep(device, name, json_dataclass.encode(found))
    return NormChoice(
        text,
        found.chosen,
        found.times_ms,
        found.rejected,
        found.note,
        1e3 * (time.perf_counter() - start_s),
        source,
    )


def _first_form() -> str:
    """Returns the form of kernels that is expected to be the fastest."""
    from cudnn_autotune.engines.norms.plan import FORMS

    return FORMS[0]


def _stored_name(signature: Signature) -> str:
    """Returns the name of a signature's choice on disk, which holds for a release of torch, whether
    that uses cuDNN, and a version of the kernels."""
    from cudnn_autotune.engines.norms import plan

    shape, stride, dtype, _, weight, bias, needs, activation, tracks = signature
    fields = {
        "input": f"{dtype}{[*shape]}{[*stride]}",
        "weight": weight,
        "bias": bias,
        "gradients": None if needs is None else [*map(int, needs)],
        "activation": activation,
        "statistics": int(tracks),
        "torch": torch.__version__,
        "cudnn": int(torch.backends.cudnn.enabled),
        "kernels": plan.VERSION,
    }
    named = (f"{name}={value}" for name, value in fields.items())
    return f"batch_norm {' '.join(named)}".replace("torch.", "").replace(", ", ",")


def _remembered(tree: Any) -> Measured | None:
    """Returns what an earlier process measured; None if the tree is not that."""
    try:
        return None if tree is None else json_dataclass.decode(Measured, tree, "entry")
    except ValueError as error:
        _log.info("a batch norm's entry in the store is not served: %s", error)
        return None


def _layout(input: Tensor) -> str:
    if input.is_contiguous():
        return "contiguous"
    return "channels_last" if input.movedim(1, -1).is_contiguous() else "strided"
