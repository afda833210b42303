"""The measurement of a norm in eager mode: PyTorch's functions against this package's kernels.

The call, with its backward if it needs one, is computed by PyTorch's functions, and by each form of
kernels that differs. Forms whose results differ from PyTorch's by more than rounding explains are
left out. The others and PyTorch take turns on the GPU. Where calls are so short that the host may
decide, the fastest form and PyTorch take turns once more, called as a program calls them.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.norms.memory import PYTORCH, NormChoice, kept_or_measured
from cudnn_autotune.norms.reference import NORM_ACTIVATIONS
from cudnn_autotune.timers.lacking import is_passing
from cudnn_autotune.tuning.checking import TOLERANCES

if TYPE_CHECKING:
    from cudnn_autotune.norms.plan import Form, NormProblem

# A first step has some dozens of signatures, so each gets few calls.
_ROUNDS = 5
_BATCH_MS = 0.1
# The host may take longer than the GPU for calls of less than this. They are timed as a program
# sees them, some in a row.
_HOST_MAY_DECIDE_MS = 0.4
_CALL_BATCH_MS = 1.0
STEPS = 4
_SAMPLED = 8  # channels or groups that are computed in float64
# Errors may be this many times PyTorch's own, or TOLERANCES if that is more.
_ERROR_FACTOR = 3.0
# Derivatives jump here. Rounding may move an argument across, so gradients are 0 that close.
_JUMPS = {"relu": (0.0,), "relu6": (0.0, 6.0), "hardswish": (-3.0, 3.0)}
_BESIDE_JUMP = 0.05
# The sums that are the gradients of weight and bias may cancel. Their errors are relative to this
# part of the output's gradient at least.
_LEAST_SUM = 0.2

_log = logging.getLogger(__name__)
_operators = torch.ops.cudnn_autotune

Results = Mapping[str, Tensor]
"""The results of a call, by their names in messages."""


class Step(ABC):
    """The tensors that a call is measured on, and what computes them."""

    input: Tensor
    least_sum: Tensor | None = None
    """Norm to which errors of sums are relative at least; None if no result is a sum."""

    @abstractmethod
    def by_pytorch(self) -> Results:
        """Returns the results of PyTorch's functions."""

    @abstractmethod
    def by_kernels(self, form: Form, adopts: bool = False) -> Results:
        """Returns the results of a form.

        Args:
            adopts: whether later calls of the signature have this form.
        """

    @abstractmethod
    def sampled(self, results: Results) -> tuple[Results, Results]:
        """Returns a sample of PyTorch's results, computed in float64, and as it is."""

    @abstractmethod
    def calls(self) -> Run:
        """Returns a function that makes ``STEPS`` calls as a program does."""


class MeasuredCall(ABC):
    """A call that is measured: a ``NormCall`` of ``norm_memory``."""

    input: Tensor
    is_timed: bool
    """Whether the sampling mode times anything."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The call, as a choice's ``signature`` says it."""

    @property
    @abstractmethod
    def stored_facts(self) -> str:
        """The facts that a choice on disk holds for, beside the versions of what computes it."""

    @abstractmethod
    def problems(self) -> list[NormProblem]:
        """Returns what the kernels compute: a forward, and its backward if there is one."""

    @abstractmethod
    def step(self) -> Step:
        """Returns the tensors that the call is measured on."""

    def choose(self) -> NormChoice:
        """Measures the call, or finds what an earlier process has chosen."""
        if not self.is_timed:
            note = "the sampling mode times nothing"
            return NormChoice(first_form(), note=note, signature=self.text)
        start_s = time.perf_counter()
        with IMPORTING:
            from cudnn_autotune.norms import plan

        name = f"{self.stored_facts} torch={torch.__version__} kernels={plan.VERSION}"
        try:
            with torch.no_grad():
                choice = kept_or_measured(self.input, name, self._holds, self._measured)
        except Exception as failure:  # PyTorch's functions run, with their errors
            choice = _left_to_pytorch(self.text, failure)
        took_ms = 1e3 * (time.perf_counter() - start_s)
        return replace(choice, signature=self.text, tuning_ms=took_ms)

    def _measured(self) -> NormChoice:
        """Checks the forms against PyTorch's functions, and times those that are right."""
        judge = _Judge(self.step())
        faults = {form: judge.fault(form) for form in _forms(self)}
        return _fastest(judge.step, faults, self.text)

    def _holds(self, chosen: str) -> bool:
        """Returns whether an earlier process's choice still computes what PyTorch's functions do;
        if so later calls have its form."""
        if chosen == PYTORCH:
            return True
        form = cast("Form", chosen)
        step = self.step()
        if why := _Judge(step).fault(form):
            _log.warning("norm %s: %s %s, as an earlier process chose", self.text, chosen, why)
            return False
        step.by_kernels(form, adopts=True)
        return True


