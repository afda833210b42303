"""The findings of an unfinished trial of ``online``, for a later process that goes on with it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cudnn_autotune.core import json_dataclass
from cudnn_autotune.engines.configs import Candidate
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.sampling.statistics import Floats

# Turns are compared as ratios, to a hundredth of a percent.
_DIGITS = 5


@dataclass(frozen=True)
class KeptTurns:
    """A candidate of a trial."""

    text: str
    times_ms: tuple[float, ...] = ()
    """The time of its turn in each round, in milliseconds; 0 in a round without. Empty if it was
    eliminated."""
    eliminated: str = ""
    """The reason for which it was eliminated; empty if it takes turns."""
    time_ms: float | None = None
    """Milliseconds of a call, if it was eliminated."""
    samples: int = 0
    """The number of its timed turns if it was eliminated."""

    def log_ms(self) -> Floats:
        """Returns the log times of its turns; infinity in a round without."""
        times_ms = np.array(self.times_ms)
        return np.log(times_ms, out=np.full(len(times_ms), math.inf), where=times_ms > 0)

    def measurement(self, candidate: Candidate) -> Measurement:
        """Returns the measurement of the candidate, which was eliminated."""
        return Measurement(candidate, self.time_ms, self.samples, eliminated=self.eliminated)


@dataclass(frozen=True)
class TrialRecord:
    """The candidates of a trial, those that take turns first, from the fastest to the slowest."""

    candidates: tuple[KeptTurns, ...] = ()
    regret_bound: float = 0.0
    """Largest relative lead that a candidate which gave way may have over those that take turns."""

    @cached_property
    def by_text(self) -> dict[str, KeptTurns]:
        return {kept.text: kept for kept in self.candidates}

    @property
    def rounds(self) -> int:
        return max((len(kept.times_ms) for kept in self.candidates), default=0)

    def is_out(self, text: str) -> bool:
        """Returns whether the candidate of this text was eliminated."""
        kept = self.by_text.get(text)
        return kept is not None and bool(kept.eliminated)

    def place(self, candidate: Candidate) -> int:
        """Returns the place at which a candidate joins again; new ones join last."""
        places = list(self.by_text)
        return places.index(candidate.text) if candidate.text in places else len(places)

    def to_json(self) -> object:
        return json_dataclass.encode(self, _DIGITS)

    @classmethod
    def from_json(cls, tree: object) -> TrialRecord:
        """Raises ValueError if ``tree`` is not what :meth:`to_json` returns."""
        return json_dataclass.decode(cls, tree)
