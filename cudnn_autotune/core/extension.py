"""The loading of `_C`, the compiled part, after a check that it was built for the running torch.

A C++ extension of torch fits only the torch minor release and the CUDA version that it was built
with. Loaded into another, it fails with an undefined symbol at best and corrupts memory at worst.
So the build records both in `_build_info`, which is compared before the library is loaded.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["_C", "extension_available", "require_cuda_build"]

_REBUILD = "pip install --force-reinstall --no-deps ."
_HOW_TO_REBUILD = (
    f"Rebuild it against the torch that runs: `{_REBUILD}` in a checkout (with uv, or for an "
    "editable install, add `--no-build-isolation`)."
)


def _release(version: str) -> str:
    """Returns the minor release, as `2.11` of `2.11.0+cu130`. torch keeps its C++ ABI within it."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _describe(torch_version: str, cuda_version: str | None, cxx11_abi: bool) -> str:
    cuda = f"CUDA {cuda_version}" if cuda_version else "no CUDA"
    abi = "" if cxx11_abi else ", pre-C++11 ABI"
    return f"torch {torch_version} ({cuda}{abi})"


def check_build(built: tuple[str, str | None, bool], running: tuple[str, str | None, bool]) -> None:
    """Compares (torch version, CUDA version or None, C++11 ABI) of the build and of this process.

    Raises:
        ImportError: build and process do not fit. The message names the build, the running
            versions, and the cure.
    """
    if (_release(built[0]), *built[1:]) != (_release(running[0]), *running[1:]):
        raise ImportError(
            f"cudnn_autotune was built with {_describe(*built)}, but {_describe(*running)} is "
            f"running. {_HOW_TO_REBUILD}"
        )


def how_to_mend(failure: str) -> str:
    """Returns the advice for a library that does not load; ``failure`` is the loader's message."""
    missing = re.search(r"(\S+): cannot open shared object file", failure)
    if missing is not None:
        return f"Install {missing[1]}, or let LD_LIBRARY_PATH name its folder."
    if "undefined symbol" in failure and "cudnn_autotune" in failure:
        # It is one of the package's own, which the build has left out.
        return "Another build would be the same: please report this as a fault of the package."
    return _HOW_TO_REBUILD


try:
    from cudnn_autotune import _build_info
except ImportError as error:
    raise ImportError(
        f"cudnn_autotune was imported from {Path(__file__).parent}, where its extension module "
        "has not been built, and no other one is installed. Run `pip install .` in the checkout, "
        "or build it in place: `pip install --no-build-isolation -e .`"
    ) from error

check_build(
    (_build_info.TORCH_VERSION, _build_info.CUDA_VERSION, _build_info.CXX11_ABI),
    (torch.__version__, torch.version.cuda, torch.compiled_with_cxx11_abi()),
)

try:
    import cudnn_autotune._C as _C
except ImportError as error:
    raise ImportError(
        "cudnn_autotune._C, built with "
        f"{_describe(_build_info.TORCH_VERSION, _build_info.CUDA_VERSION, _build_info.CXX11_ABI)}, "
        f"does not load in Python {sys.version_info.major}.{sys.version_info.minor}: {error}. "
        f"{how_to_mend(str(error))}"
    ) from error


def extension_available() -> bool:
    """Returns whether `_C` has the search, which a build with a CPU-only torch lacks.

    The answer does not depend on a GPU: candidates for an absent GPU can be listed without one.
    """
    return _build_info.CUDA_VERSION is not None


class CpuOnlyBuild(RuntimeError):
    """The error of a function that needs cuDNN, in an extension built with a CPU-only torch."""


def require_cuda_build() -> Any:
    """Returns `_C` if it has the search.

    Raises:
        CpuOnlyBuild: the extension was built with a CPU-only torch.
    """
    if not extension_available():
        raise CpuOnlyBuild(
            "cudnn_autotune was built with a CPU-only torch: there is no cuDNN to ask. Install a "
            f"CUDA build of torch, then rebuild: `{_REBUILD}`"
        )
    return _C
