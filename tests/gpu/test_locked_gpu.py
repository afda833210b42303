"""With a locked store no GPU is asked for a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.store.decisions import L4, decision
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.norms.choices import norm_choices
from cudnn_autotune.store.file_store import Store
from cudnn_autotune.timers.gpu_timer import GpuTimer
from cudnn_autotune.timers.stopwatch import Stopwatch

COUNTED = "not in the locked store: "


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
    model.to("cuda", torch.half, memory_format=torch.channels_last)
    model[1].float()  # as mixed precision has it: the kernels for norms take no weights in half
    return model


def batch(size: int) -> Tensor:
    torch.manual_seed(size)
    x = torch.randn(size, 16, 28, 28, device="cuda", dtype=torch.half)
    return x.contiguous(memory_format=torch.channels_last)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _no_timing(*args: Any, **kwargs: Any) -> Any:
    pytest.fail("a candidate is timed")


@pytest.fixture
def lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Returns a function that locks the process's store, from which on nothing may be timed."""

    def now() -> Path:
        ca.set_store(mode="locked")
        ca.forget()
        torch._dynamo.reset()
        monkeypatch.setattr(GpuTimer, "run", _no_timing)
        monkeypatch.setattr(GpuTimer, "frontend_find", _no_timing)
        return folder

    return now


def step(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    y.float().sum().backward()
    return y.detach()


@pytest.mark.parametrize("way", ["convert", "enable", "functional"])
def test_eager_calls(way: str, lock: Callable[[], Path]) -> None:
    model = net()
    if way == "convert":
        ca.convert(model)
    elif way == "enable":
        ca.enable()

    def run(size: int) -> Tensor:
        if way == "functional":
            return ca.functional.conv2d(batch(size), model[0].weight, padding=1)
        return step(model, batch(size))

    try:
        run(8)
        folder = lock()
        before, uses = contents(folder), Stopwatch.uses
        run(8)
        assert ca.choices()
        assert {choice.origin for choice in ca.choices()} == {"store"}
        assert {norm.source for norm in norm_choices()} <= {"store"}
        assert ca.fallbacks().keys() <= {"PyTorch's own path was chosen (see choices())"}
        made = len(ca.choices())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = run(5)
        lacking = ca.choices()[made:]
        assert {(choice.origin, choice.text) for choice in lacking} == {("missing", "aten")}
        assert ca.fallbacks()[f"{COUNTED}convolutions"] == len(lacking)
        if way == "functional":
            own = F.conv2d(batch(5), model[0].weight, padding=1)
            torch.testing.assert_close(found, own, rtol=0, atol=0)
        else:
            assert {norm.source for norm in norm_choices()} == {"store", "missing"}
            assert ca.fallbacks()[f"{COUNTED}norms"] == 1
        assert Stopwatch.uses == uses
        assert contents(folder) == before
    finally:
        ca.disable()


def test_tune_and_prefetch(lock: Callable[[], Path]) -> None:
    model = ca.convert(net())
    tuned = ca.tune(model, batch(8))
    folder = lock()
    before = contents(folder)
    found = ca.prefetch(model, batch(8))
    assert found.problems == found.known > 0
    again = ca.tune(model, batch(8))
    assert [one.candidate.text for one in again] == [one.candidate.text for one in tuned]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lacking = ca.tune(model, batch(3))
    assert {one.candidate.text for one in lacking} == {"aten"}
    assert ca.fallbacks()[f"{COUNTED}convolutions"] == len(lacking)
    assert ca.prefetch(model, batch(4)).known == 0
    assert contents(folder) == before


@pytest.mark.parametrize("is_trained", [False, True], ids=["inference", "training"])
def test_compiled_graphs(is_trained: bool, lock: Callable[[], Path]) -> None:
    model = net().train(is_trained)

    def run(size: int) -> Tensor:
        compiled = torch.compile(model, backend="cudnn_autotune")
        with torch.set_grad_enabled(is_trained):
            return step(compiled, batch(size)) if is_trained else compiled(batch(size))

    run(8)
    run(8)
    chosen = ca.compilations()[-1]
    folder = lock()
    before, uses = contents(folder), Stopwatch.uses
    found = run(8)
    kept = ca.compilations()[-1]
    assert kept.chosen == chosen.chosen
    assert [group.is_fused for group in kept.groups] == [group.is_fused for group in chosen.groups]
    assert kept.source == chosen.source or kept.source == "store"
    assert {choice.origin for choice in ca.choices()} <= {"store"}
    assert found.isfinite().all()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lacking = run(5)
    record = ca.compilations()[-1]
    assert record.times_ms == {}
    if not is_trained:
        assert record.chosen == "inductor"
        expected = model(batch(5))
        torch.testing.assert_close(lacking, expected, rtol=1e-2, atol=1e-2)
    assert sum(n for reason, n in ca.fallbacks().items() if reason.startswith(COUNTED)) > 0
    assert Stopwatch.uses == uses
    assert contents(folder) == before


def test_a_capture(lock: Callable[[], Path]) -> None:
    model = ca.convert(net()).eval()
    with torch.no_grad():
        model(batch(8))
        lock()
        x = batch(3)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = model(x)
        graph.replay()
        torch.cuda.synchronize()
        expected = ca.revert(model)(x)
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)


def test_a_store_of_another_gpu(folder: Path) -> None:
    torch.cuda.init()  # before, it is not known which GPU this is
    Store(folder / "l4", L4).add([decision()])
    with pytest.raises(ValueError, match=r"NVIDIA L4 \(58 multiprocessors\)"):
        ca.set_store(folder / "l4", mode="locked")
