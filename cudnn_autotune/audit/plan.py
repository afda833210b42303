"""What an audit in fresh processes is to do, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cudnn_autotune.audit.model import PYTORCH_MODES
from cudnn_autotune.audit.oracle_settings import OracleSettings

ORACLE = "oracle"


@dataclass(frozen=True)
class Plan:
    """What a session is to do."""

    backend: str
    """``gpu`` or ``simulation`` (``worker.BACKENDS``)."""
    runs: Mapping[str, int]
    """Our modes -> how many runs."""
    pytorch: Sequence[str]
    """Of ``PYTORCH_MODES``."""
    reference: str
    """Our mode whose first run picks what PyTorch is compared with."""
    oracle: OracleSettings = field(default_factory=OracleSettings)
    budget_ms: float | None = None
    time_limit_s: float | None = None
    case_limit_s: float = 60.0
    """A process that takes longer for a case hangs: it is ended, and the case counts as failed."""
    modules: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.pytorch and self.reference not in self.runs:
            raise ValueError(f"reference must be one of {', '.join(self.runs)}")


@dataclass(frozen=True)
class Step:
    """What one process does."""

    mode: str
    """One of ours, one of PyTorch's, or ``oracle``."""
    run: int = 1

    @property
    def name(self) -> str:
        return self.mode if self.task != "pick" else f"{self.mode}#{self.run}"

    @property
    def task(self) -> str:
        if self.mode == ORACLE:
            return ORACLE
        return "pytorch" if self.mode in PYTORCH_MODES else "pick"


def steps(plan: Plan) -> list[Step]:
    """In the order of execution: the reference first, PyTorch after the first runs, the oracle
    last. Every other run goes through the modes backwards, so that none is always late."""
    modes = sorted(plan.runs, key=lambda mode: mode != plan.reference)
    found = [Step(mode) for mode in modes] + [Step(mode) for mode in plan.pytorch]
    for run in range(2, max(plan.runs.values(), default=0) + 1):
        order = modes[::-1] if run % 2 == 0 else modes
        found += [Step(mode, run) for mode in order if run <= plan.runs[mode]]
    return [*found, Step(ORACLE)]
