"""The measurement of a batch norm in eager training: PyTorch's functions against this package's
operators.

A forward with its backward is run by PyTorch's functions, and by the operators in each form that
has kernels of its own. Forms whose results differ from PyTorch's by more than rounding explains are
left out. The others and PyTorch take turns on the GPU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from cudnn_autotune.core import json_dataclass
from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.core.fork_safe_lock import IMPORTING, ForkSafeLock
from cudnn_autotune.engines.norms.reference import NORM_ACTIVATIONS
from cudnn_autotune.nn.backend.comparison import Run, time_in_turns
from cudnn_autotune.store import norm_file

if TYPE_CHECKING:
    from cudnn_autotune.engines.norms.plan import Form

PYTORCH = "pytorch"

# A first step has some dozens of signatures, so each gets few calls.
_ROUNDS = 5
# Sizes that are measured of norms that differ in nothing else.
_MOST_MEASURED = 4
_BATCH_MS = 0.1
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
_measuring = ForkSafeLock()
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


@dataclass(frozen=True)
class NormChoice:
    """The way to compute the batch norms of a signature in eager training on a GPU, with the times
    by which it was chosen.

    Raises:
        ValueError: ``chosen`` is unknown.
    """

    chosen: str
    """``"pytorch"``, or the form of this package's kernels: ``"kept"``, ``"half kept"`` or
    ``"two passes"`` (docs/reference/norms.md)."""
    times_ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds of the GPU for a forward with its backward, by ``"pytorch"`` and by each form;
    empty if nothing was timed."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Reason why a form was not timed: it fails, or its results are wrong."""
    note: str = ""
    """Reason why nothing was timed; empty if it was."""
    signature: str = ""
    """The dtype, shape and layout of the input, the dtype of weight and bias, the activation, and
    what needs gradients; empty on disk, where the entry's name says it."""
    tuning_ms: float = 0.0
    """Milliseconds that the choice took, compiling included."""
    source: str = "tuned"
    """The source of the choice: ``tuned`` (by this process), or ``store`` (by an earlier one)."""

    def __post_init__(self) -> None:
        with IMPORTING:
            from cudnn_autotune.engines.norms.plan import FORMS

        allowed = (PYTORCH, *FORMS)
        if self.chosen not in allowed:
            raise ValueError(f"chosen: must be one of {', '.join(allowed)}, got {self.chosen!r}")

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


def chosen_now(input: Tensor, choose: Callable[[], NormChoice]) -> NormChoice | None:
    """Returns what ``choose`` measures; None while a stream is captured or another thread measures
    a norm. A thread that waited could hold up autograd's, which the other one waits for."""
    if input.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if not _measuring.acquire_now():
        return None
    try:
        return choose()
    finally:
        _measuring.release()


def measured(text: str, norm: Any, input: Tensor, signature: Signature) -> NormChoice:
    """Returns what computes the calls of a norm the fastest, and lets later calls of the operators
    have the form that was chosen. The choice does not say its signature.

    Args:
        text: what is measured, for the log.
        norm: a batch norm module.
        input: (N, C, *spatial).
        signature: that of the call.
    """
    try:
        with torch.no_grad(), _without_hooks():
            return _measured(text, _operands(norm, input, signature))
    except Exception as failure:  # the module's own class runs, with its errors
        return left_to_pytorch(f"batch norm {text}", failure)


def holds(chosen: str, text: str, norm: Any, input: Tensor, signature: Signature) -> bool:
    """Returns whether an earlier process's choice still computes what PyTorch's functions do; if so
    later calls of the operators have its form. The arguments are those of :func:`measured`.

    Args:
        chosen: ``"pytorch"``, or the name of a form.
    """
    if chosen == PYTORCH:
        return True
    form = cast("Form", chosen)
    try:
        with torch.no_grad(), _without_hooks():
            given = _operands(norm, input, signature)
            expected = _with_statistics(given, _by_pytorch(given))
            why = _fault(given, form, expected, _allowed_errors(given, expected))
            if not why:
                _by_operators(given, form, adopts=True)
    except Exception as failure:  # the measurement that follows says what is wrong
        why = f"cannot be checked: {type(failure).__name__}: {failure}".partition("\n")[0]
    if why:
        _log.warning("batch norm %s: %s, as an earlier process chose, %s", text, chosen, why)
    return not why


