"""The public names, as a user meets them: in help(), signatures and tab completion."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
from pathlib import Path

import pytest
from torch import nn

import cudnn_autotune as ca

FORMER = {name: f"cudnn_autotune.expert.{name}" for name in ca.expert.__all__}
FORMER["use_sampling"] = "cudnn_autotune.flags"
"""Names that users of earlier versions may have typed, and what they are now."""
REPOSITORY = Path(__file__).resolve().parents[2]


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
        "Candidate",
        "build_plan",
        "candidates",
        "engine_text",
        "execute",
        "measure",
        "parse_engine_text",
        "recipe",
    },
    "expert.recipe": {
        *("Address", "CompiledKernel", "EngineLaunch", "Int64", "Kernel", "KernelLaunch"),
        *("PythonLaunch", "Recipe", "TensorMap", "workspace_room"),
    },
    "functional": {f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)},
    "sampling": set(ca.sampling.__all__),
}


@pytest.mark.parametrize("name", OFFERED)
def test_completion_offers_what_is_public(name: str) -> None:
    module = importlib.import_module(f"cudnn_autotune.{name}".rstrip("."))
    offered = [name for name in dir(module) if not name.startswith("__")]
    assert offered == sorted(OFFERED[name])
    assert {"__name__", "__doc__", "__file__"} <= set(dir(module))
    for public in offered:
        assert getattr(module, public) is not None


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_warns_and_works(name: str) -> None:
    assert name not in dir(ca)
    message = re.escape(f"cudnn_autotune.{name} is now {FORMER[name]}")
    with pytest.warns(DeprecationWarning, match=message) as warned:
        found = ca.use_sampling() if name == "use_sampling" else getattr(ca, name)
    assert warned[0].filename == __file__
    assert name == "use_sampling" or found is getattr(ca.expert, name)


def test_use_sampling_takes_what_it_took() -> None:
    before = ca.get_sampling()
    with pytest.warns(DeprecationWarning, match="use_sampling is now"):
        context = ca.use_sampling(mode="race", budget_ms=3)
    with context:
        assert (ca.get_sampling(), ca.get_budget_ms()) == ("race", 3.0)
    assert (ca.get_sampling(), ca.get_budget_ms()) == (before, None)
    with pytest.warns(DeprecationWarning, match="use_sampling is now"):
        context = ca.use_sampling(mode="fastest")
    with pytest.raises(ValueError, match=r"sampling must be one of .*, got 'fastest'"):
        context.__enter__()
    assert ca.get_sampling() == before


def test_a_name_that_never_was_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'cudnn_autotune' has no attribute 'nope'"):
        getattr(ca, "nope")  # noqa: B009
    with pytest.raises(ImportError):
        from cudnn_autotune import nope  # type: ignore[attr-defined]  # noqa: F401


def test_nothing_here_uses_a_former_name() -> None:
    used = re.compile(rf"\b(?:ca|cudnn_autotune|settings)\.({'|'.join(FORMER)})\b(?!\.py|/)")
    folders = ("cudnn_autotune", "tests", "benchmarks", "docs", "examples")
    paths = [path for folder in folders for path in (REPOSITORY / folder).rglob("*")]
    paths = [path for path in paths if path.suffix in (".md", ".py", ".cpp", ".h")]
    assert len(paths) > 300
    found = [
        f"{path.relative_to(REPOSITORY)}: {match[0]}"
        for path in [*paths, REPOSITORY / "README.md"]
        if path != Path(__file__)
        for match in used.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []
