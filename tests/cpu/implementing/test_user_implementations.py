"""``register_implementation``: what it takes, what it refuses; and the documented examples."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import checkout
from support.conv.references import assert_close, random_operands, reference
from support.kernels.user_implementations import registered
from support.processes.subprocesses import evaluate

import cudnn_autotune as ca
from cudnn_autotune.engines import recipe, registry
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.offers import gpu_of, offers_of, recipe_of
from cudnn_autotune.engines.registry import ImplementationError
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.tuning import choice_log
from cudnn_autotune.tuning.choice import Choice

H200 = replace(gpu_of("h200"), device=None)
PROBLEM = ca.ConvProblem("fprop", (2, 8, 6, 6), (8, 8, 3, 3), padding=1)
DOCUMENT = checkout.ROOT / "docs" / "how-to" / "own-implementation.md"


@pytest.fixture(autouse=True)
def none_registered() -> Iterator[None]:
    with registered():
        yield


def always(problem: ca.ConvProblem) -> bool:
    return True


def register(build: Any = lambda problem, settings: print, **given: Any) -> Any:
    given = {"name": "mine", "version": "1", "supports": always, **given}
    return ca.register_implementation(given.pop("name"), **given)(build)


def offered(problem: ca.ConvProblem = PROBLEM) -> list[tuple[str, int]]:
    return [(c.text, c.workspace_bytes) for c in offers_of(problem, H200)]


# What is registered


def test_what_is_decorated_stays_what_it_is() -> None:
    def build(problem: ca.ConvProblem, settings: str) -> Any:
        return print

    assert register(build) is build
    assert offered() == [("mine@1", 0)]
    ca.unregister_implementation("mine")
    assert offered() == []
    with pytest.raises(KeyError, match="no implementation 'mine'"):
        ca.unregister_implementation("mine")


def test_settings_and_workspace_may_depend_on_the_problem() -> None:
    register(name="listed", settings=("A=1", "A=2"))
    register(
        name="asked",
        supports=lambda problem: problem.groups == 1,
        settings=lambda problem: [f"K={k}" for k in (1, 2) if problem.weight_shape[0] % k == 0],
        workspace=lambda problem, settings: 100 * int(settings[2:]),
        numerical_notes=["TENSOR_CORE"],
        behavior_notes=(),
    )
    assert offered() == [("listed@1:A=1", 0), ("listed@1:A=2", 0), ("asked@1:K=1", 100),
                         ("asked@1:K=2", 200)]  # fmt: skip
    odd = ca.ConvProblem("fprop", (2, 8, 6, 6), (3, 8, 3, 3))
    assert offered(odd)[2:] == [("asked@1:K=1", 100)]
    assert len(offered(ca.ConvProblem("fprop", (2, 8, 6, 6), (8, 4, 3, 3), groups=2))) == 2
    last = offers_of(PROBLEM, H200)[-1]
    assert (last.notes, last.is_compiled) == (("TENSOR_CORE",), False)


def test_a_function_or_a_recipe_is_built() -> None:
    given = recipe.Recipe((), 64)
    results = {"f": print, "r": given, "n": None}
    register(
        lambda problem, settings: results[settings],
        settings=tuple(results),
        workspace=lambda problem, settings: 32,
    )
    assert recipe_of("mine@1:r", PROBLEM, H200) is given
    found = recipe_of("mine@1:f", PROBLEM, H200)
    assert found == recipe.Recipe((recipe.PythonLaunch(print),), 32)
    with pytest.raises(ImplementationError, match="build must return a function or a Recipe"):
        recipe_of("mine@1:n", PROBLEM, H200)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"name": "Mine"}, ValueError, "name must be an identifier"),
        ({"name": "aten"}, ValueError, "name must be an identifier"),
        ({"version": "1 2"}, ValueError, "version must be"),
        ({"version": "1:2"}, ValueError, "version must be"),
        ({"version": "1@2"}, ValueError, "version must be"),
        ({"version": ""}, ValueError, "version must be"),
        ({"version": 1}, ValueError, "version must be"),
        ({"supports": True}, TypeError, "supports must be a function"),
        ({"build": "mine.build"}, TypeError, "build must be a function"),
        ({"workspace": 100}, TypeError, "workspace must be a function"),
        ({"settings": "A=1"}, TypeError, "settings must be a sequence of texts"),
        ({"settings": ("A = 1",)}, ValueError, "settings must be a text of at most"),
        ({"settings": (1,)}, ValueError, "settings must be a text of at most"),
        ({"numerical_notes": ("TF32",)}, ValueError, "numerical_notes must be some of NOND"),
        ({"numerical_notes": "TENSOR_CORE"}, ValueError, "numerical_notes must be some of"),
        ({"behavior_notes": ("TENSOR_CORE",)}, ValueError, "behavior_notes must be some of RUN"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        register(**given)
    assert registry.registered() == ()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"supports": lambda problem: problem.no_such_field}, "AttributeError"),
        ({"settings": lambda problem: "A=1"}, "settings must be a sequence"),
        ({"settings": lambda problem: ["A 1"]}, "settings must be a text"),
        ({"workspace": lambda problem, settings: -1}, "workspace must return a number of bytes"),
        ({"workspace": lambda problem, settings: 1.5}, "workspace must return a number of bytes"),
    ],
)
def test_one_that_fails_when_asked_is_left_out(
    given: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    # The log names each version once.
    register(version=f"{reason}-{id(given)}".replace(" ", "_"), **given)
    register(name="other")
    with caplog.at_level(logging.WARNING):
        assert offered() == [("other@1", 0)]
        assert offered() == [("other@1", 0)]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "is left out" in said
    assert reason in said


@pytest.mark.search
def test_registering_forgets_what_the_process_has_chosen() -> None:
    selection = Selection((Measurement(OWN_PATH, 1.0, 9),), 9)
    choice = Choice(Decision(PROBLEM, Policy("auto"), selection), 0, "tuned")
    for change in (register, lambda: ca.unregister_implementation("mine")):
        choice_log.record(choice)
        assert len(ca.choices()) == 1
        change()
        assert ca.choices() == []


# The documented examples


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)


def written(path: Path, code: str) -> ModuleType:
    """A module of ``code``, from a file, since Triton reads the sources of kernels."""
    path.write_text(code, encoding="utf-8")
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def depthwise(**changes: Any) -> ca.ConvProblem:
    given: dict[str, Any] = {
        "input_shape": (2, 70, 7, 6),
        "weight_shape": (70, 1, 3, 5),
        "padding": (1, 2, 0, 1),
        "groups": 70,
        "dtype": torch.float16,
        "memory_format": torch.channels_last,
    }
    return ca.ConvProblem("fprop", **{**given, **changes})


_INTERPRETED = """
import sys
sys.path.insert(0, {folder!r})
import torch
import example
import cudnn_autotune as ca