def _without_hooks() -> AbstractContextManager[object]:
    """Returns a context in which hooks of the caller, as of a checkpoint, see no saved tensor."""
    # There are none where they are refused, as under torch.func.grad.
    if not cast(Any, torch._C)._autograd._saved_tensors_hooks_is_enabled():
        return nullcontext()
    return saved_tensors_hooks(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


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
        given = random(given)
    return given, parameter(weight, 1.0), parameter(bias, 0.0), random


def nearest(measured: Sequence[tuple[int, NormChoice]], elements: int) -> NormChoice | None:
    """Returns the choice of the nearest size, if enough sizes were measured.

    Args:
        measured: number of elements and choice of each size that was.
        elements: number of elements of the input.
    """
    if len(measured) < _MOST_MEASURED:
        return None

    def distance(size: tuple[int, NormChoice]) -> float:
        return abs(math.log(max(1, size[0]) / max(1, elements)))

    return min(measured, key=distance)[1]


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


def _measured(text: str, given: _Operands) -> NormChoice:
    """Checks the forms against PyTorch's functions, times those that are right, and returns the
    fastest."""
    expected = _with_statistics(given, _by_pytorch(given))
    allowed = _allowed_errors(given, expected)
    faults = {form: _fault(given, form, expected, allowed) for form in _forms(given)}
    del expected
    programs = (partial(_by_pytorch, given), partial(_by_operators, given))
    return fastest(f"batch norm {text}", faults, *programs, given.input.is_cuda)


def fastest(
    subject: str,
    faults: Mapping[Form, str],
    by_pytorch: Run,
    by_kernels: Callable[..., Any],
    on_gpu: bool,
) -> NormChoice:
    """Times PyTorch's kernels and the forms of this package's, in turns, and lets later calls have
    the fastest form, if that is faster.

    Args:
        subject: the call that is measured, for the log.
        faults: why each form cannot compute the call; empty if it can.
        by_pytorch: runs the call by PyTorch's kernels.
        by_kernels: runs it by a form, which later calls have where ``adopts`` is True.
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
    if chosen != PYTORCH:
        by_kernels(cast("Form", chosen), adopts=True)
    return NormChoice(chosen, times_ms, rejected)


def left_to_pytorch(subject: str, failure: Exception) -> NormChoice:
    """Returns the choice for a call whose measurement failed."""
    if isinstance(failure, torch.OutOfMemoryError):
        return NormChoice(PYTORCH, note="there was not enough memory to measure it")
    why = f"{type(failure).__name__}: {failure}".partition("\n")[0]
    _log.warning("%s could not be measured: %s", subject, why)
    return NormChoice(PYTORCH, note=f"it could not be measured: {why}")


def kept_or_measured(
    input: Tensor,
    name: str,
    holds: Callable[[str], bool],
    measured: Callable[[], NormChoice],
) -> NormChoice:
    """Returns what an earlier process chose, if that holds, else what is measured, and keeps it.

    Args:
        input: the call's input, which tells whose store is meant.
        name: the name of the choice on disk.
        holds: says whether ``"pytorch"``, or a form, still computes the call.
        measured: measures the call.
    """
    device = input.get_device() if input.is_cuda else None
    tree = norm_file.find(device, name)
    try:
        found = None if tree is None else json_dataclass.decode(NormChoice, tree, "entry")
    except ValueError as error:
        _log.info("the entry of a norm in the store is not served: %s", error)
        found = None
    if found is not None and holds(found.chosen):
        return replace(found, source="store")
    found = measured()
    if found.times_ms:  # without memory, say, nothing was learnt
        norm_file.keep(device, name, json_dataclass.encode(found))
    return found


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
        from cudnn_autotune.engines.norms.loading import compiled_forms
        from cudnn_autotune.engines.norms.plan import NormProblem

    input = given.input
    spatial = math.prod(input.shape[2:])
    parameters = next((p.dtype for p in (given.weight, given.bias) if p is not None), torch.float32)
    forward = NormProblem(
        False,
        input.dtype,
        parameters,
        input.shape[0],
        input.shape[1],
        spatial,
        spatial > 1 and input.is_contiguous(),
        alignment_of(input),
        given.activation,
    )
    problems = [forward]
    if any(given.needs):
        problems.append(replace(forward, is_backward=True, grad_input=given.needs[0]))
    return compiled_forms(problems, input.get_device())


@contextmanager
def planned(form: Form, adopts: bool) -> Iterator[None]:
    """Within the context the operators' calls of this thread have a form."""
    with IMPORTING:
        from cudnn_autotune.engines.norms.plan import FORMS

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
