"""The memory of what computes norms in eager mode: one for batch, instance and group norms.

The first sizes of a layer are measured at their first calls. Further ones may keep changing, so
they are measured only when they have come often enough. Until then PyTorch's kernels compute them,
or this package's where a measured size says so: one near it that is computed by the same kernels,
which were clearly the faster ones there.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cudnn_autotune.core.fork_safe_lock import IMPORTING, ForkSafeLock

if TYPE_CHECKING:
    from cudnn_autotune.engines.implementations import Gpu
    from cudnn_autotune.norms.plan import NormPlan, NormProblem

PYTORCH = "pytorch"

# Sizes of a layer that are measured at their first calls, and of several layers that are told apart
# by nothing.
_MOST_MEASURED = {False: 4, True: 16}
# A measured size speaks for those that are nearer than this: a factor of two in one size.
_NEAR = 1.0
# It speaks for this package's kernels where they took this part of PyTorch's time, or less.
_CLEAR_GAIN = 0.9
# The parts of the multiprocessors that have work differ by this factor at most.
_SAME_OCCUPANCY = 1.25
# Measuring takes about this long. A new size is measured when its calls have taken as long.
_PAID_BACK_MS = 100.0
_LEAST_CALLS, _MOST_CALLS = 16, 4096
# Sizes that were put off. Of more than these none is known any more.
_MOST_PUT_OFF = 4096

_log = logging.getLogger(__name__)
_measuring = ForkSafeLock()


@dataclass(frozen=True)
class NormChoice:
    """The way to compute the norms of a signature in eager mode on a GPU, with the times by which
    it was chosen.

    Raises:
        ValueError: ``chosen`` is unknown.
    """

    chosen: str
    """``"pytorch"``, or the form of this package's kernels: ``"kept"``, ``"half kept"`` or
    ``"two passes"`` (docs/reference/norms.md)."""
    times_ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds of the GPU for a forward with its backward, by ``"pytorch"`` and by each form;
    empty if nothing was timed."""
    call_times_ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds of the same as a program sees it, by ``"pytorch"`` and by the form that takes
    the GPU the least time: the host's or the GPU's part, whichever is longer. Empty where the GPU's
    decides."""
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
    is_provisional: bool = False
    """Whether the choice is made again after some calls: what it lacked may have come by then."""

    def __post_init__(self) -> None:
        with IMPORTING:
            from cudnn_autotune.norms.plan import FORMS

        allowed = (PYTORCH, *FORMS)
        if self.chosen not in allowed:
            raise ValueError(f"chosen: must be one of {', '.join(allowed)}, got {self.chosen!r}")

    @property
    def is_served(self) -> bool:
        """Whether this package's operators compute it."""
        return self.chosen != PYTORCH

    def __str__(self) -> str:
        times = _times(self.times_ms)
        if self.call_times_ms:
            times += f", with the host {_times(self.call_times_ms)}"
        if self.source == "store":
            times = f"from the store: {times}"
        why = [self.note or times, *(f"{name} {why}" for name, why in self.rejected.items())]
        return f"{self.signature}: {self.chosen} ({'; '.join(why)})"


