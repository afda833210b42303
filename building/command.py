"""The extension, and the commands that build it or say why they cannot."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

from building.headers import cuda_include_dirs, frontend_include
from building.kept import Kept, digest
from building.requirements import build_requirements
from building.sources import compiled_together, sources, write_if_changed


def extension(torch: ModuleType) -> Any:
    with_cuda = torch.version.cuda is not None
    macros = ["AT_PER_OPERATOR_HEADERS"]  # else torch's headers include all of ATen's operators
    if with_cuda:
        macros += [
            "CUDNN_AUTOTUNE_WITH_CUDA",
            "NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING",
            "CUDNN_FRONTEND_SKIP_JSON_LIB",  # no graph is serialized; a fourth of its headers' time
        ]
    # No -std: each torch has its own default. The C++ is small beside torch's headers, so leaving
    # out debug information (Python's own flags ask for it) saves much of the time.
    return importlib.import_module("torch.utils.cpp_extension").CppExtension(
        "cudnn_autotune._C",
        sources(with_cuda),
        depends=[path.as_posix() for path in sorted(Path("csrc").rglob("*.h"))],
        include_dirs=[str(Path("csrc").resolve())],
        define_macros=[(macro, None) for macro in macros],
        libraries=["c10_cuda", "torch_cuda"] if with_cuda else [],
        extra_compile_args=["-O2", "-g0", "-fvisibility=hidden"],
        extra_link_args=_shared_standard_library(),
    )


def _shared_standard_library() -> list[str]:
    """libstdc++.so.6, to be named before the compiler's own -lstdc++.

    A toolchain that finds only libstdc++.a gives the extension a second copy of the library beside
    torch's. The two share what must not be shared, and the first stream that formats a number
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
    base: Any = importlib.import_module("torch.utils.cpp_extension").BuildExtension

    class BuildWithInfo(base):  # type: ignore[misc]
        """torch's command, which also records the versions in build_info.h and _build_info.py."""

        def finalize_options(self) -> None:
            super().finalize_options()
            # Objects of another torch must never be linked in.
            self.build_temp = str(Path(self.build_temp, f"torch-{torch.__version__}"))
            # Nor may a library that another torch's build has left count as up to date. Ninja knows
            # which objects are.
            self.force = True

        def build_extensions(self) -> None:
            (module,) = self.extensions
            if torch.version.cuda is not None:
                module.include_dirs += cuda_include_dirs(torch)
            header = self._write_header()
            library = Path(self.get_ext_fullpath(module.name)).resolve()
            # Not below build_temp, which is a temporary folder in an editable install.
            name = f"kept-{sys.implementation.cache_tag}-torch-{torch.__version__}"
            kept = Kept(Path("build", name), self._made_of(module))
            if kept.copy_to(library):
                print(f"{library.name}: as it was built before, from the same sources", flush=True)
            else:
                module.include_dirs.append(str(header.parent))
                module.depends += module.sources
                module.sources = compiled_together(module.sources, header.parent)
                super().build_extensions()
                kept.keep(library)
            self._write_python(library.parent)

        def _made_of(self, module: Any) -> str:
            facts = {
                **versions,
                "torch": torch.version.git_version,
                "macros": module.define_macros,
                "arguments": (module.extra_compile_args, module.extra_link_args, module.libraries),
            }
            if torch.version.cuda is not None:
                header = frontend_include() / "cudnn_frontend_version.h"
                facts["frontend"] = header.read_text(encoding="utf-8")
            files = [*Path("csrc").rglob("*.*"), *Path("building").glob("*.py")]
            return digest(facts, [path for path in files if path.is_file()])

        def copy_extensions_to_source(self) -> None:
            """setuptools calls this for an editable install."""
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
            lines = ["# Written by the build: what _C was built with."]
            lines += [f"{name} = {value!r}" for name, value in versions.items()]
            write_if_changed(folder / "_build_info.py", "\n".join(lines) + "\n")

    return BuildWithInfo


def refusing_commands() -> dict[str, type[Any]]:
    """Commands that fail for want of torch, since a package without `_C` would be of no use.

    An editable install runs `build_py` too, but turns its errors into a warning. So the commands
    `editable_wheel` (of setuptools 64 and later) and `develop` fail by themselves.
    """

    def refusing(base: Any) -> type[Any]:
        class WithoutTorch(base):
            def run(self) -> None:
                raise SetupError(
                    f"torch is not installed for {sys.executable}. Without build isolation it has "
                    f"to be there already, with these: {', '.join(build_requirements(None))}."
                )

        return WithoutTorch

    found = {}
    for name in ("build_py", "develop", "editable_wheel"):
        try:
            module = importlib.import_module(f"setuptools.command.{name}")
        except ModuleNotFoundError:
            continue
        found[name] = refusing(getattr(module, name))
    return found
