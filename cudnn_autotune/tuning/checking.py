"""Checks of candidates: runs on a caller's tensors, and comparisons of the output with a reference.

The reference is the convolution's definition at a sample of the output's places
(csrc/measure/sampled_reference.h), which each check draws again. The whole output is filled with
NaN before the engine runs, and none may be left. A candidate writes to memory between guard bands.

If the caller's tensors do not distinguish right from wrong, as zeros, random ones are used. An
output is right, wrong, or not comparable, which is not recorded. Wrong ones are rejected: two
engines of cuDNN 9.19 ignore a difference of padding before and after, and one rounds float32
without a note (csrc/core/cudnn/errata.cpp). A candidate that raises has no output: it fails.

If a problem asks for determinism, a candidate runs once more on the same operands, and both outputs
must have the same bits.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from cudnn_autotune.core.extension import _C
from cudnn_autotune.core.guard_bands import GuardedMemory, are_touched
from cudnn_autotune.engines.candidate_id import identify
from cudnn_autotune.engines.problem import ConvProblem, Operands
from cudnn_autotune.timers.measuring import WRITTEN, telling_operands, terms
from cudnn_autotune.tuning.tolerances import KERNEL_TF32, TOLERANCES

_log = logging.getLogger(__name__)

# The error of one place or channel may be three times that of the whole: it has few numbers, which
# may nearly cancel.
_LOCAL_SHARE = 1 / 3
# The least share of places and channels with a nonzero reference, of those that operands reach.
_LEAST_SHARE = 0.25
# The least share of nonzero numbers in an operand. An operand with fewer is not used for timing
# either: it draws less power than later ones.
_LEAST_FILLED = 0.01

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types that compare all bits of an element, by its size in bytes."""


def is_right(problem: ConvProblem, error: float | None) -> bool:
    """Returns whether an output of this error was compared with a reference, and is right."""
    return error is not None and error <= tolerance(problem)


def tolerance(problem: ConvProblem) -> float:
    """Returns the largest relative error of a right engine."""
    if problem.may_use_tf32:
        return KERNEL_TF32
    return TOLERANCES[problem.dtype].kernel


def new_seed() -> int:
    """Returns a seed, from the system's generator, for the places of one check."""
    return int.from_bytes(os.urandom(4), "little")


def relative_error(
    problem: ConvProblem,
    run: Callable[[], None],
    x: Tensor,
    w: Tensor,
    y: Tensor,
    *added: Tensor,
    seed: int | None = None,
) -> float | None:
    """Fills the output with NaN, calls ``run``, and compares the output with the reference.

    Args:
        problem: the problem of the tensors.
        run: computes ``problem`` on ``x``, ``w`` and ``y``, writing one of them.
        x, w, y: the forward's input, weight and output, on any device.
        added: the bias, the residual and the slopes of a fused problem that has them.
        seed: draws the places that are compared; None stands for a new one.

    Returns:
        ``|output - reference| / |reference|``, or a third of the largest such ratio of one place
        with its channels, or of one channel, if that is more. It is infinity if the output has NaN
        or infinities that a right one cannot have. It is None without evidence: an operand is zero
        or not finite, the reference is nearly all zero, the output overflows its type, or memory is
        short for workspace or reference. If the output is certainly wrong even so, its error, above
        :func:`tolerance`, is returned.
    """
    found = comparison(problem, run, x, w, y, *added, seed=new_seed() if seed is None else seed)
    return None if found is None else error_in(problem, found)


def comparison(
    problem: ConvProblem,
    run: Callable[[], None],
    x: Tensor,
    w: Tensor,
    y: Tensor,
    *added: Tensor,
    seed: int,
) -> Tensor | None:
    """Begins :func:`relative_error`, and does not wait for the device.

    Returns:
        The numbers that :func:`error_in` reads, on the operands' device; None if there is no
        memory.
    """
    (x, w, y)[WRITTEN[problem.op]].fill_(math.nan)
    try:
        run()
        return _C.compare_output(problem.native(), [x, w, y, *added], seed)
    except torch.OutOfMemoryError:
        return None


