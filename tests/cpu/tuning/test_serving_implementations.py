"""A remembered implementation serves like an engine, as long as it is what it was."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels import user_kernels
from support.kernels.user_implementations import registered

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines import offers
from cudnn_autotune.engines.candidates import named
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.implementing import isolated_run
from cudnn_autotune.implementing import registering as implementing
from cudnn_autotune.implementing.isolated_run import Outcome
from cudnn_autotune.kernels.rewrites.fft import Fft
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.timers.measuring import operands
from cudnn_autotune.tuning import miss, remembering, serving

pytestmark = pytest.mark.search

PROBLEM = ca.ConvProblem("fprop", (2, 3, 5, 6), (4, 3, 3, 3), padding=1)


def elsewhere(outcome: Outcome) -> Callable[..., list[Outcome]]:
    """Stands for ``run_elsewhere``, with this outcome of each setting up to the first harm."""
    return lambda _, settings, *__: [outcome] * (1 if outcome.harm else len(settings))


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Functions run on the CPU, where implementations are asked about another GPU."""
    h200 = replace(gpu_of("h200"), device=None)
    monkeypatch.setattr(implementing, "gpu_of", lambda device: h200)
    monkeypatch.setattr(offers, "gpu_of", lambda device: h200)
    monkeypatch.setattr(isolated_run, "run_elsewhere", elsewhere(Outcome()))
    ca.set_store(tmp_path, mode="read_write")
    with registered():
        yield
    isolated_run.forget("mine")


def register(version: str = "1", **changes: Any) -> None:
    given: dict[str, Any] = {
        "supports": user_kernels.always,
        "settings": ("right", "wrong", "behind", "raises"),
        "workspace": user_kernels.workspace,
        **changes,
    }
    ca.register_implementation("mine", version=version, **given)(user_kernels.build)


def remember(
    settings: str, problem: ca.ConvProblem = PROBLEM, workspace_limit: int | None = None
) -> None:
    ours = Measurement(named(f"mine@1:{settings}"), 1.0, 9)
    selection = Selection((ours, Measurement(OWN_PATH, 2.0, 9)), 18)
    decision = Decision(problem, Policy("race", workspace_limit), selection, 1e-7)
    ca.get_store().add([decision])


def served(problem: ca.ConvProblem = PROBLEM, limit: int | None = None) -> str | None:
    known = remembering.find(problem, Policy("race", limit), 0)
    assert known is not None
    found = serving.serve(known, operands(problem, "cpu"))
    return None if found is None else found.plan.text


def test_what_is_as_it_was_serves() -> None:
    register()
    remember("right")
    assert served() == "mine@1:right"
    assert ca.fallbacks() == {}
    plan = _C.build_plan(PROBLEM.native(), "mine@1:right", 0)
    x, w, y = operands(PROBLEM, "cpu")
    workspace = torch.empty(1000, dtype=torch.uint8)
    _C.execute(plan, x, w, y, workspace=workspace)
    torch.testing.assert_close(y, torch.conv2d(x, w, padding=1))
    with pytest.raises(ValueError, match="workspace must have 1000 bytes or more"):
        _C.execute(plan, x, w, y, workspace=workspace[1:])


def test_without_it_the_next_best_serves_and_the_decision_stays() -> None:
    remember("right")
    assert served() == "aten"
    assert ca.fallbacks() == {}
    register()
    assert served() == "mine@1:right"


