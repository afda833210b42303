"""The choice between PyTorch's kernels and this package's for the forward of a group norm.

``aten::native_group_norm`` asks for it (csrc/aten_norms.h) at the first call of a shape that a
policy is in force for: that of a converted model's forward, or the process's. PyTorch's kernels and
each form of this package's kernels compute the call's input. Forms whose results differ from
PyTorch's by more than rounding explains are left out; the others and PyTorch take turns on the GPU,
and the fastest computes all later calls. The next process finds the choice on disk
(``store/norm_file``), where it is checked again and not timed. Of sizes that keep changing few are
measured, and others are computed as the nearest of these. The backward is PyTorch's.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.nn.norm_measuring import (
    ERROR_FACTOR,
    PYTORCH,
    NormChoice,
    alignment_of,
    chosen_now,
    fastest,
    kept_or_measured,
    left_to_pytorch,
    measured_on,
    nearest,
    planned,
)

if TYPE_CHECKING:
    from cudnn_autotune.engines.norms.plan import Form

_SAMPLED_GROUPS = 8
_ROUNDINGS = 4
"""Errors of so many units in the last place of the largest result are rounding, also where PyTorch
happens to round less."""
_LOOSEST = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative error of a mean or an inverse deviation that PyTorch rounds to a dtype."""

_log = logging.getLogger(__name__)
_choices: dict[str, NormChoice] = {}
_sizes: dict[tuple[object, ...], dict[int, NormChoice]] = {}
"""Terms of a group norm without its size -> number of elements -> the choice."""

Results = tuple[Tensor, Tensor, Tensor]


def choices() -> tuple[NormChoice, ...]:
    """Returns how group norms are computed, in the order of their first calls."""
    return tuple(_choices.values())


def choose(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    eps: float,
) -> bool | None:
    """Returns whether the kernels of this package compute calls like this one; None if that cannot
    be measured now.

    Args:
        input: (N, C, *spatial), contiguous.
        weight, bias: (C,), of the input's dtype, or None.
        groups: a divisor of C.
    """
    known = _sizes.setdefault(_but_for_size(input, weight, bias, groups), {})
    near = nearest([*known.items()], input.numel())
    with torch.no_grad():
        choice = chosen_now(input, lambda: near or _chosen(input, weight, bias, groups, eps))
    if choice is None:
        return None
    if near is None:
        known[input.numel()] = _choices[choice.signature] = choice
        _log.info("group norm %s", choice)
    return choice.is_served


def forget() -> None:
    """Clears the choices that are known here."""
    _choices.clear()
    _sizes.clear()


def _but_for_size(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int
) -> tuple[object, ...]:
    given = (weight is not None, bias is not None)
    return (input.dtype, input.get_device(), input.dim(), input.shape[1], groups, *given)


class _Call:
    """A call of a group norm, with the results that PyTorch's kernels have of it."""

    def __init__(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
    ) -> None:
        self.input, self.weight, self.bias, _ = measured_on(input, weight, bias)
        self.groups, self.eps = groups, eps
        self.expected = self.by_pytorch()
        self.allowed = self._allowed_error()

    def by_pytorch(self) -> Results:
        images, channels = self.input.shape[:2]
        spatial = self.input[0, 0].numel()
        operator = torch.ops.aten.native_group_norm.default
        return cast(
            Results,
            operator(
                *(self.input, self.weight, self.bias),
                *(images, channels, spatial, self.groups, self.eps),
            ),
        )

    def by_kernels(self, form: Form, adopts: bool = False) -> Results:
        """Returns the results of a form, as those of PyTorch's operator.

        Args:
            adopts: whether later calls of the shape have this form.
        """
        operator = torch.ops.cudnn_autotune.group_norm
        with planned(form, adopts):
            output, statistics = operator(self.input, self.weight, self.bias, self.groups, self.eps)
        mean, inv_std = statistics.to(self.input.dtype)
        return output, mean, inv_std

    def fault_of(self, form: Form) -> str:
        """Says why a form cannot compute the call; nothing if it can."""
        try:
            found = self.by_kernels(form)
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:  # PyTorch's kernels are always there
            return f"fails: {type(failure).__name__}: {failure}".partition("\n")[0]
        names = ("output", "mean", "inverse deviation")
        for name, actual, wanted in zip(names, found, self.expected, strict=True):
            error = _distance(actual, wanted)
            allowed = self.allowed
            if name != "output":
                allowed = _LOOSEST[wanted.dtype] * float(wanted.abs().max())
                if name == "mean":  # its numbers may cancel
                    allowed += _LOOSEST[torch.float32] * float(self.input.abs().max())
            if not error <= allowed:
                return f"is wrong: the {name} differs by {error:.2g}, allowed {allowed:.2g}"
        return ""

    def _allowed_error(self) -> float:
        """Returns by how much an output may differ from PyTorch's."""
        output = self.expected[0]
        images, channels = output.shape[:2]
        count = images * self.groups
        places = torch.linspace(0, count - 1, min(count, _SAMPLED_GROUPS)).round().long()
        wide = self.input.view(count, -1)[places.to(output.device)].double()
        var, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
        exact = ((wide - mean) / (var + self.eps).sqrt()).view(
            len(places), channels // self.groups, -1
        )
        for values, apply in ((self.weight, torch.mul), (self.bias, torch.add)):
            if values is not None:
                of_groups = values.view(self.groups, -1)[places.to(output.device) % self.groups]
                exact = apply(exact, of_groups.double().unsqueeze(-1))
        found = output.view(count, -1)[places.to(output.device)].view_as(exact)
        rounding = _ROUNDINGS * torch.finfo(output.dtype).eps * float(output.abs().max())
        return ERROR_FACTOR * _distance(found, exact) + rounding


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs_().max())


