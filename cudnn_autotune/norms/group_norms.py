"""The choice between PyTorch's kernels and this package's for the forward of a group norm.

``aten::native_group_norm`` asks for it (csrc/aten_norms.h) at the first call of a shape that a
policy is in force for: that of a converted model's forward, or the process's. PyTorch's kernels and
each form of this package's kernels compute the call's input. Forms whose results differ from
PyTorch's by more than rounding explains are left out; the others and PyTorch take turns, and the
fastest computes all later calls (``norm_memory``). The next process finds the choice on disk
(``norms/file``), where it is checked again and not timed. The backward is PyTorch's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.norms.measuring import (
    ERROR_FACTOR,
    STEPS,
    alignment_of,
    fastest,
    left_to_pytorch,
    measured_on,
    planned,
)
from cudnn_autotune.norms.memory import PYTORCH, NormChoice, kept_or_measured
from cudnn_autotune.timers.programs import Run

if TYPE_CHECKING:
    from cudnn_autotune.norms.plan import Form, NormProblem

_SAMPLED_GROUPS = 8
_ROUNDINGS = 4
"""Errors of so many units in the last place of the largest result are rounding, also where PyTorch
happens to round less."""
_LOOSEST = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative error of a mean or an inverse deviation that PyTorch rounds to a dtype."""

_log = logging.getLogger(__name__)

Results = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class GroupNormCall:
    """A call of a group norm: a ``NormCall`` of ``norm_memory``."""

    input: Tensor
    """(N, C, *spatial), contiguous."""
    weight: Tensor | None
    """(C,), of the input's dtype."""
    bias: Tensor | None
    groups: int
    """A divisor of C."""
    eps: float
    is_timed = True
    mixes_layers = False

    @property
    def text(self) -> str:
        named = (("weight", self.weight), ("bias", self.bias))
        given = [name for name, one in named if one is not None]
        return (
            f"{str(self.input.dtype).removeprefix('torch.')} "
            f"{'x'.join(map(str, self.input.shape))} groups={self.groups} "
            f"{'+'.join(given) or 'no parameters'} aligned={alignment_of(self.input)}"
        )

    @property
    def key(self) -> Hashable:
        return (self.text, self.input.get_device())

    @property
    def layer(self) -> Hashable:
        of = self.input
        given = (self.weight is not None, self.bias is not None)
        return (of.dtype, of.get_device(), of.dim(), of.shape[1], self.groups, *given)

    def problems(self) -> list[NormProblem]:
        # They need the kernels, which nobody who tunes nothing has to import.
        with IMPORTING:
            from cudnn_autotune.norms.plan import NormProblem

        input = self.input
        has_parameters = self.weight is not None or self.bias is not None
        problem = NormProblem(
            is_backward=False,
            dtype=input.dtype,
            parameters=input.dtype if has_parameters else torch.float32,
            batch=input.shape[1] // self.groups,
            channels=input.shape[0] * self.groups,
            spatial=input[0, 0].numel(),
            planes=True,
            alignment=alignment_of(input),
            activation="identity",
            groups=self.groups,
        )
        return [problem]

    def choose(self) -> NormChoice:
        start_s = time.perf_counter()
        try:
            with torch.no_grad():
                step = _Step(self)
                choice = kept_or_measured(
                    self.input, self._stored_name(), step.holds, step.measured
                )
        except Exception as failure:  # PyTorch's kernel runs, with its errors
            choice = left_to_pytorch(f"group norm {self.text}", failure)
        took_ms = 1e3 * (time.perf_counter() - start_s)
        return replace(choice, signature=self.text, tuning_ms=took_ms)

    def _stored_name(self) -> str:
        """Returns the name of the choice on disk, which holds for a release of torch and a version
        of the kernels."""
        with IMPORTING:
            from cudnn_autotune.norms import plan

        return f"group_norm {self.text} torch={torch.__version__} kernels={plan.VERSION}"


class _Step:
    """The tensors that are measured, and the results that PyTorch's kernels have of them."""

    def __init__(self, call: GroupNormCall) -> None:
        self.call = call
        self.input, self.weight, self.bias, _ = measured_on(call.input, call.weight, call.bias)
        self.groups, self.eps = call.groups, call.eps
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

    def calls(self, by_kernels: bool) -> Run:
        """Returns a function that makes some calls, as a program does."""

        def run() -> None:
            with _C.NormsByKernels() if by_kernels else _C.PyTorchsOwn():
                for _ in range(STEPS):
                    self.by_pytorch()

        return run

    def measured(self) -> NormChoice:
        """Checks the forms against PyTorch's kernels, times those that are right, and lets later
        calls have the fastest."""
        faults = {form: self.fault_of(form) for form in _forms(self)}
        programs = (self.by_pytorch, self.by_kernels, self.calls)
        return fastest(f"group norm {self.call.text}", faults, *programs, self.input.is_cuda)

    def holds(self, chosen: str) -> bool:
        """Returns whether an earlier process's choice still computes what PyTorch's kernels do; if
        so later calls have its form."""
        if chosen == PYTORCH:
            return True
        form = cast("Form", chosen)
        if why := self.fault_of(form):
            text = f"group norm {self.call.text}"
            _log.warning("%s: %s, as an earlier process chose, %s", text, form, why)
            return False
        self.by_kernels(form, adopts=True)
        return True


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs_().max())


def _forms(step: _Step) -> list[Form]:
    """Returns the forms of this package's kernels that compute a call differently."""
    with IMPORTING:
        from cudnn_autotune.norms.loading import compiled_forms

    return compiled_forms(step.call.problems(), step.input.get_device())
