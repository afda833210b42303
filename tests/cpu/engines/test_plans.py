"""Plans: what computes a problem, by whichever means, is built from a text and run alike."""

from __future__ import annotations

import functools

import pytest
from support.processes.subprocesses import evaluate_forked
from support.tuning.made_up_plans import PROBLEM

from cudnn_autotune import _C
from cudnn_autotune.engines.configs import open_search

pytestmark = pytest.mark.search


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eng0", True), ("unfused:eng67:KERNEL_CFG=3", True), ("nonsense", True),
        ("aten", False), ("matmul", False), ("mine@1", False), ("mine@1:A=2", False),
    ],
)  # fmt: skip
def test_a_text_tells_whether_cudnn_computes_it(text: str, expected: bool) -> None:
    assert _C.is_engine(text) is expected


# The builder that Python sets: in a process of its own, since it stays set

BODIES = {
    "a plan": 'return _C.recipe_plan(problem, f"{text} {device}", [("python", print)], 0, device)',
    "ValueError": 'raise ValueError("no such settings")',
    "PlanError": 'raise _C.PlanError("no such settings")',
    "None": "return None",
    "a number": "return 3",
    "a convolution": 'convolve(); return _C.recipe_plan(problem, text, [("python", print)], 0, 0)',
    "an interrupt": "raise KeyboardInterrupt",
}
BUILDERS = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # there need not be a device 3
import torch
from cudnn_autotune import _C, ConvProblem
def convolve():
    _C.exchange_process_wide(_C.ProcessWidePolicy("no such mode", -1))
    torch.conv2d(torch.zeros(1, 2, 5, 5), torch.zeros(3, 2, 3, 3))
kernels = _C.AtenKernels("CPU")
problem = ConvProblem("fprop", (1, 8, 8, 8), (8, 8, 3, 3)).native()
for name, body in {bodies!r}.items():
    exec("def build(problem, text, device): " + body, globals())
    _C.set_plan_builder(build)
    try:
        print(name, _C.build_plan(problem, "mine@1:A=2", 3).text, sep=": ")
    except BaseException as error:
        print(name, type(error).__name__, error, sep=": ")
"""


@functools.cache
def what_comes_of_builders() -> dict[str, str]:
    lines = evaluate_forked(BUILDERS.format(bodies=BODIES)).splitlines()
    return dict(line.split(": ", 1) for line in lines if ": " in line)


@pytest.mark.parametrize("error", ["ValueError", "PlanError"])
def test_what_the_builder_raises_names_the_plan(error: str) -> None:
    found = what_comes_of_builders()[error]
    assert found.startswith("PlanError: building mine@1:A=2 for fprop x=1x8x8x8")
    assert found.endswith(f"{error}: no such settings")


@pytest.mark.parametrize("returned", ["None", "a number"])
def test_the_builder_returns_a_plan(returned: str) -> None:
    found = what_comes_of_builders()[returned]
    assert found.startswith("PlanError: building mine@1:A=2 for fprop")


def test_convolutions_of_the_builder_are_pytorchs_own() -> None:
    """One that were tuned would wait for the thread that tunes, which waits for the builder."""
    assert what_comes_of_builders()["a convolution"] == "mine@1:A=2"


def test_plans_of_all_kinds_are_built_side_by_side() -> None:
    """Without its GPU an implementation's is not."""
    search = open_search(PROBLEM, "h200")
    engine = search.query("A")[0].text
    texts = ["aten", engine, "mine@1", "matmul", "nonsense"]
    found = search.build_many(texts * 3, 4)
    assert [plan and plan.text for plan, _ in found] == ["aten", engine, None, None, None] * 3
    errors = [error for _, error in found[:5]]
    assert errors[:2] == ["", ""]
    assert errors[2] == "mine@1 is built for a CUDA device of this machine only"
    assert "no matrix product" in errors[3]
    assert "does not parse" in errors[4]
