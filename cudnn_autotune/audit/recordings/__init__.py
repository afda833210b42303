"""Recordings of real GPUs: raw samples of every candidate of a problem, to replay without a GPU.

The GPU, the versions and the date are in each file's `environment`. `h200_forum` is the convolution
of https://discuss.pytorch.org/t/torch-cudnn-benchmark-true-picks-slower-algorithm/215906, and the
others are layers of ResNet-50 and VGG in float16. The result of a replay holds for that problem on
that board only.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import resources
from pathlib import Path

from cudnn_autotune.audit.offline.recording import Recording

__all__ = ["load", "names", "path"]

_FILES = resources.files(__name__)
_SUFFIX = ".json.gz"


def names() -> tuple[str, ...]:
    """Returns the sorted names of the recordings that the package ships, which `load` takes."""
    files = (file.name for file in _FILES.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX)))


def load(name: str) -> Recording:
    """Returns a shipped recording. Raises ValueError for an unknown name."""
    with path(name) as file:
        return Recording.load(file)


def path(name: str) -> AbstractContextManager[Path]:
    """Returns a context that gives the file of a shipped recording. Raises as :func:`load`."""
    if name not in names():
        raise ValueError(f"name must be one of {', '.join(names())}, got {name!r}")
    return resources.as_file(_FILES / f"{name}{_SUFFIX}")
