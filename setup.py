"""Finds torch, chooses the sources, collects the header folders; metadata is in pyproject.toml.

The extension must be compiled against the torch that will load it. pip's build isolation hides
that torch, so it is looked for in the environment that pip was called from; only where there is
none is one asked for (`setup_requires`), and then pip installs that same release into the
environment, since the wheel requires it (`install_requires`). Nothing is asked for that is already
there, so that `pip install --no-build-isolation --no-deps .` works offline.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.metadata
import os
import re
import shlex
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

OLDEST_TORCH = (2, 11)
OLDEST_FRONTEND = (1, 26)
# These need the cuDNN frontend and CUDA; a CPU-only torch is built without them.
CUDA_SOURCES = (
    "captured_plans.cpp",
    "choices_binding.cpp",
    "conv_cuda.cpp",
    "engine_dispatch.cpp",
    "measuring_binding.cpp",
    "non_cudnn_paths.cpp",
    "online_trial.cpp",
    "plan_timer.cpp",
    "search_binding.cpp",
    "torch_bridge.cpp",
    "workspace_pages.cpp",
)
# Sources that are compiled as one file, because most of the time goes into the headers that they
# share. A source that is in none of these groups is compiled by itself.
COMPILED_TOGETHER = {
    "frontend": (
        "core/cudnn_library.cpp",
        "core/conv_graph.cpp",
        "core/conv_plan.cpp",
        "core/engine_search.cpp",
        "core/frontend_find.cpp",
    ),
    "operators": (
        "aten_conv.cpp",
        "conv_*.cpp",
        "fallback_counts.cpp",
        "non_cudnn_paths.cpp",
        "settings.cpp",
    ),
    "bindings": ("module.cpp", "*_binding.cpp", "python_conv.cpp"),
    "measuring": (
        "torch_bridge.cpp",  # first: it includes Python.h
        "captured_plans.cpp",
        "engine_dispatch.cpp",
        "online_trial.cpp",
        "plan_timer.cpp",
        "workspace_pages.cpp",
    ),
    "core": ("core/*.cpp",),  # the rest of it, without heavy headers
}
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


def find_torch() -> ModuleType | None:
    """torch as it can be imported here, or else out of the environment that pip was called from."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError:
        # In pip's isolated build sys.prefix still is the environment's, only sys.path is not.
        paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        paths += site.getsitepackages()
        if sys.prefix == sys.base_prefix:
            paths.append(site.getusersitepackages())
    sys.path += [path for path in dict.fromkeys(paths) if path not in sys.path]
    importlib.invalidate_caches()
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None


def cpp_extension() -> ModuleType:
    return importlib.import_module("torch.utils.cpp_extension")


def torch_requirement(torch: ModuleType | None) -> str:
    """The torch that the wheel will work with: torch keeps its C++ ABI within a minor release."""
    if torch is None:
        return "torch>={}.{}".format(*OLDEST_TORCH)
    major, minor = map(int, torch.__version__.split(".")[:2])
    if (major, minor) < OLDEST_TORCH:
        raise SetupError(
            f"cudnn_autotune needs {torch_requirement(None)}, but this environment has torch "
            f"{torch.__version__}. Upgrade it (`pip install --upgrade torch`) and try again."
        )
    return f"torch=={major}.{minor}.*"


def toolkit_folders(torch: ModuleType) -> list[Path]:
    """The header folders of an installed CUDA toolkit, if it is of the version of torch's."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    major, minor = map(int, torch.version.cuda.split("."))
    for home in [named] if named else [cpp_extension().CUDA_HOME, "/usr/local/cuda"]:
        include = Path(home or "", "include")
        if (include / "cuda.h").is_file():
            version = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", (include / "cuda.h").read_text())
            if version is not None and int(version[1]) == 1000 * major + 10 * minor:
                return [include, include / "cccl"]
    return []


def cuda_header_folders(torch: ModuleType) -> list[Path]:
    """Where CUDA's and cuDNN's headers may lie: pip's wheels first, they are what torch links."""
    wheels = CUDA_WHEELS.get(torch.version.cuda.split(".")[0], ("cudnn",))
    folders = [Path(path, "nvidia", wheel, "include") for path in sys.path for wheel in wheels]
    return [*folders, *toolkit_folders(torch)]


