"""The console that progress bars are drawn on."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def bar_console() -> Console | None:
    """Returns standard error if it is a terminal, or the cell of a notebook; None elsewhere.

    In a notebook rich draws by ipywidgets, and would warn where there is none.
    """
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    can_be_notebook = "IPython" in sys.modules and find_spec("ipywidgets") is not None
    if not is_terminal and not can_be_notebook:
        return None
    from rich.console import Console  # most programs need none

    console = Console(stderr=True)
    return console if is_terminal or console.is_jupyter else None
