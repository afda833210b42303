"""The measurement of a batch norm's call: its forward, and its backward if it needs one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.fork_safe_lock import IMPORTING
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
from cudnn_autotune.norms.reference import NORM_ACTIVATIONS, Operands
from cudnn_autotune.timers.programs import Run

if TYPE_CHECKING:
    from cudnn_autotune.norms.plan import Form, NormProblem

# Derivatives jump here. Rounding may move an argument across, so gradients this near are 0.
_JUMPS = {"relu": (0.0,), "relu6": (0.0, 6.0), "hardswish": (-3.0, 3.0), "leaky_relu": (0.0,)}
_BESIDE_JUMP = 0.05
# The gradients of weight and bias are sums that may cancel. Their errors are relative to at least
# this part of the output's gradient.
_LEAST_SUM = 0.2

_operators = torch.ops.cudnn_autotune


@dataclass(frozen=True)
class BatchNormCall(MeasuredCall):
    """A call of a batch norm with the statistics of the batch."""

    input: Tensor
    """(N, C, *spatial)."""
    weight: Tensor | None
    """(C,)."""
    bias: Tensor | None
    tracks: bool
    """Whether it updates running statistics."""
    eps: float
    activation: str
    """Function that follows the norm, a key of ``NORM_ACTIVATIONS``."""
    is_timed: bool

    @cached_property
    def needs(self) -> tuple[bool, ...] | None:
        """Whether input's, weight's and bias's gradients are computed; None if gradients are
        off."""
        if not torch.is_grad_enabled():
            return None
        tensors = (self.input, self.weight, self.bias)
        return tuple(one is not None and one.requires_grad for one in tensors)

    @property
    def _facts(self) -> tuple[Any, ...]:
        """The facts of both keys."""
        dtypes = (None if one is None else one.dtype for one in (self.weight, self.bias))
        of = self.input
        others = (self.needs, self.activation, self.tracks, self.is_timed)
        return (of.dtype, of.get_device(), *dtypes, *others)

    @property
    def key(self) -> Hashable:  # the hit path has the same in csrc/norm/norm_call.cpp
        return (*self._facts, self.input.shape, self.input.stride(), alignment_of(self.input))

    @property
    def layer(self) -> Hashable:
        is_of_rows = self.input.stride(1) == 1
        channels = None if self.mixes_layers else self.input.shape[1]
        return (*self._facts, self.input.dim(), channels, is_of_rows)

    @property
    def mixes_layers(self) -> bool:
        # PyTorch makes one image of an instance norm's images, with all their channels.
        return self.input.shape[0] == 1

    @property
    def text(self) -> str:
        named = zip(("input", "weight", "bias"), self.needs or (), strict=False)
        wanted = [name for name, needed in named if needed]
        parameters = "no parameters" if self.weight is None else str(self.weight.dtype)
        aligned = alignment_of(self.input)
        words = (
            str(self.input.dtype),
            "x".join(map(str, self.input.shape)),
            _layout(self.input),
            *(() if aligned == 16 else (f"aligned={aligned}",)),
            f"{parameters}, {self.activation},",
            f"gradients of {', '.join(wanted)}" if wanted else "no gradients",
        )
        return " ".join(words).replace("torch.", "")

    @property
    def stored_facts(self) -> str:
        of, weight, bias = self.input, self.weight, self.bias
        fields = {
            "input": f"{of.dtype}{[*of.shape]}{[*of.stride()]}",
            "weight": None if weight is None else weight.dtype,
            "bias": None if bias is None else bias.dtype,
            "gradients": None if self.needs is None else [*map(int, self.needs)],
            "activation": self.activation,
            "statistics": int(self.tracks),
            "aligned": alignment_of(of),
            "cudnn": int(torch.backends.cudnn.enabled),
        }
        named = (f"{name}={value}" for name, value in fields.items())
        return f"batch_norm {' '.join(named)}".replace("torch.", "").replace(", ", ",")

    def problems(self) -> list[NormProblem]:
        with IMPORTING:
            from cudnn_autotune.norms.plan import problem_of

        given = Operands(self.input, self.weight, self.bias, None, self.activation, self.eps)
        forward, needs = problem_of(given, alignment_of(self.input)), self.needs or (False,) * 3
        if not any(needs):
            return [forward]
        return [forward, replace(forward, is_backward=True, grad_input=needs[0])]

    def step(self) -> Step:
        given, weight, bias, random = measured_on(self.input, self.weight, self.bias)
        grad_output = random(given)
        if jumps := _JUMPS.get(self.activation.partition("(")[0]):
            z = F.batch_norm(given, None, None, weight, bias, True, 0.0, self.eps)
            for place in jumps:
                grad_output.masked_fill_((z - place).abs_() < _BESIDE_JUMP, 0)
        running = None
        if self.tracks:
            mean = torch.zeros(given.shape[1], device=given.device)
            running = (mean, torch.ones_like(mean))
        tensors = (given, weight, bias, grad_output, running)
        needs = self.needs or (False,) * 3
        return BatchNormStep(*tensors, needs, self.activation, self.eps)


@dataclass(frozen=True)
class BatchNormStep(Step):
    """A forward of a batch norm, and the backward for tensors that need gradients."""

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    grad_output: Tensor
    running: tuple[Tensor, Tensor] | None
    """Running statistics, which each forward overwrites; None if the norm has none."""
    needs: tuple[bool, ...]
    """Whether the gradients of input, weight and bias are computed."""
    activation: str
    eps: float

    @cached_property
    def least_sum(self) -> Tensor:  # type: ignore[override]
        norm = torch.linalg.vector_norm(self.grad_output, dtype=torch.float32)
        return _LEAST_SUM * norm.double()

    def by_pytorch(self) -> Results:
        return _by_own_path(self)

    def by_kernels(self, form: Form, adopts: bool = False) -> Results:
        return _by_operators(self, form, adopts)

    def sampled_channels(self) -> Tensor:
        """Returns the indices of some channels that are norms by themselves."""
        return sampled_places(self.input.shape[1], self.input.device)

    def sampled(self, results: Results) -> tuple[Results, Results]:
        places = self.sampled_channels()

        def chosen(tensor: Tensor | None) -> Any:
            return None if tensor is None else _channels(tensor, places).double()

        sample = replace(
            self,
            input=chosen(self.input),
            weight=chosen(self.weight),
            bias=chosen(self.bias),
            grad_output=chosen(self.grad_output),
            running=None if self.running is None else (*map(chosen, self.running),),
        )
        exact = _by_own_path(sample)
        return exact, {name: _channels(tensor, places) for name, tensor in results.items()}

    def leaves(self) -> list[Tensor | None]:
        """Returns input, weight and bias as leaves of a new graph."""
        tensors = zip((self.input, self.weight, self.bias), self.needs, strict=True)
        return [t if t is None else t.detach().requires_grad_(needed) for t, needed in tensors]

    def calls(self) -> Run:
        leaves = [self.leaves() for _ in range(STEPS)]
        calls = [self.call(*each) for each in leaves]
        wanted = [leaf for each in leaves for leaf in each if leaf is not None]
        return partial(_with_backward, self, calls, wanted)

    def function_call(self, input: Any, weight: Tensor | None, bias: Tensor | None) -> Run:
        """Returns a call of PyTorch's function; modules end in its operators, too."""
        mean, var = self.running or (None, None)
        function = partial(F.batch_norm, input, mean, var, weight, bias)
        return partial(function, True, 1.0, self.eps)

    def call(self, input: Any, weight: Tensor | None, bias: Tensor | None) -> Run:
        """Returns the call that a program makes."""
        if self.activation == "identity":
            return self.function_call(input, weight, bias)
        return _pair_call(self, input, weight, bias)


