"""On a GPU: a first call on operands that tell nothing is tuned and checked on random ones, and is
served on its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import assert_close
from support.kernels import user_kernels
from torch import Tensor, nn

import cudnn_autotune as ca
from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines.configs import open_search
from cudnn_autotune.store import checked_outputs
from cudnn_autotune.timers.gpu_timer import GpuTimer
from cudnn_autotune.timers.measuring import WRITTEN, operands, telling_operands
from cudnn_autotune.tuning import checking, miss
from cudnn_autotune.tuning.checking import is_telling, relative_error, tolerance

ALLOWED = 2e-2
MIB = 1 << 20


def nothing(tensor: Tensor) -> None:
    tensor.zero_()


def one_infinity(tensor: Tensor) -> None:
    tensor.view(-1)[5] = math.inf


def one_nan(tensor: Tensor) -> None:
    tensor.view(-1)[5] = math.nan


def hardly_anything(tensor: Tensor) -> None:
    kept = tensor.view(-1)[:3].clone()
    tensor.zero_()
    tensor.view(-1)[:3] = kept


SPOILS: dict[str, Callable[[Tensor], None]] = {
    "zeros": nothing,
    "one infinity": one_infinity,
    "one NaN": one_nan,
    "nearly all zeros": hardly_anything,
}


def tensors_of(dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(4, 32, 20, 20, device="cuda").to(dtype)
    w = torch.randn(48, 32, 3, 3, device="cuda").to(dtype)
    y = torch.randn(4, 48, 20, 20, device="cuda").to(dtype)
    return x, w, y


def is_refused(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory, says the test")


def same(found: Tensor, expected: Tensor) -> None:
    """Equal within the tolerance. Beside an infinity, engines that multiply it by padding have NaN
    where others have a number."""
    kept = expected.isfinite().to(found.device) & found.isfinite()
    assert int(kept.sum()) >= 0.9 * kept.numel()
    assert_close(found[kept], expected.to(found.device)[kept], ALLOWED)


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("name", SPOILS)
def test_a_first_call_is_checked_on_random_operands(folder: Path, name: str, op: str) -> None:
    x, w, y = tensors_of()
    spoilt = {"fprop": w, "dgrad": y, "wgrad": y}[op]
    SPOILS[name](spoilt)
    before = spoilt.clone()
    if op == "fprop":
        found = ca.functional.conv2d(x, w, padding=1, sampling="race")
        expected = F.conv2d(x.double(), w.double(), padding=1)
    else:
        variable = {"dgrad": x, "wgrad": w}[op].requires_grad_()
        out = ca.functional.conv2d(x, w, padding=1, sampling="race")
        (found,) = torch.autograd.grad(out, variable, y)
        exact = [t.detach().double().requires_grad_(t.requires_grad) for t in (x, w)]
        (expected,) = torch.autograd.grad(
            F.conv2d(exact[0], exact[1], padding=1), exact[op == "wgrad"], y.double()
        )
    same(found, expected)
    assert torch.equal(spoilt.nan_to_num(), before.nan_to_num())
    (choice,) = (c for c in ca.choices() if c.problem.op == op)
    assert 0 < choice.relative_error <= tolerance(choice.problem)
    assert choice.total_samples > 0
    assert not choice.rejected
    assert checked_outputs.error_of(choice.problem.text, choice.text, choice.device) is not None
    (kept,) = folder.rglob("checked-outputs")
    lines = kept.read_text().splitlines()
    assert len(lines) == len(set(lines)) == len(ca.choices())


def test_a_first_training_step_with_zero_gamma() -> None:
    """The gradient of a branch whose last norm begins with zeros is zero."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(32, 32, 3, 1, 1), nn.Conv2d(32, 32, 3, 1, 1)
            self.norm = nn.BatchNorm2d(32)
            nn.init.zeros_(self.norm.weight)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.b(F.relu(self.a(x))))

    model = ca.convert(nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), Block(), Block()).cuda())
    model(torch.randn(8, 3, 28, 28, device="cuda")).square().sum().backward()
    zero = [
        p for p in model.parameters() if p.dim() == 4 and p.grad is not None and not p.grad.any()
    ]
    assert len(zero) == 4
    made = ca.choices()
    assert {choice.problem.op for choice in made} == {"fprop", "dgrad", "wgrad"}
    for choice in made:
        if choice.total_samples > 0:
            assert 0 < choice.relative_error <= tolerance(choice.problem)