class _Judge:
    """The comparison of forms with PyTorch's functions."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._expected = step.by_pytorch()
        own = _errors(*step.sampled(self._expected), step.least_sum)
        floor = TOLERANCES[step.input.dtype]
        self._allowed = {name: max(floor, _ERROR_FACTOR * error) for name, error in own.items()}

    def fault(self, form: Form) -> str:
        """Says why a form cannot compute a call; nothing if it can."""
        try:
            found = self.step.by_kernels(form)
            errors = _errors(self._expected, found, self.step.least_sum)
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:  # PyTorch's functions are always there
            return f"fails: {type(failure).__name__}: {failure}".partition("\n")[0]
        for name, error in errors.items():
            most = self._allowed[name]
            if not error <= most:  # NaN neither
                return (
                    f"is wrong: {name} has a relative error of {error:.2g}, allowed is {most:.2g}"
                )
        return ""


def _errors(expected: Results, found: Results, least_sum: Tensor | None) -> dict[str, float]:
    """Returns the relative error of each result: the norm of the difference over the norm, or the
    largest difference over the largest number if that is more. Sums have the first one alone."""

    def norm(tensor: Tensor, order: float = 2) -> Tensor:
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        return torch.linalg.vector_norm(tensor, order, dtype=dtype).double()

    errors = []
    for name, wanted in expected.items():
        difference = found[name] - wanted
        size = norm(wanted).clamp_min(1e-30)
        if wanted.dim() == 1 and least_sum is not None:
            errors.append(norm(difference) / torch.maximum(size, least_sum))
        else:
            largest = norm(wanted, math.inf).clamp_min(1e-30)
            local = norm(difference, math.inf) / largest
            errors.append(torch.maximum(norm(difference) / size, local))
    return dict(zip(expected, torch.stack(errors).tolist(), strict=True))


def _forms(call: MeasuredCall) -> list[Form]:
    """Returns the forms of this package's kernels that compute a call differently."""
    # They need the kernels, which nobody who tunes nothing has to import.
    with IMPORTING:
        from cudnn_autotune.norms.loading import compiled_forms

    return compiled_forms(call.problems(), call.input.get_device())


def first_form() -> Form:
    """Returns the form of kernels that is expected to be the fastest."""
    with IMPORTING:
        from cudnn_autotune.norms.plan import FORMS

    return FORMS[0]


def _fastest(step: Step, faults: Mapping[Form, str], text: str) -> NormChoice:
    """Times PyTorch's functions and the forms, in turns, and lets later calls have the fastest
    form, if a call is faster by it.

    Args:
        faults: why each form cannot compute the call; empty if it can.
        text: the call, for the log.
    """
    rejected: dict[str, str] = {form: why for form, why in faults.items() if why}
    for form, why in rejected.items():
        _log.warning("norm %s: %s %s", text, form, why)
    programs: dict[str, Run] = {PYTORCH: step.by_pytorch}
    programs.update(
        (form, partial(step.by_kernels, form)) for form, why in faults.items() if not why
    )
    if len(programs) == 1:
        note = "no form of this package's kernels computes it"
        return NormChoice(PYTORCH, rejected=rejected, note=note)
    on_gpu = step.input.is_cuda
    options = {"with_host": False, "batch_ms": _BATCH_MS, "rounds": _ROUNDS, "warmup_calls": 0}
    times_ms = time_in_turns(programs, (), on_gpu, **options)  # type: ignore[arg-type]
    chosen = min(times_ms, key=times_ms.__getitem__)
    if chosen == PYTORCH:
        return NormChoice(PYTORCH, times_ms, rejected=rejected)
    step.by_kernels(cast("Form", chosen), adopts=True)
    call_times_ms: dict[str, float] = {}
    if times_ms[PYTORCH] < _HOST_MAY_DECIDE_MS:
        programs = {PYTORCH: _by(_C.PyTorchsOwn, step), chosen: _by(_C.NormsByKernels, step)}
        some_ms = time_in_turns(
            programs, (), on_gpu, batch_ms=_CALL_BATCH_MS, rounds=_ROUNDS, warmup_calls=1
        )
        call_times_ms = {name: ms / STEPS for name, ms in some_ms.items()}
        if call_times_ms[chosen] >= call_times_ms[PYTORCH]:
            chosen = PYTORCH
    return NormChoice(chosen, times_ms, call_times_ms, rejected)


