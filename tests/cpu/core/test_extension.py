"""`_C` is only loaded into the torch that it was built for."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from support.checkout import ROOT, TESTS
from support.processes.subprocesses import python

import cudnn_autotune as ca
from cudnn_autotune import _build_info
from cudnn_autotune.core import extension as _extension
from cudnn_autotune.core.extension import extension_available

BUILT = ("2.11.0+cu130", "13.0", True)


# Imports the package from each folder in turn. The package under test, or the finder of an editable
# install, would take the place of a copy that is not built, or fill in what it lacks.
IMPORTS = """
import os, sys, torch
sys.path[1:] = [p for p in sys.path[1:] if not os.path.exists(os.path.join(p, "cudnn_autotune"))]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
for folder in sys.argv[1:]:
    sys.path[0] = folder
    try:
        import cudnn_autotune
    except ImportError as error:
        print(error)
    for name in [name for name in sys.modules if name.startswith("cudnn_autotune")]:
        del sys.modules[name]
"""


def copy_package(folder: Path) -> Path:
    """A copy of the installed package in a new folder, without what the build wrote."""
    source = Path(ca.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__", "_build_info.py", "_C.*so")
    return Path(shutil.copytree(source, folder / "cudnn_autotune", ignore=ignore))


@pytest.mark.slow
@pytest.mark.parametrize("is_of_another_python", [False, True])
def test_python_in_a_checkout_finds_the_installed_package(
    tmp_path: Path, is_of_another_python: bool
) -> None:
    """Its folder comes first on sys.path, and nothing that this Python can load is built there."""
    checkout = copy_package(tmp_path).parent
    if is_of_another_python:
        (checkout / "cudnn_autotune" / "_C.cpython-39-x86_64-linux-gnu.so").write_text("")
    code = (
        "import sys, torch, cudnn_autotune as ca, cudnn_autotune.nn.modules as modules\n"
        "is_the_module = sys.modules['cudnn_autotune'] is ca\n"
        "print(ca.__file__, modules.__file__, ca._C.__file__, is_the_module)\n"
        "print(ca.Conv2d(2, 3, 1)(torch.ones(1, 2, 4, 4)).shape)"
    )
    done = python("-c", code, cwd=checkout)
    assert done.returncode == 0, done.stderr
    *files, is_the_module = done.stdout.splitlines()[0].split()
    package = Path(ca.__file__).parent
    assert files == [ca.__file__, str(package / "nn" / "modules.py"), ca._C.__file__]
    assert is_the_module == "True"
    if not is_of_another_python:
        assert python("-m", "cudnn_autotune", "--version", cwd=checkout).returncode == 0


@pytest.mark.slow
def test_python_m_pytest_in_a_checkout_tests_the_installed_package(tmp_path: Path) -> None:
    """`python -m` puts the checkout, where nothing is built, first on sys.path."""
    checkout = copy_package(tmp_path).parent
    shutil.copy(ROOT / "pyproject.toml", checkout)
    shutil.copytree(TESTS, checkout / "tests", ignore=shutil.ignore_patterns("cpu", "gpu"))
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
    assert extension_available() == (torch.version.cuda is not None)


def test_library_and_record_are_of_one_build() -> None:
    assert _extension._C.built_with_torch == _build_info.TORCH_VERSION
    assert _extension._C.built_with_cuda == (_build_info.CUDA_VERSION or "")


@pytest.mark.slow
def test_a_library_that_does_not_fit_is_not_loaded(tmp_path: Path) -> None:
    """Versions are compared first: a library of another torch may crash as it loads."""
    unbuilt, other_torch, broken = (copy_package(tmp_path / name) for name in "abc")
    (other_torch / "_build_info.py").write_text(
        "TORCH_VERSION = '1.0.0'\nCUDA_VERSION = None\nCXX11_ABI = True\n", encoding="utf-8"
    )
    shutil.copy(_build_info.__file__, broken)
    for package in (other_torch, broken):
        (package / "_C.so").write_text("no library", encoding="utf-8")
    folders = [str(package.parent) for package in (unbuilt, other_torch, broken)]
    done = python("-c", IMPORTS, *folders)
    assert done.returncode == 0, done.stderr
    of_unbuilt, of_other_torch, of_broken = done.stdout.splitlines()
    assert of_unbuilt.startswith(f"cudnn_autotune was imported from {unbuilt}")
    assert "pip install ." in of_unbuilt
    assert "was built with torch 1.0.0 (no CUDA), but torch" in of_other_torch
    assert of_broken.startswith("cudnn_autotune._C, built with torch")
    assert "does not load in Python" in of_broken
    assert "pip install --force-reinstall" in of_broken


@pytest.mark.parametrize(
    ("failure", "is_mended_by_a_build", "said"),
    [
        ("/p/_C.so: undefined symbol: _ZN3c106ivalue14ConstantString6createE", True, "pip install"),
        ("/p/_C.so: undefined symbol: _ZN14cudnn_autotune11ConvProblemC1Ev", False, "report"),
        ("libcudart.so.13: cannot open shared object file: No such file", False, "libcudart.so.13"),
        ("/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found", True, "pip install"),
        ("No module named 'cudnn_autotune._C'", True, "pip install"),
    ],
)
def test_another_build_is_advised_where_it_helps(
    failure: str, is_mended_by_a_build: bool, said: str
) -> None:
    advice = _extension.how_to_mend(failure)
    assert said in advice
    assert ("pip install --force-reinstall" in advice) == is_mended_by_a_build


@pytest.mark.slow
@pytest.mark.parametrize("build", ["build_wheel", "build_editable"])
def test_a_build_without_torch_is_an_error(build: str, tmp_path: Path) -> None:
    """Also an editable one, of which setuptools turns most errors into warnings."""
    pytest.importorskip("setuptools", "70.1", "setuptools before 70.1 needs wheel to build one")
    code = (
        "import sys; sys.modules['torch'] = None  # as where it is not installed\n"
        f"from setuptools import build_meta; build_meta.{build}({str(tmp_path)!r})"
    )
    done = python("-c", code, cwd=ROOT)
    assert done.returncode != 0
    assert f"error: torch is not installed for {sys.executable}" in done.stderr
    assert "torch>=2.11" in done.stderr
    assert not list(tmp_path.glob("*.whl"))
