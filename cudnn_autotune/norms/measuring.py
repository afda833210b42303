"""The measurement of a batch norm in eager training: PyTorch's functions against this package's
operators.

A forward with its backward is run by PyTorch's functions, and by the operators in each form that
has kernels of its own. Forms whose results differ from PyTorch's by more than rounding explains are
left out. The others and PyTorch take turns on the GPU. Where calls are so short that the host may
decide, the fastest form and PyTorch take turns once more, called as a program calls them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.norms.memory import PYTORCH, NormChoice, kept_or_measured
from cudnn_autotune.norms.reference import NORM_ACTIVATIONS
from cudnn_autotune.timers.lacking import is_passing
from cudnn_autotune.timers.programs import Run, time_in_turns

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
_SAMPLED_CHANNELS = 8
ERROR_FACTOR = 3.0
# Errors of this size are rounding, also where PyTorch happens to round less.
_FLOORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Derivatives jump here. Rounding may move an argument across, so gradients are 0 that close.
_JUMPS = {"relu": (0.0,), "relu6": (0.0, 6.0), "hardswish": (-3.0, 3.0)}
_BESIDE_JUMP = 0.05
# The sums that are the gradients of weight and bias may cancel. Their errors are relative to this
# part of the output's gradient at least.
_LEAST_SUM = 0.2

_log = logging.getLogger(__name__)
_operators = torch.ops.cudnn_autotune


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
    """Whether the call updates the module's running statistics."""
    alignment: int
    """The power of two up to 16 that the input's address is a multiple of, in bytes."""


@dataclass(frozen=True)
class _Operands:
    """The tensors of a step: a forward, and the backward of what needs gradients."""

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

    def of_channels(self, places: Tensor) -> _Operands:
        """Some channels of them in float64. Each channel is a norm by itself."""

        def chosen(tensor: Tensor | None) -> Any:
            return None if tensor is None else _channels(tensor, places).double()

        return replace(
            self,
            input=chosen(self.input),
            weight=chosen(self.weight),
            bias=chosen(self.bias),
            grad_output=chosen(self.grad_output),
            running=None if self.running is None else (*map(chosen, self.running),),
        )


@dataclass(frozen=True)
class BatchNormCall:
    """A call of a batch norm: a ``NormCall`` of ``norm_memory``."""

    norm: Any
    """The module, or what has its attributes."""
    input: Tensor
    """(N, C, *spatial)."""
    signature: Signature
    by_module: bool
    """Whether a module of this package's makes the call."""
    is_timed: bool
    """Whether the sampling mode times anything."""

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
        return (self.by_module, self.is_timed, self.signature)

    @property
    def layer(self) -> Hashable:
        of = self.signature
        is_of_rows = of.stride[1] == 1
        channels = None if self.mixes_layers else of.shape[1]
        facts = (of.dtype, of.device, of.weight, of.bias, of.needs, of.activation, of.tracks)
        return (self.by_module, self.is_timed, len(of.shape), channels, is_of_rows, *facts)

    @property
    def mixes_layers(self) -> bool:
        # PyTorch makes one image of an instance norm's, with the channels of all.
        return self.signature.shape[0] == 1

    def problems(self) -> list[NormProblem]:
        of, norm = self.signature, self.norm
        needs = of.needs or (False, False, False)
        return _problems(self.input, norm.weight, norm.bias, needs, of.activation)

    def choose(self) -> NormChoice:
        start_s = time.perf_counter()
        if self.is_timed:
            found = kept_or_measured(self.input, self._stored_name(), self._holds, self._measured)
        else:
            found = NormChoice(first_form(), note="the sampling mode times nothing")
        took_ms = 1e3 * (time.perf_counter() - start_s) if self.is_timed else 0.0
        return replace(found, signature=self.text, tuning_ms=took_ms)

    def _stored_name(self) -> str:
        """Returns the name of the choice on disk, which holds for a release of torch, whether that
        uses cuDNN, and a version of the kernels."""
        with IMPORTING:
            from cudnn_autotune.norms import plan

        of = self.signature
        fields = {
            "input": f"{of.dtype}{[*of.shape]}{[*of.stride]}",
            "weight": of.weight,
            "bias": of.bias,
            "gradients": None if of.needs is None else [*map(int, of.needs)],
            "activation": of.activation,
            "statistics": int(of.tracks),
            "aligned": of.alignment,
            "module": int(self.by_module),
            "torch": torch.__version__,
            "cudnn": int(torch.backends.cudnn.enabled),
            "kernels": plan.VERSION,
        }
        named = (f"{name}={value}" for name, value in fields.items())
        return f"batch_norm {' '.join(named)}".replace("torch.", "").replace(", ", ",")

    def _measured(self) -> NormChoice:
        """Checks the forms against PyTorch's functions, times those that are right, and lets later
        calls of the operators have the form that is chosen."""
        subject = f"batch norm {self.text}"
        try:
            with torch.no_grad():
                given = _operands(self.norm, self.input, self.signature)
                expected = _with_statistics(given, _by_pytorch(given))
                allowed = _allowed_errors(given, expected)
                faults = {form: _fault(given, form, expected, allowed) for form in _forms(given)}
                del expected
                programs = (partial(_by_pytorch, given), partial(_by_operators, given))
                calls = partial(_calls_of_module if self.by_module else _calls_of_function, given)
                return fastest(subject, faults, *programs, calls, given.input.is_cuda)
        except Exception as failure:  # the module's own class runs, with its errors
            return left_to_pytorch(subject, failure)

    def _holds(self, chosen: str) -> bool:
        """Returns whether an earlier process's choice still computes what PyTorch's functions do;
        if so later calls of the operators have its form."""
        if chosen == PYTORCH:
            return True
        form = cast("Form", chosen)
        try:
            with torch.no_grad():
                given = _operands(self.norm, self.input, self.signature)
                expected = _with_statistics(given, _by_pytorch(given))
                why = _fault(given, form, expected, _allowed_errors(given, expected))
                if not why:
                    _by_operators(given, form, adopts=True)
        except Exception as failure:  # the measurement that follows says what is wrong
            why = f"cannot be checked: {type(failure).__name__}: {failure}".partition("\n")[0]
        if why:
            text = f"batch norm {self.text}"
            _log.warning("%s: %s, as an earlier process chose, %s", text, chosen, why)
        return not why


