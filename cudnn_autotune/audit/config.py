"""The configuration of an audit and of its oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

Solo = Literal["never", "throttled", "always"]
SOLO: tuple[Solo, ...] = get_args(Solo)
"""When candidates get sustained runs, from the least measuring to the most."""


@dataclass(frozen=True)
class OracleSettings:
    """How long the oracle measures; by default about half a second of GPU time for a case."""

    rounds: int = 16
    """Rounds with a cold cache, and as many with a hot one."""
    batch_ms: float = 0.5
    survivors: int = 10
    """The most candidates that reach the rounds, not counting picked ones."""
    within: float = 1.10
    """Candidates up to this factor behind the best reach the rounds."""
    solo: Solo = "never"
    probe_ms: float = 150.0
    """How long the leader runs alone to find out whether the board throttles."""
    clock_drop: float = 0.015
    """The board throttles when the probe's clock is lower than the highest by this share."""
    solo_ms: float = 300.0
    """Least length of a sustained run; it goes on to three times that until it is steady."""
    solo_candidates: int = 4
    """The most candidates with sustained runs, not counting picked ones."""
    seed: int = 0


@dataclass(frozen=True)
class AuditConfig:
    """The configuration of an audit in fresh processes."""

    runs: Mapping[str, int]
    """How many times each of our modes runs."""
    pytorch: Sequence[str]
    """Names of ``model.PYTORCH_MODES``."""
    reference: str
    """PyTorch is compared with what this mode, one of ``runs``, picked in its first run."""
    oracle: OracleSettings = field(default_factory=OracleSettings)
    budget_ms: float | None = None
    """The most milliseconds that a choice may take; None stands for no limit."""
    time_limit_s: float | None = None
    """About the most seconds that one session may take; None stands for no limit."""
    case_limit_s: float = 60.0
    """A process that takes longer for a case is killed, and the case counts as failed."""
    modules: Sequence[str] = ()
    """Modules that every process imports first: they may register modes."""
    backend: str = "cudnn_autotune.audit.gpu"
    """The module whose ``open_backend`` makes what does the work in a process (see ``worker``)."""