def test_a_zero_bias_is_no_reason_to_believe_that_it_is_added() -> None:
    x, w, _ = tensors_of()
    bias = torch.zeros(48, device="cuda", dtype=torch.float16)
    found = ca.functional.conv2d(x, w, bias, padding=1, sampling="race")
    same(found, F.conv2d(x.double(), w.double(), padding=1))
    (choice,) = ca.choices()
    assert 0 < choice.relative_error <= tolerance(choice.problem)


def test_what_is_remembered_is_checked_on_random_operands_too(folder: Path) -> None:
    x, w, _ = tensors_of()
    ca.functional.conv2d(x, w, padding=1, sampling="race")
    (tuned,) = ca.choices()
    (decision,) = ca.get_store()
    ca.Store(folder / "another").add([decision])
    ca.set_store(folder / "another")
    ca.forget()
    assert not ca.functional.conv2d(x.zero_(), w, padding=1, sampling="race").any()
    (choice,) = ca.choices()
    assert (choice.origin, choice.text) == ("store", tuned.text)
    assert choice.relative_error > 0
    assert list((folder).rglob("checked-outputs"))


def test_online_checks_on_random_operands_too() -> None:
    x, w, _ = tensors_of()
    w.zero_()
    again = []
    real = checking.begin_anew

    def begin_anew(*arguments: Any) -> checking.OutputCheck:
        again.append(arguments[1])
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking, "begin_anew", begin_anew)
        for _ in range(300):
            assert not ca.functional.conv2d(x, w, padding=1, sampling="online").any()
            torch.cuda.synchronize()
    assert again
    assert len(again) == len(set(again)), "a candidate is checked once more, and not again"


# Want of memory


@pytest.mark.parametrize("what", ["surrounded", "telling_operands"])
def test_without_memory_beside_the_call_nothing_is_timed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is timed must not write to the caller's result, beside which other tensors lie."""
    x, w, _ = tensors_of()
    if what == "telling_operands":
        w.zero_()
        monkeypatch.setattr(checking, what, is_refused)
    monkeypatch.setattr(miss, what, is_refused)
    found = ca.functional.conv2d(x, w, padding=1, sampling="race")
    same(found, F.conv2d(x.double(), w.double(), padding=1))
    (choice,) = ca.choices()
    assert choice.total_samples == 0
    assert choice.relative_error is None


def test_a_result_that_cannot_be_compared_is_not_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, _ = tensors_of()
    ca.functional.conv2d(x, w, padding=1, sampling="race")
    (decision,) = ca.get_store()
    ca.Store(folder / "another").add([decision])
    ca.set_store(folder / "another")
    ca.forget()
    monkeypatch.setattr(checking, "telling_operands", is_refused)
    ca.functional.conv2d(x, w.zero_(), padding=1, sampling="race")
    (choice,) = ca.choices()
    assert choice.origin == "store"
    assert choice.relative_error is None
    assert checked_outputs.error_of(choice.problem.text, choice.text, choice.device) is None


# Workspaces


def timer_of(problem: ca.ConvProblem) -> GpuTimer:
    return GpuTimer(problem, open_search(problem), operands(problem, "cuda"))


def with_workspace(problem: ca.ConvProblem, timer: GpuTimer) -> _C.Plan:
    """A plan that needs more than a page of workspace."""
    listed = [
        c for c in ca.expert.candidates(problem) if c.engine is not None and not c.is_compiled
    ]
    for candidate in timer.runnable(listed):
        plan = timer.plans[candidate.text]
        if plan.workspace_bytes > _C.PlanTimer.PLACE_BYTES:
            return plan
    pytest.skip("no engine here needs a workspace of more than a page")


PROBLEM = ca.ConvProblem(
    "wgrad", (4, 64, 28, 28), (64, 64, 3, 3), padding=1, dtype=torch.float16,
    memory_format=torch.channels_last,
)  # fmt: skip


