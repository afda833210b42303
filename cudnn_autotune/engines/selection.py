"""What a strategy decides, and on what grounds. All of it round-trips through plain JSON."""

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
    """A candidate and the time that a strategy credits it with."""

    candidate: Candidate
    time_ms: float | None
    """Milliseconds a call in short batches, every candidate under the same clock; None where the
    strategy does not time."""
    samples: int
    """Timed launches behind ``time_ms``."""
    low_ms: float | None = None
    high_ms: float | None = None
    """The interval of ``time_ms`` at the strategy's confidence; None where it gives none."""
    sustained_ms: float | None = None
    """Milliseconds a call when it runs alone until the clock is steady, the cache hot; what a cold
    one costs it more than the race's leader is added. None: not measured."""
    eliminated: str = ""
    """Why it left the search early; empty for a candidate that stayed to the end."""
    runs: str = ""
    """The text of another candidate that this one is, and whose times it has: PyTorch's own path
    where it runs one of cuDNN's plans; else empty."""

    @property
    def reported_ms(self) -> float | None:
        """Milliseconds a call: alone where that was measured, else in short batches."""
        return self.sustained_ms or self.time_ms

    def score(self, burst_weight: float) -> float:
        """Of those that ran alone, the less the better, by ``Evidence.burst_weight``; of the others
        infinite."""
        if self.sustained_ms is None:
            return math.inf
        return self.sustained_ms * (self.time_ms or 1.0) ** burst_weight


Timed = Measurement
"""The earlier name of :class:`Measurement`."""


@dataclass(frozen=True)
class Evidence:
    """How a choice came about."""

    rule: str = ""
    """What decided, in words: ``fastest``, ``tie: less workspace``, ..."""
    tied: tuple[str, ...] = ()
    """Texts of the candidates that the measurement could not tell from the chosen one, or found
    within the tie width of the fastest; the chosen one among them."""
    burst_weight: float = 0.0
    """Of candidates that ran alone, the least ``log(sustained_ms) + burst_weight * log(time_ms)``
    was looked for; 0 to 1."""
    sustained_reach: float = 1.1
    """Nobody ran alone whose time in the race was this many times the leader's, or more. What was
    written down before it was told has the value of the mode ``auto``."""
    regret_bound: float | None = None
    """The chosen one is at most this much slower than the fastest (0.01: 1 %), at the strategy's
    confidence; None where it claims nothing."""
    confidence: float | None = None
    """Of ``regret_bound`` and the intervals, as 0.95."""
    gpu_ms: float = 0.0
    """GPU time of all launches, the untimed ones included."""
    wall_ms: float = 0.0
    """Wall time of the strategy, plan building included."""
    clock_mhz: float | None = None
    """Median SM clock of the short batches."""
    sustained_clock_mhz: float | None = None
    """SM clock at the end of the chosen one's last sustained run."""
    max_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    """NVML's names of the reasons seen for a clock below the highest."""
    disturbed: int = 0
    """Samples of the races that something disturbed: more than six standard deviations off."""
    budget_ms: float | None = None
    """The wall time that the choice was allowed, where that left something out; None where nothing
    was left out."""
    remarks: tuple[str, ...] = ()
    """What else a reader should know: a budget that ran out, a probe that was not needed."""


@dataclass(frozen=True)
class Selection:
    """The outcome of a strategy: every candidate that it looked at, the chosen one first."""

    ranking: tuple[Measurement, ...]
    total_samples: int
    """Timed launches of all candidates."""
    evidence: Evidence = field(default_factory=Evidence)

    @property
    def winner(self) -> Measurement:
        return self.ranking[0]

    def to_json(self) -> dict[str, Any]:
        """A tree of dicts, lists, texts and finite numbers; :meth:`from_json` is its inverse."""
        tree = _plain(dataclasses.asdict(self))
        assert isinstance(tree, dict)
        for entry in tree["ranking"]:
            entry["cut"] = entry.pop("eliminated")
        tree["evidence"]["solo_reach"] = tree["evidence"].pop("sustained_reach")
        return tree

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Selection:
        """Raises ValueError naming what is missing or malformed, and its place in the tree."""
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
    """An object whose fields ``readers`` read; one that is missing gets its default, if any."""
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
