"""The least time of PyTorch's own path is that of its convolution and of the kernels behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decisions import EVIDENCE, decision, problem, selection, timed

from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.store import Policy
from cudnn_autotune.tuning import aten_floor, choice_log
from cudnn_autotune.tuning.choice import Choice

FUSED = problem(activation="relu")
POLICY = decision().policy
BYTES = 2 * 2 * 64 * 64 * 56 * 56  # the result is read and written once more
ADDED_MS = 1e-3 + BYTES / (64 * 132 * 1_980_000)


@pytest.fixture(autouse=True)
def described_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gpu = SimpleNamespace(multi_processor_count=132, clock_rate=1_980_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    yield
    choice_log.forget()


def floor_ms(fused: ConvProblem = FUSED, policy: Policy = POLICY, **evidence: Any) -> float | None:
    """Returns the floor once the convolution alone takes 0.99 to 1.01 ms."""
    alone = replace(fused, bias=False, residual=False, activation="")
    entry = timed("fastest", 1.0, low_ms=0.99, high_ms=1.01)
    found = selection([entry], replace(EVIDENCE, **evidence))
    choice_log.record(Choice(decision(problem=alone, policy=policy, selection=found), 0))
    return aten_floor.floor_ms(fused, policy, 0)


def test_it_begins_at_the_interval_of_the_convolution() -> None:
    assert floor_ms() == pytest.approx(0.99 + ADDED_MS)
    assert floor_ms(max_clock_mhz=1980.0) == pytest.approx(0.99 + ADDED_MS)


def test_a_clock_that_was_low_may_have_risen() -> None:
    floor = floor_ms(clock_mhz=1485.0, max_clock_mhz=1980.0)
    assert floor == pytest.approx(0.75 * 0.99 + ADDED_MS)


def test_there_is_none_where_the_convolution_was_limited_and_pytorchs_is_not() -> None:
    assert floor_ms(policy=replace(POLICY, workspace=4096)) is None
    assert floor_ms(policy=replace(POLICY, benchmark=2)) is None
    assert floor_ms(budget_ms=20.0) is None


def test_there_is_none_where_pytorch_writes_to_dense_memory() -> None:
    assert floor_ms(replace(FUSED, pixel_strides=(128, 128))) is None