def _by(guard: Callable[[], Any], step: Step) -> Run:
    """Returns a function that makes a step's calls under a guard of its thread."""
    run = step.calls()

    def guarded() -> None:
        with guard():
            run()

    return guarded


def _left_to_pytorch(text: str, failure: Exception) -> NormChoice:
    """Returns the choice for a call whose measurement failed. It is provisional where the reason
    may pass."""
    if isinstance(failure, torch.OutOfMemoryError):
        note = "there was not enough memory to measure it"
        return NormChoice(PYTORCH, note=note, is_provisional=True)
    why = f"{type(failure).__name__}: {failure}".partition("\n")[0]
    _log.warning("norm %s could not be measured: %s", text, why)
    passes = is_passing(str(failure))
    return NormChoice(PYTORCH, note=f"it could not be measured: {why}", is_provisional=passes)


def alignment_of(tensor: Tensor) -> int:
    """Returns the power of two up to 16 that the address is a multiple of, in bytes."""
    address = tensor.data_ptr() | 16
    return address & -address


def measured_on(
    input: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Callable[[Tensor], Tensor]]:
    """Returns what a call is measured on: its input, unless that is constant or not finite, random
    parameters, and a function that returns random numbers like a tensor. None of it advances the
    caller's generators.

    Args:
        input: (N, C, *spatial).
        weight, bias: (C,), or None.
    """
    generator = torch.Generator(input.device).manual_seed(0)

    def random(like: Tensor) -> Tensor:
        return torch.empty_like(like).normal_(generator=generator)

    def parameter(like: Tensor | None, offset: float) -> Tensor | None:
        return None if like is None else random(like.detach()).mul_(0.3).add_(offset)

    given = input.detach()
    first = given[(0,) * given.dim()]
    deviation = torch.linalg.vector_norm(given - first, dtype=torch.float32)
    if not (deviation.isfinite() and deviation > 0):  # NaN or infinite, or all the same
        # At an address that is aligned alike, which new memory begins.
        place = alignment_of(given) % 16 // given.element_size()
        memory = given.new_empty(given.numel() + place)
        given = memory.as_strided(given.shape, given.stride(), place).normal_(generator=generator)
    return given, parameter(weight, 1.0), parameter(bias, 0.0), random


def sampled_places(count: int, device: torch.device) -> Tensor:
    """Returns the indices of some of ``count`` channels or groups."""
    return torch.linspace(0, count - 1, min(_SAMPLED, count), device=device).long()


@contextmanager
def planned(form: Form, adopts: bool) -> Iterator[None]:
    """Within the context the operators' calls of this thread have a form."""
    with IMPORTING:
        from cudnn_autotune.norms.plan import FORMS

    if extension_available():
        _C.set_norm_form_of_thread(1 + FORMS.index(form), adopts)
    try:
        yield
    finally:
        if extension_available():
            _C.set_norm_form_of_thread(0, False)