def _times(times_ms: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {ms:.4f} ms" for name, ms in times_ms.items())


@dataclass(frozen=True)
class Verdict:
    """A choice, and the number of calls that it holds for."""

    choice: NormChoice
    most_calls: int = 0
    """0 stands for all calls."""


class NormCall(ABC):
    """A call of a norm, for which something is to be chosen."""

    input: Tensor
    """(N, C, *spatial)."""
    is_timed: bool
    """Whether the sampling mode times anything."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The call, as a choice's ``signature`` says it."""

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """The facts that a choice holds for."""

    @property
    @abstractmethod
    def layer(self) -> Hashable:
        """The same facts without the sizes."""

    @property
    @abstractmethod
    def mixes_layers(self) -> bool:
        """Whether several layers of a model have these."""

    @abstractmethod
    def problems(self) -> list[NormProblem]:
        """Returns what the kernels compute: a forward, and its backward if there is one."""

    @abstractmethod
    def choose(self) -> NormChoice:
        """Measures the call, or finds what an earlier process has chosen."""


@dataclass(frozen=True)
class _Measured:
    """A size of a layer that was measured."""

    shape: torch.Size
    """Shape of the input."""
    problems: Sequence[NormProblem]
    choice: NormChoice


@dataclass
class _PutOff:
    """A size that is measured later."""

    verdict: Verdict
    askers: set[Hashable]
    """The tables that have the verdict. One that asks again has used it up."""


class NormMemory:
    """The choices for the norms of a process, and its measured sizes."""

    def __init__(self) -> None:
        self._choices: dict[Hashable, NormChoice] = {}
        self._sizes: dict[Hashable, dict[Hashable, _Measured]] = {}
        self._put_off: dict[Hashable, _PutOff] = {}

    def choices(self) -> tuple[NormChoice, ...]:
        """Returns the choices for what was measured, or need not be, in the order of their first
        calls."""
        return tuple(self._choices.values())

    def clear(self) -> None:
        """Clears all choices."""
        self._choices.clear()
        self._sizes.clear()
        self._put_off.clear()

    def verdict(self, call: NormCall, asker: Hashable) -> Verdict | None:
        """Returns what computes a call, and measures that if need be; None if it cannot be measured
        now.

        Args:
            asker: the table of verdicts that asks. It asks again when it has used one up.
        """
        put_off = self._put_off.get(call.key)
        if put_off is None and (known := self._choices.get(call.key)) is not None:
            return Verdict(known)
        if not call.is_timed:
            self._choices[call.key] = call.choose()
            return Verdict(self._choices[call.key])
        if put_off is None:
            sizes = self._sizes.get(call.layer, {})
            if len(sizes) >= _MOST_MEASURED[call.mixes_layers]:
                return self._later(call, _unmeasured(call, list(sizes.values())), asker)
        elif asker not in put_off.askers:
            put_off.askers.add(asker)
            return put_off.verdict
        choice = _chosen_now(call)
        if choice is None:
            return None
        _log.info("norm %s", choice)
        self._choices[call.key] = choice
        if choice.is_provisional:
            calls = 2 * put_off.verdict.most_calls if put_off else _LEAST_CALLS
            return self._later(call, Verdict(choice, calls), asker)
        self._put_off.pop(call.key, None)
        sizes = self._sizes.setdefault(call.layer, {})
        sizes[call.key] = _Measured(call.input.shape, call.problems(), choice)
        return Verdict(choice)

    def _later(self, call: NormCall, verdict: Verdict, asker: Hashable) -> Verdict:
        if len(self._put_off) >= _MOST_PUT_OFF:
            self._put_off.clear()
        self._put_off[call.key] = _PutOff(verdict, {asker})
        return verdict


def _chosen_now(call: NormCall) -> NormChoice | None:
    """Returns what is measured; None while a stream is captured or another thread measures a norm.
    A thread that waited could hold up autograd's, which the other one waits for."""
    if call.input.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if not _measuring.acquire_now():
        return None
    try:
        return call.choose()
    finally:
        _measuring.release()


def _unmeasured(call: NormCall, sizes: Sequence[_Measured]) -> Verdict:
    """Returns what computes a size that is measured later.

    Args:
        sizes: the measured ones of its layer.
    """
    near = sorted(sizes, key=lambda size: _distance(call.input.shape, size.shape))
    calls = _calls_before(call, near)
    chosen, note = PYTORCH, "its sizes change"
    alike = next((size for size in near if _is_alike(call, size)), None)
    if alike is not None:
        chosen = alike.choice.chosen
        note = f"{note}; it is computed as {alike.choice.signature}"
    note = f"{note}; it is measured after {calls} calls"
    return Verdict(NormChoice(chosen, note=note, signature=call.text), calls)


def _is_alike(call: NormCall, size: _Measured) -> bool:
    """Returns whether a measured size says that this package's kernels compute a call: they were
    clearly faster there, the size is near, and the same kernels keep as much of the GPU busy."""
    with IMPORTING:
        from cudnn_autotune.norms.plan import FORMS, plan_norm, unsupported_by_kernels

    if _distance(call.input.shape, size.shape) >= _NEAR or not _is_clear(size.choice):
        return False
    gpu = _gpu_of(call.input)
    form = next(form for form in FORMS if form == size.choice.chosen)
    for new, known in zip(call.problems(), size.problems, strict=True):
        if unsupported_by_kernels(new) or unsupported_by_kernels(known):
            return False
        # A vector of a group norm may be of two channels.
        if math.gcd(new.spatial, new.vector) != math.gcd(known.spatial, known.vector):
            return False
        # A size for which no form was adopted has the first one.
        plans = plan_norm(new, gpu, FORMS[0]), plan_norm(known, gpu, form)
        if not _runs_alike(*plans, gpu):
            return False
    return True


def _is_clear(choice: NormChoice) -> bool:
    """Returns whether this package's kernels were clearly faster than PyTorch's."""
    known = [times for times in (choice.times_ms, choice.call_times_ms) if times]
    return choice.is_served and all(
        times[choice.chosen] <= _CLEAR_GAIN * times[PYTORCH] for times in known
    )


def _runs_alike(one: NormPlan, other: NormPlan, gpu: Gpu) -> bool:
    """Returns whether two plans have the same kernels, and keep about as many multiprocessors
    busy."""
    if [launch.kernel for launch in one.launches] != [launch.kernel for launch in other.launches]:
        return False
    busy = [_occupancy(plan, gpu) for plan in (one, other)]
    return max(busy) <= _SAME_OCCUPANCY * min(busy)


def _occupancy(plan: NormPlan, gpu: Gpu) -> float:
    """Returns the part of the multiprocessors that has blocks, on average over their rounds."""
    blocks = plan.launches[0].blocks
    rounds = math.ceil(blocks / gpu.multiprocessors)
    return blocks / (rounds * gpu.multiprocessors)


def _distance(one: torch.Size, other: torch.Size) -> float:
    """Returns the Euclidean norm of the base-2 logarithms of the ratios of all sizes."""
    pairs = zip(one, other, strict=True)
    return math.hypot(*(math.log2(a / b) for a, b in pairs))


def _calls_before(call: NormCall, near: Sequence[_Measured]) -> int:
    """Returns the number of calls after which a size is measured: about what that costs. The time
    of a call is that of the nearest size that was timed, in proportion to the elements."""
    timed = next((size for size in near if size.choice.times_ms), None)
    if timed is None:
        return _LEAST_CALLS
    elements = call.input.numel() / timed.shape.numel()
    call_ms = max(timed.choice.times_ms[PYTORCH] * elements, _PAID_BACK_MS / _MOST_CALLS)
    return max(_LEAST_CALLS, math.ceil(_PAID_BACK_MS / call_ms))


def _gpu_of(input: Tensor) -> Gpu:
    with IMPORTING:
        from cudnn_autotune.engines.offers import gpu_of

    return gpu_of(input.get_device())
