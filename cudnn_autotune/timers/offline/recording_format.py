"""Raw samples of one problem on one GPU, and the file that holds them.

The file is JSON (gzip where its name ends in ``.gz``): an object with ``format`` and the fields of
:class:`Recording`. Times are milliseconds, rounded to five digits. A candidate takes
the same place in every list; null says that it took no part.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudnn_autotune.core import atomic_file
from cudnn_autotune.core.json_node import read_json, shown
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.timers.offline.recording_json import VERSION, fields_from_json, to_json
from cudnn_autotune.timers.offline.recording_parts import (
    Reading,
    RecordedCandidate,
    Rounds,
    Row,
    SoloTrace,
)

# Uncompressed: fifty times as much as a usual one has.
_MOST_BYTES = 4 * 2**20
_MOST_CANDIDATES = 1000

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
"""What ``Recording.environment`` has at least; values may be None."""


@dataclass(frozen=True)
class Recording:
    """All that was measured. :func:`recording.record` makes one, ``ReplayTimer`` plays it.

    Raises:
        ValueError: lists whose lengths do not fit, or a trace or reading of an unknown candidate.
    """

    environment: Mapping[str, str | int | float | None]
    problem: ConvProblem
    aten_uses_cudnn: bool
    candidates: tuple[RecordedCandidate, ...]
    cold: Rounds
    hot: Rounds
    lone: tuple[Row, ...]
    """Single launches that the host waited for, hot cache, as cuDNN's own search times them: pass
    by pass, by candidate."""
    solo: tuple[SoloTrace, ...]
    readings: tuple[Reading, ...]
    build_threads: int
    """How many plans were compiled at run time side by side."""
    run_overhead_ms: float
    """Host time that the ``Timer.run`` of a round took beyond its batches: launches that are queued
    up, operands that are cooled."""
    remarks: tuple[str, ...] = ()
    """What cut the recording short."""
    version: int = VERSION
    """Of the file's format. Version 1 kept neither the power of ``solo`` nor whether the board
    tells of all that holds its clock: where :attr:`lacks_power`, modes that decide by these decide
    otherwise than on the GPU."""

    @property
    def lacks_power(self) -> bool:
        """Whether what the board drew was not kept, though it may have been known."""
        return self.version < 2

    def __post_init__(self) -> None:
        for name in ENVIRONMENT:
            if name not in self.environment:
                raise ValueError(f"environment.{name}: is missing")
        if len(self.candidates) > _MOST_CANDIDATES:
            most = f"must be at most {_MOST_CANDIDATES}"
            raise ValueError(f"candidates: {most}, got {len(self.candidates)}")
        texts: dict[str, None] = {}
        ran = {c.candidate.text for c in self.candidates if c.first_run_ms is not None}
        for i, candidate in enumerate(self.candidates):
            if candidate.candidate.text in texts:
                told = shown(candidate.candidate.text)
                raise ValueError(f"candidates[{i}].text: {told} is listed twice")
            texts[candidate.candidate.text] = None
        for name, rounds in (("cold", self.cold), ("hot", self.hot)):
            _check_length(f"{name}.calls", rounds.calls, len(texts))
            _check_rows(f"{name}.time_ms", rounds.time_ms, len(texts))
            _check_rows(f"{name}.clock_mhz", rounds.clock_mhz, len(texts))
            _check_length(f"{name}.clock_mhz", rounds.clock_mhz, len(rounds.time_ms))
            _check_calls(name, rounds)
        _check_rows("lone", self.lone, len(texts))
        for i, trace in enumerate(self.solo):
            if trace.text not in ran:
                raise ValueError(f"solo[{i}].text: {shown(trace.text)} is no candidate that ran")
            if not trace.at_ms:
                raise ValueError(f"solo[{i}].at_ms: must not be empty")
            _check_length(f"solo[{i}].time_ms", trace.time_ms, len(trace.at_ms))
            _check_length(f"solo[{i}].clock_mhz", trace.clock_mhz, len(trace.at_ms))
            if (trace.power_w is None) != self.lacks_power:
                raise ValueError(f"solo[{i}].power_w: must be there from version 2 on")
            if trace.power_w is not None:
                _check_length(f"solo[{i}].power_w", trace.power_w, len(trace.at_ms))
            if any(b <= a for a, b in zip(trace.at_ms, trace.at_ms[1:], strict=False)):
                raise ValueError(f"solo[{i}].at_ms: must rise")
        for i, reading in enumerate(self.readings):
            if reading.phase not in ("start", "rounds") and reading.phase not in texts:
                raise ValueError(
                    f"readings[{i}].phase: must be start, rounds or a candidate's text, "
                    f"got {shown(reading.phase)}"
                )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, in one step: an older one is replaced, or, where this raises, left as
        it was.

        Raises:
            ValueError: there is more in it than :meth:`load` would read. OSError: as ``open``.
        """
        text = json.dumps(to_json(vars(self)), separators=(",", ":"), allow_nan=False) + "\n"
        data = text.encode()
        if len(data) > _MOST_BYTES:
            raise ValueError(f"a recording may have {_MOST_BYTES} bytes at most, got {len(data)}")
        target = Path(path)
        if target.name.endswith(".gz"):
            data = gzip.compress(data, mtime=0)
        atomic_file.write(target, data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Reads a file that :meth:`save` wrote.

        Raises:
            ValueError: naming the file and the field, and what is wrong with it.
            OSError: the file cannot be read.
        """
        try:
            return cls(**fields_from_json(read_json(Path(path), _MOST_BYTES)))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error


def _check_length(place: str, values: tuple[Any, ...], length: int) -> None:
    if len(values) != length:
        raise ValueError(f"{place}: must have {length} entries, got {len(values)}")


def _check_rows(place: str, rows: tuple[Row, ...], length: int) -> None:
    for i, row in enumerate(rows):
        _check_length(f"{place}[{i}]", row, length)


def _check_calls(name: str, rounds: Rounds) -> None:
    for i, row in enumerate(rounds.time_ms):
        for j, (time_ms, calls) in enumerate(zip(row, rounds.calls, strict=True)):
            if time_ms is not None and not calls:
                raise ValueError(f"{name}.time_ms[{i}][{j}]: must be null, as calls[{j}] is 0")