def error_in(problem: ConvProblem, found: Tensor) -> float | None:
    """Returns the relative error, as :func:`relative_error`, from the numbers of
    :func:`comparison`."""
    norm, error, local, filled, (largest, *operands) = _C.read_comparison(found.cpu())
    if not all(map(math.isfinite, (norm, *operands))):
        return None
    if math.isnan(largest) or (math.isinf(largest) and not _may_overflow(problem, operands)):
        return math.inf
    if norm == 0:
        return math.inf if error > 0 else (0.0 if filled else None)
    relative = max(error / norm, _LOCAL_SHARE * local)
    is_wrong = relative > tolerance(problem)
    is_told = filled >= _LEAST_SHARE and 0 not in operands and math.isfinite(largest)
    return relative if is_wrong or is_told else None


def _may_overflow(problem: ConvProblem, operands: Sequence[float]) -> bool:
    """Returns whether right outputs may be infinite, given each operand's largest magnitude."""
    a, b, *added = operands
    slope = max(1.0, added.pop()) if problem.has_slope else 1.0
    largest: float = torch.finfo(problem.dtype).max
    return slope * (a * b * terms(problem) + sum(added)) >= 0.9 * largest


def is_telling(problem: ConvProblem, tensors: Sequence[Tensor]) -> bool:
    """Returns whether these operands seem to distinguish a right output from a wrong one: each is
    finite, and not nearly all zero. Waits for the device.

    Args:
        problem, tensors: as for :func:`relative_error`.
    """
    norm = torch.linalg.vector_norm
    found = []
    for place, tensor in enumerate(tensors):
        if place != WRITTEN[problem.op]:
            # The number of nonzero elements does not fit into 16 bits.
            counted = torch.float32 if tensor.itemsize < 4 else tensor.dtype
            found += [norm(tensor, math.inf).double(), norm(tensor, 0, dtype=counted).double()]
    numbers: list[float] = torch.stack(found).tolist()
    read = (tensor for place, tensor in enumerate(tensors) if place != WRITTEN[problem.op])
    return all(
        math.isfinite(largest) and count >= max(1, _LEAST_FILLED * tensor.numel())
        for tensor, largest, count in zip(read, numbers[::2], numbers[1::2], strict=True)
    )


@dataclass(eq=False)
class OutputChecks:
    """The checks of one problem's candidates so far."""

    errors: dict[str, float | None] = field(default_factory=dict)
    """Relative error of each checked candidate by its text, as of :func:`relative_error`; None if
    its output could not be compared."""
    rejected: list[tuple[str, float]] = field(default_factory=list)
    """``(engine text, relative error)`` of candidates whose output is wrong, or is not
    deterministic though it must be."""
    varying: set[str] = field(default_factory=set)
    """The texts in ``rejected`` whose only fault is a difference from run to run."""
    failures: dict[str, str] = field(default_factory=dict)
    """Reason why a candidate failed to run, by its text."""

    def is_right(self, problem: ConvProblem, text: str, plan: _C.Plan, tensors: Operands) -> bool:
        """Runs the candidate named ``text`` and compares its output with the reference; returns
        False if it is wrong, or fails. ``errors`` has None if it is not comparable."""
        return self.conclude(problem, text, examined(problem, text, plan, tensors))

    def conclude(self, problem: ConvProblem, text: str, check: OutputCheck) -> bool:
        """Records a check, and returns False if the output is wrong or the candidate failed.
        Waits for the device."""
        if check.failure:
            self.failures[text] = check.failure
            return False
        error = self.errors[text] = check.error()
        if error is None or is_right(problem, error):
            return True
        if check.varies():
            self.varying.add(text)
        _log.warning("%s: %s %s", problem.text, text, check.fault())
        self.rejected.append((text, error))
        return False


