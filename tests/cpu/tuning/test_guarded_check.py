"""What a candidate writes is checked between guard bands: before it serves, or even is timed."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.kernels import user_kernels
from support.tuning.made_up_plans import plan_of
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.timers.measuring import operands
from cudnn_autotune.tuning import checking, miss
from cudnn_autotune.tuning.checking import OutputChecks, begin, is_telling, refusal, relative_error

pytestmark = pytest.mark.search

PROBLEM = ca.ConvProblem("fprop", (2, 3, 5, 6), (4, 3, 3, 3), padding=1)
RIGHT_ON_PAPER = ["right", "prints", "uses_workspace"]
# Patterns
FAULTS = {
    "wrong": r"it is wrong \(relative error 2; seed \d+\)",
    "half": r"it is wrong \(relative error inf; seed \d+\)",
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
    assert re.fullmatch(FAULTS[settings], refusal(PROBLEM, tensors)(one.text, one))
    checks = OutputChecks()
    with caplog.at_level(logging.WARNING):
        assert not checks.is_right(PROBLEM, one.text, one, tensors)
    assert re.search(FAULTS[settings].removeprefix("it "), caplog.text)
    if settings == "raises":  # it has no output that could be wrong
        assert checks.failures == {one.text: "mine@1:raises: ValueError: not today"}
        assert (checks.rejected, checks.errors) == ([], {})
        return
    assert checks.failures == {}
    ((text, error),) = checks.rejected
    assert text == one.text
    assert error > 1


def test_the_callers_result_is_not_written_to() -> None:
    tensors = data()
    before = tensors[2].clone()
    for settings in ("right", "wrong", "behind"):
        one = plan(settings)
        begin(PROBLEM, one.text, one, tensors)
        assert torch.equal(tensors[2], before)


# Operands that do not tell right from wrong


def spoilt(name: str) -> tuple[Tensor, ...]:
    """As in a first training step: infinite by a loss scale that is too large, or zero."""
    x, w, y = data()
    if name == "infinite":
        x[0, 0, 0, 0] = torch.inf
    elif name == "nan":
        w[0, 0, 0, 0] = torch.nan
    elif name == "zero":
        w.zero_()
    elif name == "nearly zero":
        x.view(-1)[1:] = 0
    return x, w, y


@pytest.mark.parametrize("name", ["infinite", "nan", "zero", "nearly zero"])
def test_on_operands_that_tell_nothing_random_ones_decide(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    tensors, checks = spoilt(name), OutputChecks()
    before = [tensor.clone() for tensor in tensors]
    why = refusal(PROBLEM, tensors)
    right = plan("right")
    assert why(right.text, right) == ""
    assert checks.is_right(PROBLEM, right.text, right, tensors)
    error = checks.errors[right.text]
    assert error is not None
    assert error < 1e-4
    for settings in ("wrong", "half", "behind", "workspace"):
        one = plan(settings)
        assert not checks.is_right(PROBLEM, one.text, one, tensors), settings
        assert why(one.text, one)
    # Of a few numbers that are not zero a wrong sign shows.
    assert ("random operands, seed" in caplog.text) is (name != "nearly zero")
    assert [text for text, _ in checks.rejected] == [
        f"mine@1:{settings}" for settings in ("wrong", "half", "behind", "workspace")
    ]
    assert all(
        torch.equal(now, then) or name == "nan" for now, then in zip(tensors, before, strict=True)
    )


def test_an_engine_that_writes_zeros_is_wrong_where_zeros_are_right() -> None:
    plan = plan_of("eng3", PROBLEM, lambda x, w, y, *_: y.zero_())
    checks = OutputChecks()
    assert not checks.is_right(PROBLEM, "eng3", plan, spoilt("zero"))
    assert checks.errors["eng3"] == pytest.approx(1)


def test_an_output_that_overflows_is_compared_on_random_operands() -> None:
    problem = ca.ConvProblem("fprop", (2, 3, 5, 6), (4, 3, 3, 3), padding=1, dtype=torch.float16)
    right = _C.build_plan(problem.native(), "aten", 0)
    x, w, y = operands(problem, "cpu")
    tensors = (x * 1000, w * 1000, y)
    checks = OutputChecks()
    assert checks.is_right(problem, "aten", right, tensors)
    assert checks.errors["aten"] is not None
    infinite = plan_of("eng3", problem, lambda x, w, y, *_: y.fill_(torch.inf))
    assert not checks.is_right(problem, "eng3", infinite, tensors)


def test_without_memory_for_random_operands_it_is_neither_right_nor_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checking, "telling_operands", refuse)
    one, checks = plan("right"), OutputChecks()
    assert checks.is_right(PROBLEM, one.text, one, spoilt("zero"))
    assert checks.errors == {one.text: None}
    with pytest.raises(torch.OutOfMemoryError):
        refusal(PROBLEM, spoilt("zero"))(one.text, one)
    # What the caller's tensors tell is believed.
    wrong = plan("wrong")
    assert not checks.is_right(PROBLEM, wrong.text, wrong, data())


def test_the_seed_that_is_logged_shows_the_fault_again(caplog: pytest.LogCaptureFixture) -> None:
    """Where the output is wrong at one place of many."""
    problem = ca.ConvProblem("fprop", (2, 3, 40, 40), (4, 3, 3, 3), padding=1)
    right = _C.build_plan(problem.native(), "aten", 0)

    def run(x: Tensor, w: Tensor, y: Tensor, *_: Tensor) -> None:
        y.copy_(_C.execute(right, x, w, y))
        y[:, :, 10:15, 10:20] = 3

    engine, tensors, checks = (
        plan_of("eng3", problem, run),
        operands(problem, "cpu"),
        OutputChecks(),
    )
    with caplog.at_level(logging.WARNING):
        found = [checks.is_right(problem, "eng3", engine, tensors) for _ in range(8)]
    assert not all(found)
    for (_, error), seed in zip(
        checks.rejected, re.findall(r"seed (\d+)", caplog.text), strict=True
    ):
        assert relative_error(problem, lambda: run(*tensors), *tensors, seed=int(seed)) == error


@pytest.mark.parametrize("name", ["zero", "nearly zero", "infinite", "nan", "right"])
def test_a_search_measures_on_what_tells(name: str) -> None:
    """Zeros draw less power, and another engine may win on them."""
    tensors = spoilt(name)
    before = [tensor.clone() for tensor in tensors]
    x, w, y = miss._to_measure_on(PROBLEM, tensors)
    assert [x is tensors[0], w is tensors[1]] == [name == "right"] * 2
    assert y.data_ptr() != tensors[2].data_ptr()
    assert is_telling(PROBLEM, (x, w, y))
    assert y.untyped_storage().nbytes() > y.nbytes + (2 << 20)
    assert all(
        torch.equal(now.nan_to_num(), then.nan_to_num())
        for now, then in zip(tensors, before, strict=True)
    )


# Determinism

STRICT = replace(PROBLEM, deterministic=True)


@pytest.mark.parametrize("is_zero", [False, True])
def test_where_determinism_is_asked_for_the_bits_of_two_runs_are_compared(
    is_zero: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """On random operands too, where the caller's tell nothing."""
    one, tensors, checks = plan("varies"), spoilt("zero" if is_zero else ""), OutputChecks()
    assert refusal(STRICT, tensors)(one.text, one) == "it differs from run to run"
    assert not checks.is_right(STRICT, one.text, one, tensors)
    assert checks.rejected == [(one.text, math.inf)]
    assert checks.varying == {one.text}
    assert f"{one.text} differs from run to run" in caplog.text
    assert OutputChecks().is_right(PROBLEM, one.text, one, tensors)


