"""The interface of the backend that does the work in a process of an audit."""

from __future__ import annotations

from typing import Any, Protocol

from cudnn_autotune.audit.model import Oracle, Pick, PytorchRow


class Poisoned(RuntimeError):
    """A failure after which this process cannot do any further work."""


class Backend(Protocol):
    """Does the work in a worker process."""

    def work(
        self, task: str, case: dict[str, Any], request: dict[str, Any]
    ) -> Pick | PytorchRow | Oracle:
        """Does a ``task`` (``pick``, ``pytorch`` or ``oracle``) for a case.

        Raises:
            Poisoned: the process cannot do any further work.
        """
