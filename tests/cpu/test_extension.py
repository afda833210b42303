"""`_C` is only loaded into the torch that it was built for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from subprocesses import python

import cudnn_autotune as ca
from cudnn_autotune import _build_info
from cudnn_autotune.core import extension as _extension

BUILT = ("2.11.0+cu130", "13.0", True)


# The finder of an editable install would fill in what a copy of the package lacks.
IMPORT = (
    "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]; "
    "import cudnn_autotune"
)


def run_import(folder: Path) -> str:
    """What `import cudnn_autotune` out of `folder` writes to stderr; it must fail."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    return done.stderr


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the installed package, without what the build wrote."""
    source = Path(ca.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__", "_build_info.py", "_C.*so")
    return Path(shutil.copytree(source, tmp_path / "cudnn_autotune", ignore=ignore))


def test_python_m_pytest_in_a_checkout_tests_the_installed_package(package: Path) -> None:
    """`python -m` puts the checkout, where nothing is built, first on sys.path."""
    checkout = package.parent
    tests = Path(__file__).parents[1]
    shutil.copy(tests.parent / "pyproject.toml", checkout)
    shutil.copytree(tests, checkout / "tests", ignore=shutil.ignore_patterns("cpu", "gpu"))
    (checkout / "tests" / "test_it.py").write_text(
        "import cudnn_autotune\n\n"
        f"def test():\n    assert not cudnn_autotune.__file__.startswith({str(checkout)!r})\n"
    )
    done = python("-m", "pytest", "-q", "tests/test_it.py", cwd=checkout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "running",
    [
        BUILT,
        ("2.11.1+cu130", "13.0", True),
        ("2.11.0", "13.0", True),
        ("2.11.0a0+git1234567", "13.0", True),
    ],
)
def test_build_fits(running: tuple[str, str | None, bool]) -> None:
    _extension.check_build(BUILT, running)


@pytest.mark.parametrize(
    ("running", "described"),
    [
        (("2.12.0+cu130", "13.0", True), "torch 2.12.0+cu130 (CUDA 13.0) is running"),
        (("3.11.0+cu130", "13.0", True), "torch 3.11.0+cu130 (CUDA 13.0) is running"),
        (("2.11.0+cu128", "12.8", True), "torch 2.11.0+cu128 (CUDA 12.8) is running"),
        (("2.11.0+cpu", None, True), "torch 2.11.0+cpu (no CUDA) is running"),
        (("2.11.0+cu130", "13.0", False), "(CUDA 13.0, pre-C++11 ABI) is running"),
    ],
)
def test_build_does_not_fit(running: tuple[str, str | None, bool], described: str) -> None:
    with pytest.raises(ImportError) as error:
        _extension.check_build(BUILT, running)
    message = str(error.value)
    assert "was built with torch 2.11.0+cu130 (CUDA 13.0), but" in message
    assert described in message
    assert "pip install --force-reinstall" in message


def test_extension_is_available_with_a_cuda_build_of_torch() -> None:
    assert ca.extension_available() == (torch.version.cuda is not None)


def test_library_and_record_are_of_one_build() -> None:
    assert _extension._C.built_with_torch == _build_info.TORCH_VERSION
    assert _extension._C.built_with_cuda == (_build_info.CUDA_VERSION or "")


def test_source_checkout_says_how_to_install(package: Path) -> None:
    message = run_import(package.parent).splitlines()[-1]
    assert message.startswith("ImportError: cudnn_autotune was imported from ")
    assert str(package) in message
    assert "pip install ." in message


def test_versions_are_compared_before_the_library_is_loaded(package: Path) -> None:
    """A library of another torch may crash as it loads: here one that is no library at all."""
    (package / "_build_info.py").write_text(
        "TORCH_VERSION = '1.0.0'\nCUDA_VERSION = None\nCXX11_ABI = True\n", encoding="utf-8"
    )
    (package / "_C.so").write_text("no library", encoding="utf-8")
    message = run_import(package.parent).splitlines()[-1]
    assert "was built with torch 1.0.0 (no CUDA), but torch" in message


def test_library_that_does_not_load(package: Path) -> None:
    shutil.copy(_build_info.__file__, package)
    (package / "_C.so").write_text("no library", encoding="utf-8")
    message = run_import(package.parent).splitlines()[-1]
    assert message.startswith("ImportError: cudnn_autotune._C, built with torch")
    assert "does not load in Python" in message
    assert "pip install --force-reinstall" in message
