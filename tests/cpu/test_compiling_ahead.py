"""Engines of several problems are compiled at once, and their searches find the plans.

No engine is compiled at run time for a GPU that is not here. So these tests compile, and keep, all
engines that cuDNN has for a GPU that is described.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from problems import make

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines.configs import Candidate, open_search
from cudnn_autotune.nn.models.compiling_ahead import CompilingAhead
from cudnn_autotune.store import kept_plans

pytestmark = pytest.mark.search

PROBLEM = make("resnet_fp16_nhwc")


@pytest.fixture(autouse=True)
def all_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _C.keep_plans("", kept_plans.find, kept_plans.keep)
    monkeypatch.setattr(Candidate, "is_compiled", property(lambda one: one.engine is not None))
    ca.set_store(tmp_path, mode="read_write")
    yield
    _C.keep_plans("RUNTIME_COMPILATION", kept_plans.find, kept_plans.keep)


def read_back(problem: ca.ConvProblem) -> list[bool]:
    """Of each engine config of a problem, whether its plan was kept."""
    texts = [candidate.text for candidate in ca.candidates(problem, device="h200")]
    built = open_search(problem, "h200").build_many(texts, 1)
    return [plan.is_read_back for plan, _ in built if plan is not None]


def test_searches_find_the_plans() -> None:
    problems = [PROBLEM, make("resnet_fp16_nhwc", op="dgrad")]
    with CompilingAhead() as ahead:
        for problem in problems * 2:
            ahead.start(problem, "h200", "race", None)
        ahead.wait(problems, "h200")
        for problem in problems:
            found = read_back(problem)
            assert len(found) > 10
            assert all(found)


def test_auto_compiles_one_kernel_of_an_engine() -> None:
    """As its search does."""
    with CompilingAhead() as ahead:
        ahead.start(PROBLEM, "h200", "auto", None)
        ahead.wait([PROBLEM], "h200")
    found = read_back(PROBLEM)
    engines = {candidate.engine for candidate in ca.candidates(PROBLEM, device="h200")}
    assert 1 < sum(found) <= len(engines) < len(found)


@pytest.mark.parametrize("sampling", ["heuristic", "online", "sample_once"])
def test_modes_that_compile_otherwise_are_left_alone(sampling: str) -> None:
    with CompilingAhead() as ahead:
        ahead.start(PROBLEM, "h200", sampling, None)
        ahead.wait([PROBLEM], "h200")
    assert not any(read_back(PROBLEM))


@pytest.mark.parametrize("mode", ["off", "read"])
def test_nothing_is_compiled_that_would_not_be_kept(mode: str, tmp_path: Path) -> None:
    ca.set_store(tmp_path, mode=mode)
    compiled = kept_plans.counts()["compiled"]
    with CompilingAhead() as ahead:
        ahead.start(PROBLEM, "h200", "race", None)
        ahead.wait([PROBLEM], "h200")
    assert kept_plans.counts()["compiled"] == compiled


def test_a_budget_is_the_searchs_own() -> None:
    with CompilingAhead() as ahead, ca.use_sampling("race", budget_ms=100.0):
        ahead.start(PROBLEM, "h200", "", None)
        ahead.wait([PROBLEM], "h200")
    assert not any(read_back(PROBLEM))


def test_a_problem_that_cudnn_does_not_take_is_for_its_search() -> None:
    huge = make("resnet_fp16_nhwc", op="fprop", dtype=torch.float64)
    with CompilingAhead() as ahead:
        ahead.start(huge, "h200", "race", None)
        ahead.wait([huge], "h200")
        ahead.wait([PROBLEM], "h200")  # which was never begun


def test_what_has_not_begun_is_left_out() -> None:
    shapes = [(8, 32, 16 + i, 16) for i in range(40)]
    problems = [
        ca.ConvProblem("fprop", shape, (32, 32, 3, 3), padding=1, dtype=torch.float16)
        for shape in shapes
    ]
    with CompilingAhead() as ahead:
        for problem in problems:
            ahead.start(problem, "h200", "race", None)
        futures = list(ahead._building.values())
    assert any(future.cancelled() for future in futures)
