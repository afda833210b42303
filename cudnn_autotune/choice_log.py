"""What was chosen in this process, and why: the record behind every tuned call."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from cudnn_autotune._extension import _C, extension_available
from cudnn_autotune.problem import ConvProblem

ATEN = "aten"


@dataclass(frozen=True)
class Choice:
    """The engine that serves one problem under one policy."""

    problem: ConvProblem
    device: int
    """Index of the CUDA device."""
    sampling: str
    workspace_limit: int | None
    """Bytes; None: no limit."""
    benchmark_limit: int
    text: str
    """The engine config, or ``"aten"`` where no engine of cuDNN runs."""
    engine: int | None
    """cuDNN's engine number; None for ``"aten"``."""
    knobs: Mapping[str, int]
    time_ms: float | None
    """Milliseconds a call as the mode measured it; None where it does not time."""
    workspace_bytes: int
    samples: int
    """Timed launches of the chosen engine."""
    total_samples: int
    """Timed launches of all candidates."""
    candidates: int
    """How many candidates were timed."""
    tuning_ms: float
    """Wall time of the search, plan building included."""
    ranking: tuple[tuple[str, float], ...]
    """``(engine text, milliseconds)`` of every candidate that was timed, fastest first."""
    relative_error: float | None
    """Of the chosen engine's output against a reference (``checking``); None where nothing was
    searched, or where the operands or the memory did not allow a check."""
    struck: tuple[tuple[str, float], ...]
    """``(engine text, relative error)`` of candidates that were faster but wrong."""


_lock = threading.Lock()
_records: dict[tuple[object, ...], Choice] = {}


def record(choice: Choice) -> None:
    key = (
        choice.problem,
        choice.device,
        choice.sampling,
        choice.workspace_limit,
        choice.benchmark_limit,
    )
    with _lock:
        _records[key] = choice


def choices() -> list[Choice]:
    """Every choice of this process, in the order in which they were made."""
    with _lock:
        return list(_records.values())


def forget() -> None:
    """Clears all choices, built plans and counts: the next call of each shape tunes anew."""
    _C.clear_fallbacks()
    if extension_available():
        _C.forget_choices()
    with _lock:
        _records.clear()


def fallbacks() -> dict[str, int]:
    """Calls that ATen's own convolution served, by reason, since :func:`forget`."""
    return dict(_C.fallbacks())
