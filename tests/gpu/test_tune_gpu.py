"""``tune``: a model's convolutions in one race, on a GPU."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.conv.references import assert_close
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.store.file_store import Store
from cudnn_autotune.timers.gpu_timer import GpuTimer
from cudnn_autotune.timers.timer import Batch, Sample

pytestmark = pytest.mark.usefixtures("folder")


def network(plain: bool = False) -> tuple[nn.Module, Tensor]:
    """Two layers alike, and another one, in half precision and channels_last."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(32, 64, 1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
    )
    model = model.cuda().half().to(memory_format=torch.channels_last)
    x = torch.randn(8, 32, 28, 28, device="cuda", dtype=torch.float16, requires_grad=True)
    with torch.no_grad():
        x = x.contiguous(memory_format=torch.channels_last)
    return (model if plain else ca.convert(model)), x.requires_grad_()


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    output = model(x)
    (gradient,) = torch.autograd.grad(output.float().sum(), x)
    return output.detach(), gradient


def test_a_first_step_after_it_searches_nothing(folder: Path) -> None:
    plain, x = network(plain=True)
    model, _ = network()
    made = ca.tune(model, x)
    assert len(made) == 6
    assert all(decision.selection.total_samples > 0 for decision in made)
    before = ca.choices()
    assert {choice.origin for choice in before} == {"tuned"}
    assert {choice.problem for choice in before} == {decision.problem for decision in made}
    # PyTorch's time is of the same races; the 3x3 layer is called twice in each direction.
    assert (made.gain.calls, made.gain.compared_calls) == (9, 9)
    compared = [choice for choice in before if choice.speedup is not None]
    assert len(compared) == 6
    times = [(made.calls[c.problem], c.pytorch_ms, c.time_ms) for c in compared]
    theirs, ours = (sum(n * (t[i] or 0.0) for n, *t in times) for i in (0, 1))
    assert made.speedup == pytest.approx(theirs / ours)
    assert str(made).startswith(f"{type(model).__name__}, forward + backward: ")
    heard: list[ca.Choice] = []
    with ca.on_decision(heard.append):
        output, gradient = step(model, x)
    assert heard == []
    assert ca.choices() == before
    right, right_gradient = step(plain.double(), x.detach().double().requires_grad_())
    assert_close(output, right, 2e-2)
    assert gradient is not None
    assert right_gradient is not None
    assert_close(gradient, right_gradient, 2e-2)
    kept = list(Store(folder, ca.get_store().environment))
    assert {decision.problem for decision in kept} == {decision.problem for decision in made}
    for decision in made:
        assert decision.relative_error is not None
        assert decision.selection.evidence.regret_bound is None or (
            0 <= decision.selection.evidence.regret_bound < math.inf
        )


@pytest.mark.parametrize("has_store", [True, False])
def test_what_it_decided_is_not_raced_again(
    has_store: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_store:
        ca.set_store(mode="off")
    model, x = network()
    made = ca.tune(model, x, train=False)
    assert len(made) == 2
    if has_store:
        ca.forget()

    def fails(self: GpuTimer, batches: Sequence[Batch]) -> list[Sample]:
        raise AssertionError("it was raced again")

    monkeypatch.setattr(GpuTimer, "run", fails)
    again = ca.tune(model, x, train=False)
    assert [d.chosen and d.chosen.candidate for d in again] == [
        d.chosen and d.chosen.candidate for d in made
    ]


def test_what_a_first_call_decided_is_raced(folder: Path) -> None:
    model, x = network()
    with torch.no_grad():
        model(x)
    first = {choice.problem: choice.decision for choice in ca.choices()}
    made = {decision.problem: decision for decision in ca.tune(model, x, train=False)}
    assert made.keys() == first.keys()
    assert all(made[problem] != first[problem] for problem in first)


def test_both_layouts_are_tuned_and_the_model_has_one_of_them() -> None:
    model, x = network()
    model = model.to(memory_format=torch.contiguous_format)
    image = x.detach().contiguous()
    made = ca.tune(model, image, train=False, memory_format="auto")
    layouts = {decision.problem.memory_format for decision in made}
    assert layouts == {torch.contiguous_format, torch.channels_last}
    # The sums are of a step in one layout.
    assert made.gain.calls == sum(made.calls.values()) == 3
    before = ca.choices()
    with torch.no_grad():
        model(image)
    assert ca.choices() == before


def test_with_no_time_nothing_is_timed(folder: Path) -> None:
    model, x = network()
    made = ca.tune(model, x, budget_s=0)
    assert {decision.selection.total_samples for decision in made} == {0}
    before = ca.choices()
    step(model, x)
    assert ca.choices() == before
    assert list(Store(folder, ca.get_store().environment)) == []


@pytest.mark.parametrize("is_stored", [True, False])
def test_with_no_time_earlier_decisions_stay(is_stored: bool) -> None:
    """Those of first calls are not replaced by the heuristics' first plans."""
    if not is_stored:
        ca.set_store(mode="off")
    model, x = network()
    with torch.no_grad():
        model(x)
    first = {choice.problem: choice.text for choice in ca.choices()}
    if is_stored:
        ca.forget()
    made = ca.tune(model, x, train=False, budget_s=0)
    assert all(decision.selection.total_samples > 0 for decision in made)
    assert {choice.problem: choice.text for choice in ca.choices()} == first


def test_an_interruption_keeps_what_was_raced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cudnn_autotune")
    model, x = network()
    run = GpuTimer.run
    rounds = [0]

    def interrupted(self: GpuTimer, batches: Sequence[Batch]) -> list[Sample]:
        rounds[0] += len(batches) > 1 and len({b.candidate for b in batches}) > 1
        if rounds[0] == 20:
            rounds[0] += 1
            raise KeyboardInterrupt
        return run(self, batches)

    monkeypatch.setattr(GpuTimer, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ca.tune(model, x)
    assert rounds[0] > 20, "the race was over before"
    assert any(" ms a step by estimate of its " in line for line in caplog.messages)
    assert len(list(Store(folder, ca.get_store().environment))) >= 1
    assert all(choice.relative_error is not None for choice in ca.choices())
    monkeypatch.undo()
    step(model, x)


def test_memory_is_given_back() -> None:
    """All but what later calls use: cuBLAS's workspaces, and the pages of small ones."""
    model, x = network()
    step(model, x)  # with what a first call leaves
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    big = torch.randn(64, 32, 112, 112, device="cuda", dtype=torch.float16)
    ca.tune(model, big)
    size = big.untyped_storage().nbytes()
    del big
    torch.cuda.synchronize()
    most = 2 * size + (64 << 20)
    assert torch.cuda.memory_allocated() <= allocated + (64 << 20)
    assert torch.cuda.memory_reserved() <= reserved + most
