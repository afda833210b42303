"""A folder that lasts as long as a run, with CUDA's folder of compiled kernels for each worker.

The driver keeps kernels that were compiled at run time in ``CUDA_CACHE_PATH``, some half a second
each: who finds them there has a shorter first call. Which of them a process finds is therefore part
of what is measured. The driver reads the variable once, so a worker sets it before it imports
torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_VARIABLE = "BENCHMARK_SCRATCH"


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder; processes that are started meanwhile know of it."""
    with tempfile.TemporaryDirectory(prefix="benchmark_", ignore_cleanup_errors=True) as folder:
        os.environ[_VARIABLE] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ[_VARIABLE]


def compiled_in(folder: Path, name: str) -> Path:
    """Where the kernels that were compiled for ``name`` lie."""
    return folder / ("compiled_" + "".join(c if c.isalnum() else "_" for c in name))


def find_compiled(name: str) -> None:
    """In a worker, before torch is imported: its kernels are those of ``name``."""
    folder = compiled_in(Path(os.environ[_VARIABLE]), name)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_CACHE_PATH"] = str(folder)


def copy_compiled(folder: Path, name: str, other: str) -> None:
    """``other`` finds what ``name`` has left; the worker of ``other`` has not touched CUDA yet."""
    left = compiled_in(folder, name)
    if left.is_dir():
        shutil.copytree(left, compiled_in(folder, other), dirs_exist_ok=True)