def first_form() -> Form:
    """Returns the form of kernels that is expected to be the fastest."""
    with IMPORTING:
        from cudnn_autotune.norms.plan import FORMS

    return FORMS[0]


def _layout(input: Tensor) -> str:
    if input.is_contiguous():
        return "contiguous"
    return "channels_last" if input.movedim(1, -1).is_contiguous() else "strided"


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


def _operands(norm: Any, input: Tensor, signature: Signature) -> _Operands:
    """Returns the tensors that a signature is measured on (see :func:`measured_on`)."""
    given, weight, bias, random = measured_on(input, norm.weight, norm.bias)
    grad_output = random(given)
    if jumps := _JUMPS.get(signature.activation):
        z = F.batch_norm(given, None, None, weight, bias, True, 0.0, norm.eps)
        for place in jumps:
            grad_output.masked_fill_((z - place).abs_() < _BESIDE_JUMP, 0)
    running = None
    if signature.tracks:
        running = (torch.zeros_like(norm.running_mean), torch.ones_like(norm.running_var))
    return _Operands(
        given,
        weight,
        bias,
        grad_output,
        running,
        signature.needs or (False, False, False),
        signature.activation,
        norm.eps,
    )


def fastest(
    subject: str,
    faults: Mapping[Form, str],
    by_pytorch: Run,
    by_kernels: Callable[..., Any],
    calls: Callable[[bool], Run],
    on_gpu: bool,
) -> NormChoice:
    """Times PyTorch's kernels and the forms of this package's, in turns, and lets later calls have
    the fastest form, if a call is faster by it.

    Args:
        subject: the call that is measured, for the log.
        faults: why each form cannot compute the call; empty if it can.
        by_pytorch: runs the call by PyTorch's kernels.
        by_kernels: runs it by a form, which later calls have where ``adopts`` is True.
        calls: returns a function that makes some calls as a program does, by this package's
            kernels for True, and by PyTorch's for False.
        on_gpu: whether its tensors are on a GPU.
    """
    rejected: dict[str, str] = {form: why for form, why in faults.items() if why}
    for form, why in rejected.items():
        _log.warning("%s: %s %s", subject, form, why)
    programs: dict[str, Run] = {PYTORCH: by_pytorch}
    programs.update((form, partial(by_kernels, form)) for form, why in faults.items() if not why)
    if len(programs) == 1:
        note = "no form of this package's kernels computes it"
        return NormChoice(PYTORCH, rejected=rejected, note=note)
    times_ms = time_in_turns(
        programs,
        (),
        on_gpu,
        with_host=False,
        batch_ms=_BATCH_MS,
        rounds=_ROUNDS,
        warmup_calls=0,
    )
    chosen = min(times_ms, key=times_ms.__getitem__)
    if chosen == PYTORCH:
        return NormChoice(PYTORCH, times_ms, rejected=rejected)
    by_kernels(cast("Form", chosen), adopts=True)
    call_times_ms: dict[str, float] = {}
    if times_ms[PYTORCH] < _HOST_MAY_DECIDE_MS:
        programs = {PYTORCH: calls(False), chosen: calls(True)}
        some_ms = time_in_turns(
            programs, (), on_gpu, batch_ms=_CALL_BATCH_MS, rounds=_ROUNDS, warmup_calls=1
        )
        call_times_ms = {name: ms / STEPS for name, ms in some_ms.items()}
        if call_times_ms[chosen] >= call_times_ms[PYTORCH]:
            chosen = PYTORCH
    return NormChoice(chosen, times_ms, call_times_ms, rejected)