@pytest.mark.parametrize("problem", [PROBLEM, STRICT])
def test_only_where_determinism_is_asked_for_it_runs_twice(problem: ca.ConvProblem) -> None:
    right, runs = _C.build_plan(PROBLEM.native(), "aten", 0), []

    def run(x: Tensor, w: Tensor, y: Tensor, *_: Tensor) -> None:
        runs.append(1)
        y.copy_(_C.execute(right, x, w, y))

    assert begin(problem, "mine@1", plan_of("mine@1", problem, run), data()).error() is not None
    assert len(runs) == (2 if problem.deterministic else 1)


def test_what_is_wrong_in_each_run_is_wrong() -> None:
    runs: list[int] = []

    def run(x: Tensor, w: Tensor, y: Tensor, *_: Tensor) -> None:
        runs.append(1)
        y.fill_(len(runs))

    check = begin(STRICT, "mine@1", plan_of("mine@1", STRICT, run), data())
    assert not check.varies()
    assert check.fault().startswith("is wrong")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_bits_of_every_type_are_compared(dtype: torch.dtype) -> None:
    """The sign of a zero is one of them."""
    problem, sign = replace(STRICT, dtype=dtype), [0.0, -0.0]
    right = _C.build_plan(problem.native(), "aten", 0)

    def run(x: Tensor, w: Tensor, y: Tensor, *_: Tensor) -> None:
        y.copy_(_C.execute(right, x, w, y))
        y[..., 0] = sign.pop()

    x, w, y = operands(problem, "cpu")
    x.zero_()
    assert not begin(problem, "aten", right, (x, w, y)).varies()
    assert begin(problem, "mine@1", plan_of("mine@1", problem, run), (x, w, y)).varies()