class Signature(NamedTuple):
    """The facts of a batch norm's call that a choice holds for."""

    shape: torch.Size
    """Shape of the input."""
    stride: tuple[int, ...]
    """Strides of the input, in elements."""
    dtype: torch.dtype
    """Type of the input."""
    device: int
    """Index of the GPU; -1 for the CPU."""
    weight: torch.dtype | None
    """Type of the weight; None without one."""
    bias: torch.dtype | None
    """Type of the bias; None without one."""
    needs: tuple[bool, bool, bool] | None
    """Whether the gradients of input, weight and bias are computed; None where gradients are
    off."""
    activation: str
    """Function that follows the norm, a key of ``NORM_ACTIVATIONS``."""
    tracks: bool
    """Whether the call updates running statistics."""
    alignment: int
    """The power of two up to 16 that the input's address is a multiple of, in bytes."""


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
    def signature(self) -> Signature:
        """The facts that a choice holds for. The hit path has the same in csrc/norm_call.cpp."""
        input, weight, bias = self.input, self.weight, self.bias
        needs = None
        if torch.is_grad_enabled():
            tensors = (input, weight, bias)
            needs = cast(Any, tuple(one is not None and one.requires_grad for one in tensors))
        return Signature(
            shape=input.shape,
            stride=input.stride(),
            dtype=input.dtype,
            device=input.get_device(),
            weight=None if weight is None else weight.dtype,
            bias=None if bias is None else bias.dtype,
            needs=needs,
            activation=self.activation,
            tracks=self.tracks,
            alignment=alignment_of(input),
        )

    @property
    def text(self) -> str:
        of = self.signature
        needs = zip(("input", "weight", "bias"), of.needs or (), strict=False)
        wanted = [name for name, needed in needs if needed]
        parameters = "no parameters" if of.weight is None else str(of.weight)
        words = (
            str(of.dtype),
            "x".join(map(str, of.shape)),
            _layout(self.input),
            *(() if of.alignment == 16 else (f"aligned={of.alignment}",)),
            f"{parameters}, {of.activation},",
            f"gradients of {', '.join(wanted)}" if wanted else "no gradients",
        )
        return " ".join(words).replace("torch.", "")

    @property
    def key(self) -> Hashable:
        return (self.is_timed, self.signature)

    @property
    def layer(self) -> Hashable:
        of = self.signature
        is_of_rows = of.stride[1] == 1
        channels = None if self.mixes_layers else of.shape[1]
        facts = (of.dtype, of.device, of.weight, of.bias, of.needs, of.activation, of.tracks)
        return (self.is_timed, len(of.shape), channels, is_of_rows, *facts)

    @property
    def mixes_layers(self) -> bool:
        # PyTorch makes one image of an instance norm's, with the channels of all.
        return self.signature.shape[0] == 1

    @property
    def stored_facts(self) -> str:
        of = self.signature
        fields = {
            "input": f"{of.dtype}{[*of.shape]}{[*of.stride]}",
            "weight": of.weight,
            "bias": of.bias,
            "gradients": None if of.needs is None else [*map(int, of.needs)],
            "activation": of.activation,
            "statistics": int(of.tracks),
            "aligned": of.alignment,
            "cudnn": int(torch.backends.cudnn.enabled),
        }
        named = (f"{name}={value}" for name, value in fields.items())
        return f"batch_norm {' '.join(named)}".replace("torch.", "").replace(", ", ",")

    def problems(self) -> list[NormProblem]:
        with IMPORTING:
            from cudnn_autotune.norms.plan import NormProblem

        input, needs = self.input, self.signature.needs or (False, False, False)
        spatial = math.prod(input.shape[2:])
        parameters = (p.dtype for p in (self.weight, self.bias) if p is not None)
        forward = NormProblem(
            is_backward=False,
            dtype=input.dtype,
            parameters=next(parameters, torch.float32),
            batch=input.shape[0],
            channels=input.shape[1],
            spatial=spatial,
            planes=spatial > 1 and input.is_contiguous(),
            alignment=alignment_of(input),
            activation=self.activation,
        )
        if not any(needs):
            return [forward]
        return [forward, replace(forward, is_backward=True, grad_input=needs[0])]

    def step(self) -> Step:
        given, weight, bias, random = measured_on(self.input, self.weight, self.bias)
        grad_output = random(given)
        if jumps := _JUMPS.get(self.activation):
            z = F.batch_norm(given, None, None, weight, bias, True, 0.0, self.eps)
            for place in jumps:
                grad_output.masked_fill_((z - place).abs_() < _BESIDE_JUMP, 0)
        running = None
        if self.tracks:
            mean = torch.zeros(given.shape[1], device=given.device)
            running = (mean, torch.ones_like(mean))
        needs = self.signature.needs or (False, False, False)
        activation, eps = self.activation, self.eps
        return _BatchNormStep(given, weight, bias, grad_output, running, needs, activation, eps)


