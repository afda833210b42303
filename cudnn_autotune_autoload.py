"""Serves ``CUDNN_AUTOTUNE_ENABLE=1`` and ``cudnn-autotune run``, and tells torch of this package's
cache artifacts: torch calls it in every process that imports torch.

It lies beside the package because the package's import loads the extension and registers operators
with torch, which a process that has not asked for it must not get. torch finds :func:`autoload` by
the entry point group ``torch.backends``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress

ENTRY_POINT_GROUP, ENTRY_POINT = "torch.backends", "cudnn_autotune"
ARTIFACT = "cudnn_autotune"
"""The kind of the cache artifacts."""
_RUN_VARIABLE = "_CUDNN_AUTOTUNE_RUN"
_log = logging.getLogger("cudnn_autotune")


def run_environment(sampling: str | None) -> dict[str, str]:
    """Returns the variables by which this process, once it executes another program, is served as
    by ``cudnn-autotune run``. A program keeps the process's number; the processes that it starts
    have others, and are not served."""
    return {_RUN_VARIABLE: f"{os.getpid()}:{sampling or ''}"}


def run_sampling(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the mode that ``cudnn-autotune run`` was given for this process, empty for the
    settings' mode; None if the process was not started by it."""
    process, _, sampling = environ.get(_RUN_VARIABLE, "").partition(":")
    return sampling if process == str(os.getpid()) else None


def is_asked_for(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the environment asks for convolutions to be tuned in this process."""
    is_switched_on = environ.get("CUDNN_AUTOTUNE_ENABLE", "0") not in ("", "0")
    return is_switched_on or run_sampling(environ) is not None


def register_artifact() -> None:
    """Registers the cache artifacts with ``torch.compiler.load_cache_artifacts``, which takes
    nothing of what was saved, Inductor's neither, if a kind is unknown. The package is imported
    when one is loaded."""
    with suppress(ImportError, AttributeError, AssertionError, TypeError):  # they are torch's own
        from torch.compiler._cache import CacheArtifact, CacheArtifactFactory

        if ARTIFACT in CacheArtifactFactory._artifact_types:
            return

        class StoreArtifact(CacheArtifact):
            """Entry of a store."""

            @staticmethod
            def type() -> str:
                return ARTIFACT

            def populate_cache(self) -> None:
                try:
                    from cudnn_autotune.compile.cache_artifacts import load

                    load(self.key, self.content)
                except Exception:  # torch goes on with Inductor's
                    _log.warning("a cache artifact is not taken over", exc_info=True)

        CacheArtifactFactory.register(StoreArtifact)


def autoload() -> None:
    """Registers the cache artifacts, and imports the package if the environment asks for it; the
    package then enables itself.

    Where the package's own import has imported torch, it goes on when this returns.
    """
    register_artifact()
    if is_asked_for():
        import cudnn_autotune  # noqa: F401
