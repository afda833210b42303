"""The terms on which a problem is decided."""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_autotune.core.json_node import Node
from cudnn_autotune.engines.configs import check_workspace_limit
from cudnn_autotune.sampling.strategy import check_mode_name


@dataclass(frozen=True)
class Policy:
    """The terms on which a problem is decided.

    Raises:
        ValueError: A term is not allowed; the message names it as the settings do.
    """

    mode: str = "auto"
    """The name of the sampling mode. It need not be registered in this process."""
    workspace: int | None = None
    """The most bytes of workspace that a candidate may need; None stands for no limit."""
    benchmark: int = 0
    """The most candidates that the mode may time; 0 stands for all."""
    probe: int | None = None
    """The number of the call's probe (``tuning.probing``); None outside of a probe."""

    def __post_init__(self) -> None:
        check_mode_name(self.mode, "sampling")
        check_workspace_limit(self.workspace)
        Node(self.benchmark, "benchmark_limit").integer()

    @classmethod
    def of_call(cls, mode: str, workspace_limit: int, benchmark_limit: int) -> Policy:
        """Returns the policy of a call from C++'s numbers: a workspace limit of -1 is None, and a
        benchmark limit below 0 is the number of a probe."""
        workspace = None if workspace_limit < 0 else workspace_limit
        if benchmark_limit < 0:
            return cls(mode, workspace, 0, benchmark_limit)
        return cls(mode, workspace, benchmark_limit)
