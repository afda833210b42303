"""What a store says is believed of nothing that this machine can verify."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.conv.problems import make
from support.conv.references import random_operands

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines.candidates import QueriedCandidates
from cudnn_autotune.engines.configs import OWN_PATH, open_search
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.engines.unlisted import MATMUL
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import checked_outputs, kept_plans
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.timers.measuring import operands
from cudnn_autotune.tuning import remembering, serving
from cudnn_autotune.tuning.checking import tolerance
from cudnn_autotune.tuning.choice import Choice

pytestmark = pytest.mark.search

# A knob that there is not.
UNREADABLE = "eng67:KNOB_X=0"
POINTWISE = ca.ConvProblem(
    "fprop", (2, 16, 6, 5), (8, 16, 1, 1), dtype=torch.float16, memory_format=torch.channels_last
)
PADDED = replace(POINTWISE, weight_shape=(8, 16, 3, 3), padding=1)


def remembered(
    problem: ca.ConvProblem, candidate: ca.expert.Candidate, *, error: float | None = 1e-4
) -> Decision:
    """As a store has it, whoever wrote it there."""
    selection = Selection((Measurement(candidate, 1.0, 9), Measurement(OWN_PATH, 2.0, 9)), 18)
    return Decision(problem, Policy("race"), selection, error)


def known(
    problem: ca.ConvProblem, candidate: ca.expert.Candidate, origin: str = "store", **fields: Any
) -> Choice:
    return Choice(remembered(problem, candidate, **fields), 0, origin)


@functools.cache
def listed(problem: ca.ConvProblem) -> list[ca.expert.Candidate]:
    return ca.expert.candidates(problem, device="h200", filtered=False)


def first(
    problem: ca.ConvProblem, fits: Callable[[ca.expert.Candidate], bool]
) -> ca.expert.Candidate:
    """Of those that cuDNN offers for an H200; none of them is compiled."""
    return next(c for c in listed(problem) if fits(c) and not c.is_compiled)


def built(what: Choice, problem: ca.ConvProblem, limit: int | None = None) -> _C.Plan:
    search = functools.partial(open_search, problem, "h200")
    limited = replace(what.decision.policy, workspace=limit)
    decision = replace(what.decision, problem=problem, policy=limited)
    return serving.built(replace(what, decision=decision), search)


def refused(what: Choice, problem: ca.ConvProblem, limit: int | None = None) -> tuple[str, str]:
    with pytest.raises(serving.UnfitError) as unfit:
        built(what, problem, limit)
    reason, found = unfit.value.args
    return reason, found


# What is built


def test_what_is_true_is_built() -> None:
    problem = make("resnet_fp16_nhwc")
    one = first(problem, lambda c: c.workspace_bytes > 0)
    for limit in (None, one.workspace_bytes):
        plan = built(known(problem, one), problem, limit)
        assert (plan.text, plan.workspace_bytes) == (one.text, one.workspace_bytes)
    for one, of in ((OWN_PATH, problem), (MATMUL, POINTWISE)):
        plan = built(known(of, one), of)
        assert (plan.text, plan.workspace_bytes) == (one.text, 0)


def test_the_workspace_is_the_plans() -> None:
    problem = make("resnet_fp16_nhwc", "wgrad")
    one = first(problem, lambda c: c.workspace_bytes > 1000)
    lie = known(problem, replace(one, workspace_bytes=0))
    reason, found = refused(lie, problem, 1000)
    assert reason == serving.NOT_ALLOWED
    assert f"it needs {one.workspace_bytes} bytes" in found
    assert built(lie, problem, one.workspace_bytes).text == one.text


@pytest.mark.parametrize(
    ("note", "changes", "demand"),
    [
        ("NONDETERMINISTIC", {}, {"deterministic": True}),
        (
            "TENSOR_CORE",
            {"dtype": torch.float32, "memory_format": torch.contiguous_format},
            {"allow_tf32": False},
        ),
    ],
)
def test_the_notes_are_the_engines(
    note: str, changes: dict[str, Any], demand: dict[str, Any]
) -> None:
    problem = make("resnet_fp16_nhwc", "wgrad", **changes, **demand)
    one = first(problem, lambda c: note in c.numerical_notes)
    lie = known(problem, replace(one, numerical_notes=()))
    reason, found = refused(lie, problem)
    assert reason == serving.NOT_ALLOWED
    assert note in found
    free = make("resnet_fp16_nhwc", "wgrad", **changes)
    assert built(lie, free).text == one.text


def test_what_an_erratum_names_serves_no_longer() -> None:
    """The entry may be older."""
    problem = make("resnet_fp16_nhwc", "wgrad", padding=(0, 0, 1, 1))
    version = _C.cudnn_runtime_version()
    wrong = [c for c in listed(problem) if _C.is_known_wrong(c.text, problem.native(), version)]
    if not wrong:
        pytest.skip(f"no erratum is known of cuDNN {version} for this problem")
    assert refused(known(problem, wrong[0]), problem)[0] == serving.NOT_ALLOWED


@pytest.mark.parametrize("text", [UNREADABLE, "eng987", "nonsense", "", "eng67:KERNEL_CFG=987"])
def test_what_this_version_does_not_have_no_longer_builds(text: str) -> None:
    problem = make("resnet_fp16_nhwc")
    gone = replace(first(problem, lambda c: True), text=text)
    reason, found = refused(known(problem, gone), problem)
    assert reason == serving.NO_LONGER_BUILDS
    assert text in found


def test_a_matrix_product_serves_problems_that_are_one() -> None:
    reason, found = refused(known(PADDED, MATMUL), PADDED)
    assert reason == serving.NO_LONGER_BUILDS
    assert "no matrix product" in found


def test_a_pin_is_an_order() -> None:
    """The notes and the workspace are the user's business."""
    problem = make("resnet_fp16_nhwc", "wgrad", deterministic=True)
    one = first(problem, lambda c: "NONDETERMINISTIC" in c.numerical_notes)
    assert built(known(problem, one, "pinned"), problem, 0).text == one.text
    for text in ("eng987", UNREADABLE):
        with pytest.raises(ca.CudnnError):
            built(known(problem, replace(one, text=text), "pinned"), problem)