def system_header_folders() -> list[Path]:
    """Where the compiler looks anyway. They are not passed on: that would change their order."""
    return [Path("/usr/include", sysconfig.get_config_var("MULTIARCH") or ""), Path("/usr/include")]


def first_with(header: str, folders: list[Path]) -> Path | None:
    return next((folder for folder in folders if (folder / header).is_file()), None)


def missing_cuda_headers(torch: ModuleType) -> list[str]:
    if torch.version.cuda is None:
        return []
    folders = cuda_header_folders(torch) + system_header_folders()
    return [header for header in CUDA_HEADERS if first_with(header, folders) is None]


def build_requirements(torch: ModuleType | None) -> list[str]:
    """What has to be fetched to build: only what is not there."""
    if torch is None:
        # `==2.*` bounds torch from above, which makes pip settle torch first and then the
        # cuda-toolkit that it pins; the other way round it would go back to an older torch.
        return [
            torch_requirement(None) + ",==2.*",
            "cuda-toolkit[crt,cccl]; sys_platform == 'linux'",
        ]
    extras = [CUDA_HEADERS[header] for header in missing_cuda_headers(torch)]
    if not any(extras):
        return []
    if torch.version.cuda.startswith("12."):
        extras = ["nvcc" if extra == "crt" else extra for extra in extras]
    pins = (re.search(r"^cuda-toolkit\b.*?==\s*([\d.]+)", line) for line in torch_requires())
    pin = next((match[1] for match in pins if match), f"{torch.version.cuda}.*")
    return [f"cuda-toolkit[{','.join(filter(None, extras))}]=={pin}"]


def torch_requires() -> list[str]:
    try:
        return importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:  # a torch that pip did not install
        return []


def frontend_include() -> Path:
    """The folder of cudnn_frontend.h: CUDNN_FRONTEND_INCLUDE, or that of the installed wheel.

    Its name has to be `include`: the headers include one another as `../include/...`.
    """
    named = os.environ.get("CUDNN_FRONTEND_INCLUDE")
    folders = [Path(named)] if named else [Path(path, "include") for path in sys.path]
    folder = first_with("../include/cudnn_frontend.h", folders)
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


def cuda_include_dirs(torch: ModuleType) -> list[str]:
    """The folders to compile with.

    Raises:
        SetupError: a header is in none of them; names it and the cure.
    """
    missing = missing_cuda_headers(torch)
    if missing:
        fetch = build_requirements(torch)
        if "cudnn.h" in missing:
            fetch.append(f"nvidia-cudnn-cu{torch.version.cuda.split('.')[0]}")
        raise SetupError(
            f"torch {torch.__version__} is of CUDA {torch.version.cuda}, but these headers were "
            f"not found: {', '.join(missing)}. Let CUDA_HOME name a toolkit of that version, or "
            f"install them: pip install {' '.join(map(repr, fetch))}"
        )
    folders = cuda_header_folders(torch)
    found = [frontend_include(), *(first_with(header, folders) for header in CUDA_HEADERS)]
    return [str(folder) for folder in dict.fromkeys(found) if folder is not None]


def sources(with_cuda: bool) -> Iterator[str]:
    for path in sorted(Path("csrc").glob("*.cpp")):
        if with_cuda or path.name not in CUDA_SOURCES:
            yield path.as_posix()
    if with_cuda:
        yield from (path.as_posix() for path in sorted(Path("csrc/core").glob("*.cpp")))


def compiled_together(sources: list[str], folder: Path) -> list[str]:
    """The files to compile for these sources: those of a group in one file, written to `folder`."""
    alone = list(sources)
    files = []
    for group, patterns in COMPILED_TOGETHER.items():
        paths = [f"csrc/{pattern}" for pattern in patterns]
        members = [source for path in paths for source in fnmatch.filter(alone, path)]
        if members:
            includes = [f'#include "{source.removeprefix("csrc/")}"\n' for source in members]
            write_if_changed(folder / f"{group}.cpp", "".join(includes))
            files.append(str(folder / f"{group}.cpp"))
            alone = [source for source in alone if source not in members]
    return files + alone


