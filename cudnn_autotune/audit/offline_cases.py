"""Audits without a GPU: every mode replays recordings, in this process.

Each run replays with a seed of its own. The truth is computed from all samples of a recording.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cudnn_autotune import sampling
from cudnn_autotune.audit import recordings
from cudnn_autotune.audit.judged_turns import relative_error
from cudnn_autotune.audit.model import BURST_COLD, BURST_HOT, SUSTAINED, Oracle, Pick, Record, Truth
from cudnn_autotune.audit.offline.recording import Recording, Rounds
from cudnn_autotune.audit.offline.replay import ReplayTimer
from cudnn_autotune.sampling import Limits, Selection


class RecordedCase:
    """A recording that modes can be tried on. Raises ValueError for a file that is none, or of
    which no candidate ran."""

    def __init__(self, path: Path) -> None:
        self.id = path.name.removesuffix(".gz").removesuffix(".json")
        try:
            self.recording = Recording.load(path)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error
        if not ReplayTimer(self.recording).truth("burst", "cold"):
            raise ValueError(f"{path}: no candidate of it ran")

    @classmethod
    def shipped(cls, name: str) -> RecordedCase:
        """The case of a recording that the package ships. Raises ValueError for another name."""
        with recordings.path(name) as path:
            return cls(path)

    def described(self) -> dict[str, Any]:
        """The case's entry in ``Record.cases``."""
        return {
            "recording": self.id,
            "gpu": self.recording.environment["gpu"],
            "problem": self.recording.problem.text,
        }

    def open(self, seed: int) -> ReplayTimer:
        """Returns a new timer, in which no plan is built and no kernel loaded."""
        return ReplayTimer(self.recording, seed)

    def oracle(self) -> Oracle:
        """Returns the true times, from all samples of the recording."""
        timer = ReplayTimer(self.recording)
        cold, hot = timer.truth("burst", "cold"), timer.truth("burst", "hot")
        truths = {
            BURST_COLD: Truth(cold, _errors(self.recording, self.recording.cold, cold)),
            BURST_HOT: Truth(hot, _errors(self.recording, self.recording.hot, hot)),
        }
        remarks = []
        alone = _mean(timer.truth("sustained", "cold"), timer.truth("sustained", "hot"))
        if alone:
            truths[SUSTAINED] = Truth(_completed(alone, _mean(cold, hot)))
            if len(alone) < len(cold):
                remarks.append(
                    f"{len(alone)} candidates were recorded alone; the others' sustained times "
                    "follow from their bursts"
                )
        count = len(self.recording.candidates)
        return Oracle(truths, candidates=count, remarks=tuple(remarks))


def _mean(cold: Mapping[str, float], hot: Mapping[str, float]) -> dict[str, float]:
    """Returns the geometric means of the candidates that are in both."""
    return {text: math.sqrt(ms * hot[text]) for text, ms in cold.items() if text in hot}


def _errors(recording: Recording, rounds: Rounds, times: Mapping[str, float]) -> dict[str, float]:
    """Returns relative standard errors of the ratios to the fastest time, paired by round."""
    column = {r.text: i for i, r in enumerate(recording.candidates)}
    best = column[min(times, key=times.__getitem__)]
    found = {}
    for text in times:
        pairs = [(row[column[text]], row[best]) for row in rounds.time_ms]
        ratios = [mine / other for mine, other in pairs if mine is not None and other is not None]
        if column[text] != best and len(ratios) > 1:
            found[text] = relative_error(np.array(ratios))
    return found


def _completed(alone: Mapping[str, float], burst: Mapping[str, float]) -> dict[str, float]:
    """Returns sustained times of all candidates that have a burst time. One without a sustained run
    gets that, slowed down by the median factor of the others; it never becomes the best."""
    slower = float(np.median([alone[text] / burst[text] for text in alone]))
    best = min(alone.values())
    return {
        text: alone[text] if text in alone else max(best, slower * time_ms)
        for text, time_ms in burst.items()
    }


def modes() -> tuple[str, ...]:
    """Returns the modes that a recording can be played to: those that decide at once."""
    return tuple(mode for mode in sampling.names() if not sampling.traits(mode).decides_later)


def pick(case: RecordedCase, mode: str, seed: int, limits: Limits) -> Pick:
    """Runs a mode once. An exception that it raises becomes the pick's ``error``.

    ``seed`` determines the samples and, for the modes that draw the order of their turns, this
    order.
    """
    timer = case.open(seed)
    try:
        selection = select(timer, mode, seed, limits)
    except Exception as error:  # the other runs still count; the record names this one
        found = Pick(tuning_ms=timer.elapsed_ms(), error=f"{type(error).__name__}: {error}")
    else:
        found = Pick.of(selection, timer.elapsed_ms())
    return dataclasses.replace(found, lacking=timer.missing)


def select(timer: ReplayTimer, mode: str, seed: int, limits: Limits) -> Selection | None:
    """Returns what a mode selects; ``seed`` is that of its turns. Raises whatever the mode does."""
    strategy = sampling.get(mode)
    if dataclasses.is_dataclass(strategy) and hasattr(strategy, "seed"):
        strategy = dataclasses.replace(strategy, seed=seed)
    return strategy.select(timer.candidates, timer, limits)


def seed_of(seed: int, *names: object) -> int:
    """Returns a seed for each run of each mode on each case; it is the same on every machine."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def audit(
    record: Record,
    cases: Sequence[RecordedCase],
    runs: Mapping[str, int],
    *,
    limits: Limits,
    seed: int = 0,
    time_limit_s: float | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Fills ``record`` with ``runs[mode]`` runs of each mode on each case.

    The first runs of all modes come before any second run, so that a time limit (of wall seconds)
    leaves all modes with about as many runs. ``progress`` receives the number of runs done and
    the number of all.
    """
    end = None if time_limit_s is None else time.monotonic() + time_limit_s
    for case in cases:
        record.cases[case.id] = case.described()
        record.oracle[case.id] = case.oracle()
    total = sum(runs.values()) * len(cases)
    for index, (mode, run) in enumerate(_steps(runs)):
        if end is not None and index and time.monotonic() > end:
            break
        by_case = record.picks.setdefault(mode, {}).setdefault(str(run), {})
        for place, case in enumerate(cases):
            by_case[case.id] = pick(case, mode, seed_of(seed, case.id, mode, run), limits)
            progress(index * len(cases) + place + 1, total)
    else:
        record.complete = True


def _steps(runs: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    for run in range(1, max(runs.values(), default=0) + 1):
        yield from ((mode, run) for mode, wanted in runs.items() if run <= wanted)
