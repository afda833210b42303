"""Audits without a GPU: every mode on a simulation or on a recording, in this process.

A run is a fresh timer with a seed of its own. What is true is known beforehand: exactly for a
simulation, from all samples for a recording.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from cudnn_autotune import sampling
from cudnn_autotune.audit.analysis import keep_missed
from cudnn_autotune.audit.model import (
    BURST,
    BURST_COLD,
    BURST_HOT,
    SUSTAINED,
    Oracle,
    Pick,
    Record,
    Truth,
)
from cudnn_autotune.audit.pairing import relative_error
from cudnn_autotune.engines.candidates import Candidates
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.sampling.strategy import Limits
from cudnn_autotune.timers import recordings
from cudnn_autotune.timers.offline import simulated
from cudnn_autotune.timers.offline.recording_format import Recording
from cudnn_autotune.timers.offline.recording_parts import Rounds
from cudnn_autotune.timers.offline.replay import ReplayTimer
from cudnn_autotune.timers.timer import Cache, Timer


class Scene(Protocol):
    """A case that modes can be tried on."""

    @property
    def id(self) -> str: ...

    def described(self) -> dict[str, Any]:
        """As plain JSON."""

    def open(self, seed: int) -> tuple[Timer, Candidates]:
        """As a fresh process would find it."""

    def oracle(self) -> Oracle: ...

    def lacking(self, timer: Timer) -> tuple[str, ...]:
        """What a mode asked ``timer`` for that the scene does not have."""


class SimulatedScene:
    """A preset of the simulation.

    Raises:
        ValueError: an unknown name.
    """

    def __init__(self, name: str) -> None:
        self.id = name
        self._timer = simulated.preset(name)

    def described(self) -> dict[str, Any]:
        return {"simulation": self.id, "gpu": self._timer.gpu.name}

    def open(self, seed: int) -> tuple[simulated.SimulatedTimer, Candidates]:
        timer = simulated.preset(self.id, seed)
        return timer, timer.candidates

    def oracle(self) -> Oracle:
        truths = {name: Truth(times) for name, times in _bursts(self._timer).items()}
        truths[SUSTAINED] = Truth(_sustained(self._timer))
        return Oracle(truths, candidates=len(self._timer.engines))

    def lacking(self, timer: Timer) -> tuple[str, ...]:
        return ()


class RecordedScene:
    """A recording of a GPU.

    Raises:
        ValueError: the file is no recording, or nothing in it ran.
    """

    def __init__(self, path: Path) -> None:
        self.id = path.name.removesuffix(".gz").removesuffix(".json")
        try:
            self.recording = Recording.load(path)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from error
        if not ReplayTimer(self.recording).truth("burst", "cold"):
            raise ValueError(f"{path}: no candidate of it ran")

    @classmethod
    def shipped(cls, name: str) -> RecordedScene:
        """Of a recording that the package ships. ValueError: an unknown name."""
        with recordings.path(name) as path:
            return cls(path)

    def described(self) -> dict[str, Any]:
        return {
            "recording": self.id,
            "gpu": self.recording.environment["gpu"],
            "problem": self.recording.problem.text,
        }

    def open(self, seed: int) -> tuple[ReplayTimer, Candidates]:
        timer = ReplayTimer(self.recording, seed)
        return timer, timer.candidates

    def oracle(self) -> Oracle:
        timer = ReplayTimer(self.recording)
        burst = _bursts(timer)
        rounds = {BURST_COLD: self.recording.cold, BURST_HOT: self.recording.hot}
        truths = {
            name: Truth(times, _errors(self.recording, rounds[name], times))
            for name, times in burst.items()
        }
        remarks = []
        alone = _sustained(timer)
        if alone:
            truths[SUSTAINED] = Truth(_completed(alone, _mean(burst[BURST_COLD], burst[BURST_HOT])))
            if len(alone) < len(burst[BURST_COLD]):
                remarks.append(
                    f"{len(alone)} candidates were recorded alone; the others' sustained times "
                    "follow from their bursts"
                )
        count = len(self.recording.candidates)
        return Oracle(truths, candidates=count, remarks=tuple(remarks))

    def lacking(self, timer: Timer) -> tuple[str, ...]:
        return timer.missing if isinstance(timer, ReplayTimer) else ()


class _Knowing(Protocol):
    """A timer that knows what is true."""

    def truth(
        self, kind: Literal["burst", "sustained"] = ..., cache: Cache = ...
    ) -> dict[str, float]: ...


def _bursts(timer: _Knowing) -> dict[str, dict[str, float]]:
    return {BURST_COLD: timer.truth("burst", "cold"), BURST_HOT: timer.truth("burst", "hot")}


def _sustained(timer: _Knowing) -> dict[str, float]:
    return _mean(timer.truth("sustained", "cold"), timer.truth("sustained", "hot"))


def _mean(cold: Mapping[str, float], hot: Mapping[str, float]) -> dict[str, float]:
    """Geometric; of those that both know."""
    return {text: math.sqrt(ms * hot[text]) for text, ms in cold.items() if text in hot}


def _errors(recording: Recording, rounds: Rounds, times: Mapping[str, float]) -> dict[str, float]:
    """Relative standard errors of the distances from the fastest, paired round by round."""
    column = {r.candidate.text: i for i, r in enumerate(recording.candidates)}
    best = column[min(times, key=times.__getitem__)]
    found = {}
    for text in times:
        pairs = [(row[column[text]], row[best]) for row in rounds.time_ms]
        ratios = [mine / other for mine, other in pairs if mine is not None and other is not None]
        if column[text] != best and len(ratios) > 1:
            found[text] = relative_error(np.array(ratios))
    return found


def _completed(alone: Mapping[str, float], burst: Mapping[str, float]) -> dict[str, float]:
    """``alone``, and for the rest their burst times, slowed down as the median of ``alone`` is;
    none of those may be the best, which was not seen to be."""
    slower = float(np.median([alone[text] / burst[text] for text in alone]))
    best = min(alone.values())
    return {
        text: alone[text] if text in alone else max(best, slower * time_ms)
        for text, time_ms in burst.items()
    }


def pick_of(selection: Selection | None, tuning_ms: float) -> Pick:
    """What a strategy's outcome says, for the record."""
    if selection is None:
        return Pick(tuning_ms=tuning_ms, error="no candidate runs")
    winner, evidence = selection.winner, selection.evidence
    # A leader that was probed alone, without rivals, was still chosen by the race.
    alone = sum(timed.sustained_ms is not None for timed in selection.ranking)
    return Pick(
        text=winner.candidate.text,
        tuning_ms=tuning_ms,
        gpu_ms=evidence.gpu_ms or None,
        time_ms=winner.time_ms,
        samples=selection.total_samples,
        regret_bound=evidence.regret_bound,
        bound_truth=SUSTAINED if alone > 1 else BURST,
        confidence=evidence.confidence,
        rule=evidence.rule,
        clock_mhz=evidence.clock_mhz,
        sustained_clock_mhz=evidence.sustained_clock_mhz,
        throttle_reasons=evidence.throttle_reasons,
        disturbed=evidence.disturbed,
        passed_over={
            timed.candidate.text: _account(timed, winner)
            for timed in selection.ranking
            if timed.candidate != winner.candidate
        },
        remarks=evidence.remarks,
    )


