"""``tune`` and ``distributed.tune`` take the same arguments, and refuse the same."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from support.processes import distributed_cases as cases
from support.processes.gloo_ranks import Ranks
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune.models.tune import find_in

BOTH = [ca.tune, ca.distributed.tune]
LAYER, X = ca.Conv2d(3, 4, 3), torch.ones(1, 3, 8, 8)


def test_they_take_the_same_arguments() -> None:
    alone, together = (dict(inspect.signature(tune).parameters) for tune in BOTH)
    for only_of_ranks in ("group", "timeout_s"):
        del together[only_of_ranks]
    assert list(alone.values()) == list(together.values())
    assert {"train", "budget_s", "memory_format"} <= alone.keys()


@pytest.mark.parametrize("tune", BOTH, ids=lambda tune: tune.__module__)
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"train": "yes"}, TypeError, "train must be a bool, got str"),
        ({"train": 1}, TypeError, "train must be a bool, got int"),
        ({"memory_format": "nhwc"}, ValueError, "memory_format must be None or 'auto', got 'nhwc'"),
        (
            {"memory_format": torch.channels_last},
            ValueError,
            r"memory_format must be None or 'auto', got torch\.channels_last",
        ),
        ({"budget_s": "5"}, TypeError, "budget_s must be a number of seconds or None, got '5'"),
        ({"budget_s": -1}, ValueError, "budget_s must be a finite number of seconds of 0 or more"),
        ({"budget_s": math.inf}, ValueError, "budget_s must be a finite number .*, got inf"),
    ],
)
def test_bad_arguments_are_named(
    tune: Any, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tune(LAYER, X, **given)


@pytest.mark.parametrize("tune", BOTH, ids=lambda tune: tune.__module__)
def test_bad_inputs_are_named(tune: Any) -> None:
    with pytest.raises(TypeError, match=r"inputs must be .* Conv2d\.forward\(input.*missing"):
        tune(LAYER)
    with pytest.raises(TypeError, match="too many positional arguments"):
        tune(LAYER, X, X)
    if not torch.cuda.is_available():  # there the model's own error comes from its run
        with pytest.raises(ValueError, match="inputs must be what Conv2d takes, and it raises"):
            tune(LAYER, "x")
        with pytest.raises(ValueError, match="model must have been called once"):
            tune(ca.LazyConv2d(4, 3), X)


@pytest.mark.parametrize(("train", "count"), [(True, 5), (False, 3)])
def test_ranks_tune_the_backward_if_they_train(two: Ranks, train: bool, count: int) -> None:
    for result in two.values(cases.tuned_with, 3, {"train": train}):
        assert result["error"] is None
        assert len(result["decisions"]) == count
        assert set(result["budgets"]) <= {None}


def test_ranks_time_nothing_once_the_budget_is_spent(two: Ranks) -> None:
    results = two.values(cases.tuned_with, 8, {"budget_s": 0.15})
    for result in results:
        assert result["error"] is None
        assert result["decisions"] == results[0]["decisions"]
        budgets = result["budgets"]
        left = [0.15, 0.05, *[0.0] * 8]
        assert budgets == pytest.approx(left[: len(budgets)])
    assert sum(len(result["budgets"]) for result in results) == len(results[0]["decisions"]) == 10


def test_with_no_time_ranks_time_nothing(two: Ranks) -> None:
    for result in two.values(cases.tuned_with, 2, {"budget_s": 0}):
        assert result["error"] is None
        assert set(result["budgets"]) <= {0.0}


def test_both_layouts_are_looked_at() -> None:
    model = cases.Laid(1.0)
    found = find_in("auto", True, model, (X,), {})
    assert (list(found.counts), found.device) == (cases.problems(4), 0)
    assert list(find_in(None, True, model, (X,), {}).counts) == cases.problems(2)
    assert model.conv.weight.is_contiguous()


@pytest.mark.parametrize("train", [True, False])
def test_gradients_are_as_asked_for(train: bool) -> None:
    seen = []

    class Sees(cases.Asking):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.is_grad_enabled())
            return super().forward(x)

    with torch.set_grad_enabled(not train):
        find_in(None, train, Sees(1), (X,), {})
    assert seen == [train]