@pytest.mark.parametrize(
    ("settings", "changes", "why"),
    [
        ("right", {"version": "2"}, "'mine' is registered in version '2'"),
        ("right", {"settings": ("left",)}, "it is not offered for fprop"),
        ("right", {"supports": lambda problem: False}, "it is not offered for fprop"),
        ("right", {"supports": lambda problem: 1 / 0}, "it is not offered for fprop"),
    ],
)
def test_another_version_or_other_settings_are_tuned_again(
    settings: str, changes: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    register(**changes)
    remember(settings)
    assert served() is None
    assert ca.fallbacks() == {serving.NO_LONGER_BUILDS: 1}
    assert why in caplog.text
    again = remembering.find(PROBLEM, Policy("race"), 0)
    assert again is None or not again.text.startswith("mine")


@pytest.mark.parametrize("settings", ["wrong", "behind", "raises"])
def test_what_turns_out_wrong_or_fails_is_tuned_again(settings: str) -> None:
    register()
    remember(settings)
    assert served() is None
    reason = serving.FAILS if settings == "raises" else serving.WRONG
    assert ca.fallbacks() == {reason: 1}
    assert served() == "aten"


def test_one_that_runs_out_of_memory_stays_remembered_and_is_provisional() -> None:
    """A call of it is served by another, as of any engine that lacks memory."""
    register(settings=("out_of_memory",))
    remember("out_of_memory")
    known = remembering.find(PROBLEM, Policy("race"), 0)
    assert known is not None
    found = serving.serve(known, operands(PROBLEM, "cpu"))
    assert found is not None
    assert found.plan.text == "mine@1:out_of_memory"
    assert found.choice.lacking.check
    assert "could not be compared" in found.choice.provisional
    assert ca.fallbacks() == {}
    assert remembering.find(PROBLEM, Policy("race"), 0) == known


def test_one_that_fails_for_a_reason_that_may_pass_stays_remembered() -> None:
    register(settings=("no_space",))
    remember("no_space")
    assert served() is None
    assert ca.fallbacks() == {serving.FAILS: 1}
    known = remembering.find(PROBLEM, Policy("race"), 0)
    assert known is not None
    assert known.text == "mine@1:no_space"


def test_an_interrupt_passes_and_the_decision_stays() -> None:
    register(settings=("interrupted",))
    remember("interrupted")
    with pytest.raises(KeyboardInterrupt):
        served()
    known = remembering.find(PROBLEM, Policy("race"), 0)
    assert known is not None
    assert known.text == "mine@1:interrupted"


@pytest.mark.parametrize("is_measured_strictly", [False, True])
def test_what_differs_from_run_to_run_serves_where_that_is_allowed(
    is_measured_strictly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    strict = replace(PROBLEM, deterministic=True)
    register(settings=("varies",))
    remember("varies", strict if is_measured_strictly else PROBLEM)
    assert served(strict) is None
    assert ca.fallbacks() == {serving.VARIES: 1}
    assert "mine@1:varies differs from run to run" in caplog.text
    assert served(strict) == "aten"
    if not is_measured_strictly:
        assert served() == "mine@1:varies"
    assert ca.fallbacks() == {serving.VARIES: 1}


def test_the_store_does_not_say_what_the_implementation_may() -> None:
    """Its notes and its workspace are those of today."""
    strict = ca.ConvProblem("fprop", (2, 3, 5, 6), (4, 3, 3, 3), padding=1, deterministic=True)
    register(numerical_notes=("NONDETERMINISTIC",))
    remember("right", strict)
    assert served(strict) is None
    remember("right", PROBLEM, 999)
    assert served(PROBLEM, 999) is None
    assert ca.fallbacks() == {serving.NOT_ALLOWED: 2}


def test_what_does_harm_elsewhere_is_not_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolated_run, "run_elsewhere", elsewhere(Outcome("it hangs")))
    register()
    remember("right")
    with caplog.at_level(logging.WARNING):
        assert served() is None
    assert ca.fallbacks() == {serving.NO_LONGER_BUILDS: 1}
    assert "mine@1:right is left out: it hangs" in caplog.text
    with pytest.raises(_C.PlanError, match="mine@1:wrong is left out: it hangs"):
        _C.build_plan(PROBLEM.native(), "mine@1:wrong", 0)
    # One that is registered anew is tried anew.
    monkeypatch.setattr(isolated_run, "run_elsewhere", elsewhere(Outcome()))
    ca.unregister_implementation("mine")
    register()
    assert _C.build_plan(PROBLEM.native(), "mine@1:wrong", 0).text == "mine@1:wrong"


def test_a_capture_runs_no_function_that_never_ran_unless_it_is_pinned() -> None:
    def captured() -> _C.Plan | None:
        return serving.known_during_capture(PROBLEM, Policy("race", None), 0)

    register()
    remember("right")
    assert captured() is None
    assert ca.fallbacks() == {}, "the decision stays"
    ca.pin(PROBLEM, "mine@1:right")
    try:
        found = captured()
    finally:
        ca.unpin()
    assert found.text == "mine@1:right"


@pytest.mark.parametrize("calls_python", [True, False])
def test_a_capture_runs_spectra_only_if_they_are_pinned(
    calls_python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuFFT plans a transform when it first runs, which a capture does not allow."""
    one = Fft()
    monkeypatch.setattr(Fft, "calls_python", calls_python)
    monkeypatch.setattr(remembering, "checked_error", lambda known: 1e-4)
    text = f"fft@{one.version}"
    problem = ca.ConvProblem(
        "fprop", (1, 64, 2048), (64, 1, 1024), padding=(1023, 0), groups=64, dtype=torch.float16
    )
    selection = Selection((Measurement(named(text), 1.0, 9), Measurement(OWN_PATH, 2.0, 9)), 18)
    ca.get_store().add([Decision(problem, Policy("race", None), selection, 1e-4)])
    with registered(one):
        found = serving.known_during_capture(problem, Policy("race", None), 0)
        assert (found is None) == calls_python
        ca.pin(problem, text)
        try:
            pinned = serving.known_during_capture(problem, Policy("race", None), 0)
        finally:
            ca.unpin()
    assert pinned is not None
    assert pinned.text == text


def test_a_tighter_limit_refuses_spectra_that_are_remembered() -> None:
    one = Fft()
    problem = ca.ConvProblem(
        "fprop", (1, 64, 2048), (64, 1, 1024), padding=(1023, 0), groups=64, dtype=torch.float16
    )
    (offer,) = one.offers(problem, gpu_of("h200"))
    text, room = f"fft@{one.version}", offer.workspace_bytes
    with registered(one):
        assert serving.may_serve(text, problem, 0, room, None) == ("FFT",)
        with pytest.raises(serving.UnfitError):
            serving.may_serve(text, problem, 0, room - 1, None)


def test_the_log_says_once_why_one_does_not_build(caplog: pytest.LogCaptureFixture) -> None:
    own = ca.register_implementation("broken", version="1", supports=user_kernels.always)
    own(user_kernels.builds_nothing)
    for _ in range(2):
        with pytest.raises(_C.PlanError, match="RuntimeError: no compiler"):
            _C.build_plan(PROBLEM.native(), "broken@1", 0)
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert said == [
        f"broken@1 does not build; first for {PROBLEM.text}: broken@1: RuntimeError: no compiler"
    ]


def test_what_the_log_has_said_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementing, "_MOST_REPORTED", 4)
    own = ca.register_implementation("broken", version="1", supports=user_kernels.always)

    @own
    def build(problem: ca.ConvProblem, settings: str) -> Any:
        raise RuntimeError(problem.text)

    for size in range(5, 12):
        problem = replace(PROBLEM, input_shape=(2, 3, size, 6))
        with pytest.raises(_C.PlanError):
            _C.build_plan(problem.native(), "broken@1", 0)
    assert len(implementing._reported) == 4


@pytest.mark.parametrize("deterministic", [False, True])
def test_cudnns_first_engine_is_checked_where_determinism_is_asked_for(
    deterministic: bool,
) -> None:
    candidate = replace(named("eng0"), heuristic_mode="A")
    selection = Selection((Measurement(candidate, None, 0),), 0)
    problem = replace(PROBLEM, deterministic=deterministic)
    assert miss._needs_check(problem, selection) is deterministic


def test_a_winner_that_was_not_timed_is_checked() -> None:
    """PyTorch's own path is not."""
    for candidate, is_checked in ((named("mine@1:right"), True), (OWN_PATH, False)):
        selection = Selection((Measurement(candidate, None, 0),), 0)
        assert miss._needs_check(PROBLEM, selection) is is_checked