def _account(timed: Measurement, winner: Measurement) -> str:
    """What a strategy says of one that it did not take."""
    alone = (" alone", timed.sustained_ms, winner.sustained_ms)
    for how, ms, winners_ms in (alone, ("", timed.time_ms, winner.time_ms)):
        if ms and winners_ms:
            behind = f"{100 * (ms / winners_ms - 1):+.1f} %{how}"
            return f"{timed.eliminated} ({behind})" if timed.eliminated else behind
    return timed.eliminated or "not timed"


def pick(scene: Scene, mode: str, seed: int, limits: Limits) -> Pick:
    """One run of a mode; what it raises becomes the pick's ``error``."""
    timer, candidates = scene.open(seed)
    try:
        selection = sampling.get(mode).select(candidates, timer, limits)
    except Exception as error:  # the other runs still count; the record names this one
        why = f"{type(error).__name__}: {error}"
        return Pick(tuning_ms=timer.elapsed_ms(), error=why, lacking=scene.lacking(timer))
    found = pick_of(selection, timer.elapsed_ms())
    return dataclasses.replace(found, lacking=scene.lacking(timer))


def seed_of(seed: int, *names: object) -> int:
    """A seed for each run of each mode on each case, the same on every machine."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def audit(
    record: Record,
    scenes: Sequence[Scene],
    runs: Mapping[str, int],
    *,
    limits: Limits,
    seed: int = 0,
    time_limit_s: float | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Fills ``record``: ``runs[mode]`` runs of each mode on each scene, run by run, so that a time
    limit (of real seconds) leaves all modes with about as many.

    ``progress`` is told how many runs are done, and of how many.
    """
    end = None if time_limit_s is None else time.monotonic() + time_limit_s
    for scene in scenes:
        record.cases[scene.id] = scene.described()
        record.oracle[scene.id] = scene.oracle()
    steps = list(_steps(runs))
    total = len(steps) * len(scenes)
    for index, (mode, run) in enumerate(steps):
        if end is not None and index and time.monotonic() > end:
            break
        by_case = record.picks.setdefault(mode, {}).setdefault(str(run), {})
        for place, scene in enumerate(scenes):
            by_case[scene.id] = pick(scene, mode, seed_of(seed, scene.id, mode, run), limits)
            keep_missed(record, scene.id)
            progress(index * len(scenes) + place + 1, total)
    else:
        record.complete = True


def _steps(runs: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    for run in range(1, max(runs.values(), default=0) + 1):
        yield from ((mode, run) for mode, wanted in runs.items() if run <= wanted)
