"""Whatever a store holds as the text of an engine, a call is served, and nothing is raised."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cudnn_autotune as ca
from cudnn_autotune import _C
from cudnn_autotune.engines.configs import OWN_PATH, open_search
from cudnn_autotune.engines.offers import gpu_of
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.online.tuner import OnlineCommitter, Prepared
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import kept_plans
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.timers.lacking import NOTHING
from cudnn_autotune.timers.measuring import operands
from cudnn_autotune.tuning import miss, new_sizes, remembering, serving
from cudnn_autotune.tuning.choice import Choice, untimed

pytestmark = [pytest.mark.search, pytest.mark.usefixtures("store")]

SURROGATE = "eng3\ud800:"
# What is near to something that means something, and what is not.
PARTS = (
    "eng", "eng3:", "unfused:", "KERNEL_CFG=", "aten", "matmul", "depthwise", "@", "@1:", ":", "=",
    ",", "-", "9" * 30, "-1", "\0", "\n", "\u202e", "é", "💥", "\ud800", "\udcff", "\uffff", " ",
)  # fmt: skip


def problem(batch: int) -> ca.ConvProblem:
    return ca.ConvProblem(
        "fprop",
        (batch, 16, 6, 5),
        (8, 16, 1, 1),
        dtype=torch.float16,
        memory_format=torch.channels_last,
    )


def decision(batch: int, text: str) -> Decision:
    """As a store may have it."""
    odd = replace(OWN_PATH, text=text, behavior_notes=("RUNTIME_COMPILATION",))
    selection = Selection((Measurement(odd, 1.0, 9), Measurement(OWN_PATH, 2.0, 9)), 18)
    return Decision(problem(batch), Policy("race"), selection, 1e-4)


def texts(count: int) -> list[str]:
    rng = random.Random(0)
    made = ["".join(rng.choices(PARTS, k=rng.randint(1, 5))) for _ in range(count)]
    return [*made, "", SURROGATE, "\0", "eng3:" + "x" * 1_000_000, "a@" + "9" * 5000]


def serve(batch: int) -> str:
    """The text of what serves a call, whose search finds PyTorch's own path."""
    one = problem(batch)
    selection = Selection((Measurement(OWN_PATH, 1.0, 3),), 3)
    plans = {"aten": _C.build_plan(one.native(), "aten", 0)}
    timer: Any = SimpleNamespace(plans=plans, lacking=lambda: NOTHING)
    with miss.searched(one, selection, timer):
        plan, *_, afterwards = miss.choose(one.native(), "race", -1, 0, 0, *operands(one, "cpu"))
    if afterwards is not None:
        afterwards()
    return plan.text


@pytest.fixture(autouse=True)
def engines_of_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's, for a GPU that is not here."""
    found = open_search(problem(1), "h200")
    monkeypatch.setattr(serving, "_search_on", lambda native, device: lambda: found)
    gpu = gpu_of("h200")
    monkeypatch.setattr(new_sizes, "gpu_of", lambda device: gpu)


def test_any_text_of_a_decision_leads_to_a_plan() -> None:
    """Ranks' decisions are verified as a store's are."""
    served = {}
    for batch, text in enumerate(texts(60), 1):
        remembering.install([decision(batch, text)], 0)
        served[text] = serve(batch)
    odd = {text: by for text, by in served.items() if text not in ("aten", "matmul", "eng3:")}
    assert set(odd.values()) == {"aten"}


def test_any_text_in_a_store_leads_to_a_plan(store: ca.Store) -> None:
    for batch, text in enumerate(texts(60), 1):
        try:
            store.add([decision(batch, text)])
        except ValueError:
            continue  # it is not taken
    for batch in range(1, 66):
        assert serve(batch) in ("aten", "matmul")


def test_no_error_of_any_type_comes_out_of_what_is_built() -> None:
    """A pin is an order, and its error the user's."""
    for error in (TypeError, KeyError, OverflowError, RecursionError, torch.OutOfMemoryError):

        def fail(error: type[Exception] = error) -> _C.EngineList:
            raise error("mine")

        for origin, raised in (("store", serving.UnfitError), ("pinned", error)):
            known = Choice(decision(1, "eng3:"), 0, origin)
            with pytest.raises(raised, match="mine"):
                serving.built(known, fail)


def test_for_want_of_memory_no_decision_is_rejected(
    store: ca.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may serve the next process."""
    store.add([decision(1, "eng3:")])

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(serving, "_search_on", lambda native, device: full)
    one = problem(1)
    known = remembering.find(one, Policy("race"), 0)
    assert known is not None
    assert serving.serve(known, operands(one, "cpu")) is None
    assert remembering.find(one, Policy("race"), 0) is not None


@pytest.mark.parametrize("failing", ["find", "keys"])
def test_a_store_that_fails_to_answer_has_no_decision(
    failing: str, store: ca.Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TypeError("mine")

    monkeypatch.setattr(ca.Store, failing, fail)
    assert remembering.similar(problem(1), 0) == [] if failing == "keys" else True
    assert serve(1) == "aten"


def test_a_change_that_fails_does_not_keep_the_next_one_from_being_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from cudnn_autotune.tuning import deferred

    made = []
    with deferred.put_off() as changes:
        deferred.change(lambda: made.append(1))
        deferred.change(lambda: {}["mine"])  # type: ignore[index]
        deferred.change(lambda: made.append(2))
    deferred.make_all(changes)
    assert made == [1, 2]
    assert "mine" in caplog.text


def test_a_trial_begins_anew_whatever_was_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = Choice(untimed(problem(1), Policy("online"), Measurement(OWN_PATH, None, 0)), 0)
    committer = OnlineCommitter(first, Prepared(), 0)
    for kept in (3, [], {"rounds": []}, {"\ud800": 1}, {"candidates": {"a": None}}, "\0"):
        monkeypatch.setattr(kept_plans, "find_trial", lambda *_, kept=kept: kept)
        with caplog.at_level(logging.INFO):
            assert committer.earlier().rounds == 0
