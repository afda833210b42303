"""The measurement of a norm in eager mode: PyTorch's functions against this package's kernels.

The call, with its backward if it needs one, is computed by PyTorch's functions, and by each
different form of kernels. Forms with wrong results are left out. The others and PyTorch take turns
on the GPU. For short calls the host may decide: the fastest form and PyTorch take turns once more,
called as a program calls them.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.core.fork_safe_lock import IMPORTING
from cudnn_autotune.norms.memory import PYTORCH, NormCall, NormChoice
from cudnn_autotune.store import locked, verdicts
from cudnn_autotune.timers.lacking import is_passing
from cudnn_autotune.timers.programs import Run, time_in_turns
from cudnn_autotune.tuning.tolerances import TOLERANCES

if TYPE_CHECKING:
    from cudnn_autotune.norms.plan import Form

RULE = 2
"""The version of the rule of a choice. Choices of another one on disk are measured again."""

# A first step has some dozens of signatures, so there are few calls for each.
_ROUNDS = 5
_BATCH_MS = 0.1
# The host may take longer than the GPU for shorter calls. They are timed as a program sees them,
# some in a row.
_HOST_MAY_DECIDE_MS = 0.4
_CALL_BATCH_MS = 1.0
STEPS = 4
_SAMPLED = 8  # channels or groups that are computed in float64
# A caller's seed draws the same numbers: a gradient that equals the input has a gradient of zero.
_SEED = 7_406_189
# Errors may be this many times PyTorch's own, or the table's tolerance if that is more.
_ERROR_FACTOR = 3.0

_log = logging.getLogger(__name__)

STATISTICS = "statistics"
Results = Mapping[str, Tensor]
"""The results of a call, by their names in messages."""


class Step(ABC):
    """The tensors of a measurement, and the functions that compute on them."""

    input: Tensor
    least_sum: Tensor | None = None
    """Least norm for relative errors of sums; None if no result is a sum."""

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
        """Returns a sample of PyTorch's results: computed in float64, and as they are."""

    @abstractmethod
    def calls(self) -> Run:
        """Returns a function that makes ``STEPS`` calls as a program does."""


class MeasuredCall(NormCall):
    """A call that is measured."""

    @property
    @abstractmethod
    def stored_facts(self) -> str:
        """The conditions of a choice on disk, beside versions."""

    @abstractmethod
    def step(self) -> Step:
        """Returns the tensors of the call's measurement."""

    def choose(self) -> NormChoice:
        if not self.is_timed:
            note = "the sampling mode times nothing"
            return NormChoice(first_form(), note=note, signature=self.text)
        start_s = time.perf_counter()
        with IMPORTING:
            from cudnn_autotune.norms import plan

        versions = f"torch={torch.__version__} kernels={plan.VERSION} rule={RULE}"
        try:
            with torch.no_grad():
                choice, is_kept = verdicts.kept_or_measured(
                    self.input.get_device() if self.input.is_cuda else None,
                    f"{self.stored_facts} {versions}",
                    NormChoice,
                    self._measured,
                    lambda kept: self._holds(kept.chosen),
                    lambda new: bool(new.times_ms),  # e.g. not without memory
                )
            choice = replace(choice, source="store" if is_kept else "tuned")
        except verdicts.LockedError:
            locked.missed("norms", self.text)
            choice = NormChoice(PYTORCH, note=locked.REASON, source="missing")
        except Exception as failure:  # PyTorch's functions run, with their errors
            choice = _left_to_pytorch(self.text, failure)
        took_ms = 1e3 * (time.perf_counter() - start_s)
        return replace(choice, signature=self.text, tuning_ms=took_ms)

    def _measured(self) -> NormChoice:
        """Checks the forms against PyTorch's functions, and times the right ones."""
        judge = _Judge(self.step())
        faults = {form: judge.fault(form) for form in _forms(self)}
        return _fastest(judge.step, faults, self.text)

    def _holds(self, chosen: str) -> bool:
        """Returns whether an earlier process's choice still has right results; if so later calls
        have its form."""
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
        self._allowed = {}
        for name, result in self._expected.items():  # others follow rounded numbers
            dtype = result.dtype if name == STATISTICS else step.input.dtype
            self._allowed[name] = max(TOLERANCES[dtype].norm, _ERROR_FACTOR * own[name])

    def fault(self, form: Form) -> str:
        """Returns the reason why a form cannot compute a call; empty if it can."""
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
    largest difference over the largest number if that is more. Sums have only the first."""

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
    # They need the kernels, which a process without tuning does not import.
    with IMPORTING:
        from cudnn_autotune.norms.loading import compiled_forms

    return compiled_forms(call.problems(), call.input.get_device())


def first_form() -> Form:
    """Returns the form of kernels that is expected to be the fastest."""
    with IMPORTING:
        from cudnn_autotune.norms.plan import FORMS

    return FORMS[0]


def _fastest(step: Step, faults: Mapping[Form, str], text: str) -> NormChoice:
    """Times PyTorch's functions and the forms, in turns. Later calls have the fastest form if it is
    faster than PyTorch.

    Args:
        faults: the reason why each form cannot compute the call; empty if it can.
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
        programs = {PYTORCH: _by(_C.OwnPath, step), chosen: _by(_C.NormsByKernels, step)}
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
    """Returns the choice for a call whose measurement failed. It is provisional if the reason may
    pass."""
    if isinstance(failure, torch.OutOfMemoryError):
        note = "there was not enough memory to measure it"
        return NormChoice(PYTORCH, note=note, is_provisional=True)
    why = f"{type(failure).__name__}: {failure}".partition("\n")[0]
    _log.warning("norm %s could not be measured: %s", text, why)
    passes = is_passing(str(failure))
    return NormChoice(PYTORCH, note=f"it could not be measured: {why}", is_provisional=passes)


def alignment_of(tensor: Tensor) -> int:
    """Returns the alignment of the address in bytes, a power of two up to 16."""
    address = tensor.data_ptr() | 16
    return address & -address


def measured_on(
    input: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Callable[[Tensor], Tensor]]:
    """Returns the tensors of a measurement: the call's input, or a random one if that is constant
    or not finite; random parameters; and a function that returns random numbers like a tensor. The
    caller's generators do not advance.

    Args:
        input: (N, C, *spatial).
        weight, bias: (C,), or None.
    """
    generator = torch.Generator(input.device).manual_seed(_SEED)

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
    """Gives the operators' calls of this thread a form within the context."""
    with IMPORTING:
        from cudnn_autotune.norms.plan import FORMS

    if extension_available():
        _C.set_norm_form_of_thread(1 + FORMS.index(form), adopts)
    try:
        yield
    finally:
        if extension_available():
            _C.set_norm_form_of_thread(0, False)