def _chosen(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> NormChoice:
    start_s = time.perf_counter()
    text = _text(input, weight, bias, groups)
    try:
        call = _Call(input, weight, bias, groups, eps)
        choice = kept_or_measured(
            input,
            _stored_name(text),
            partial(_holds, text, call),
            partial(_measured, text, call),
        )
    except Exception as failure:  # PyTorch's kernel runs, with its errors
        choice = left_to_pytorch(f"group norm {text}", failure)
    took_ms = 1e3 * (time.perf_counter() - start_s)
    return replace(choice, signature=text, tuning_ms=took_ms)


def _holds(text: str, call: _Call, chosen: str) -> bool:
    """Returns whether an earlier process's choice still computes what PyTorch's kernels do; if so
    later calls have its form."""
    if chosen == PYTORCH:
        return True
    form = cast("Form", chosen)
    if why := call.fault_of(form):
        _log.warning("group norm %s: %s, as an earlier process chose, %s", text, form, why)
        return False
    call.by_kernels(form, adopts=True)
    return True


def _measured(text: str, call: _Call) -> NormChoice:
    """Checks the forms against PyTorch's kernels, times those that are right, and lets later calls
    have the fastest."""
    faults = {form: call.fault_of(form) for form in _forms(call)}
    programs = (call.by_pytorch, call.by_kernels)
    return fastest(f"group norm {text}", faults, *programs, call.input.is_cuda)


def _forms(call: _Call) -> list[Form]:
    """Returns the forms of this package's kernels that compute a call differently."""
    # They need the kernels, which nobody who tunes nothing has to import.
    with IMPORTING:
        from cudnn_autotune.engines.norms.loading import compiled_forms
        from cudnn_autotune.engines.norms.plan import NormProblem

    input = call.input
    has_parameters = call.weight is not None or call.bias is not None
    problem = NormProblem(
        is_backward=False,
        dtype=input.dtype,
        parameters=input.dtype if has_parameters else torch.float32,
        batch=input.shape[1] // call.groups,
        channels=input.shape[0] * call.groups,
        spatial=input[0, 0].numel(),
        planes=True,
        alignment=alignment_of(input),
        activation="identity",
        groups=call.groups,
    )
    return compiled_forms([problem], input.get_device())


def _text(input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int) -> str:
    given = [name for name, one in (("weight", weight), ("bias", bias)) if one is not None]
    return (
        f"{str(input.dtype).removeprefix('torch.')} {'x'.join(map(str, input.shape))} "
        f"groups={groups} {'+'.join(given) or 'no parameters'} aligned={alignment_of(input)}"
    )


def _stored_name(text: str) -> str:
    """Returns the name of a choice on disk, which holds for a release of torch and a version of the
    kernels."""
    with IMPORTING:
        from cudnn_autotune.engines.norms import plan

    return f"group_norm {text} torch={torch.__version__} kernels={plan.VERSION}"
