"""The choice between PyTorch's kernels and this package's for a group norm: the forward of a
contiguous one, or forward and backward in channels_last.

``aten::native_group_norm`` needs it (csrc/norm/aten_norms.h) at the first call of a shape under a
policy: a converted model's forward's, or the process's. PyTorch's kernels and each form of this
package's kernels compute the call's input. Forms with wrong results are left out; the others and
PyTorch take turns, and the fastest computes all later calls (``memory``). The next process finds
the choice on disk (``store/verdicts``), and checks it again without timing. The backward of a
contiguous one is PyTorch's.

Modules of a model in channels_last (``kept_layouts``) need it before that operator.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.norms.batch_norm_calls import BatchNormCall, BatchNormStep, results_of
from cudnn_autotune.norms.measuring import (
    STATISTICS,
    STEPS,
    MeasuredCall,
    Results,
    Step,
    alignment_of,
    measured_on,
    planned,
    sampled_places,
)
from cudnn_autotune.timers.programs import Run

if TYPE_CHECKING:
    from cudnn_autotune.norms.plan import Form, NormProblem


@dataclass(frozen=True)
class GroupNormCall(MeasuredCall):
    """A call of a group norm; the forward is measured."""

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
        # They need the kernels, which a process without tuning does not import.
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

    @property
    def stored_facts(self) -> str:
        return f"group_norm {self.text}"

    def step(self) -> Step:
        input, weight, bias, _ = measured_on(self.input, self.weight, self.bias)
        return _GroupNormStep(input, weight, bias, self.groups, self.eps)


@dataclass(frozen=True)
class _GroupNormStep(Step):
    """A forward of a group norm."""

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    groups: int
    eps: float

    def by_pytorch(self) -> Results:
        images, channels = self.input.shape[:2]
        spatial = self.input[0, 0].numel()
        tensors = (self.input, self.weight, self.bias)
        operator = torch.ops.aten.native_group_norm.default
        return _results(*operator(*tensors, images, channels, spatial, self.groups, self.eps))

    def by_kernels(self, form: Form, adopts: bool = False) -> Results:
        operator = torch.ops.cudnn_autotune.group_norm
        with planned(form, adopts):
            output, statistics = operator(self.input, self.weight, self.bias, self.groups, self.eps)
        return _results(output, *statistics.to(self.input.dtype))

    def sampled(self, results: Results) -> tuple[Results, Results]:
        images, channels = self.input.shape[:2]
        count = images * self.groups
        places = sampled_places(count, self.input.device)
        wide = self.input.view(count, channels // self.groups, -1)[places].double()
        var, mean = torch.var_mean(wide, (1, 2), correction=0, keepdim=True)
        deviation = (var + self.eps).sqrt()
        exact = (wide - mean) / deviation
        for values, apply in ((self.weight, torch.mul), (self.bias, torch.add)):
            if values is not None:
                of_groups = values.view(self.groups, -1, 1)[places % self.groups]
                exact = apply(exact, of_groups.double())
        found = {
            "output": results["output"].view(count, *wide.shape[1:])[places],
            STATISTICS: results[STATISTICS].view(2, count)[:, places],
        }
        statistics = torch.stack([mean.flatten(), deviation.flatten()])
        return {"output": exact, STATISTICS: statistics}, found

    def calls(self) -> Run:
        def run() -> None:
            for _ in range(STEPS):
                self.by_pytorch()

        return run


def _results(output: Tensor, mean: Tensor, inv_std: Tensor) -> Results:
    """Returns the results of PyTorch's operator by name. A mean is as exact as its deviation."""
    return {"output": output, STATISTICS: torch.stack([mean, 1 / inv_std])}


@dataclass(frozen=True)
class GroupNormInRows(BatchNormCall):
    """A call of a group or instance norm in channels_last. The forward is measured, with the
    backward if it needs one."""

    groups: int
    """A divisor of the channels; all of them for an instance norm."""
    mixes_layers = False

    @property
    def text(self) -> str:
        return f"{super().text} groups={self.groups}"

    @property
    def key(self) -> Hashable:
        return (super().key, self.groups)

    @property
    def layer(self) -> Hashable:
        return (super().layer, self.groups)

    @property
    def stored_facts(self) -> str:
        return f"group_norm={self.groups} {super().stored_facts}"

    def problems(self) -> list[NormProblem]:
        return [replace(one, groups=self.groups) for one in super().problems()]

    def step(self) -> Step:
        of: Any = super().step()
        tensors = (of.input, of.weight, of.bias, of.grad_output, of.running)
        of_group = self.input.shape[1] // self.groups
        return _RowsStep(*tensors, of.needs, of.activation, of.eps, of_group)


@dataclass(frozen=True)
class _RowsStep(BatchNormStep):
    """A forward of a group norm in channels_last, and the backward for tensors that need
    gradients."""

    of_group: int
    """Channels of a group."""

    @property
    def groups(self) -> int:
        return self.input.shape[1] // self.of_group

    def by_kernels(self, form: Form, adopts: bool = False) -> Results:
        operators = torch.ops.cudnn_autotune
        tensors = (self.input, self.weight, self.bias)
        gradients: Sequence[Tensor | None] = (None, None, None)
        with planned(form, adopts):
            output, statistics = operators.group_norm(*tensors, self.groups, self.eps)
            if any(self.needs):
                given = (self.grad_output, self.input, self.weight, statistics)
                gradients = operators.group_norm_backward(*given, self.groups, [*self.needs])
        return results_of(self, output, gradients)

    def sampled_channels(self) -> Tensor:
        first = self.of_group * sampled_places(self.groups, self.input.device)
        return (first[:, None] + torch.arange(self.of_group, device=first.device)).flatten()

    def function_call(self, input: Any, weight: Tensor | None, bias: Tensor | None) -> Run:
        def run() -> Tensor:
            if self.of_group == 1:
                output = F.instance_norm(input, None, None, weight, bias, eps=self.eps)
            else:
                groups = input.shape[1] // self.of_group
                output = F.group_norm(input, groups, weight, bias, self.eps)
            return in_rows(output)

        return run

    def call(self, input: Any, weight: Tensor | None, bias: Tensor | None) -> Run:
        norm, pytorchs = nn.Module(), self.function_call(input, weight, bias)

        def run() -> Tensor:
            found = _C.group_norm(norm, input, weight, bias, self.groups, self.eps, False)
            return found if isinstance(found, Tensor) else pytorchs()

        return run


def in_rows(tensor: Tensor) -> Tensor:
    """Returns a tensor (N, C, *spatial) in the order (N, *spatial, C) in memory."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
