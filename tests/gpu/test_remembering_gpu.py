"""On a GPU: what is remembered serves without timing, what is pinned serves at once."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import assert_close
from torch.profiler import ProfilerActivity, profile

import cudnn_autotune as ca
from cudnn_autotune.sampling import Candidates, Limits, Measurement, Selection, Timer
from cudnn_autotune.store import checked_outputs
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.file_store import Store
from cudnn_autotune.timers.measuring import WRITTEN
from cudnn_autotune.tuning import serving, tune_problem

pytestmark = pytest.mark.usefixtures("folder")

ALLOWED = 2e-2


def operands(n: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 32, 20, 20, device="cuda", dtype=torch.float16)
    w = torch.randn(48, 32, 3, 3, device="cuda", dtype=torch.float16)
    return tuple(t.contiguous(memory_format=torch.channels_last) for t in (x, w))  # type: ignore[return-value]


def call(x: torch.Tensor, w: torch.Tensor, mode: str = "race") -> torch.Tensor:
    return ca.functional.conv2d(x, w, padding=1, sampling=mode)


def only() -> ca.Choice:
    (choice,) = ca.choices()
    return choice


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_capture_takes_what_is_remembered(tmp_path: Path, is_compiled: bool) -> None:
    """By the range of the profiler, which names it."""
    x, w = operands()
    call(x, w)
    (decision,) = ca.get_store()
    # One that the heuristics would not take, if possible: the slowest takes the winner's place.
    engines = [
        e
        for e in decision.selection.ranking
        if e.time_ms is not None
        and e.candidate.engine is not None
        and e.candidate.is_compiled is is_compiled
        and e.samples > 1
    ]
    if not engines:
        pytest.skip("no such engine was raced")
    slowest = max(engines, key=lambda entry: entry.time_ms or 0.0)
    others = [entry for entry in decision.selection.ranking if entry is not slowest]
    selection = dataclasses.replace(decision.selection, ranking=(slowest, *others))
    Store(tmp_path / "turned").add([dataclasses.replace(decision, selection=selection)])
    ca.set_store(tmp_path / "turned")
    ca.forget()
    found_right(decision, slowest.candidate.text, x.device.index)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU]) as result, torch.cuda.graph(graph):
        y = call(x, w)
    names = {event.name for event in result.events()}
    assert f"cudnn_autotune::{slowest.candidate.text}" in names
    assert not ca.choices()
    y.fill_(float("nan"))
    graph.replay()
    assert_close(y, F.conv2d(x.double(), w.double(), padding=1), ALLOWED)


@pytest.mark.parametrize("mode", ["race", "auto", "till_stable"])
def test_a_second_start_times_nothing(mode: str) -> None:
    x, w = operands()
    expected = F.conv2d(x.double(), w.double(), padding=1)
    call(x, w, mode)
    tuned = only()
    assert tuned.origin == "tuned"
    ca.forget()
    y = call(x, w, mode)
    again = only()
    assert again.origin == "store"
    assert again.text == tuned.text
    assert again.tuning_ms < tuned.tuning_ms
    assert_close(y, expected, ALLOWED)


# A knob that there is not.
UNREADABLE = "eng67:KNOB_X=0"


def spoilt(folder: Path, decision: Decision, **changes: Any) -> None:
    """From now on the store says so of its winner, and that its relative error was 1e-4."""
    winner = decision.selection.winner
    result = dataclasses.replace(
        winner, candidate=dataclasses.replace(winner.candidate, **changes), runs=""
    )
    others = [
        e for e in decision.selection.ranking[1:] if e.candidate.text != result.candidate.text
    ]
    selection = dataclasses.replace(decision.selection, ranking=(result, *others))
    Store(folder / "spoilt").add(
        [dataclasses.replace(decision, selection=selection, relative_error=1e-4)]
    )
    ca.set_store(folder / "spoilt")
    ca.forget()


def found_right(decision: Decision, text: str, device: int) -> None:
    """From now on a process of this user has found that output right."""
    checked_outputs.remember(decision.problem.text, text, device, 1e-4)


@pytest.mark.parametrize("text", ["eng987", UNREADABLE])
@pytest.mark.parametrize("limit", [None, 1 << 20])
def test_a_config_that_no_longer_builds_is_tuned_again(
    folder: Path, caplog: pytest.LogCaptureFixture, limit: int | None, text: str
) -> None:
    """Under the same constraints, and under tighter ones: what is stored would else prevail."""
    x, w = operands()
    call(x, w)
    (decision,) = ca.get_store()
    spoilt(folder, decision, engine=987, text=text, workspace_bytes=0)
    ca.set_workspace_limit(limit)
    with caplog.at_level(logging.WARNING):
        y = call(x, w)
    assert only().origin == "tuned"
    assert serving.NO_LONGER_BUILDS in caplog.text
    assert ca.fallbacks()[serving.NO_LONGER_BUILDS] == 1
    assert_close(y, F.conv2d(x.double(), w.double(), padding=1), ALLOWED)
    ca.forget()
    call(x, w)
    assert only().origin == "store"  # the new one took its place


def test_what_is_served_from_a_store_is_checked(folder: Path) -> None:
    x, w = operands()
    call(x, w)
    (decision,) = ca.get_store()
    spoilt(folder, decision)
    call(x, w)
    assert only().origin == "store"
    assert only().relative_error not in (None, 1e-4)
    assert not any("tuned again" in reason for reason in ca.fallbacks())


@pytest.mark.parametrize("text", ["matmul", UNREADABLE])
def test_a_capture_verifies_what_the_store_says(
    folder: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    x, w = operands()
    call(x, w)
    (decision,) = ca.get_store()
    spoilt(folder, decision, engine=None, text=text, workspace_bytes=0, numerical_notes=())
    found_right(decision, text, x.device.index)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with caplog.at_level(logging.WARNING), torch.cuda.graph(graph):
        y = call(x, w)
    assert f"{text} is not captured" in caplog.text
    y.fill_(float("nan"))
    graph.replay()
    assert_close(y, F.conv2d(x.double(), w.double(), padding=1), ALLOWED)
    call(x, w)
    assert only().origin == "tuned"


def test_a_capture_does_not_believe_a_store(folder: Path) -> None:
    """It takes what PyTorch would run; the next call outside checks what the store says."""
    x, w = operands()
    call(x, w)
    (decision,) = ca.get_store()
    spoilt(folder, decision)  # another folder, in which nothing was found right
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = call(x, w)
    assert ca.choices() == []
    graph.replay()
    assert_close(y, F.conv2d(x.double(), w.double(), padding=1), ALLOWED)
    call(x, w)
    assert only().origin == "store"
    assert only().relative_error is not None


def test_what_was_captured_is_found_at_the_next_call_outside() -> None:
    x, w = operands()
    call(x, w)
    ca.forget()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call(x, w)
    assert ca.choices() == []
    call(x, w)
    assert only().origin == "store"
    assert only().relative_error is not None


def test_a_pin_during_the_tuning_of_its_problem_holds() -> None:
    class Pinning:
        """Has its problem pinned while it is being tuned, as another thread might."""

        name = "test_pinning"

        def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection:
            ca.pin(problem, "aten")
            (first,) = timer.runnable(candidates.all(), limit=1)
            return Selection((Measurement(first, None, 0),), total_samples=0)

    ca.sampling.register(Pinning())
    x, w = operands()
    call(x, w, "heuristic")
    problem = only().problem
    call(x, w, "test_pinning")
    call(x, w, "test_pinning")
    (choice,) = [c for c in ca.choices() if c.sampling == "test_pinning"]
    assert (choice.text, choice.origin) == ("aten", "pinned")


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize(
    "changes",
    [
        {"alignment": 8},
        {"dtype": torch.bfloat16, "alignment": 2},
        {"dtype": torch.float32, "allow_tf32": False, "alignment": 4},
        {"allow_reduced_precision": False},
        {"dtype": torch.bfloat16, "allow_reduced_precision": False},
        {"deterministic": True},
    ],
    ids=str,
)
def test_a_problem_is_tuned_exactly_as_it_was_recorded(op: str, changes: dict[str, Any]) -> None:
    """With the alignment of a view into a flat parameter, under the flags of who recorded it."""
    changes = {"dtype": torch.float16, **changes}
    aligned = changes.pop("alignment", 32)
    alignment = tuple(32 if i == WRITTEN[op] else aligned for i in range(3))
    problem = ca.ConvProblem(
        op, (4, 32, 20, 20), (48, 32, 3, 3), padding=1, alignment=alignment, **changes
    )
    assert tune_problem.tune(problem, 0, "heuristic").problem == problem


@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_models_problems_are_found_unheard_and_tuned(is_autocast: bool) -> None:
    ca.set_store(mode="off")
    layers = [ca.Conv2d(8, 8, 3, sampling=mode) for mode in (None, None, "race")]
    model = torch.nn.Sequential(torch.nn.ReLU(inplace=True), *layers).cuda()
    x = torch.randn(2, 8, 20, 20, device="cuda")
    before = x.clone()
    heard: list[ca.Choice] = []
    with torch.autocast("cuda", enabled=is_autocast), ca.flags("race"):
        with ca.on_decision(heard.append):
            problems = ca.distributed.problems_of(model, x)
            assert heard == ca.choices() == []
            # Three forward convolutions; the first one's input needs no gradient.
            assert [p.op for p in problems].count("fprop") == 3
            assert sorted(p.op for p in problems)[:2] == ["dgrad"] * 2
            assert len(problems) == 8
            assert torch.equal(x, before)
            decisions = ca.distributed.tune(model, x)
        assert [decision.problem for decision in decisions] == problems
        assert [choice.problem for choice in heard] == problems
        model(x).float().sum().backward()
    assert {choice.problem for choice in ca.choices()} == set(problems)
    assert {choice.origin for choice in ca.choices()} == {"agreed"}
