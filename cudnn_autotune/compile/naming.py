"""Makes the backend known to ``torch.compile`` by its name. Its first use imports it."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from cudnn_autotune.core.after_import import after_import
from cudnn_autotune.core.late import late

NAME = "cudnn_autotune"


def _register(registry: Any) -> None:
    """Makes the name known where no entry point of an installed package does."""
    if NAME not in entry_points(group="torch_dynamo_backends").names:
        registry.register_backend(late("cudnn_autotune.compile.entry:backend"), name=NAME)


after_import("torch._dynamo.backends.registry", _register)
