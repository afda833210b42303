"""The package's kernels and rewrites: how they are registered, and what versions cover."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.kernels.random_problems import KINDS, random_problem
from support.kernels.user_implementations import registered
from support.processes.subprocesses import evaluate_forked

import cudnn_autotune as ca
from cudnn_autotune import _C, kernels
from cudnn_autotune.core import nvrtc
from cudnn_autotune.engines.implementations import Implementation
from cudnn_autotune.engines.offers import gpu_of, offers_of
from cudnn_autotune.implementing import registering as implementing
from cudnn_autotune.kernels import rewrites, sources
from cudnn_autotune.kernels.built_in import BUILT_IN
from cudnn_autotune.kernels.sources import files_behind, version_of

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
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            found = vars(importlib.import_module(module.name))
            here |= {
                type_
                for type_ in found.values()
                if isinstance(type_, type)
                and callable(getattr(type_, "offers", None))
                and not inspect.isabstract(type_)
            }
    assert here - {Implementation} == {type(one) for one in BUILT_IN}


@pytest.mark.search
def test_prelu_is_offered_by_kernels_that_read_its_slopes() -> None:
    """Others compute layers like these with other activations, and would not know of slopes."""
    computing: dict[str, set[str]] = {}
    for activation in ("relu", "prelu"):
        rng = random.Random(0)
        for kind in [*KINDS] * 300:
            problem = random_problem(rng, kind)
            if problem.op == "fprop":
                fused = replace(problem, alignment=(32, 32, 32), activation=activation)
                found = {one.id.name for one in offers_of(fused, H200)}
                computing.setdefault(activation, set()).update(found)
    assert computing["prelu"] == {"few_filters", "implicit_gemm_1d"}
    assert computing["relu"] > {"depthwise", "grouped", "few_channels", *computing["prelu"]}


def test_those_of_the_package_are_imported_when_they_are_asked_for() -> None:
    code = "import sys, cudnn_autotune; from cudnn_autotune.engines import registry\n"
    loaded = "print('cudnn_autotune.kernels' in sys.modules)\n"
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

    monkeypatch.setattr(nvrtc, "version", absent)
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

PACKAGE = Path(ca.__file__).parent


def path_of(module: str) -> str:
    """The file of a module of the package."""
    return module.removeprefix("cudnn_autotune.").replace(".", "/") + ".py"


def files_of_room() -> list[str]:
    """The modules and the sources of CUDA C++ in kernels/."""
    files = (PACKAGE / "kernels").rglob("*.*")
    sources = (path for path in files if path.suffix in (".py", ".cu", ".cuh"))
    return sorted(path.relative_to(PACKAGE).as_posix() for path in sources)


def sources_named(tree: ast.AST) -> Iterator[str]:
    """The files of CUDA C++ that a module names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and re.fullmatch(r"\w+\.cuh?", str(node.value)):
            yield str(node.value)


def files_imported(tree: ast.AST) -> Iterator[str]:
    """The files of kernels/ that a module imports."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith(f"{kernels.__name__}."):
                yield path_of(name)


def files_needed(file: str, found: set[str]) -> set[str]:
    """The files that a module of kernels/ depends on, but what reads the sources. All sources have
    device.cuh before them but packing.cu."""
    if file in found or file == "kernels/sources.py" or not (PACKAGE / file).exists():
        return found
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    named = [Path(file).with_name(name).as_posix() for name in sources_named(tree)]
    found |= {file, *named}
    if named and "kernels/rewrites/packing.cu" not in named:
        found.add("kernels/device.cuh")
    for imported in files_imported(tree):
        files_needed(imported, found)
    return found


@pytest.fixture(scope="module")
def version_after(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], str]]:
    """A module's version after a change of one file, in a copy of kernels/."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE / "kernels", copy / "kernels")

    def version(module: str, changed: str) -> str:
        code = (copy / changed).read_text(encoding="utf-8")
        (copy / changed).write_text(code + "\n", encoding="utf-8")
        forget()
        try:
            return version_of(module)
        finally:
            (copy / changed).write_text(code, encoding="utf-8")

    def forget() -> None:
        sources._read.cache_clear()
        sources._files_of_module.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_FOLDER", copy)
        yield version
    forget()


@pytest.mark.parametrize("implementation", BUILT_IN, ids=lambda one: one.name)
def test_a_version_tells_a_change_of_exactly_the_files_that_results_depend_on(
    implementation: Implementation, version_after: Callable[[str, str], str]
) -> None:
    module = type(implementation).__module__
    versions = {path: version_after(module, path) for path in files_of_room()}
    told = {path for path, version in versions.items() if version != implementation.version}
    assert path_of(module) in told
    assert told == files_needed(path_of(module), set())


def test_the_files_that_a_version_covers() -> None:
    assert files_behind(f"{kernels.__name__}.grouped.grouped_wgrad") == {
        "kernels/cost_model.py",
        "kernels/device.cuh",
        "kernels/family.py",
        "kernels/grouped/grouped_layer.py",
        "kernels/grouped/grouped_tile.cuh",
        "kernels/grouped/grouped_wgrad.cu",
        "kernels/grouped/grouped_wgrad.py",
        "kernels/grouped/grouped_wgrad_operands.cuh",
        "kernels/sum_parts.cu",
        "kernels/sum_parts.py",
    }


def test_folders_of_kernels_have_no_code_that_versions_would_have_to_cover() -> None:
    files = sorted((PACKAGE / "kernels").rglob("__init__.py"))
    assert len(files) > 1
    for file in files:
        (sentence,) = ast.parse(file.read_text(encoding="utf-8")).body
        assert isinstance(sentence, ast.Expr), file


def test_the_version_of_a_rewrite_covers_the_kernels_that_it_runs() -> None:
    (rewrite,) = [one for one in BUILT_IN if one.name == "channels_last"]
    constants = vars(importlib.import_module(type(rewrite).__module__)).values()
    runs = {type(one) for c in constants for one in (c if isinstance(c, tuple) else (c,))}
    modules = {type(one).__module__ for one in BUILT_IN if type(one) in runs}
    assert len(modules) >= 6
    behind = files_behind(type(rewrite).__module__)
    assert all(files_behind(module) <= behind for module in modules)
