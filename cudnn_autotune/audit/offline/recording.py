"""Raw samples of one problem on one GPU, and the file that holds them.

The file is JSON (gzip if its name ends in ``.gz``): an object with ``format`` and the fields of
:class:`Recording`. Times are in milliseconds. A candidate has the same place in every list; null
stands for no sample.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cudnn_autotune.expert import (
    HEURISTIC_MODES,
    Candidate,
    ConvProblem,
    problem_from_json,
)
from cudnn_autotune.sampling import Cache, GpuState
from cudnn_autotune.tools import decode, read_json, shown

FORMAT = "cudnn-autotune recording"
VERSION = 2
ENVIRONMENT = (
    "gpu",
    "multiprocessors",
    "compute_capability",
    "driver",
    "cuda",
    "cudnn",
    "cudnn_frontend",
    "torch",
    "cudnn_autotune",
    "date",
)
"""The keys that ``Recording.environment`` must have; values may be None."""

# Fifty times the size of a usual recording, uncompressed.
_MOST_BYTES = 4 * 2**20
_MOST_THREADS = 4096
_LEAST = 1e-9
"""Lower bound of every time and clock, so that dividing by one does not overflow."""

Row = tuple[float | None, ...]
"""One value for each candidate, in the recording's order; None stands for no sample."""


@dataclass(frozen=True)
class RecordedCandidate(Candidate):
    """A candidate, its build time and the times of its first runs."""

    built: bool
    build_ms: float | None
    """Host time of building its plan, or of trying to, in milliseconds; None if that was not
    tried. Among candidates compiled at run time only the first is timed, and stands for all."""
    first_run_ms: float | None
    """Milliseconds of its first call, and of the loading of its kernel before; None if it did
    not run."""
    warm_ms: float | None
    """Milliseconds of its second call; None if it did not run, or if the first call was too slow
    to repeat."""
    error: str = ""
    """Why it did not build or run, or was not tried. The samples of a candidate that failed later
    on are kept, but it has no true time."""

    @functools.cached_property
    def candidate(self) -> Candidate:
        """The candidate, as a sampling mode gets it."""
        return Candidate(**{f.name: getattr(self, f.name) for f in fields(Candidate)})


@dataclass(frozen=True)
class Rounds:
    """Short batches of candidates that took turns."""

    calls: tuple[int, ...]
    """Calls in a batch, by candidate; 0 if it has no batch."""
    time_ms: tuple[Row, ...]
    """Milliseconds of a call, by round and candidate."""
    clock_mhz: tuple[Row, ...]
    """Mean SM clock of each batch; None if it is unknown."""


@dataclass(frozen=True)
class SoloTrace:
    """The batches of one candidate's sustained run, which began right after rounds."""

    text: str
    cache: Cache
    calls: int
    """Calls in a batch."""
    at_ms: tuple[float, ...]
    """Milliseconds from the start of the run to the middle of each batch."""
    time_ms: tuple[float, ...]
    """Milliseconds of a call."""
    clock_mhz: Row
    power_w: Row
    """Power of the board in watts (``Sample.power_w``)."""


@dataclass(frozen=True, kw_only=True)
class Reading(GpuState):
    """A reading of the board's state during the recording."""

    at_ms: float
    """Wall time in milliseconds since the recording's timer was made."""
    phase: str
    """``start``, ``rounds``, or the text of the candidate that has just run alone."""