def left_to_pytorch(subject: str, failure: Exception) -> NormChoice:
    """Returns the choice for a call whose measurement failed. It is provisional where the reason
    may pass."""
    if isinstance(failure, torch.OutOfMemoryError):
        note = "there was not enough memory to measure it"
        return NormChoice(PYTORCH, note=note, is_provisional=True)
    why = f"{type(failure).__name__}: {failure}".partition("\n")[0]
    _log.warning("%s could not be measured: %s", subject, why)
    passes = is_passing(str(failure))
    return NormChoice(PYTORCH, note=f"it could not be measured: {why}", is_provisional=passes)


def _fault(
    given: _Operands, form: Form, expected: Mapping[str, Tensor], allowed: Mapping[str, float]
) -> str:
    """Says why a form cannot compute a step; nothing if it can."""
    try:
        found = _with_statistics(given, _by_operators(given, form))
        return _wrong(given, expected, found, allowed)
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # PyTorch's functions are always there
        return f"fails: {type(failure).__name__}: {failure}".partition("\n")[0]


def alignment_of(tensor: Tensor) -> int:
    """Returns the power of two up to 16 that the address is a multiple of, in bytes."""
    address = tensor.data_ptr() | 16
    return address & -address


def _forms(given: _Operands) -> list[Form]:
    """Returns the forms of this package's kernels that compute a step differently."""
    # They need the kernels, which nobody who tunes nothing has to import.
    with IMPORTING:
        from cudnn_autotune.norms.loading import compiled_forms

    problems = _problems(given.input, given.weight, given.bias, given.needs, given.activation)
    return compiled_forms(problems, given.input.get_device())


def _problems(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needs: Sequence[bool],
    activation: str,
) -> list[NormProblem]:
    """Returns what the kernels compute in a step."""
    with IMPORTING:
        from cudnn_autotune.norms.plan import NormProblem

    spatial = math.prod(input.shape[2:])
    parameters = next((p.dtype for p in (weight, bias) if p is not None), torch.float32)
    forward = NormProblem(
        False,
        input.dtype,
        parameters,
        input.shape[0],
        input.shape[1],
        spatial,
        spatial > 1 and input.is_contiguous(),
        alignment_of(input),
        activation,
    )
    if not any(needs):
        return [forward]
    return [forward, replace(forward, is_backward=True, grad_input=needs[0])]


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


def _by_operators(given: _Operands, form: Form, adopts: bool = False) -> dict[str, Tensor]:
    """Returns the results of a step by the operators. They are called as autograd does.

    Args:
        adopts: whether later calls of the signature have this form.
    """
    input, weight, bias, activation = given.input, given.weight, given.bias, given.activation
    with planned(form, adopts):
        output, mean, inv_std, unbiased, _ = _operators.batch_norm_act(
            input, weight, bias, None, activation, given.eps
        )
        if given.running is not None:
            torch._foreach_lerp_([*given.running], [mean, unbiased], 1.0)
        gradients: Sequence[Tensor | None] = ()
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
    return _results(output, gradients[:3])


def _by_pytorch(given: _Operands) -> dict[str, Tensor]:
    """Returns the results of a step by PyTorch's functions."""
    tensors = (given.input, given.weight, given.bias)
    with torch.set_grad_enabled(any(given.needs)):
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(tensors, given.needs, strict=True)
        ]
        input, weight, bias = leaves
        mean, var = given.running or (None, None)
        with _C.PyTorchsOwn():
            z = F.batch_norm(cast(Tensor, input), mean, var, weight, bias, True, 1.0, given.eps)
        output = NORM_ACTIVATIONS[given.activation].forward(z)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, given.grad_output) if wanted else ())
    gradients = [next(found) if needed else None for needed in given.needs]
    return _results(output.detach(), gradients)


class _StandIn:
    """The parts of a training module that its calls read, for calls that are timed."""

    def __init__(self, given: _Operands) -> None:
        values = {"weight": given.weight, "bias": given.bias}
        self._parameters = {
            name: None if tensor is None else nn.Parameter(tensor, requires_grad=needed)
            for (name, tensor), needed in zip(values.items(), given.needs[1:], strict=True)
        }
        mean, var = given.running or (None, None)
        steps = None if mean is None else torch.zeros((), dtype=torch.long, device=mean.device)
        self._buffers = {"running_mean": mean, "running_var": var, "num_batches_tracked": steps}
        self.training, self.track_running_stats = True, mean is not None
        self.eps, self.momentum = given.eps, 1.0

    def _check_input_dim(self, input: Tensor) -> None:
        """Takes all inputs."""