# What is served, on the CPU, where PyTorch's own path and the matrix product run


def tensors_of(problem: ca.ConvProblem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return operands(problem, "cpu")


def served(what: Choice, problem: ca.ConvProblem, tensors: Any = None) -> Choice | None:
    found = serving.serve(what, tensors or tensors_of(problem))
    return None if found is None else found.choice


@pytest.mark.parametrize("candidate", [OWN_PATH, MATMUL], ids=lambda c: c.text)
def test_what_is_right_serves_with_the_error_that_was_found_here(
    candidate: ca.expert.Candidate,
) -> None:
    what = known(POINTWISE, candidate, error=1.5e-5)
    outcome = served(what, POINTWISE)
    assert outcome.chosen.candidate == candidate
    assert outcome.relative_error != 1.5e-5
    assert outcome.relative_error < tolerance(POINTWISE)
    assert ca.fallbacks() == {}


def found(problem: ca.ConvProblem) -> Choice | None:
    return remembering.find(problem, Policy("race"), 0)


def test_a_matrix_product_of_what_is_none_is_tuned_again(
    store: ca.Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.add([remembered(PADDED, MATMUL)])
    what = found(PADDED)
    assert what.text == "matmul"
    assert served(what, PADDED) is None
    assert ca.fallbacks() == {serving.NO_LONGER_BUILDS: 1}
    assert "matmul (store): a remembered choice no longer builds: tuned again" in caplog.text
    # Nor is it found again.
    again = found(PADDED)
    assert again is None or again.text != "matmul"


def test_a_stored_error_does_not_spare_the_check(
    store: ca.Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.add([remembered(POINTWISE, MATMUL, error=0.0)])
    what = found(POINTWISE)
    assert what is not None
    x, w, y = tensors_of(POINTWISE)
    # In another layout than the problem says, the product's rows lie elsewhere: a wrong output.
    assert served(what, POINTWISE, (x, w, torch.empty(y.shape, dtype=y.dtype))) is None
    assert ca.fallbacks() == {serving.WRONG: 1}
    assert "is wrong" in caplog.text
    again = found(POINTWISE)
    assert again is None or again.text != "matmul"


def test_what_ranks_agreed_upon_is_verified_too() -> None:
    ca.set_store(mode="off")
    remembering.install([remembered(PADDED, MATMUL)], 0)
    what = found(PADDED)
    assert what.origin == "agreed"
    assert served(what, PADDED) is None
    assert found(PADDED) is None


def test_a_wrong_pin_serves_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    x, w, y = tensors_of(POINTWISE)
    tensors = (x, w, torch.empty(y.shape, dtype=y.dtype))
    assert served(known(POINTWISE, MATMUL, "pinned"), POINTWISE, tensors).relative_error > 0.5
    assert "serves all the same: it is pinned" in caplog.text
    assert ca.fallbacks() == {}


# While a stream is being captured


def captured(problem: ca.ConvProblem, limit: int = -1) -> str | None:
    policy = Policy("race", None if limit < 0 else limit)
    way = serving.known_during_capture(problem, policy, 0)
    return None if way is None else way.text


def found_right(problem: ca.ConvProblem, text: str, error: float = 1e-3) -> None:
    """From now on a process of this user has found that output right."""
    checked_outputs.remember(problem.text, text, 0, error)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs are remembered as checked on some GPU."""
    here = {**ca.environment(), "gpu": "NVIDIA H200", "multiprocessors": 132, "driver": "580.82"}
    monkeypatch.setattr(kept_plans.versions, "environment", lambda device=None: here)
    checked_outputs._file_at.cache_clear()
    yield
    checked_outputs._file_at.cache_clear()


@pytest.mark.usefixtures("on_a_gpu")
def test_during_a_capture_serves_what_was_found_right_here(store: ca.Store) -> None:
    assert captured(POINTWISE) is None
    store.add([remembered(POINTWISE, MATMUL)])
    found_right(POINTWISE, "matmul")
    assert captured(POINTWISE) == "matmul"
    # Re-ranked: PyTorch's path takes its place, and nobody has checked that yet.
    deterministic = replace(POINTWISE, deterministic=True)
    assert found(deterministic) is not None
    assert captured(deterministic) is None


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("error", [None, 0.0, 1e-4, 0.7])
def test_during_a_capture_a_store_is_not_believed(store: ca.Store, error: float | None) -> None:
    """A captured graph is replayed as it is: nobody would check it later."""
    store.add([remembered(POINTWISE, MATMUL, error=error)])
    assert found(POINTWISE) is not None
    assert captured(POINTWISE) is None
    found_right(POINTWISE, "matmul", 0.7)  # by another version's tolerance
    assert captured(POINTWISE) is None


@pytest.mark.usefixtures("on_a_gpu")
def test_during_a_capture_other_ranks_are_not_believed() -> None:
    remembering.install([remembered(POINTWISE, MATMUL)], 0)
    assert found(POINTWISE) is not None
    assert captured(POINTWISE) is None


@pytest.mark.usefixtures("on_a_gpu")
def test_during_a_capture_the_plan_is_verified(
    store: ca.Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.add([remembered(PADDED, MATMUL)])
    found_right(PADDED, "matmul")
    assert captured(PADDED) is None
    assert "matmul is not captured: no matrix product computes" in caplog.text


def test_during_a_capture_a_pin_is_an_order() -> None:
    ca.pin(POINTWISE, "aten")
    assert captured(POINTWISE) == "aten"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_a_capture_without_a_known_choice_has_what_pytorch_would_run(op: Any, bias: bool) -> None:
    problem = make("resnet_fp16_nhwc", op, bias=bias and op == "fprop")
    search = functools.partial(open_search, problem, "h200")
    plan = serving.heuristic_plan(problem, -1, 0, search)
    pytorchs = [c for c in ca.expert.candidates(problem, "h200") if c.is_unfused == problem.bias]
    assert plan.text in [c.text for c in pytorchs]
    assert serving.heuristic_plan(problem, 0, 0, search).workspace_bytes == 0
    for changes in ({"padding": (0, 1, 1, 1)}, {"op": "fprop", "activation": "relu"}):
        changed = replace(problem, **changes)
        opened = functools.partial(open_search, changed, "h200")
        assert serving.heuristic_plan(changed, -1, 0, opened).text == "aten"


# Neighbours


def offered(
    problem: ca.ConvProblem, nearby: Sequence[ca.expert.Candidate], limit: int | None = None
) -> list[ca.expert.Candidate]:
    a, b = random_operands(problem)
    search = open_search(problem, "h200")
    return list(QueriedCandidates(search, problem, (a, b, a), limit, nearby).similar())


def test_a_neighbours_engine_is_what_cudnn_says_of_it_here() -> None:
    problem = make("resnet_fp16_nhwc", "wgrad")
    one = first(problem, lambda c: c.workspace_bytes > 0 and bool(c.numerical_notes))
    lie = replace(one, workspace_bytes=0, numerical_notes=(), behavior_notes=("RUNTIME",))
    unreadable = replace(one, text=UNREADABLE)
    (here,) = offered(problem, [unreadable, lie, replace(one, text="eng987"), MATMUL])
    assert here.text == one.text
    assert here.workspace_bytes == one.workspace_bytes
    assert (here.numerical_notes, here.behavior_notes) == (one.numerical_notes, one.behavior_notes)
    assert here.heuristic_mode == ""
    assert offered(problem, [lie], one.workspace_bytes - 1) == []


def test_a_neighbours_engine_is_under_the_rules_of_this_problem() -> None:
    problem = make("resnet_fp16_nhwc", "wgrad", deterministic=True)
    one = first(problem, lambda c: "NONDETERMINISTIC" in c.numerical_notes)
    assert offered(problem, [replace(one, numerical_notes=())]) == []
