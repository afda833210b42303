"""The memory of choices for norms in eager mode: one for batch, instance and group norms.

The first sizes of a layer are measured at their first calls. Further ones may keep changing, so
they are measured only when they have come often enough. Until then PyTorch's kernels compute them,
or this package's by a neighbour's choice. A neighbour is a near measured size with the same
kernels, which were clearly faster there.
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
from cudnn_autotune.store import settings

if TYPE_CHECKING:
    from cudnn_autotune.engines.implementations import Gpu
    from cudnn_autotune.norms.plan import NormPlan, NormProblem

PYTORCH = "pytorch"

# Sizes of a layer that are measured at their first calls, and sizes of several layers with one key.
_MOST_MEASURED = {False: 4, True: 16}
# A measured size is a neighbour of sizes nearer than this: a factor of two in one size.
_NEAR = 1.0
# This package's kernels were clearly faster if they took this part of PyTorch's time, or less.
_CLEAR_GAIN = 0.9
# The largest ratio of the busy shares of multiprocessors at neighbours.
_SAME_OCCUPANCY = 1.25
# The approximate duration of a measurement. A new size is measured when its calls have taken this
# long.
_PAID_BACK_MS = 100.0
_LEAST_CALLS, _MOST_CALLS = 16, 4096
# The most deferred sizes. Beyond this number all are forgotten.
_MOST_PUT_OFF = 4096

_log = logging.getLogger(__name__)
_measuring = ForkSafeLock()


@dataclass(frozen=True)
class NormChoice:
    """The choice for the norms of a signature in eager mode on a GPU, with its times.

    Raises:
        ValueError: ``chosen`` is unknown.
    """

    chosen: str
    """``"pytorch"``, or the form of this package's kernels: ``"kept"``, ``"half kept"`` or
    ``"two passes"`` (docs/reference/norms.md)."""
    times_ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds of the GPU for a forward with its backward, by ``"pytorch"`` and by each form;
    empty without timing."""
    call_times_ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds of the same as a program sees it, the longer of the host's and the GPU's, by
    ``"pytorch"`` and by the fastest form on the GPU. Empty if the GPU's time decides."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Reason why a form was not timed: a failure, or wrong results."""
    note: str = ""
    """Reason why there was no timing; empty if there was."""
    signature: str = ""
    """The dtype, shape and layout of the input, the dtype of weight and bias, the activation, and
    the needed gradients; empty on disk, where the entry's name has it."""
    tuning_ms: float = 0.0
    """Milliseconds of making the choice, compiling included."""
    source: str = "tuned"
    """The source of the choice: ``tuned`` (by this process), ``store`` (by an earlier one), or
    ``missing`` (PyTorch's functions: a locked store lacks it)."""
    is_provisional: bool = False
    """Whether the choice is made again after some calls, because resources were short."""

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
    """A choice, and the number of calls for which it holds."""

    choice: NormChoice
    most_calls: int = 0
    """0 stands for all calls."""


class NormCall(ABC):
    """A call of a norm that needs a choice."""

    input: Tensor
    """(N, C, *spatial)."""
    is_timed: bool
    """Whether the sampling mode times candidates."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The call as a choice's ``signature``."""

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """The conditions of a choice."""

    @property
    @abstractmethod
    def layer(self) -> Hashable:
        """The conditions without the sizes."""

    @property
    @abstractmethod
    def mixes_layers(self) -> bool:
        """Whether several layers of a model have this key."""

    @abstractmethod
    def problems(self) -> list[NormProblem]:
        """Returns the kernels' problems: a forward, and its backward if there is one."""

    @abstractmethod
    def choose(self) -> NormChoice:
        """Measures the call, or finds an earlier process's choice."""


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
    """The tables that have the verdict. A table that asks again has used it up."""


class NormMemory:
    """The choices for the norms of a process, and its measured sizes."""

    def __init__(self) -> None:
        self._choices: dict[Hashable, NormChoice] = {}
        self._sizes: dict[Hashable, dict[Hashable, _Measured]] = {}
        self._put_off: dict[Hashable, _PutOff] = {}

    def choices(self) -> tuple[NormChoice, ...]:
        """Returns the choices for measured signatures, and for those that need no measurement, in
        the order of their first calls."""
        return tuple(self._choices.values())

    def clear(self) -> None:
        """Clears all choices."""
        self._choices.clear()
        self._sizes.clear()
        self._put_off.clear()

    def verdict(self, call: NormCall, asker: Hashable) -> Verdict | None:
        """Returns the verdict on a call, and measures if need be; None if it cannot be measured
        now.

        Args:
            asker: the calling table of verdicts. It asks again when it has used one up.
        """
        put_off = self._put_off.get(call.key)
        if put_off is None and (known := self._choices.get(call.key)) is not None:
            return Verdict(known)
        if not call.is_timed:
            self._choices[call.key] = call.choose()
            return Verdict(self._choices[call.key])
        if put_off is None and not settings.is_locked():  # there a choice costs no measurement
            sizes = self._sizes.get(call.layer, {})
            if len(sizes) >= _MOST_MEASURED[call.mixes_layers]:
                return self._later(call, _unmeasured(call, list(sizes.values())), asker)
        elif put_off is not None and asker not in put_off.askers:
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
    """Measures and returns a choice; None while a stream is captured or another thread measures a
    norm. A waiting thread could block autograd's, for which the other one waits."""
    if call.input.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if not _measuring.acquire_now():
        return None
    try:
        return call.choose()
    finally:
        _measuring.release()


def _unmeasured(call: NormCall, sizes: Sequence[_Measured]) -> Verdict:
    """Returns the verdict on a size that is measured later.

    Args:
        sizes: the measured sizes of its layer.
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
    """Returns whether a measured size is evidence for this package's kernels in a call: they were
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
        # A size without an adopted form has the first one.
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
    """Returns whether two plans have the same kernels and about the same busy share of the GPU."""
    if [launch.kernel for launch in one.launches] != [launch.kernel for launch in other.launches]:
        return False
    busy = [_occupancy(plan, gpu) for plan in (one, other)]
    return max(busy) <= _SAME_OCCUPANCY * min(busy)


def _occupancy(plan: NormPlan, gpu: Gpu) -> float:
    """Returns the busy share of the multiprocessors, on average over rounds of blocks."""
    blocks = plan.launches[0].blocks
    rounds = math.ceil(blocks / gpu.multiprocessors)
    return blocks / (rounds * gpu.multiprocessors)


def _distance(one: torch.Size, other: torch.Size) -> float:
    """Returns the Euclidean norm of the base-2 logarithms of the ratios of all sizes."""
    pairs = zip(one, other, strict=True)
    return math.hypot(*(math.log2(a / b) for a, b in pairs))


def _calls_before(call: NormCall, near: Sequence[_Measured]) -> int:
    """Returns the number of calls after which a size is measured: their time is about the
    measurement's. A call's time is scaled from the nearest timed size by the elements."""
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
