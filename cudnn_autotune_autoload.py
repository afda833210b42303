"""Serves ``CUDNN_AUTOTUNE_ENABLE=1``: torch calls it in every process that imports torch.

It lies beside the package because importing anything from the package imports all of it, which a
process that has not asked for it must not wait for. torch finds :func:`autoload` by the entry point
group ``torch.backends``.
"""

from __future__ import annotations

import os


def autoload() -> None:
    """Imports the package if the environment asks for it; the package then enables itself.

    Where the package's own import has imported torch, it goes on when this returns.
    """
    if os.environ.get("CUDNN_AUTOTUNE_ENABLE", "0") not in ("", "0"):
        import cudnn_autotune  # noqa: F401
