"""The backend's name for ``torch.compile``. Its first use imports the backend."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from cudnn_autotune.core.after_import import after_import
from cudnn_autotune.core.late import late

NAME = "cudnn_autotune"


def _register(registry: Any) -> None:
    """Registers the name if no entry point of an installed package does."""
    if NAME not in entry_points(group="torch_dynamo_backends").names:
        registry.register_backend(late("cudnn_autotune.compile.entry:backend"), name=NAME)


after_import("torch._dynamo.backends.registry", _register)