@dataclass(frozen=True)
class _BatchNormStep(Step):
    """A forward of a batch norm, and the backward of what needs gradients."""

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    grad_output: Tensor
    running: tuple[Tensor, Tensor] | None
    """Running statistics, which each forward overwrites; None if the norm has none."""
    needs: tuple[bool, bool, bool]
    """Whether the gradients of input, weight and bias are computed."""
    activation: str
    eps: float

    @cached_property
    def least_sum(self) -> Tensor:  # type: ignore[override]
        norm = torch.linalg.vector_norm(self.grad_output, dtype=torch.float32)
        return _LEAST_SUM * norm.double()

    def by_pytorch(self) -> Results:
        return _by_pytorch(self)

    def by_kernels(self, form: Form, adopts: bool = False) -> Results:
        return _by_operators(self, form, adopts)

    def sampled(self, results: Results) -> tuple[Results, Results]:
        places = sampled_places(self.input.shape[1], self.input.device)

        def chosen(tensor: Tensor | None) -> Any:  # each channel is a norm by itself
            return None if tensor is None else _channels(tensor, places).double()

        sample = replace(
            self,
            input=chosen(self.input),
            weight=chosen(self.weight),
            bias=chosen(self.bias),
            grad_output=chosen(self.grad_output),
            running=None if self.running is None else (*map(chosen, self.running),),
        )
        exact = _by_pytorch(sample)
        return exact, {name: _channels(tensor, places) for name, tensor in results.items()}

    def leaves(self) -> list[Tensor | None]:
        """Returns input, weight and bias as leaves of a new graph."""
        tensors = zip((self.input, self.weight, self.bias), self.needs, strict=True)
        return [t if t is None else t.detach().requires_grad_(needed) for t, needed in tensors]

    def calls(self) -> Run:
        leaves = [self.leaves() for _ in range(STEPS)]
        make = _function_call if self.activation == "identity" else _pair_call
        calls = [make(self, *each) for each in leaves]
        wanted = [leaf for each in leaves for leaf in each if leaf is not None]
        return partial(_with_backward, self, calls, wanted)


def _function_call(
    step: _BatchNormStep, input: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> Run:
    """Returns a call of PyTorch's function, in whose operators modules end too."""
    mean, var = step.running or (None, None)
    function = partial(F.batch_norm, cast(Tensor, input), mean, var, weight, bias)
    return partial(function, True, 1.0, step.eps)


def _pair_call(
    step: _BatchNormStep, input: Tensor | None, weight: Tensor | None, bias: Tensor | None
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

    def __init__(self, step: _BatchNormStep) -> None:
        super().__init__()
        self._function = NORM_ACTIVATIONS[step.activation].forward

    def forward(self, input: Tensor) -> Tensor:
        return self._function(input)


def _with_backward(step: _BatchNormStep, calls: Sequence[Run], leaves: Sequence[Tensor]) -> None:
    """Makes some calls, then their backwards."""
    with torch.set_grad_enabled(any(step.needs)):
        outputs = [call() for call in calls]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if wanted:
        torch.autograd.grad(outputs, wanted, [step.grad_output] * len(outputs))


def _by_operators(given: _BatchNormStep, form: Form, adopts: bool = False) -> Results:
    """Returns the results of a step by the operators, which are called as autograd does."""
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
    return _results(given, output, gradients[:3])


def _by_pytorch(given: _BatchNormStep) -> Results:
    """Returns the results of a step by PyTorch's functions."""
    with torch.set_grad_enabled(any(given.needs)):
        leaves = given.leaves()
        with _C.PyTorchsOwn():
            z = _function_call(given, *leaves)()
        output = NORM_ACTIVATIONS[given.activation].forward(z)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, given.grad_output) if wanted else ())
    gradients = [next(found) if needed else None for needed in given.needs]
    return _results(given, output.detach(), gradients)


def _results(
    given: _BatchNormStep, output: Tensor, gradients: Sequence[Tensor | None]
) -> dict[str, Tensor]:
    """Returns the results of a step by name, with the running statistics that it has just written.
    A mean is as exact as the deviation beside it."""
    results: dict[str, Tensor] = {}
    if given.running is not None:
        mean, var = given.running
        results["running statistics"] = torch.stack([mean, var.sqrt()])
    names = ("gradient of the input", "gradient of the weight", "gradient of the bias")
    named = zip(names, gradients, strict=True)
    return {**results, "output": output, **{name: t for name, t in named if t is not None}}


def _layout(input: Tensor) -> str:
    if input.is_contiguous():
        return "contiguous"
    return "channels_last" if input.movedim(1, -1).is_contiguous() else "strided"


def _channels(tensor: Tensor, places: Tensor) -> Tensor:
    return tensor.index_select(min(1, tensor.dim() - 1), places)
