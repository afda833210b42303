"""The processes of an audit, in the order in which they run, and what a case costs each of them."""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_autotune.audit.config import AuditConfig, Solo
from cudnn_autotune.audit.model import PYTORCH_MODES

ORACLE = "oracle"
START_S = 6.0
"""Seconds that a process takes before its first case."""
# Seconds of a case on an H200.
_SECONDS = {
    "heuristic": 0.05,
    "auto": 1.0,
    "sustained": 5.0,
    ORACLE: 1.0,
    **dict.fromkeys(PYTORCH_MODES, 0.5),
}
_SECONDS_OF_OTHERS = 0.6
# Added where steady times are measured and the board throttles.
_SECONDS_ALONE = {ORACLE: 5.0, **dict.fromkeys(PYTORCH_MODES, 3.5)}


@dataclass(frozen=True)
class Step:
    """One process of an audit."""

    mode: str
    """One of our modes, one of PyTorch's, or ``oracle``."""
    run: int = 1

    @property
    def name(self) -> str:
        return self.mode if self.task != "pick" else f"{self.mode}#{self.run}"

    @property
    def task(self) -> str:
        """The process's task: ``pick``, ``pytorch`` or ``oracle``."""
        if self.mode == ORACLE:
            return ORACLE
        return "pytorch" if self.mode in PYTORCH_MODES else "pick"

    def seconds_of_case(self, solo: Solo) -> float:
        """Wall seconds of one case, about."""
        seconds = _SECONDS.get(self.mode, _SECONDS_OF_OTHERS)
        return seconds if solo == "never" else seconds + _SECONDS_ALONE.get(self.mode, 0.0)


def steps(config: AuditConfig) -> list[Step]:
    """Returns the processes in their order.

    The reference comes first, PyTorch after the first runs, and the oracle last. Every other run
    goes through the modes backwards, so that no mode is always late.
    """
    modes = sorted(config.runs, key=lambda mode: mode != config.reference)
    found = [Step(mode) for mode in modes] + [Step(mode) for mode in config.pytorch]
    for run in range(2, max(config.runs.values(), default=0) + 1):
        order = modes[::-1] if run % 2 == 0 else modes
        found += [Step(mode, run) for mode in order if run <= config.runs[mode]]
    return [*found, Step(ORACLE)]
