"""On a GPU: a user's implementation competes, is remembered, and is kept from doing harm."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.conv.references import assert_close
from support.kernels import user_kernels
from support.kernels.user_implementations import registered
from support.processes.subprocesses import PACKAGE_PARENT, python
from torch import Tensor

import cudnn_autotune as ca
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.implementing import isolated_run
from cudnn_autotune.sampling import Candidates, Limits, Measurement, Selection, Timer
from cudnn_autotune.store import checked_outputs
from cudnn_autotune.timers.timer import Batch

ALLOWED = 4e-3
HARMFUL = {
    "wrong": "its output is wrong",
    "behind": "it writes outside of y",
    "workspace": "it writes outside of workspace",
    "input": "it writes to x, which it may only read",
    "exits": "ends with status 3",
    "crashes": "dies of signal 11",
    "gpu_error": "leaves the GPU in an error",
}


class PrefersOwn:
    """Takes the implementation if it runs, with made-up times, so that no test depends on which is
    faster."""

    name = "test_prefers_own"

    def select(self, candidates: Candidates, timer: Timer, limits: Limits) -> Selection | None:
        own = [c for c in candidates.beyond() if c.text.startswith("mine@")]
        entries, failed = [], []
        for candidate in timer.runnable(own):
            (sample,) = timer.run([Batch(candidate, 1, "hot")])
            if sample.error:
                failed.append(Measurement(candidate, None, 0, eliminated=f"failed: {sample.error}"))
            else:
                entries.append(Measurement(candidate, 1.0, 1))
        entries.append(Measurement(OWN_PATH, 2.0, 1))
        return Selection((*entries, *failed), len(entries))


ca.sampling.register(PrefersOwn())


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    ca.set_store(tmp_path / "store", mode="read_write")
    with registered():
        yield
    isolated_run.forget("mine")


def register(build: Any = user_kernels.build, *settings: str, **changes: Any) -> None:
    given: dict[str, Any] = {
        "version": "1",
        "supports": user_kernels.is_pointwise,
        "settings": settings or ("right",),
        "workspace": user_kernels.workspace,
        "numerical_notes": ("TENSOR_CORE",),
        **changes,
    }
    ca.register_implementation("mine", **given)(build)


def operands() -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 64, 14, 14, device="cuda", dtype=torch.float16)
    w = torch.randn(96, 64, 1, 1, device="cuda", dtype=torch.float16)
    return x.contiguous(memory_format=torch.channels_last), w.contiguous(
        memory_format=torch.channels_last
    )


def call(
    x: Tensor, w: Tensor, sampling: str = PrefersOwn.name, workspace_limit: int | None = None
) -> Tensor:
    found = ca.functional.conv2d(x, w, sampling=sampling, workspace_limit=workspace_limit)
    right = F.conv2d(x.double(), w.double())
    assert_close(found, right, ALLOWED)
    return found


def chosen() -> str:
    (choice,) = ca.choices()
    return choice.text


# It competes


@pytest.mark.parametrize("build", [user_kernels.build_mm, user_kernels.build_recipe])
def test_a_function_and_a_recipe_serve(build: Any) -> None:
    register(build)
    x, w = operands()
    for _ in range(3):
        call(x, w)
    assert chosen() == "mine@1:right"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ca.functional.conv2d(x, w, sampling=PrefersOwn.name)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert_close(y, F.conv2d(x.double(), w.double()), ALLOWED)


def test_it_is_run_and_timed_by_name() -> None:
    register(user_kernels.build_recipe)
    x, w = operands()
    problem = ca.ConvProblem(
        "fprop", tuple(x.shape), tuple(w.shape), dtype=x.dtype, memory_format=torch.channels_last
    )
    text = "mine@1:right"
    assert text in [c.text for c in ca.expert.candidates(problem)]
    assert ca.expert.build_plan(problem, text).text == text
    assert_close(ca.expert.execute(problem, text, x, w), F.conv2d(x.double(), w.double()), ALLOWED)
    first = ca.expert.candidates(problem)[0].text
    times = ca.expert.measure(problem, [first, text], rounds=3)
    assert {len(found) for found in times.values()} == {3}
    ca.pin(problem, text)
    call(x, w, sampling="heuristic")
    assert chosen() == text
    ca.unpin(problem)


# Those of the package compete


# It is remembered


_LATER = """
import sys
import torch
import cudnn_autotune as ca
from support.kernels import user_kernels

class Never:
    name = "test_prefers_own"

    def select(self, candidates, timer, limits):
        raise AssertionError("nothing is timed")

ca.sampling.register(Never())
ca.set_store({store!r}, mode="read")
if {version!r}:
    ca.register_implementation(
        "mine", version={version!r}, supports=user_kernels.is_pointwise, settings=("right",),
        workspace=user_kernels.workspace, numerical_notes=("TENSOR_CORE",),
    )(user_kernels.build_recipe)