def test_a_timed_workspace_has_unused_memory_on_both_sides() -> None:
    timer = timer_of(PROBLEM)
    with_workspace(PROBLEM, timer)
    workspace = timer._workspace
    assert workspace.storage_offset() == MIB
    assert workspace.untyped_storage().nbytes() == workspace.numel() + 2 * MIB
    timer.close()


def test_what_is_timed_may_write_beside_its_workspace() -> None:
    """It hits no tensor, neither before nor behind."""
    timer = timer_of(PROBLEM)
    need = 5 * _C.PlanTimer.PLACE_BYTES
    written = []

    def run(x: Tensor, w: Tensor, y: Tensor, work: Tensor) -> None:
        for address in (work.data_ptr() - MIB, work.data_ptr() + need + MIB - 1):
            user_kernels.clear_byte(address, x)
            written.append(address)

    plan = _C.recipe_plan(PROBLEM.native(), "mine@1", [("python", run)], need, 0)
    others = [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for size in (512, MIB) * 8]
    timer._use_workspace(need)
    others += [torch.full((size,), 7, dtype=torch.uint8, device="cuda") for size in (512, MIB) * 8]
    native = _C.PlanTimer(PROBLEM.native(), [operands(PROBLEM, "cuda")], 0)
    assert timer._workspace is not None
    native.set_workspace(timer._workspace)
    torch.cuda.synchronize()
    ((*_, error),) = native.run([(native.add(plan), 1, False, False)], 0)
    assert not error
    torch.cuda.synchronize()
    assert len(written) == 2
    assert all(bool((other == 7).all()) for other in others)


def test_a_workspace_that_is_too_small_is_an_error() -> None:
    timer = timer_of(PROBLEM)
    plan = with_workspace(PROBLEM, timer)
    data = operands(PROBLEM, "cuda")
    need = plan.workspace_bytes
    native = _C.PlanTimer(PROBLEM.native(), [data], 0)
    batch = (native.add(plan), 1, False, False)
    with pytest.raises(ValueError, match=rf"needs {need} bytes of workspace, .* gave 0"):
        native.run([batch], 0)
    small = torch.empty(need - 1, dtype=torch.uint8, device="cuda")
    native.set_workspace(small)
    for as_graph in (False, True):
        with pytest.raises(ValueError, match=rf"needs {need} bytes of workspace, .* {need - 1}"):
            native.run([(batch[0], 2, False, as_graph)], 0)
    with pytest.raises(ValueError, match="workspace must have"):
        _C.execute(plan, *data, workspace=small)
    for workspace in (None, small):
        with pytest.raises(ValueError, match=rf"needs {need} bytes"):
            _C.frontend_find("sample_once", [plan], data, workspace, 0)
    native.set_workspace(torch.empty(need, dtype=torch.uint8, device="cuda"))
    ((*_, error),) = native.run([batch], 0)
    assert not error


# On the GPU itself


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_the_check_is_the_same_as_on_the_cpu(op: str, dtype: torch.dtype) -> None:
    for problem in (
        ca.ConvProblem(op, (300, 16, 9, 9), (24, 8, 3, 3), padding=1, groups=2, dtype=dtype),
        ca.ConvProblem(op, (2, 64, 40, 33), (64, 1, 5, 5), stride=2, groups=64, dtype=dtype),
        ca.ConvProblem(op, (3, 4, 20, 20, 9), (6, 4, 1, 1, 1), stride=3, dtype=dtype),
    ):
        data = telling_operands(problem, "cuda")
        assert is_telling(problem, data)
        plan = _C.build_plan(problem.native(), "aten", 0)
        written = data[WRITTEN[op]]
        result = _C.execute(plan, *data).clone()
        host = tuple(tensor.cpu() for tensor in data)
        there = relative_error(problem, partial(written.copy_, result), *data, seed=3)
        copy = partial(host[WRITTEN[op]].copy_, result.cpu())
        here = relative_error(problem, copy, *host, seed=3)
        assert here is not None
        assert there <= tolerance(problem) / 2
        assert there == pytest.approx(here, rel=0.5, abs=1e-6 if dtype is torch.float32 else 1e-12)