def error(dtype, settings):
    problem = ca.ConvProblem("fprop", (2, 70, 7, 6), (70, 1, 3, 5), padding=(1, 2, 0, 1), groups=70,
                             dtype=dtype, memory_format=torch.channels_last)
    assert example.supports(problem)
    x, w, y = (torch.randn(shape).to(dtype).contiguous(memory_format=torch.channels_last)
               for shape in (problem.input_shape, problem.weight_shape, problem.output_shape))
    y.fill_(torch.nan)
    example.build(problem, settings)(x, w, y, None)
    padded = torch.nn.functional.pad(x.double(), (2, 1, 1, 0))
    right = torch.nn.functional.conv2d(padded, w.double(), groups=70)
    return float((y.double() - right).norm() / right.norm())

print(error(torch.float16, "BLOCK=64") < 1e-3, error(torch.float32, "BLOCK=128") < 1e-6)
"""


@pytest.mark.slow
def test_the_example_in_triton_computes_a_depthwise_convolution(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "example.py").write_text(blocks()[0], encoding="utf-8")
    code = _INTERPRETED.format(folder=str(tmp_path))
    assert evaluate(code, {"TRITON_INTERPRET": "1"}) == "True True"


class _Hopper:
    """A driver of Triton for a GPU that is not here."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def test_the_example_in_triton_as_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled for an H200 by Triton itself, whose PTX says which arguments there are."""
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(triton.runtime.driver, "_active", _Hopper())
    module = written(tmp_path / "example.py", blocks()[0] + blocks()[1])
    problem = depthwise()
    found = recipe_of("triton_depthwise_recipe@1:BLOCK=64", problem, H200)
    (launch,) = found.launches
    assert isinstance(launch, recipe.KernelLaunch)
    kernel = launch.kernel
    assert isinstance(kernel, recipe.CompiledKernel)
    assert kernel.cubin.startswith(b"\x7fELF")
    assert kernel.function.encode() in kernel.cubin
    assert (launch.grid, launch.block) == ((2 * 6 * 5, 2, 1), (128, 1, 1))
    grid, constants = module.sizes(problem, "BLOCK=64")
    compiled = module.depthwise.warmup(*[problem.dtype] * 3, *constants, grid=grid)
    arguments = re.findall(rf"\.param [^\n]*{kernel.function}_param_\d+", compiled.asm["ptx"])
    assert len(arguments) == len(launch.arguments)
    about = compiled.metadata
    assert (about.global_scratch_size, about.profile_scratch_size, about.num_ctas) == (0, 0, 1)
    assert found.workspace_bytes == 0


def test_the_example_of_an_operator(tmp_path: Path) -> None:
    module = written(tmp_path / "operator_example.py", blocks()[2])
    given: dict[str, Any] = {
        "input_shape": (2, 6, 7, 8),
        "weight_shape": (4, 6, 1, 1),
        "stride": (2, 3),
        "memory_format": torch.channels_last,
    }
    problem = ca.ConvProblem("fprop", **given)
    assert offered(problem) == [("pointwise_mm@1", 0)]
    (launch,) = recipe_of("pointwise_mm@1", problem, H200).launches
    assert isinstance(launch, recipe.PythonLaunch)
    x, w = random_operands(problem)
    y = torch.full(problem.output_shape, torch.nan).contiguous(memory_format=torch.channels_last)
    launch.function(x, w, y, torch.empty(0, dtype=torch.uint8))
    assert_close(y, reference(problem, x, w), 1e-5)
    for changes in ({"padding": 1}, {"weight_shape": (4, 6, 3, 1)}, {"activation": "relu"}):
        assert not module.supports(ca.ConvProblem("fprop", **{**given, **changes})), changes
    assert not module.supports(ca.ConvProblem("wgrad", **given))