x = torch.ones(4, 64, 14, 14, device="cuda", dtype=torch.float16)
w = torch.ones(96, 64, 1, 1, device="cuda", dtype=torch.float16)
x, w = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))
y = ca.functional.conv2d(x, w, sampling="test_prefers_own")
assert bool((y == 64).all())
(choice,) = ca.choices()
print(choice.text, choice.origin)
"""


@pytest.mark.parametrize(("version", "served"), [("1", "mine@1:right store"), ("", "aten store")])
def test_another_process_takes_it_from_the_store(version: str, served: str, tmp_path: Path) -> None:
    """Or the next best, if it has not registered the implementation."""
    register(user_kernels.build_recipe)
    call(*operands())
    assert chosen() == "mine@1:right"
    code = _LATER.format(store=str(tmp_path / "store"), version=version)
    done = python("-c", code, cwd=PACKAGE_PARENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == served


# It does no harm


@pytest.mark.parametrize("settings", HARMFUL)
def test_a_harmful_one_is_left_out(settings: str, caplog: pytest.LogCaptureFixture) -> None:
    register(user_kernels.build, settings)
    x, w = operands()
    with caplog.at_level(logging.WARNING):
        call(x, w)
    assert chosen() == "aten"
    assert HARMFUL[settings] in caplog.text
    torch.cuda.synchronize()


def test_a_kernel_that_spins_is_left_out_and_other_settings_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A setting of its version that was tried before does not vouch for it."""
    monkeypatch.setattr(isolated_run, "RUN_S", 10.0)
    register(user_kernels.build_recipe, "right", "spins", "again")
    with caplog.at_level(logging.WARNING):
        call(*operands())
    assert chosen() in ("mine@1:right", "mine@1:again")
    said = [r.getMessage() for r in caplog.records if "mine@1" in r.getMessage()]
    assert said == [
        "mine@1:spins is left out: in a process of its own it does not finish within 10 s"
    ]
    (choice,) = ca.choices()
    assert "mine@1:spins" not in {e.candidate.text for e in choice.searched.ranking}


@pytest.mark.parametrize("settings", ["wrong", "behind", "workspace", "raises"])
def test_what_cannot_run_elsewhere_is_found_out_here(
    settings: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it is timed on the caller's tensors, with the reason in the evidence."""
    register(lambda problem, _: user_kernels.build(problem, settings))
    with caplog.at_level(logging.WARNING):
        call(*operands())
    assert "could not test mine@1 in a separate process" in caplog.text
    (choice,) = ca.choices()
    assert choice.text == "aten"
    (entry,) = [e for e in choice.searched.ranking if e.candidate.text == "mine@1:right"]
    assert entry.time_ms is None
    reason = {"wrong": "it is wrong", "raises": "ValueError: not today"}
    assert reason.get(settings, "it writes outside of its result") in entry.eliminated


# It raises


class Switched:
    """A right function, which raises while it is told to."""

    def __init__(self, error: BaseException | None, varies: bool) -> None:
        self.error = error
        self.runs = 0
        self.varies = varies

    def __call__(self, problem: ca.ConvProblem, settings: str) -> Any:
        right = user_kernels.build_mm(problem, settings)

        def launch(x: Tensor, w: Tensor, y: Tensor, work: Tensor) -> None:
            self.runs += 1
            if self.error is not None:
                raise self.error
            right(x, w, y, work)
            if self.varies:
                y[0, 0, 0, 0] *= 1 + 2**-9 * (self.runs % 2)

        return launch


def switched(
    error: BaseException | None = None,
    varies: bool = False,
    workspace_limit: int | None = None,
    **changes: Any,
) -> tuple[Switched, Tensor, Tensor]:
    """The function, which is registered, and the operands of a first call."""
    one = Switched(error, varies)
    register(one, **changes)
    x, w = operands()
    call(x, w, workspace_limit=workspace_limit)
    return one, x, w


NO_ROOM = torch.OutOfMemoryError("CUDA out of memory: no room for spectra")


def stored() -> list[str]:
    found = [decision.chosen for decision in ca.get_store()]
    return [entry.candidate.text for entry in found if entry is not None]


@pytest.mark.parametrize("limit", [None, 0])
def test_a_call_of_one_that_runs_out_of_memory_is_served_by_another(limit: int | None) -> None:
    one, x, w = switched(workspace_limit=limit, workspace=None)
    assert chosen() == "mine@1:right"
    one.error = NO_ROOM
    runs = one.runs
    for _ in range(3):
        call(x, w, workspace_limit=limit)
    assert one.runs == runs + 3
    assert ca.fallbacks()["there was no memory to run what was chosen"] == 3
    one.error = None
    call(x, w, workspace_limit=limit)
    assert one.runs == runs + 4
    assert "mine@1:right" in stored()


def test_a_search_in_which_one_runs_out_of_memory_is_provisional() -> None:
    switched(NO_ROOM)
    (choice,) = ca.choices()
    assert choice.text != "mine@1:right"
    assert choice.provisional
    assert choice.rejected == ()
    assert stored() == []


def test_a_remembered_one_that_runs_out_of_memory_stays_remembered() -> None:
    one, x, w = switched()
    assert stored() == ["mine@1:right"]
    ca.forget()
    checked_outputs._file_at.cache_clear()
    one.error = NO_ROOM
    call(x, w)
    call(x, w)
    assert stored() == ["mine@1:right"]
    one.error = None
    ca.forget()
    call(x, w)
    assert chosen() == "mine@1:right"


def test_other_errors_and_interrupts_of_a_hit_reach_the_caller() -> None:
    one, x, w = switched()
    one.error = ValueError("not today")
    with pytest.raises(RuntimeError, match=r"^mine@1:right: ValueError: not today"):
        call(x, w)
    one.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        call(x, w)
    one.error = None
    call(x, w)


def test_one_that_differs_from_run_to_run_serves_only_where_that_is_allowed() -> None:
    one, x, w = switched(varies=True)
    assert chosen() == "mine@1:right"
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        call(x, w)
        found = [ca.functional.conv2d(x, w, sampling=PrefersOwn.name) for _ in range(2)]
    assert torch.equal(*found)
    strict = [choice for choice in ca.choices() if choice.problem.deterministic]
    assert [choice.text != "mine@1:right" for choice in strict] == [True]
    runs = one.runs
    call(x, w)
    assert one.runs == runs + 1