class _Activation(nn.Module):
    """The module behind one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._function = NORM_ACTIVATIONS[name].forward

    def forward(self, input: Tensor) -> Tensor:
        return self._function(input)


def _calls_of_module(given: _Operands, by_kernels: bool) -> Run:
    """Returns a function that calls modules as a converted model does, each with its backward."""
    name, needs = given.activation, given.needs
    tail = () if name == "identity" else (_Activation(name),)
    calls: list[Run] = []
    leaves: list[Tensor] = []
    for _ in range(STEPS):
        norm = cast(nn.Module, _StandIn(given))
        input = given.input.detach().requires_grad_(needs[0])
        with torch.set_grad_enabled(any(needs)):
            _C.choose_norm(norm, input, name, by_kernels, 0)
        calls.append(partial(_C.batch_norm, norm, input, name, tail, True))
        leaves += [input, *(one for one in norm._parameters.values() if one is not None)]
    return partial(_with_backward, given, calls, leaves)


def _calls_of_function(given: _Operands, by_kernels: bool) -> Run:
    """Returns a function that calls PyTorch's, each call with its backward."""
    calls: list[Run] = []
    leaves: list[Tensor] = []
    for _ in range(STEPS):
        own = [
            None if tensor is None else tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(
                (given.input, given.weight, given.bias), given.needs, strict=True
            )
        ]
        input, weight, bias = own
        mean, var = given.running or (None, None)
        function = partial(F.batch_norm, cast(Tensor, input), mean, var, weight, bias)
        calls.append(partial(function, True, 1.0, given.eps))
        leaves += [leaf for leaf in own if leaf is not None]
    return partial(_guarded, by_kernels, partial(_with_backward, given, calls, leaves))


def _guarded(by_kernels: bool, run: Run) -> None:
    with _C.NormsByKernels() if by_kernels else _C.PyTorchsOwn():
        run()


def _with_backward(given: _Operands, calls: Sequence[Run], leaves: Sequence[Tensor]) -> None:
    """Makes some calls, then their backwards."""
    with torch.set_grad_enabled(any(given.needs)):
        outputs = [call() for call in calls]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if wanted:
        torch.autograd.grad(outputs, wanted, [given.grad_output] * len(outputs))


def _results(output: Tensor, gradients: Sequence[Tensor | None]) -> dict[str, Tensor]:
    names = ("gradient of the input", "gradient of the weight", "gradient of the bias")
    given = {name: t for name, t in zip(names, gradients, strict=False) if t is not None}
    return {"output": output, **given}


def _with_statistics(given: _Operands, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the results with the running statistics that the step has just written. A mean is as
    exact as the deviation beside it."""
    if given.running is None:
        return results
    mean, var = given.running
    return {"running statistics": torch.stack([mean, var.sqrt()]), **results}


def _allowed_errors(given: _Operands, expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the relative error that each result may have against PyTorch's: thrice PyTorch's own
    error, measured on some channels in float64."""
    count = given.input.shape[1]
    most = min(_SAMPLED_CHANNELS, count)
    places = torch.linspace(0, count - 1, most, device=given.input.device).long()
    sample = given.of_channels(places)
    exact = _with_statistics(sample, _by_pytorch(sample))
    floor = _FLOORS[given.input.dtype]
    own = _distances(sample, exact, {name: _channels(t, places) for name, t in expected.items()})
    return {name: ERROR_FACTOR * max(error, floor) for name, error in own.items()}


def _wrong(
    given: _Operands,
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    allowed: Mapping[str, float],
) -> str:
    """Says which result differs from PyTorch's by more than is allowed; nothing if none does."""
    for name, error in _distances(given, expected, found).items():
        most = allowed[name]
        if not error <= most:  # NaN neither
            return f"is wrong: {name} has a relative error of {error:.2g}, allowed is {most:.2g}"
    return ""


def _distances(
    given: _Operands, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> dict[str, float]:
    """Returns the relative distance of each result: the norm of the difference over the norm."""

    def norm(tensor: Tensor) -> Tensor:
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        return torch.linalg.vector_norm(tensor, dtype=dtype).double()

    least = _LEAST_SUM * norm(given.grad_output)
    distances = []
    for name, wanted in expected.items():
        size = norm(wanted).clamp_min(1e-30)
        if wanted.dim() == 1:
            size = torch.maximum(size, least)
        distances.append(norm(found[name] - wanted) / size)
    return dict(zip(expected, torch.stack(distances).tolist(), strict=True))


def _channels(tensor: Tensor, places: Tensor) -> Tensor:
    return tensor.index_select(min(1, tensor.dim() - 1), places)
