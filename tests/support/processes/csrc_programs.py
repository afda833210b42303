"""Programs of C++ that test files of ``csrc/core`` without torch."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from support import checkout

CORE = checkout.ROOT / "csrc" / "core"
COMPILER = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")
needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER[0]) is None, reason="needs the C++ compiler"
)
REQUIRE = r"""
#include <cstdio>
#include <cstdlib>
#define REQUIRE(condition)                          \
  if (!(condition)) {                               \
    std::printf("%d: %s\n", __LINE__, #condition); \
    std::exit(1);                                   \
  }
#line 1
"""
"""What ends a program with its line unless a condition holds."""


def run(folder: Path, program: str, names: tuple[str, ...], driver: str | None = None) -> None:
    """Builds a program, which has ``REQUIRE``, with these files of ``csrc/core``, and runs it.

    Args:
        driver: the source of a CUDA driver, which the program finds as it does the real one.
    """
    # The frontend's headers may have been there for the build only.
    include_dirs = checkout.module("building.headers")._cuda_folders(torch)
    folders = [CORE.parent, *(found for found in include_dirs if found.is_dir())]
    build = [*COMPILER, "-std=c++17", "-O1", "-pthread", *(f"-I{found}" for found in folders)]
    (folder / "main.cpp").write_text(REQUIRE + program, encoding="utf-8")
    if driver is not None:
        (folder / "driver.cpp").write_text(driver, encoding="utf-8")
        library = ["-shared", "-fPIC", str(folder / "driver.cpp"), "-o", folder / "libcuda.so.1"]
        subprocess.run([*build, *library], check=True)
    sources = [folder / "main.cpp", *(CORE / name for name in names)]
    subprocess.run([*build, *sources, "-ldl", "-o", folder / "program"], check=True)
    done = subprocess.run(
        [folder / "program"],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
