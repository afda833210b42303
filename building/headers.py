"""Where the headers of CUDA, of cuDNN and of its frontend are."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from setuptools.errors import SetupError

OLDEST_FRONTEND = (1, 26)
# What the sources and torch's own headers include, and the extra of the cuda-toolkit package that
# brings it. torch's wheel depends on all of them but crt (included by cuda_runtime_api.h) and cccl
# (included by cuda_fp16.h).
CUDA_HEADERS = {
    "cuda_runtime_api.h": "cudart",
    "crt/host_defines.h": "crt",
    "nv/target": "cccl",
    "cublas_v2.h": "cublas",
    "cusparse.h": "cusparse",
    "cusolverDn.h": "cusolver",
    "cudnn.h": "",  # not of the toolkit: nvidia-cudnn-cu13
}
# The folders of NVIDIA's wheels, below site-packages/nvidia.
CUDA_WHEELS = {
    "13": ("cu13", "cudnn"),
    "12": (
        "cuda_runtime",
        "cuda_nvcc",  # holds crt/ in CUDA 12
        "cuda_cccl",
        "cublas",
        "cusparse",
        "cusolver",
        "cudnn",
    ),
}


def cuda_include_dirs(torch: ModuleType) -> list[str]:
    """The folders to compile with.

    Raises:
        SetupError: a header is in none of them; the message names it and the cure.
    """
    missing = missing_cuda_headers(torch)
    if missing:
        fetch = packages_for(missing, torch)
        if "cudnn.h" in missing:
            fetch.append(f"nvidia-cudnn-cu{torch.version.cuda.split('.')[0]}")
        raise SetupError(
            f"torch {torch.__version__} is of CUDA {torch.version.cuda}, but these headers were "
            f"not found: {', '.join(missing)}. Let CUDA_HOME name a toolkit of that version, or "
            f"install them: pip install {' '.join(map(repr, fetch))}"
        )
    folders = _cuda_folders(torch)
    found = [frontend_include(), *(_first_with(header, folders) for header in CUDA_HEADERS)]
    return [str(folder) for folder in dict.fromkeys(found) if folder is not None]


def missing_cuda_headers(torch: ModuleType) -> list[str]:
    if torch.version.cuda is None:
        return []
    folders = _cuda_folders(torch) + _system_folders()
    return [header for header in CUDA_HEADERS if _first_with(header, folders) is None]


def packages_for(missing: list[str], torch: ModuleType) -> list[str]:
    """The requirement that brings these CUDA headers, in the version that torch pins."""
    extras = [CUDA_HEADERS[header] for header in missing]
    if not any(extras):
        return []
    if torch.version.cuda.startswith("12."):
        extras = ["nvcc" if extra == "crt" else extra for extra in extras]
    try:
        required = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:  # pip did not install this torch
        required = []
    pins = (re.search(r"^cuda-toolkit\b.*?==\s*([\d.]+)", line) for line in required)
    pin = next((match[1] for match in pins if match), f"{torch.version.cuda}.*")
    return [f"cuda-toolkit[{','.join(filter(None, extras))}]=={pin}"]


def frontend_include() -> Path:
    """The folder of cudnn_frontend.h: CUDNN_FRONTEND_INCLUDE, or that of the installed wheel.

    Its name has to be `include`, since the headers include one another as `../include/...`.
    """
    named = os.environ.get("CUDNN_FRONTEND_INCLUDE")
    folders = [Path(named)] if named else [Path(path, "include") for path in sys.path]
    folder = _first_with("../include/cudnn_frontend.h", folders)
    if folder is None:
        raise SetupError(
            f"CUDNN_FRONTEND_INCLUDE is {named}; it has to be a folder by the name of `include`, "
            "with cudnn_frontend.h in it."
            if named
            else "cudnn_frontend.h was not found. Install the headers (`pip install "
            "'nvidia-cudnn-frontend>=1.26,<1.29'`), or let CUDNN_FRONTEND_INCLUDE name the folder "
            "`include` that holds them."
        )
    text = (folder / "cudnn_frontend_version.h").read_text(encoding="utf-8")
    found = tuple(map(int, re.findall(r"#define\s+CUDNN_FRONTEND_M\w+_VERSION\s+(\d+)", text)))
    if found < OLDEST_FRONTEND:
        raise SetupError(
            "the headers of cudnn-frontend in {} are {}.{}; {}.{} or later is needed.".format(
                folder, *found, *OLDEST_FRONTEND
            )
        )
    return folder.absolute()


def _cuda_folders(torch: ModuleType) -> list[Path]:
    """Where CUDA's and cuDNN's headers may be: pip's wheels first, since torch links those."""
    wheels = CUDA_WHEELS.get(torch.version.cuda.split(".")[0], ("cudnn",))
    folders = [Path(path, "nvidia", wheel, "include") for path in sys.path for wheel in wheels]
    return [*folders, *_toolkit_folders(torch)]


def _toolkit_folders(torch: ModuleType) -> list[Path]:
    """The header folders of an installed CUDA toolkit, if it has the version of torch's CUDA."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    major, minor = map(int, torch.version.cuda.split("."))
    found_by_torch = importlib.import_module("torch.utils.cpp_extension").CUDA_HOME
    for home in [named] if named else [found_by_torch, "/usr/local/cuda"]:
        include = Path(home or "", "include")
        if (include / "cuda.h").is_file():
            version = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", (include / "cuda.h").read_text())
            if version is not None and int(version[1]) == 1000 * major + 10 * minor:
                return [include, include / "cccl"]
    return []


def _system_folders() -> list[Path]:
    """Where the compiler looks anyway. Passing them on would change their order."""
    return [Path("/usr/include", sysconfig.get_config_var("MULTIARCH") or ""), Path("/usr/include")]


def _first_with(header: str, folders: list[Path]) -> Path | None:
    return next((folder for folder in folders if (folder / header).is_file()), None)
