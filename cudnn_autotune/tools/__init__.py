"""Parts of commands that measure: options, fresh processes, peaks, files of JSON, and tables.

The audit is made of them, of :mod:`cudnn_autotune.expert` and of :mod:`cudnn_autotune.sampling`.
"""

from cudnn_autotune.core.atomic_file import write
from cudnn_autotune.core.display import NONE, progress_bar
from cudnn_autotune.core.json_dataclass import decode, encode
from cudnn_autotune.core.json_node import LARGEST_NUMBER, cut, read_json, shown
from cudnn_autotune.core.table import Table
from cudnn_autotune.tools import gpu_peaks, options
from cudnn_autotune.tools.processes import (
    CaseFailure,
    Poisoned,
    Process,
    ProcessFailure,
    started_ahead,
)

__all__ = [
    "CaseFailure",
    "LARGEST_NUMBER",
    "NONE",
    "Poisoned",
    "Process",
    "ProcessFailure",
    "Table",
    "cut",
    "decode",
    "encode",
    "gpu_peaks",
    "options",
    "progress_bar",
    "read_json",
    "shown",
    "started_ahead",
    "write",
]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
