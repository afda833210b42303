"""The least time of PyTorch's own path is that of its convolution and of the kernels behind it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.simulation import engine, timer_of
from support.store.decisions import EVIDENCE, decision, problem, selection, timed

from cudnn_autotune.engines.candidates import named
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.selection import Measurement
from cudnn_autotune.sampling.model_race import Entrant, rules, steps_in_model
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.sampling.search_state import SearchState
from cudnn_autotune.sampling.strategy import Budget, Limits
from cudnn_autotune.tuning import choice_log, own_path_floor
from cudnn_autotune.tuning.choice import Choice

FUSED = problem(activation="relu")
POLICY = decision().policy
PASS_MS = 2 * 64 * 64 * 56 * 56 / (64 * 132 * 1_980_000)  # the result is read or written once
ADDED_MS = 1e-3 + 2 * PASS_MS
ENGINE = timed("fastest", 1.0, low_ms=0.99, high_ms=1.01)
OTHERS = [timed(f"eng{i}", 1.2, rank=i, low_ms=1.1, high_ms=1.3) for i in range(1, 10)]
KERNEL = Measurement(named("implicit_gemm_1d@1:N_TILE=64"), 0.25, 9, low_ms=0.24, high_ms=0.26)
RUNS_IT = Measurement(OWN_PATH, 1.0, 9, low_ms=0.99, high_ms=1.01, runs="fastest")


@pytest.fixture(autouse=True)
def described_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gpu = SimpleNamespace(multi_processor_count=132, clock_rate=1_980_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    yield
    choice_log.forget()


def floor_ms(
    fused: ConvProblem = FUSED,
    policy: Policy = POLICY,
    ranking: Sequence[Measurement] = (ENGINE, RUNS_IT),
    **evidence: Any,
) -> float | None:
    """Returns the floor once the convolution alone has been searched, with ``ranking``."""
    alone = replace(fused, bias=False, residual=False, activation="")
    found = selection(ranking, replace(EVIDENCE, **evidence))
    found_alone = decision(problem=alone, policy=policy, selection=found)
    choice_log.record(Choice(found_alone, 0, searched=found))
    return own_path_floor.floor_ms(fused, policy, 0)


def test_it_begins_at_the_interval_of_the_convolution() -> None:
    assert floor_ms() == pytest.approx(0.99 + ADDED_MS)


def test_each_step_behind_the_convolution_is_a_kernel() -> None:
    both = floor_ms(replace(FUSED, residual=True))
    assert both == pytest.approx(0.99 + 2e-3 + 5 * PASS_MS)
    only = floor_ms(replace(FUSED, residual=True, activation=""))
    assert only == pytest.approx(0.99 + 1e-3 + 3 * PASS_MS)


def test_a_bias_is_one_more_kernel_only_behind_an_engine_of_cudnn() -> None:
    biased = replace(FUSED, bias=True)
    assert floor_ms(biased) == pytest.approx(0.99 + 2 * ADDED_MS)
    own = Measurement(OWN_PATH, 0.5, 9, low_ms=0.48, high_ms=0.52)
    assert floor_ms(biased, ranking=[own, ENGINE]) == pytest.approx(0.48 + ADDED_MS)


def test_the_packages_kernels_do_not_count_where_no_engine_was_left_out() -> None:
    floor = floor_ms(ranking=[KERNEL, ENGINE, *OTHERS, RUNS_IT])
    assert floor == pytest.approx(0.99 + ADDED_MS)


@pytest.mark.parametrize("left_out", OTHERS, ids=lambda one: one.candidate.text)
def test_a_kernel_counts_where_an_engine_may_have_been_left_out(left_out: Measurement) -> None:
    """The kernel is faster than the engine; PyTorch may run it all the same, if it is faster than
    the others."""
    others = [one for one in OTHERS if one is not left_out]
    floor = floor_ms(ranking=[KERNEL, ENGINE, *others, RUNS_IT])
    assert floor == pytest.approx(0.24 + ADDED_MS)


def test_one_launch_may_have_been_disturbed() -> None:
    slow = timed("slow", 1.2, rank=2, eliminated="1.60 times the best")
    assert floor_ms(ranking=[ENGINE, RUNS_IT, slow]) == pytest.approx(1.2 / 1.5 + ADDED_MS)


def test_there_is_none_where_not_all_that_pytorch_may_run_was_timed() -> None:
    assert floor_ms(ranking=[ENGINE]) is None
    assert floor_ms(ranking=[ENGINE, Measurement(OWN_PATH, None, 0, eliminated="failed")]) is None
    untimed = timed("untimed", None, rank=2, eliminated="eng2 is more than 5 times slower")
    assert floor_ms(ranking=[ENGINE, RUNS_IT, untimed]) is None
    of_b = replace(untimed, candidate=replace(untimed.candidate, heuristic_mode="B"))
    assert floor_ms(ranking=[ENGINE, RUNS_IT, of_b]) == pytest.approx(0.99 + ADDED_MS)


def test_there_is_none_where_another_process_searched() -> None:
    alone = replace(FUSED, activation="")
    found = decision(problem=alone, policy=POLICY, selection=selection([ENGINE, RUNS_IT]))
    choice_log.record(Choice(found, 0, "store"))
    assert own_path_floor.floor_ms(FUSED, POLICY, 0) is None


def test_a_clock_that_was_low_may_have_risen() -> None:
    """Its highest is what PyTorch says: NVML may be missing, or mean another GPU."""
    assert floor_ms(clock_mhz=1485.0) == pytest.approx(0.75 * 0.99 + ADDED_MS)
    assert floor_ms(clock_mhz=2010.0) == pytest.approx(0.99 + ADDED_MS)
    assert floor_ms(clock_mhz=None) is None


def test_there_is_none_where_the_convolution_was_limited_and_pytorchs_is_not() -> None:
    assert floor_ms(policy=replace(POLICY, workspace=4096)) is None
    assert floor_ms(policy=replace(POLICY, benchmark=2)) is None


def test_there_is_none_where_the_race_of_a_model_ended_first() -> None:
    """It times a layer that matters little by one launch, which may be before all is compiled."""
    for steps, is_known in ((1, False), (1000, True)):
        timer = timer_of(engine("fastest", 1.0), engine("other", 1.2))
        found = SearchState(timer, Budget(timer, Limits()), rules(), random.Random(0))
        entrant = Entrant(FUSED, 1, found, steps_in_model(found, timer.candidates, Limits()))
        for _ in range(steps):
            entrant.advance()
        entrant.end()
        raced = entrant.selection()
        assert raced is not None
        assert raced.evidence.budget_ms is None
        floor = floor_ms(ranking=raced.ranking, **vars(raced.evidence))
        assert (floor is not None) == is_known


def test_there_is_none_where_pytorch_writes_to_dense_memory() -> None:
    assert floor_ms(replace(FUSED, pixel_strides=(128, 128))) is None