# Want of memory


@pytest.mark.parametrize("problem", [PROBLEM, STRICT])
def test_one_that_runs_out_of_memory_is_neither_wrong_nor_does_it_fail(
    problem: ca.ConvProblem,
) -> None:
    one, tensors, checks = plan("out_of_memory"), data(), OutputChecks()
    with pytest.raises(torch.OutOfMemoryError, match=r"^no room for spectra$"):
        _C.execute(one, *tensors, workspace=torch.empty(1000, dtype=torch.uint8))
    with pytest.raises(torch.OutOfMemoryError):
        refusal(problem, tensors)(one.text, one)
    assert checks.is_right(problem, one.text, one, tensors)
    assert checks.errors == {one.text: None}
    assert (checks.rejected, checks.failures) == ([], {})


def test_an_interrupt_ends_the_check() -> None:
    one, tensors = plan("interrupted"), data()
    with pytest.raises(KeyboardInterrupt):
        _C.execute(one, *tensors, workspace=torch.empty(1000, dtype=torch.uint8))
    with pytest.raises(KeyboardInterrupt):
        begin(PROBLEM, one.text, one, tensors)


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


def test_without_memory_for_bands_pytorchs_own_path_is_checked_on_the_callers_result(
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


def test_an_engine_without_bands_may_be_wrong_and_is_not_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where else it writes would not be seen."""
    right = _C.build_plan(PROBLEM.native(), "aten", 0)

    def run(x: Tensor, w: Tensor, y: Tensor, *_: Tensor) -> None:
        y.copy_(_C.execute(right, x, w, y)).mul_(factor)

    engine, tensors, checks = plan_of("eng3", PROBLEM, run), data(), OutputChecks()
    monkeypatch.setattr(torch, "full", refuse)
    for factor in (1.0, 2.0):
        assert checks.is_right(PROBLEM, "eng3", engine, tensors) is (factor == 1)
        assert checks.errors["eng3"] == (None if factor == 1 else pytest.approx(1))


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


# Slices of channels

SLICES = ca.ConvProblem(
    *("fprop", (2, 8, 5, 6), (16, 8, 3, 3)),
    padding=1,
    memory_format=torch.channels_last,
    pixel_strides=(24, 40),
)


@pytest.mark.parametrize("neighbour", [False, True])
def test_the_channels_between_slices_are_guarded(neighbour: bool) -> None:
    def run(x: Tensor, w: Tensor, y: Tensor, *_: Any) -> None:
        y.copy_(torch.nn.functional.conv2d(x, w, None, 1, 1))
        if neighbour:
            y.as_strided(y.shape, y.stride(), y.storage_offset() + 1)[1, 15, 2, 3] = 7

    tensors = operands(SLICES, "cpu")
    assert [tensor.stride() for tensor in tensors[:3]] == [*SLICES.strides]
    assert SLICES.strides[2] == (5 * 6 * 40, 1, 6 * 40, 40)
    check = begin(SLICES, "mine@1:x", plan_of("mine@1:x", SLICES, run), tensors)
    if neighbour:
        assert check.fault() == "writes outside of its result or its workspace"
    else:
        error = check.error()
        assert error is not None
        assert error < 1e-5
