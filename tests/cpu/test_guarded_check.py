"""What a candidate writes is checked between guard bands: before it serves, or even is timed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import user_kernels
from made_up_plans import plan_of
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.timers.measuring import operands
from cudnn_autotune.tuning.output_check import OutputChecks, begin, refusal

pytestmark = pytest.mark.search

PROBLEM = ca.ConvProblem("fprop", (2, 3, 5, 6), (4, 3, 3, 3), padding=1)
RIGHT_ON_PAPER = ["right", "prints", "uses_workspace"]
FAULTS = {
    "wrong": "it is wrong (relative error 2)",
    "half": "it is wrong (relative error inf)",
    "behind": "it writes outside of its result or its workspace",
    "before": "it writes outside of its result or its workspace",
    "workspace": "it writes outside of its result or its workspace",
    "raises": "it fails: mine@1:raises: ValueError: not today",
}


def refuse(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("no memory")


def plan(settings: str, name: str = "mine@1") -> _C.Plan:
    run = user_kernels.build(PROBLEM, settings)
    return _C.recipe_plan(PROBLEM.native(), f"{name}:{settings}", [("python", run)], 1000, 0)


def data() -> tuple[Tensor, ...]:
    return operands(PROBLEM, "cpu")


@pytest.mark.parametrize("settings", RIGHT_ON_PAPER)
def test_what_is_right_may_run(settings: str) -> None:
    one = plan(settings)
    assert refusal(PROBLEM, data())(one.text, one) == ""
    checks = OutputChecks()
    assert checks.is_right(PROBLEM, one.text, one, data())
    assert checks.rejected == []


@pytest.mark.parametrize("settings", FAULTS)
def test_what_is_not_says_why(settings: str, caplog: pytest.LogCaptureFixture) -> None:
    one, tensors = plan(settings), data()
    assert refusal(PROBLEM, tensors)(one.text, one) == FAULTS[settings]
    checks = OutputChecks()
    with caplog.at_level(logging.WARNING):
        assert not checks.is_right(PROBLEM, one.text, one, tensors)
    ((text, error),) = checks.rejected
    assert text == one.text
    assert error > 1
    assert FAULTS[settings].removeprefix("it ") in caplog.text


def test_the_callers_result_is_not_written_to() -> None:
    tensors = data()
    before = tensors[2].clone()
    for settings in ("right", "wrong", "behind"):
        one = plan(settings)
        begin(PROBLEM, one.text, one, tensors)
        assert torch.equal(tensors[2], before)


def test_operands_that_are_not_finite_do_not_condemn_it() -> None:
    """As the first gradients of mixed precision may be; but that it writes outside is seen."""
    x, w, y = data()
    x[0, 0, 0, 0] = torch.inf
    right, outside = plan("right"), plan("behind")
    why = refusal(PROBLEM, (x, w, y))
    assert why(right.text, right) == ""
    assert why(outside.text, outside) == FAULTS["behind"]


def test_without_memory_for_a_check_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    one, tensors = plan("right"), data()
    why = refusal(PROBLEM, tensors)
    checks = OutputChecks()
    monkeypatch.setattr(torch, "full", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        why(one.text, one)
    # A known choice was right before.
    assert checks.is_right(PROBLEM, one.text, one, tensors)
    assert checks.errors == {one.text: None}


def test_engines_run_unasked() -> None:
    one = plan_of("eng3", PROBLEM)  # which fails the test if it runs
    assert refusal(PROBLEM, data())("eng3", one) == ""


@pytest.mark.parametrize("is_outside", [False, True])
def test_an_engine_that_writes_outside_is_rejected(
    is_outside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its output is right all the same, and so would another one have been, which lies behind."""

    def run(x: Tensor, w: Tensor, y: Tensor, *_: Tensor) -> None:
        y.copy_(_C.execute(right, x, w, y))
        if is_outside:
            user_kernels.clear_byte(y.data_ptr() + y.nbytes, x)

    right = _C.build_plan(PROBLEM.native(), "aten", 0)
    checks, tensors = OutputChecks(), data()
    before = tensors[2].clone()
    plan = plan_of("eng3", PROBLEM, run)
    assert checks.is_right(PROBLEM, "eng3", plan, tensors) is not is_outside
    assert bool(checks.rejected) is is_outside
    assert ("writes outside of its result" in caplog.text) is is_outside
    assert torch.equal(tensors[2], before)


def test_without_memory_for_bands_an_engine_is_checked_on_the_callers_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, tensors = _C.build_plan(PROBLEM.native(), "aten", 0), data()
    expected = _C.execute(plan, *tensors)
    tensors[2].fill_(7)
    checks = OutputChecks()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "full", refuse)
        assert checks.is_right(PROBLEM, "aten", plan, tensors)
    assert checks.errors["aten"] is not None
    assert torch.equal(tensors[2], expected)


@pytest.mark.parametrize("op", ["dgrad", "wgrad"])
def test_the_result_of_a_gradient_is_guarded_too(op: str) -> None:
    problem = ca.ConvProblem(op, (2, 3, 5, 6), (4, 3, 3, 3), padding=1)
    written = {"dgrad": 0, "wgrad": 1}[op]

    def run(*tensors: Tensor) -> None:
        tensors[written].copy_(_C.execute(right, *tensors[:3]))
        if is_outside:
            user_kernels.clear_byte(tensors[written].data_ptr() - 1, tensors[0])

    right = _C.build_plan(problem.native(), "aten", 0)
    one = plan_of("mine@1", problem, run)
    for is_outside in (False, True):
        found = refusal(problem, operands(problem, "cpu"))(one.text, one)
        assert bool(found) is is_outside, found