def extension(torch: ModuleType) -> Any:
    with_cuda = torch.version.cuda is not None
    macros = ("CUDNN_AUTOTUNE_WITH_CUDA", "NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING")
    # No -std: each torch has its own default. The C++ is small beside torch's headers, so leaving
    # out debug information (Python's own flags ask for it) saves much of the time.
    return cpp_extension().CppExtension(
        "cudnn_autotune._C",
        list(sources(with_cuda)),
        depends=[path.as_posix() for path in sorted(Path("csrc").rglob("*.h"))],
        include_dirs=[str(Path("csrc").resolve())],
        define_macros=[(macro, None) for macro in macros] if with_cuda else [],
        libraries=["c10_cuda", "torch_cuda"] if with_cuda else [],
        extra_compile_args=["-O2", "-g0", "-fvisibility=hidden"],
        extra_link_args=shared_standard_library(),
    )


def shared_standard_library() -> list[str]:
    """libstdc++.so.6, named before the compiler's own -lstdc++.

    A toolchain that finds only libstdc++.a gives the extension a second copy of the library beside
    torch's, and the two share what must not be shared: the first stream that formats a number
    crashes.
    """
    name = "libstdc++.so.6"
    compiler = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    command = [*shlex.split(compiler), f"-print-file-name={name}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return []
    return [found] if os.path.isabs(found) else []


def build_command(torch: ModuleType) -> type[build_ext]:
    versions = {
        "TORCH_VERSION": str(torch.__version__),
        "CUDA_VERSION": torch.version.cuda,
        "CXX11_ABI": torch.compiled_with_cxx11_abi(),
    }
    base: Any = cpp_extension().BuildExtension

    class BuildWithInfo(base):  # type: ignore[misc]
        """torch's command, and a record of what it built with: `build_info.h`, `_build_info.py`."""

        def finalize_options(self) -> None:
            super().finalize_options()
            # Objects of another torch must never be linked in.
            self.build_temp = str(Path(self.build_temp, f"torch-{torch.__version__}"))

        def build_extensions(self) -> None:
            (module,) = self.extensions
            if torch.version.cuda is not None:
                module.include_dirs += cuda_include_dirs(torch)
            header = self._write_header()
            module.include_dirs.append(str(header.parent))
            module.depends += module.sources
            module.sources = compiled_together(module.sources, header.parent)
            super().build_extensions()
            self._write_python(Path(self.get_ext_fullpath(module.name)).parent)

        def copy_extensions_to_source(self) -> None:
            """Called for an editable install."""
            super().copy_extensions_to_source()
            self._write_python(Path("cudnn_autotune"))

        def _write_header(self) -> Path:
            lines = ["#pragma once"]
            for name, value in versions.items():
                text = int(value) if isinstance(value, bool) else f'"{value or ""}"'
                lines.append(f"#define CUDNN_AUTOTUNE_{name} {text}")
            path = Path(self.build_temp, "generated", "build_info.h").resolve()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_if_changed(path, "\n".join(lines) + "\n")
            return path

        def _write_python(self, folder: Path) -> None:
            lines = ["# Written by setup.py: what _C was built with."]
            lines += [f"{name} = {value!r}" for name, value in versions.items()]
            write_if_changed(folder / "_build_info.py", "\n".join(lines) + "\n")

    return BuildWithInfo


class BuildWithoutTorch(build_py):
    """A wheel without `_C` would be of no use."""

    def run(self) -> None:
        raise SetupError(
            "torch is not installed. Without build isolation it has to be there already, with "
            f"these: {', '.join(build_requirements(None))}."
        )


def write_if_changed(path: Path, text: str) -> None:
    """Keeps the time of a file that stays as it is, so that nothing is compiled anew for it."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def main() -> None:
    torch = find_torch()
    arguments: dict[str, Any] = {
        "license": "Apache-2.0",
        "install_requires": [
            torch_requirement(torch),
            "click>=8",
            "filelock>=3.20.1",
            "jinja2>=3.1",
            "numpy>=1.26",
            "nvidia-ml-py>=12",
            "rich>=13",
        ],
        "setup_requires": build_requirements(torch),
    }
    if torch is None:
        arguments["cmdclass"] = {"build_py": BuildWithoutTorch}
    else:
        arguments["ext_modules"] = [extension(torch)]
        arguments["cmdclass"] = {"build_ext": build_command(torch)}
    setup(**arguments)


main()
