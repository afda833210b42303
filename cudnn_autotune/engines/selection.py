"""The result of a sampling mode and its evidence, which plain JSON can represent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cudnn_autotune.core import json_dataclass
from cudnn_autotune.engines.configs import Candidate


@dataclass(frozen=True)
class Measurement:
    """A candidate and the time that a sampling mode measured for it."""

    candidate: Candidate
    time_ms: float | None
    """Milliseconds of a call in short batches, all candidates under one clock; None if the mode
    does not time."""
    samples: int
    """Number of timed launches for ``time_ms``."""
    low_ms: float | None = None
    high_ms: float | None = None
    """The confidence interval of ``time_ms`` in milliseconds; None if the mode gives none."""
    sustained_ms: float | None = None
    """Milliseconds of a call alone until the clock is steady, with a hot cache; None if not
    measured."""
    eliminated: str = ""
    """The reason for its elimination; empty for a candidate that stayed to the end."""
    runs: str = ""
    """The candidate that PyTorch's own path runs, as text, and whose times it has; else empty."""

    @property
    def reported_ms(self) -> float | None:
        """Milliseconds of a call: in a sustained run if measured, else in short batches."""
        return self.sustained_ms or self.time_ms

    def score(self, burst_weight: float) -> float:
        """Returns ``sustained_ms * time_ms ** burst_weight``; the least score wins. It is infinity
        without a sustained run."""
        if self.sustained_ms is None:
            return math.inf
        return self.sustained_ms * (self.time_ms or 1.0) ** burst_weight


@dataclass(frozen=True)
class Evidence:
    """The evidence for a choice.

    Raises:
        ValueError: ``burst_weight`` or ``sustained_reach`` is out of its range.
    """

    rule: str = ""
    """The rule that decided: ``fastest``, ``tie: less workspace``, ..."""
    tied: tuple[str, ...] = ()
    """Texts of the chosen candidate, of candidates without a significant difference to it, and of
    candidates within the tie width of the fastest."""
    burst_weight: float = 0.0
    """Weight, 0 to 1, of the time in short batches. Of the candidates with sustained runs, the
    least ``log(sustained_ms) + burst_weight * log(time_ms)`` wins."""
    sustained_reach: float = 1.1
    """Factor, 1 or more. Candidates within this factor of the leader's time in the race had
    sustained runs."""
    regret_bound: float | None = None
    """Largest relative loss of the chosen candidate to the fastest (0.01: 1 %), at
    ``confidence``; None if no bound is claimed."""
    confidence: float | None = None
    """The confidence of ``regret_bound`` and of the intervals, such as 0.95."""
    gpu_ms: float = 0.0
    """GPU time of all launches in milliseconds, the untimed ones included."""
    wall_ms: float = 0.0
    """Wall time of the search in milliseconds, plan building included."""
    clock_mhz: float | None = None
    """Median SM clock of the rounds of the last race."""
    sustained_clock_mhz: float | None = None
    """SM clock at the end of the chosen candidate's last sustained run."""
    max_clock_mhz: float | None = None
    """The highest SM clock of the GPU."""
    throttle_reasons: tuple[str, ...] = ()
    """NVML's names of the reasons seen for a clock below the highest."""
    disturbed: int = 0
    """Number of samples in races with more than six standard deviations of error."""
    budget_ms: float | None = None
    """The budget of wall time in milliseconds if it cut the search short; else None."""
    remarks: tuple[str, ...] = ()
    """Further remarks, such as that the budget ran out."""
    provisional: str = ""
    """The reason why the choice is not final, such as candidates left out for lack of memory; empty
    if it is final. A provisional choice serves until the next search, and no store keeps it."""

    def __post_init__(self) -> None:
        if not 0 <= self.burst_weight <= 1:
            raise ValueError(f"burst_weight must be from 0 to 1, got {self.burst_weight}")
        if not self.sustained_reach >= 1:
            raise ValueError(f"sustained_reach must be 1 or more, got {self.sustained_reach}")

    @property
    def rule_in_words(self) -> str:
        """The rule; "fastest so far, undecided" if others could not be distinguished from the
        fastest."""
        is_open = len(self.tied) > 1 or any("undecided" in remark for remark in self.remarks)
        return "fastest so far, undecided" if self.rule == "fastest" and is_open else self.rule


@dataclass(frozen=True)
class Selection:
    """The result of a search: every timed or rejected candidate, the chosen one first."""

    ranking: tuple[Measurement, ...]
    """The candidates, the chosen one first."""
    total_samples: int
    """Timed launches of all candidates."""
    evidence: Evidence = field(default_factory=Evidence)

    @property
    def winner(self) -> Measurement:
        """The chosen candidate with its time."""
        return self.ranking[0]

    def to_json(self) -> dict[str, Any]:
        """Returns a tree of dicts, lists, texts and numbers, which :meth:`from_json` reads.

        Fields at their default are left out, and a number that is not finite is None.
        """
        tree: dict[str, Any] = json_dataclass.encode(self, digits=17)
        return tree

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Selection:
        """Reads a selection; raises ValueError naming what is missing or malformed, and where."""
        return json_dataclass.decode(cls, tree, "selection")
