"""What does the work in a process of an audit."""

from __future__ import annotations

from typing import Any, Protocol

from cudnn_autotune.audit.model import Oracle, Pick, PytorchRow


class Poisoned(RuntimeError):
    """After this failure nothing works any more in this process."""


class Backend(Protocol):
    """What does the work, in the worker."""

    def work(
        self, task: str, case: dict[str, Any], request: dict[str, Any]
    ) -> Pick | PytorchRow | Oracle:
        """``task`` is ``pick``, ``pytorch`` or ``oracle``; returns a dataclass of ``model``.

        Raises:
            Poisoned: the process is of no more use.
        """
