"""The result of a sampling mode and its evidence, all of which can be written as plain JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cudnn_autotune.core.json_node import Node
from cudnn_autotune.engines.configs import Candidate

_T = TypeVar("_T")


@dataclass(frozen=True)
class Measurement:
    """A candidate and the time that a sampling mode measured for it."""

    candidate: Candidate
    time_ms: float | None
    """Milliseconds of a call in short batches, with all candidates under the same clock; None where
    the mode does not time."""
    samples: int
    """Timed launches behind ``time_ms``."""
    low_ms: float | None = None
    high_ms: float | None = None
    """The confidence interval of ``time_ms`` in milliseconds; None where the mode gives none."""
    sustained_ms: float | None = None
    """Milliseconds of a call when it runs alone until the clock is steady, with a hot cache. Its
    cold-cache penalty relative to the race's leader is added. None if it was not measured."""
    eliminated: str = ""
    """The reason for which it was eliminated; empty for a candidate that stayed to the end. JSON
    calls it ``cut``."""
    runs: str = ""
    """The text of the candidate that this one runs and whose times it has, where PyTorch's own path
    is one of cuDNN's plans; else empty."""

    @property
    def reported_ms(self) -> float | None:
        """Milliseconds of a call: in a sustained run if that was measured, else in short
        batches."""
        return self.sustained_ms or self.time_ms

    def score(self, burst_weight: float) -> float:
        """Returns ``sustained_ms * time_ms ** burst_weight``, of which the least wins; infinity if
        the candidate had no sustained run."""
        if self.sustained_ms is None:
            return math.inf
        return self.sustained_ms * (self.time_ms or 1.0) ** burst_weight


Timed = Measurement
"""The earlier name of :class:`Measurement`."""


@dataclass(frozen=True)
class Evidence:
    """The evidence for a choice."""

    rule: str = ""
    """The rule that decided: ``fastest``, ``tie: less workspace``, ..."""
    tied: tuple[str, ...] = ()
    """Texts of the chosen candidate, of those whose times do not differ significantly from its own,
    and of those within the tie width of the fastest."""
    burst_weight: float = 0.0
    """Among candidates with sustained runs, the one with the least ``log(sustained_ms) +
    burst_weight * log(time_ms)`` wins; 0 to 1."""
    sustained_reach: float = 1.1
    """Only candidates whose time in the race was less than this many times the leader's had
    sustained runs. JSON calls it ``solo_reach``; where it is missing the mode was ``auto``."""
    regret_bound: float | None = None
    """The chosen candidate is at most this much slower than the fastest (0.01: 1 %), at
    ``confidence``; None if no bound is claimed."""
    confidence: float | None = None
    """The confidence of ``regret_bound`` and of the intervals, such as 0.95."""
    gpu_ms: float = 0.0
    """GPU time of all launches in milliseconds, the untimed ones included."""
    wall_ms: float = 0.0
    """Wall time of the search in milliseconds, plan building included."""
    clock_mhz: float | None = None
    """Median SM clock of the short batches."""
    sustained_clock_mhz: float | None = None
    """SM clock at the end of the chosen candidate's last sustained run."""
    max_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    """NVML's names of the reasons seen for a clock below the highest."""
    disturbed: int = 0
    """Number of samples in races that are more than six standard deviations off."""
    budget_ms: float | None = None
    """The budget of wall time in milliseconds if it left something out; else None."""
    remarks: tuple[str, ...] = ()
    """Further remarks, such as that the budget ran out."""


@dataclass(frozen=True)
class Selection:
    """The result of a search: every candidate that it timed or rejected, the chosen one first."""

    ranking: tuple[Measurement, ...]
    total_samples: int
    """Timed launches of all candidates."""
    evidence: Evidence = field(default_factory=Evidence)

    @property
    def winner(self) -> Measurement:
        return self.ranking[0]

    def to_json(self) -> dict[str, Any]:
        """Returns a tree of dicts, lists, texts and numbers, which :meth:`from_json` reads."""
        tree = _plain(dataclasses.asdict(self))
        assert isinstance(tree, dict)
        for entry in tree["ranking"]:
            entry["cut"] = entry.pop("eliminated")
        tree["evidence"]["solo_reach"] = tree["evidence"].pop("sustained_reach")
        return tree

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Selection:
        """Reads a selection; raises ValueError naming what is missing or malformed, and where."""
        selection = _read(Node(tree, "selection"), cls, _SELECTION)
        if not selection.ranking:
            raise ValueError("selection.ranking: must not be empty")
        return selection


_Read = Callable[[Node], Any]

# JSON keys that store files have always had -> the fields of today.
_FIELDS = {"cut": "eliminated", "solo_reach": "sustained_reach"}


def _texts(node: Node) -> tuple[str, ...]:
    return tuple(item.text() for item in node.items())


def _share(node: Node) -> float:
    if (value := node.number()) > 1:
        raise node.error("a number from 0 to 1")
    return value


def _factor(node: Node) -> float:
    if (value := node.number()) < 1:
        raise node.error("a number of 1 or more")
    return value


def _read(node: Node, cls: Callable[..., _T], readers: Mapping[str, _Read]) -> _T:
    """Reads an object field by field. A field that is missing gets its default, if it has one."""
    given = node.object()
    for name in given:
        if name not in readers:
            raise ValueError(f"{node.place}.{name}: is not a known field")
    values = {
        _FIELDS.get(name, name): read(given[name])
        for name, read in readers.items()
        if name in given
    }
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"{node.place}: {error}") from error


_CANDIDATE: dict[str, _Read] = {
    "engine": lambda node: None if node.value is None else node.integer(),
    "knobs": lambda node: {k: v.integer(-(2**63)) for k, v in node.object().items()},
    "workspace_bytes": Node.integer,
    "numerical_notes": _texts,
    "behavior_notes": _texts,
    "text": Node.text,
    "heuristic_mode": Node.text,
    "rank": Node.integer,
}
_TIMED: dict[str, _Read] = {
    "candidate": lambda node: _read(node, Candidate, _CANDIDATE),
    "samples": Node.integer,
    "cut": Node.text,
    "runs": Node.text,
    **dict.fromkeys(("time_ms", "low_ms", "high_ms", "sustained_ms"), Node.number_or_null),
}
_MHZ = ("clock_mhz", "sustained_clock_mhz", "max_clock_mhz")
_EVIDENCE: dict[str, _Read] = {
    "rule": Node.text,
    "disturbed": Node.integer,
    **dict.fromkeys(("tied", "throttle_reasons", "remarks"), _texts),
    **dict.fromkeys(("gpu_ms", "wall_ms"), Node.number),
    "burst_weight": _share,
    "solo_reach": _factor,
    **dict.fromkeys(("regret_bound", "confidence", "budget_ms", *_MHZ), Node.number_or_null),
}
_SELECTION: dict[str, _Read] = {
    "ranking": lambda node: tuple(_read(item, Measurement, _TIMED) for item in node.items()),
    "total_samples": Node.integer,
    "evidence": lambda node: _read(node, Evidence, _EVIDENCE),
}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
