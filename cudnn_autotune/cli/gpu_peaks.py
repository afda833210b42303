"""The peaks of the GPU that a command is about, read or measured, and how far decisions are from
the limits that they set."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from cudnn_autotune.cli.wording import say
from cudnn_autotune.engines.roofline import Limit, Peaks, limit
from cudnn_autotune.store import peaks_file
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment

HOW = "`cudnn-autotune env --measure` measures them on the GPU"


def known(place: Path, environment: Environment) -> Peaks | None:
    """The peaks that were measured; None if they were not."""
    found = peaks_file.find(place, environment)
    return found.peaks if found else None


def known_or_measured(place: Path, environment: Environment) -> Peaks | None:
    """Returns the peaks as :func:`known` does; measures them if they are not known, and the GPU
    is here."""
    found = known(place, environment)
    if found is None and torch.cuda.is_available():
        here = Environment.of()
        if peaks_file.gpu_of(here) == peaks_file.gpu_of(environment):
            return measured(place, here)
    return found


def measured(place: Path, here: Environment) -> Peaks | None:
    """Measures the current CUDA device and keeps the result, unless the store's mode forbids it.
    What goes wrong is said on standard error; None if nothing could be measured."""
    from cudnn_autotune.timers import peaks

    try:
        found = peaks.measure()
    except RuntimeError as error:
        say(f"the peaks of {here.gpu} cannot be measured: {error}", err=True)
        return None
    if store_settings.is_written():
        try:
            peaks_file.keep(place, here, found)
        except OSError as error:
            say(f"the peaks of {here.gpu} cannot be written: {error}", err=True)
    return found


@dataclass(frozen=True)
class Far:
    """A decision with a time, and the limit of its problem."""

    decision: Decision
    time_ms: float
    """Milliseconds of a call in short batches."""
    limit: Limit

    @property
    def times_limit(self) -> float:
        return self.limit.times(self.time_ms)

    @property
    def gain_ms(self) -> float:
        return self.limit.gain_ms(self.time_ms)


def far(decision: Decision, peaks: Peaks | None) -> Far | None:
    """Compares a decision with its limit; None if the peaks are not known, or the mode did not time
    what was chosen."""
    chosen = decision.chosen
    if peaks is None or chosen is None or not chosen.time_ms:
        return None
    return Far(decision, chosen.time_ms, limit(decision.problem, peaks))


def farthest(decisions: Iterable[Decision], peaks: Peaks | None, most: int) -> list[Far]:
    """Returns those with the most time to win, first the most; only decisions slower than their
    limit."""
    found = (one for d in decisions if (one := far(d, peaks)) is not None and one.gain_ms > 0)
    return heapq.nsmallest(most, found, key=lambda one: -one.gain_ms)
