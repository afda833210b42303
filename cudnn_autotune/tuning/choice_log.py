"""What was chosen in this process, and why: the record behind every tuned call."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from cudnn_autotune.core.extension import _C, extension_available
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.store.provenance import Provenance


@dataclass(frozen=True)
class Choice:
    """What serves one problem under one policy."""

    problem: ConvProblem
    device: int
    """Index of the CUDA device."""
    sampling: str
    workspace_limit: int | None
    """Bytes; None: no limit."""
    benchmark_limit: int
    text: str
    """The engine config; ``"aten"`` for PyTorch's own path, ``"matmul"`` for a matrix product."""
    chosen: Measurement | None
    """Its entry in ``selection``; None where no candidate runs and PyTorch serves the problem."""
    tuning_ms: float
    """Wall time of the search, plan building and the check of the output included."""
    selection: Selection | None
    """Every candidate with its time, and the evidence; None where there was nothing to select."""
    relative_error: float | None
    """Of the chosen one's output against a reference (``checking``); None where nothing was
    searched, or where the operands or the memory did not allow a check."""
    rejected: tuple[tuple[str, float], ...]
    """``(engine text, relative error)`` of candidates that were faster but wrong."""
    origin: str = "tuned"
    """Where it comes from: ``tuned`` here and now, ``store``, ``agreed`` (between ranks) or
    ``pinned``."""
    provenance: Provenance | None = None
    """Who measured, and when: not necessarily this process. None where nobody has."""

    @property
    def engine(self) -> int | None:
        """cuDNN's engine number; None where cuDNN has no part in it."""
        return self.chosen.candidate.engine if self.chosen else None

    @property
    def knobs(self) -> Mapping[str, int]:
        return self.chosen.candidate.knobs if self.chosen else {}

    @property
    def time_ms(self) -> float | None:
        """Milliseconds a call as the mode measured it; None where it does not time."""
        return self.chosen.time_ms if self.chosen else None

    @property
    def workspace_bytes(self) -> int:
        return self.chosen.candidate.workspace_bytes if self.chosen else 0

    @property
    def samples(self) -> int:
        """Timed launches of the chosen one."""
        return self.chosen.samples if self.chosen else 0

    @property
    def total_samples(self) -> int:
        """Timed launches of all candidates."""
        return self.selection.total_samples if self.selection else 0

    @property
    def ranking(self) -> tuple[tuple[str, float], ...]:
        """``(engine text, milliseconds)`` of every candidate that was timed, best first."""
        entries = self.selection.ranking if self.selection else ()
        return tuple((e.candidate.text, e.time_ms) for e in entries if e.time_ms is not None)

    @property
    def candidates(self) -> int:
        """How many candidates were timed."""
        return len(self.ranking)


_lock = threading.Lock()
_records: dict[tuple[object, ...], Choice] = {}
_forgettings = 0
_forgettings_of: Counter[ConvProblem] = Counter()


def _key(choice: Choice) -> tuple[object, ...]:
    return (
        choice.problem,
        choice.device,
        choice.sampling,
        choice.workspace_limit,
        choice.benchmark_limit,
    )


def generation(problem: ConvProblem) -> int:
    """Grows whenever what stands for a problem is forgotten."""
    with _lock:
        return _forgettings + _forgettings_of[problem]


def record(choice: Choice, since: int | None = None) -> bool:
    """Notes a choice, and says so; not where its problem was forgotten after the
    :func:`generation` ``since``: what was found out before is then not wanted any more."""
    with _lock:
        if since not in (None, _forgettings + _forgettings_of[choice.problem]):
            return False
        _records[_key(choice)] = choice
        return True


def find(choice: Choice) -> Choice | None:
    """What stands for the problem and policy of ``choice``."""
    with _lock:
        return _records.get(_key(choice))


def choices() -> list[Choice]:
    """Every choice of this process, in the order in which they were made."""
    with _lock:
        return list(_records.values())


def forget_problem(problem: ConvProblem) -> None:
    """Clears what stands for one problem, under every policy: its next call looks anew."""
    with _lock:
        for key in [key for key in _records if key[0] == problem]:
            del _records[key]
        _forgettings_of[problem] += 1
    if extension_available():
        _C.forget_problem(problem.native())


def forget() -> None:
    """Clears all choices, built plans and counts."""
    global _forgettings
    _C.clear_fallbacks()
    if extension_available():
        _C.forget_choices()
    with _lock:
        _records.clear()
        _forgettings += 1


def fallbacks() -> dict[str, int]:
    """Calls that ATen's own convolution served, and remembered choices that could not serve and
    were tuned again, by reason, since :func:`forget`."""
    return dict(_C.fallbacks())