@dataclass(frozen=True)
class Recording:
    """Everything that was measured of a problem; ``ReplayTimer`` plays it.

    Raises:
        ValueError: a value out of range, lists whose lengths do not fit, or a trace of an unknown
            candidate; the message names the field.
    """

    environment: dict[str, Any]
    """Numbers, texts and None, at least under the names of :data:`ENVIRONMENT`."""
    problem: ConvProblem
    aten_uses_cudnn: bool
    candidates: tuple[RecordedCandidate, ...]
    cold: Rounds
    hot: Rounds
    lone: tuple[Row, ...]
    """Single launches that the host waited for, with a hot cache, as cuDNN's own search times them:
    by pass and candidate."""
    solo: tuple[SoloTrace, ...]
    readings: tuple[Reading, ...]
    build_threads: int
    """Number of plans that were compiled at run time side by side."""
    run_overhead_ms: float
    """Host time in milliseconds that the ``Timer.run`` of a round took beyond its batches, to
    queue launches and to cool operands."""
    remarks: tuple[str, ...] = ()
    """The reasons for which the recording lacks samples, such as the time limit."""

    def __post_init__(self) -> None:
        for name in ENVIRONMENT:
            if name not in self.environment:
                raise ValueError(f"environment.{name}: is missing")
        texts: set[str] = set()
        for i, candidate in enumerate(self.candidates):
            if why := _wrong(candidate, texts):
                raise ValueError(f"candidates[{i}].{why}")
            texts.add(candidate.text)
        for name, rounds in (("cold", self.cold), ("hot", self.hot)):
            _check(f"{name}.time_ms", rounds.time_ms, (None, len(texts)))
            _check(f"{name}.clock_mhz", rounds.clock_mhz, (len(rounds.time_ms), len(texts)))
            _check_calls(name, rounds, len(texts))
        _check("lone", self.lone, (None, len(texts)))
        ran = {c.text for c in self.candidates if c.first_run_ms is not None}
        for i, trace in enumerate(self.solo):
            if trace.text not in ran:
                raise ValueError(f"solo[{i}].text: {shown(trace.text)} is no candidate that ran")
            if trace.calls < 1:
                raise ValueError(f"solo[{i}].calls: must be 1 or more, got {trace.calls}")
            if not trace.at_ms:
                raise ValueError(f"solo[{i}].at_ms: must not be empty")
            for name in ("time_ms", "clock_mhz", "power_w"):
                _check(f"solo[{i}].{name}", getattr(trace, name), (len(trace.at_ms),))
        if not 1 <= self.build_threads <= _MOST_THREADS:
            most = f"must be a whole number from 1 to {_MOST_THREADS}"
            raise ValueError(f"build_threads: {most}, got {self.build_threads}")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Reads a file. Raises OSError, or ValueError that names the file and the field, and says
        what is wrong with it."""
        try:
            return _from_json(read_json(Path(path), _MOST_BYTES))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error


def _from_json(tree: Any) -> Recording:
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise ValueError(f"format: must be {FORMAT!r}; this is no recording")
    version = tree.get("version")
    if type(version) is not int or version != VERSION:
        rule = f"must be {VERSION}; this package reads no other, got {shown(version)}"
        raise ValueError(f"version: {rule}")
    del tree["format"], tree["version"]
    if "problem" in tree:
        tree["problem"] = problem_from_json(tree["problem"], "problem")
    return decode(Recording, tree, "recording")


def _wrong(candidate: RecordedCandidate, texts: set[str]) -> str:
    """Returns what is wrong with a candidate, beginning with its field; empty if it is valid."""
    if not candidate.text:
        return "text: must be a text that is not empty"
    if candidate.text in texts:
        return f"text: {shown(candidate.text)} is listed twice"
    mode = candidate.heuristic_mode
    if mode not in ("", *HEURISTIC_MODES):
        allowed = ", ".join(HEURISTIC_MODES)
        return f"heuristic_mode: must be empty or one of {allowed}, got {shown(mode)}"
    # Only cuDNN's heuristics are sure to list engines of cuDNN.
    if candidate.engine is None and mode:
        return "engine: must be a whole number, got None"
    for name in ("first_run_ms", "warm_ms"):
        time_ms = getattr(candidate, name)
        if time_ms is not None and not _LEAST < time_ms < math.inf:
            return f"{name}: must be a number above {_LEAST:g}, got {time_ms}"
    if candidate.first_run_ms is None and not candidate.error:
        return "error: must say why first_run_ms is null"
    return ""


def _check(place: str, value: Any, lengths: tuple[int | None, ...]) -> None:
    """Checks numbers in nested tuples of these lengths, of which None stands for any."""
    if not lengths:
        if value is not None and not _LEAST < value < math.inf:
            raise ValueError(f"{place}: must be a number above {_LEAST:g}, got {value}")
        return
    if lengths[0] not in (None, len(value)):
        raise ValueError(f"{place}: must have {lengths[0]} entries, got {len(value)}")
    for i, item in enumerate(value):
        _check(f"{place}[{i}]", item, lengths[1:])


def _check_calls(name: str, rounds: Rounds, count: int) -> None:
    if len(rounds.calls) != count:
        raise ValueError(f"{name}.calls: must have {count} entries, got {len(rounds.calls)}")
    for j, calls in enumerate(rounds.calls):
        if calls < 0:
            raise ValueError(f"{name}.calls[{j}]: must be a whole number from 0, got {calls}")
    for i, row in enumerate(rounds.time_ms):
        for j, (time_ms, calls) in enumerate(zip(row, rounds.calls, strict=True)):
            if time_ms is not None and not calls:
                raise ValueError(f"{name}.time_ms[{i}][{j}]: must be null, as calls[{j}] is 0")
