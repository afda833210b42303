"""The public names, as a user meets them: in help(), signatures and tab completion."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
from pathlib import Path

import pytest
from torch import nn

import cudnn_autotune as ca


@pytest.mark.parametrize("name", ca.__all__)
def test_help(name: str) -> None:
    public = getattr(ca, name)
    text = pydoc.render_doc(public, renderer=pydoc.plaintext)
    assert name in text or not callable(public)


CALLABLE = [
    name
    for name in ca.__all__
    if callable(getattr(ca, name)) and name not in ("CudnnError", "PlanError")  # made in C++
]


@pytest.mark.parametrize("name", CALLABLE)
def test_signature(name: str) -> None:
    public = getattr(ca, name)
    parameters = inspect.signature(public).parameters
    if isinstance(public, type) and issubclass(public, nn.Module):
        assert {"sampling", "workspace_limit"} <= parameters.keys()


OFFERED = {
    "": set(ca.__all__),
    "distributed": {"DistributedTuningError", "agree", "problems_of", "tune"},
    "expert": {
        *("Board", "CHANNELS_LAST", "Candidate", "ConvProblem", "DTYPES_BY_NAME"),
        *("FAR_FROM_LIMIT", "GpuTimer", "HEURISTIC_MODES", "OPERATIONS", "OWN_PATH"),
        *("Operation", "Peaks", "Telemetry", "Turns", "at_limit_ms", "build_plan", "candidates"),
        *("engine_text", "execute", "execute_plan", "limit", "measure", "median_polish", "named"),
        *("open_timer", "operands", "parse_engine_text", "problem_from_json", "recipe"),
        *("run_operator",),
    },
    "expert.recipe": {
        *("Address", "CompiledKernel", "EngineLaunch", "Int64", "Kernel", "KernelLaunch"),
        *("PythonLaunch", "Recipe", "TensorMap", "workspace_room"),
    },
    "functional": {f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)},
    "online": {"preparing", "undecided"},
    "sampling": set(ca.sampling.__all__),
    "tools": {
        *("CaseFailure", "LARGEST_NUMBER", "NONE", "Poisoned", "Process", "ProcessFailure"),
        *("Table", "cut", "decode", "encode", "gpu_peaks", "options", "progress_bar"),
        *("read_json", "shown"),
        *("started_ahead", "write"),
    },
}


@pytest.mark.parametrize("name", OFFERED)
def test_completion_offers_what_is_public(name: str) -> None:
    module = importlib.import_module(f"cudnn_autotune.{name}".rstrip("."))
    offered = [name for name in dir(module) if not name.startswith("__")]
    assert offered == sorted(OFFERED[name])
    assert {"__name__", "__doc__", "__file__"} <= set(dir(module))
    for public in offered:
        assert getattr(module, public) is not None


def test_a_name_that_never_was_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'cudnn_autotune' has no attribute 'nope'"):
        getattr(ca, "nope")  # noqa: B009
    with pytest.raises(ImportError):
        from cudnn_autotune import nope  # type: ignore[attr-defined]  # noqa: F401


def test_the_names_of_a_checker_are_those_at_run_time() -> None:
    """The imports for type checkers and the table of late imports hold the same names."""
    tree = ast.parse(Path(ca.__file__).read_text(encoding="utf-8"))
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {(node.module, alias.name) for node in imports for alias in node.names}
    modules = {("cudnn_autotune", name) for name in ca._MODULES}
    assert seen == modules | {(module, n) for module, names in ca._PUBLIC.items() for n in names}
    assert {n for _, n in seen} | {"CudnnError", "PlanError"} == set(ca.__all__)
