"""How long the oracle measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Solo = Literal["never", "throttled", "always"]
SOLO: tuple[Solo, ...] = get_args(Solo)
"""From the least that is measured to the most."""


@dataclass(frozen=True)
class OracleSettings:
    """The defaults keep the short rounds of a case below about half a second of GPU time."""

    rounds: int = 16
    """Of each cache state."""
    batch_ms: float = 0.5
    survivors: int = 10
    """At most, besides what was picked."""
    within: float = 1.10
    """Of the best, to survive."""
    solo: Solo = "never"
    probe_ms: float = 150.0
    clock_drop: float = 0.015
    """Relative to the highest clock, from which on the probe counts as throttled."""
    solo_ms: float = 300.0
    """Least length of a sustained run; it goes on to three times that until it is steady."""
    solo_candidates: int = 4
    """At most, besides what was picked."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 2:
            raise ValueError(f"rounds must be 2 or more, got {self.rounds}")
        if self.survivors < 1:
            raise ValueError(f"survivors must be 1 or more, got {self.survivors}")
        if self.within < 1:
            raise ValueError(f"within must be 1 or more, got {self.within}")
        for name in ("batch_ms", "probe_ms", "solo_ms"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.solo not in SOLO:
            raise ValueError(f"solo must be one of {', '.join(SOLO)}, got {self.solo!r}")