def _pair_call(
    step: BatchNormStep, input: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> Run:
    """Returns a call of a converted module with an activation behind it."""
    classes = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    norm = classes[step.input.dim() - 2](1, step.eps, 1.0, affine=False, track_running_stats=False)
    norm._parameters.update(cast(Any, {"weight": weight, "bias": bias}))
    if step.running is not None:
        mean, var = step.running
        steps = torch.zeros((), dtype=torch.long, device=mean.device)
        norm._buffers |= {"running_mean": mean, "running_var": var, "num_batches_tracked": steps}
        norm.track_running_stats = True
    return partial(_C.batch_norm, norm, input, step.activation, (_Activation(step),), True)


class _Activation(nn.Module):
    """The module behind a norm."""

    def __init__(self, step: BatchNormStep) -> None:
        super().__init__()
        self._function = NORM_ACTIVATIONS[step.activation].forward

    def forward(self, input: Tensor) -> Tensor:
        return self._function(input)


def _with_backward(step: BatchNormStep, calls: Sequence[Run], leaves: Sequence[Tensor]) -> None:
    """Makes some calls, then their backwards."""
    with torch.set_grad_enabled(any(step.needs)):
        outputs = [call() for call in calls]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if wanted:
        torch.autograd.grad(outputs, wanted, [step.grad_output] * len(outputs))


def _by_operators(given: BatchNormStep, form: Form, adopts: bool = False) -> Results:
    """Returns the results of a step by the operators, called as by autograd."""
    input, weight, bias, activation = given.input, given.weight, given.bias, given.activation
    with planned(form, adopts):
        output, mean, inv_std, unbiased, _ = _operators.batch_norm_act(
            input, weight, bias, None, activation, given.eps
        )
        if given.running is not None:
            torch._foreach_lerp_([*given.running], [mean, unbiased], 1.0)
        gradients: Sequence[Tensor | None] = (None, None, None)
        if any(given.needs):
            gradients = _operators.batch_norm_act_backward(
                given.grad_output,
                None,
                input,
                None,
                weight,
                None if activation == "identity" else bias,
                None,
                mean,
                inv_std,
                activation,
                [*given.needs, False],
            )
    return results_of(given, output, gradients[:3])


def _by_own_path(given: BatchNormStep) -> Results:
    """Returns the results of a step by PyTorch's functions."""
    with torch.set_grad_enabled(any(given.needs)):
        leaves = given.leaves()
        with _C.OwnPath():
            z = given.function_call(*leaves)()
        output = NORM_ACTIVATIONS[given.activation].forward(z)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, given.grad_output) if wanted else ())
    gradients = [next(found) if needed else None for needed in given.needs]
    return results_of(given, output.detach(), gradients)


def results_of(
    given: BatchNormStep, output: Tensor, gradients: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """Returns the results of a step by name, with its new running statistics. A mean is as exact as
    its deviation."""
    results: dict[str, Tensor] = {}
    if given.running is not None:
        mean, var = given.running
        results[STATISTICS] = torch.stack([mean, var.sqrt()])
    names = ("gradient of the input", "gradient of the weight", "gradient of the bias")
    named = zip(names, gradients, strict=True)
    return {**results, "output": output, **{name: t for name, t in named if t is not None}}


def _layout(input: Tensor) -> str:
    if input.is_contiguous():
        return "contiguous"
    return "channels_last" if input.movedim(1, -1).is_contiguous() else "strided"


def _channels(tensor: Tensor, places: Tensor) -> Tensor:
    return tensor.index_select(min(1, tensor.dim() - 1), places)
