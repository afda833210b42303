"""The package's kernels and rewrites: how they are registered, and what versions cover."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from subprocesses import evaluate_forked
from user_implementations import registered

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines import kernels, rewrites
from cudnn_autotune.engines.built_in import BUILT_IN
from cudnn_autotune.engines.implementations import Implementation
from cudnn_autotune.engines.kernels.sources import digest, version_of
from cudnn_autotune.engines.offers import gpu_of, offers_of
from cudnn_autotune.tuning import implementing

H200 = gpu_of("h200")
DEPTHWISE = ca.ConvProblem(
    "fprop",
    (2, 64, 9, 9),
    (64, 1, 3, 3),
    groups=64,
    dtype=torch.float16,
    memory_format=torch.channels_last,
)


def texts() -> list[str]:
    return [c.text for c in offers_of(DEPTHWISE, H200)]


def test_every_implementation_of_the_package_is_built_in() -> None:
    here = set()
    for package in (kernels, rewrites):
        for module in pkgutil.iter_modules(package.__path__):
            found = vars(importlib.import_module(f"{package.__name__}.{module.name}"))
            here |= {
                type_
                for type_ in found.values()
                if isinstance(type_, type)
                and callable(getattr(type_, "offers", None))
                and not inspect.isabstract(type_)
            }
    assert here - {Implementation} == {type(one) for one in BUILT_IN}


def test_those_of_the_package_are_imported_when_they_are_asked_for() -> None:
    code = "import sys, cudnn_autotune; from cudnn_autotune.engines import registry\n"
    loaded = "print(any('engines.kernels' in name for name in sys.modules))\n"
    listed = "print(*(one.name for one in registry.registered()))\n"
    before, names, after = evaluate_forked(code + loaded + listed + loaded).splitlines()
    assert (before, after) == ("False", "True")
    assert names.split() == [one.name for one in BUILT_IN]


@pytest.mark.search
def test_without_nvrtc_no_kernel_builds_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent() -> None:
        raise _C.PlanError("NVRTC is not there: libnvrtc.so")

    monkeypatch.setattr(_C, "nvrtc_version", absent)
    monkeypatch.setattr(implementing, "_reported", set())
    monkeypatch.setattr(implementing, "gpu_of", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with registered(*BUILT_IN):
        offered = texts()
        for text in offered:
            with pytest.raises(_C.PlanError, match="NVRTC is not there"):
                _C.build_plan(DEPTHWISE.native(), text, 0)
    assert len(offered) > 1
    assert [r.getMessage() for r in caplog.records] == [
        f"{offered[0]} does not build; first for {DEPTHWISE.text}: NVRTC is not there: libnvrtc.so"
    ]


# Versions


def sources_named(tree: ast.AST) -> Iterator[str]:
    """The files of CUDA C++ that a module names, and device.cuh if it has it before them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and re.fullmatch(r"\w+\.cuh?", str(node.value)):
            yield str(node.value)
        elif isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
            if name == "source":
                yield "device.cuh"


def modules_imported(tree: ast.AST, package: str) -> Iterator[str]:
    """The modules of a package that a module imports, but what reads the files."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                before, _, module = name.rpartition(".")
                if before == package and module != "sources":
                    yield module


def files_behind(module: str, package: str, found: set[str]) -> set[str]:
    """The files that a module of a package depends on."""
    path = Path(str(importlib.import_module(package).__file__)).with_name(f"{module}.py")
    if path.name in found or not path.exists():
        return found
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found |= {path.name, *sources_named(tree)}
    for imported in modules_imported(tree, package):
        files_behind(imported, package, found)
    return found


@pytest.mark.parametrize("implementation", BUILT_IN, ids=lambda one: one.name)
def test_a_version_covers_all_files_that_results_depend_on(implementation: Implementation) -> None:
    package, _, module = type(implementation).__module__.rpartition(".")
    files = files_behind(module, package, set())
    assert f"{module}.py" in files
    places = {(f, kernels.__name__ if f == "device.cuh" else package) for f in files}
    runs = versions_behind(implementation) if package == rewrites.__name__ else ()
    assert implementation.version == digest(places, runs), sorted(files)


def versions_behind(rewrite: Implementation) -> tuple[str, ...]:
    """The versions of the package's kernels that a rewrite asks for offers, in its order."""
    constants = vars(importlib.import_module(type(rewrite).__module__)).values()
    found = [one for c in constants for one in (c if isinstance(c, tuple) else (c,))]
    asked = [one for one in found if type(one) in {type(other) for other in BUILT_IN}]
    return tuple(one.version for one in asked)


def test_the_version_of_a_rewrite_covers_the_kernels_that_it_runs() -> None:
    """They are all kernels that its module imports."""
    (rewrite,) = [one for one in BUILT_IN if one.name == "channels_last"]
    path = Path(str(importlib.import_module(type(rewrite).__module__).__file__))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = set(modules_imported(tree, kernels.__name__))
    behind = versions_behind(rewrite)
    assert {one.version for one in BUILT_IN if one.name in imported} == set(behind)
    assert len(behind) == len(imported) >= 6
    versions = [version_of(type(rewrite).__module__, (v,)) for v in ("1", "2")]
    assert versions[0] != versions[1]
