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
    """The settings of the oracle. Without sustained runs it takes about half a second of GPU time a
    case."""

    solo: Solo = "never"
    seed: int = 0


@dataclass(frozen=True)
class AuditConfig:
    """The configuration of an audit in fresh processes."""

    runs: Mapping[str, int]
    """Number of runs of each of our modes."""
    pytorch: Sequence[str]
    """Names of ``model.PYTORCH_MODES``."""
    reference: str
    """The mode, one of ``runs``, with whose first pick PyTorch is compared."""
    oracle: OracleSettings = field(default_factory=OracleSettings)
    budget_ms: float | None = None
    """The most milliseconds that a choice may take; None stands for no limit."""
    time_limit_s: float | None = None
    """About the most seconds that one session may take; None stands for no limit."""
    case_limit_s: float = 60.0
    """Most seconds of a process for a case; a slower one is killed, and the case counts as
    failed."""
    modules: Sequence[str] = ()
    """Modules that every process imports first: they may register modes."""
    backend: str = "cudnn_autotune.audit.gpu"
    """The module whose ``open_backend`` makes what does the work in a process (see ``worker``)."""