@dataclass(frozen=True)
class Compared:
    """The circumstances of one comparison with a reference."""

    problem: ConvProblem
    seed: int
    """The seed of the places that were compared."""
    is_random: bool = False
    """Whether the operands were random, and not the caller's."""
    is_guarded: bool = True
    """Whether guard bands would have shown a write outside of the candidate's memory."""


class OutputCheck:
    """The error of a candidate's output, which the device may still be computing.

    Args:
        found: the error; or the result of :func:`comparison`, and behind it two flags: guard bands
            were written to, and a second run gave other bits.
        failure: the reason why the candidate failed to run.
        compared: the circumstances; None if there was no comparison.
    """

    def __init__(
        self, found: Tensor | float | None, failure: str = "", compared: Compared | None = None
    ) -> None:
        self._found = found
        self.failure = failure
        self._compared = compared
        self._event: torch.cuda.Event | None = None
        if isinstance(found, Tensor) and found.is_cuda:
            # The copy lies in pinned memory, so the host does not wait for it.
            self._found = found.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(found.device))

    @property
    def is_ready(self) -> bool:
        return self._event is None or self._event.query()

    def error(self) -> float | None:
        """Waits for the device; returns as :func:`relative_error`. It is infinity if guard bands
        were written to, or the output differs from run to run. It is None if there was no memory
        for the bands, unless the output is wrong."""
        error = self._error()
        if self._compared is None or not isinstance(self._found, Tensor):
            return error
        if self._is_outside() or self.varies():
            return math.inf
        is_guarded = self._compared.is_guarded or not is_right(self._compared.problem, error)
        return error if is_guarded else None

    def _error(self) -> float | None:
        """Returns the relative error of the first run's output. Waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        if not isinstance(self._found, Tensor) or self._compared is None:
            return self._found if isinstance(self._found, float) else None
        return error_in(self._compared.problem, self._found[:-2])

    def varies(self) -> bool:
        """Returns whether a second run gave other bits, and the output has no other fault. Waits
        for the device."""
        error = self._error()
        if not isinstance(self._found, Tensor) or self._compared is None or self._is_outside():
            return False
        is_wrong = error is not None and not is_right(self._compared.problem, error)
        return bool(self._found[-1]) and not is_wrong

    @property
    def needs_others(self) -> bool:
        """Whether other operands may show what these do not. Waits for the device."""
        compared = self._compared
        is_telling = compared is None or compared.is_random or not compared.is_guarded
        return not is_telling and self.error() is None

    @property
    def is_compared(self) -> bool:
        """Whether there was memory to run and compare the candidate."""
        return self._found is not None

    def fault(self) -> str:
        """Returns the fault as the predicate of a sentence on the candidate; waits for the
        device."""
        error = self.error()
        if self.failure:
            return f"fails: {self.failure}"
        if self._is_outside():
            return "writes outside of its result or its workspace"
        if self.varies():
            return "differs from run to run"
        size = f"relative error {math.nan if error is None else error:.3g}"
        if self._compared is None:
            return f"is wrong ({size})"
        operands = "random operands, " if self._compared.is_random else ""
        return f"is wrong ({size}; {operands}seed {self._compared.seed})"

    def _is_outside(self) -> bool:
        return isinstance(self._found, Tensor) and bool(self._found[-2])


def examined(problem: ConvProblem, text: str, plan: _C.Plan, tensors: Operands) -> OutputCheck:
    """Runs the candidate named ``text`` and compares its output on the caller's tensors, or on
    random ones if those show nothing. Waits for the device."""
    try:
        check = begin(problem, text, plan, tensors)
        return begin_anew(problem, text, plan, tensors) if check.needs_others else check
    except torch.OutOfMemoryError:
        return OutputCheck(None)


def begin(problem: ConvProblem, text: str, plan: _C.Plan, tensors: Operands) -> OutputCheck:
    """Enqueues the candidate named ``text`` and the comparison of its output. The error is infinite
    if the candidate fails to run.

    Without memory for guard bands, an engine or PyTorch's own path writes to the caller's result.

    Raises:
        OutOfMemoryError: there is no memory for the guard bands of an implementation.
    """
    return _begun(problem, text, plan, tensors, is_random=False)


def begin_anew(problem: ConvProblem, text: str, plan: _C.Plan, tensors: Operands) -> OutputCheck:
    """Does the same as :func:`begin`, on random operands instead of the caller's.

    Raises:
        OutOfMemoryError: there is no memory for them.
    """
    data = telling_operands(problem, tensors[0].device)
    return _begun(problem, text, plan, data, is_random=True)


def _begun(
    problem: ConvProblem, text: str, plan: _C.Plan, tensors: Operands, is_random: bool
) -> OutputCheck:
    compared = Compared(problem, new_seed(), is_random)
    try:
        return _compared(text, plan, tensors, compared)
    except _C.PlanError as failure:
        # A handler that keeps log records would keep an error's frames, and their tensors.
        _log.warning("%s: %s fails: %s", problem.text, text, str(failure))
        return OutputCheck(math.inf, str(failure))


def _compared(text: str, plan: _C.Plan, tensors: Operands, compared: Compared) -> OutputCheck:
    problem, seed = compared.problem, compared.seed
    place = WRITTEN[problem.op]
    try:
        result = GuardedMemory.like(tensors[place])
        workspace = GuardedMemory(plan.workspace_bytes, tensors[place].device)
    except torch.OutOfMemoryError:
        if identify(text).is_implementation:
            raise
        # PyTorch's own path writes only to memory that it allocates.
        compared = replace(compared, is_guarded=not identify(text).is_engine)
        run = partial(_run, problem, plan, tensors)
        found = comparison(problem, run, *tensors, seed=seed)
        if found is None or (varies := _varies(problem, run, tensors[place])) is None:
            return OutputCheck(None)
        return OutputCheck(
            torch.cat([found, found.new_zeros(1), varies.to(found)]), compared=compared
        )
    written = result.as_tensor(tensors[place])
    guarded = (*tensors[:place], written, *tensors[place + 1 :])
    run = partial(_run, problem, plan, guarded, workspace.memory)
    found = comparison(problem, run, *guarded, seed=seed)
    if found is None or (varies := _varies(problem, run, written)) is None:
        return OutputCheck(None)
    touched = are_touched(result, workspace)[None]
    return OutputCheck(torch.cat([found, touched.to(found), varies.to(found)]), compared=compared)


def _varies(problem: ConvProblem, run: Callable[[], None], written: Tensor) -> Tensor | None:
    """Returns whether a second run changes bits of the output, which is in ``written``. The result
    is false, without a run, if the problem does not ask for determinism; None if there is no
    memory. It does not wait for the device."""
    if not problem.deterministic:
        return written.new_zeros(1, dtype=torch.bool)
    try:
        first = written.clone()
        written.fill_(math.nan)
        run()
        bits = _BITS[written.itemsize]
        return (first.view(bits) != written.view(bits)).any()[None]
    except torch.OutOfMemoryError:
        return None


def _run(
    problem: ConvProblem, plan: _C.Plan, tensors: Operands, workspace: Tensor | None = None
) -> None:
    # PyTorch's own path allocates its result.
    tensors[WRITTEN[problem.op]].copy_(_C.execute(plan, *tensors, workspace=workspace))


def refusal(problem: ConvProblem, tensors: Operands) -> Callable[[str, _C.Plan], str]:
    """Returns a function of a candidate's text and plan: the reason why the candidate must not run
    on the caller's tensors, or an empty text. It runs implementations' candidates only, and raises
    OutOfMemoryError if memory is short."""

    def why(text: str, plan: _C.Plan) -> str:
        if not identify(text).is_implementation:
            return ""
        check = examined(problem, text, plan, tensors)
        if check.failure:
            return f"it {check.fault()}"
        if not check.is_compared:
            raise torch.OutOfMemoryError("there is no memory to check it")
        error = check.error()
        return "" if error is None or is_right(problem, error) else f"it {check.fault()}"

    return why
