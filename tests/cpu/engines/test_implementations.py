"""Implementations beside cuDNN's engines: their texts, their registration, their candidates."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels.user_implementations import Fixed, registered
from support.simulation import GPU, SimulatedEngine, SimulatedTimer, candidate
from support.store.decisions import H200 as OF_H200

import cudnn_autotune as ca
from cudnn_autotune import sampling
from cudnn_autotune.core.extension import _C
from cudnn_autotune.engines import candidates as queried_module
from cudnn_autotune.engines import registry
from cudnn_autotune.engines.candidate_id import CandidateId, of_implementation, parse
from cudnn_autotune.engines.candidates import QueriedCandidates, named
from cudnn_autotune.engines.configs import OWN_PATH, build_plan, open_search, query
from cudnn_autotune.engines.implementations import Gpu, Offer
from cudnn_autotune.engines.offers import described, gpu_of, offers_of, recipe_of
from cudnn_autotune.engines.registry import ImplementationError
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.engines.unlisted import MATMUL
from cudnn_autotune.online.mode import Online
from cudnn_autotune.sampling.auto import Shortlist, few
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import codec
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.file_store import Store
from cudnn_autotune.timers.measuring import operands
from cudnn_autotune.tuning import remembering

PROBLEM = ca.ConvProblem("fprop", (2, 8, 6, 6), (8, 1, 3, 3), padding=1, groups=8)
HALF_LAST: dict[str, Any] = {"dtype": torch.float16, "memory_format": torch.channels_last}
POINTWISE = ca.ConvProblem("fprop", (2, 16, 6, 5), (8, 16, 1, 1), **HALF_LAST)
H200 = gpu_of("h200")


def texts(candidates: Sequence[ca.expert.Candidate]) -> list[str]:
    return [c.text for c in candidates]


# Texts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("depthwise@3f9a1c", of_implementation("depthwise", "3f9a1c", "")),
        ("depthwise@3f9a1c:ROWS=4", of_implementation("depthwise", "3f9a1c", "ROWS=4")),
        # Settings may themselves be the text of an engine, or of another implementation.
        ("padded@1.0+2:C=32:eng67:A=3", of_implementation("padded", "1.0+2", "C=32:eng67:A=3")),
        ("two@2:one@1:A=1", of_implementation("two", "2", "one@1:A=1")),
        ("_@~", of_implementation("_", "~", "")),
    ],
)  # fmt: skip
def test_a_text_names_an_implementation(text: str, expected: CandidateId) -> None:
    assert parse(text) == expected
    assert expected.text == text
    found = named(text, 7)
    assert (found.text, found.engine, found.knobs, found.rank) == (text, None, {}, 7)
    assert found.engine_name == f"{expected.name}@{expected.version}"
    assert not found.is_unfused


@pytest.mark.search
def test_texts_of_every_kind_name_a_candidate() -> None:
    assert (named("aten"), named("matmul")) == (OWN_PATH, MATMUL)
    engine = named("unfused:eng67:KERNEL_CFG=3")
    assert (engine.engine, engine.knobs, engine.is_unfused) == (67, {"KERNEL_CFG": 3}, True)
    for text in ("eng", "fixed", "fixed@", "eng3:NO_KNOB=1"):
        with pytest.raises(ValueError, match=r"eng|fixed"):
            named(text)
    with pytest.raises(TypeError, match="must be a text"):
        named(3)  # type: ignore[arg-type]


# Registration


def test_a_name_is_registered_once() -> None:
    with registered(Fixed()):
        with pytest.raises(ValueError, match="'fixed' is registered"):
            registry.register(Fixed(version="2"))
        assert registry.unregister("fixed") == Fixed()
        with pytest.raises(KeyError, match="no implementation 'fixed'"):
            registry.unregister("fixed")
        registry.register(Fixed(version="2"))
        assert registry.registered() == (Fixed(version="2"),)


@pytest.mark.parametrize(
    ("name", "version"),
    [("Fixed", "1"), ("", "1"), ("aten", "1"), ("eng7", "1"), ("fixed", ""), ("fixed", "1 2"),
     ("fixed", "1:2"), ("fixed", "1@2"), ("fixed", 1), (None, "1")],
)  # fmt: skip
def test_bad_names_and_versions_are_refused(name: str, version: str) -> None:
    with registered(), pytest.raises(ValueError, match=r"^(name|version) must be"):
        registry.register(Fixed(name, version))


def test_what_is_not_registered_is_not_built() -> None:
    with registered(Fixed()):
        for text, why in [
            ("other@1", "no implementation 'other' is registered"),
            ("fixed@2:ROWS=4", "'fixed' is registered in version '1'"),
            ("fixed@1:ROWS=5", "is not offered for fprop"),
            ("fixed@1", "is not offered for fprop"),
        ]:
            with pytest.raises(ImplementationError, match=why):
                described(text, PROBLEM, H200)
        assert recipe_of("fixed@1:ROWS=8", PROBLEM, H200).launches == ()
        assert described("fixed@1:ROWS=8", PROBLEM, H200) == Offer("ROWS=8")


def test_an_implementation_that_fails_to_build_says_why() -> None:
    class Failing(Fixed):
        def recipe(self, problem: ca.ConvProblem, settings: str, gpu: Gpu) -> object:  # type: ignore[override]
            raise ZeroDivisionError("ROWS")

    with registered(Failing()), pytest.raises(ImplementationError) as failed:
        recipe_of("fixed@1:ROWS=4", PROBLEM, H200)
    assert str(failed.value) == "fixed@1:ROWS=4: ZeroDivisionError: ROWS"
    assert failed.value.__context__ is None or failed.value.__suppress_context__


# Offers


def test_a_gpu_is_described_from_a_property_file(tmp_path: Path) -> None:
    assert gpu_of("h200") == H200
    assert gpu_of("l4").compute_capability == (8, 9)
    assert gpu_of("t4").compute_capability == (7, 5)
    with pytest.raises(ValueError, match="device"):
        gpu_of("h300")


def test_offers_become_candidates_in_their_order() -> None:
    given = Offer("A=1", 512, ("TENSOR_CORE",), ())
    with registered(Fixed(), Fixed("second", "2", (given, given, Offer("")))):
        found = offers_of(PROBLEM, H200)
    assert texts(found) == ["fixed@1:ROWS=4", "fixed@1:ROWS=8", "second@2:A=1", "second@2"]
    assert [c.rank for c in found] == sorted({c.rank for c in found})
    one = found[2]
    assert (one.engine, one.knobs, one.workspace_bytes) == (None, {}, 512)
    assert (one.notes, one.heuristic_mode, one.is_compiled) == (("TENSOR_CORE",), "", False)
    assert found[0].is_compiled
    assert found[0].config_family != found[1].config_family


@pytest.mark.parametrize(
    ("note", "changes", "is_allowed"),
    [
        ("NONDETERMINISTIC", {}, True),
        ("NONDETERMINISTIC", {"deterministic": True}, False),
        ("TENSOR_CORE", {}, True),
        ("TENSOR_CORE", {"allow_tf32": False}, False),
        ("TENSOR_CORE", {"allow_tf32": False, "dtype": torch.float16}, True),
        ("REDUCED_PRECISION_REDUCTION", {"dtype": torch.float16}, True),
        ("REDUCED_PRECISION_REDUCTION",
         {"dtype": torch.float16, "allow_reduced_precision": False}, False),
        ("DOWN_CONVERT_INPUTS", {}, False),
    ],
)  # fmt: skip
def test_offers_are_filtered_as_engine_configs_are(
    note: str, changes: dict[str, object], is_allowed: bool
) -> None:
    problem = ca.ConvProblem("fprop", (2, 8, 6, 6), (8, 8, 3, 3), **changes)  # type: ignore[arg-type]
    with registered(Fixed(given=(Offer("", 0, (note,)),))):
        assert bool(offers_of(problem, H200)) is is_allowed
        assert len(offers_of(problem, H200, filtered=False)) == 1


def test_one_that_fails_to_answer_is_left_out_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Fixed("failing", error=RuntimeError("no idea"))
    blank = Fixed("blank", given=(Offer("A = 1"),))
    with registered(failing, blank, Fixed()), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert texts(offers_of(PROBLEM, H200)) == ["fixed@1:ROWS=4", "fixed@1:ROWS=8"]
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2
    assert "failing@1 is left out" in said[0]
    assert "RuntimeError: no idea" in said[0]
    assert "without blanks, got 'A = 1'" in said[1]


@pytest.mark.search
def test_candidates_lists_offers_behind_cudnns() -> None:
    with registered():
        cudnns = ca.expert.candidates(POINTWISE, "h200")
    with registered(Fixed(given=(Offer("", 10),))):
        assert texts(ca.expert.candidates(POINTWISE, "h200")) == [*texts(cudnns), "fixed@1"]
        assert "fixed@1" not in texts(ca.expert.candidates(POINTWISE, "h200", workspace_limit=9))


# The lists of modes


def queried(problem: ca.ConvProblem, *nearby: ca.expert.Candidate) -> QueriedCandidates:
    search = open_search(problem, "h200")
    return QueriedCandidates(search, problem, operands(problem, "cpu"), None, nearby, H200)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modes that cuDNN is asked for from now on, of problems that it was not asked about."""
    modes: list[str] = []

    def noted(search: _C.EngineList, problem: ca.ConvProblem, of: list[str], **more: Any) -> Any:
        modes.extend(of)
        return query(search, problem, of, **more)

    monkeypatch.setattr(queried_module, "query", noted)
    monkeypatch.setattr(queried_module, "_answers", OrderedDict())
    return modes


@pytest.mark.search
def test_cudnn_is_asked_once_for_a_mode(asked: list[str]) -> None:
    queried(POINTWISE).of_mode("A")
    second, third = queried(POINTWISE), queried(POINTWISE)
    lists = [[texts(some.of_mode(mode)) for mode in ("A", "FALLBACK")] for some in (second, third)]
    assert asked == ["A", "FALLBACK"]
    assert lists[0] == lists[1]
    of_a, of_fallback = lists[0]
    listed = query(open_search(POINTWISE, "h200"), POINTWISE, ["A", "FALLBACK"])
    assert [*of_a, *of_fallback] == texts(listed)
    assert [c.rank for c in second.of_mode("FALLBACK")] == list(range(len(of_fallback)))


@pytest.mark.search
def test_a_search_takes_all_offers_and_auto_the_first_four_of_each() -> None:
    compiled = [f"ROWS={rows}" for rows in range(6)]
    ready = [f"B={b}" for b in range(6)]
    first = Fixed("first", given=tuple(map(Offer, compiled)))
    second = Fixed("second", given=tuple(Offer(b, behavior_notes=()) for b in ready))
    with registered(first, second):
        found = queried(POINTWISE)
        own = [c for c in found.beyond() if c.engine is None]
        of_first = [f"first@1:{settings}" for settings in compiled]
        of_second = [f"second@1:{settings}" for settings in ready]
        assert texts(own) == ["aten", "matmul", *of_first, *of_second]
        short = Shortlist(found)
        own = [c for c in short.beyond() if c.engine is None]
        assert texts(own) == ["aten", "matmul", *of_first[:4], *of_second[:4]]
        assert texts(short.other_kernels({"first@1"})) == of_first[4:]
        in_turns = [c for c in Online().shortlist(found) if c.engine is None]
        assert {*of_first[:4], *of_second[:4]} == set(texts(in_turns)) - {"aten", "matmul"}
        # A new size is compared with little: nothing is compiled for it that did not win nearby.
        assert texts(few(found))[-3:] == ["aten", "matmul", "second@1:B=0"]


@pytest.mark.search
def test_what_won_nearby_goes_first_if_it_is_offered_here() -> None:
    nearby = [named(t) for t in ("fixed@1:ROWS=5", "fixed@0:ROWS=0", "gone@1", "aten")]
    with registered(Fixed(given=tuple(Offer(f"ROWS={rows}") for rows in range(6)))):
        found = queried(POINTWISE, *nearby)
        assert texts(found.similar()) == ["fixed@1:ROWS=5"]
        short = Shortlist(found)
        assert texts(short.similar()) == ["fixed@1:ROWS=5"]
        own = [text for text in texts(short.beyond()) if text.startswith("fixed")]
        assert own == [f"fixed@1:ROWS={rows}" for rows in (0, 1, 2, 5)]
        assert texts(few(found))[0] == "fixed@1:ROWS=5"


@pytest.mark.parametrize("mode", ["race", "sustained", "auto"])
@pytest.mark.parametrize("notes", [(), ("RUNTIME_COMPILATION",)], ids=["ready", "compiled"])
def test_whatever_is_fastest_wins(mode: str, notes: tuple[str, ...]) -> None:
    ours = replace(named("fixed@1:ROWS=4"), behavior_notes=notes)
    slower = replace(named("fixed@1:ROWS=8"), behavior_notes=notes)
    cudnns = [candidate(f"eng{i}", i) for i in range(3)]
    times_ms = {ours: 0.8, slower: 0.9, OWN_PATH: 1.3, **{c: 1.0 for c in cudnns}}
    timer = SimulatedTimer(GPU, [SimulatedEngine(c, ms, 100.0) for c, ms in times_ms.items()])
    selection = sampling.get(mode).select(timer.candidates, timer, sampling.Limits())
    assert selection.winner.candidate == ours


def test_a_settings_that_is_far_too_slow_speaks_for_its_siblings() -> None:
    ours = [named(f"fixed@1:ROWS={rows}") for rows in range(4)]
    times_ms = {candidate("eng0"): 1.0, **dict.fromkeys(ours, 20.0)}
    timer = SimulatedTimer(GPU, [SimulatedEngine(c, ms, 100.0) for c, ms in times_ms.items()])
    selection = sampling.get("race").select(timer.candidates, timer, sampling.Limits())
    out = {e.candidate.text: e.eliminated for e in selection.ranking}
    assert out["fixed@1:ROWS=3"] == "fixed@1 is more than 5 times slower"


# What is remembered


def decided(*entries: Measurement, problem: ca.ConvProblem = PROBLEM) -> Decision:
    return Decision(problem, Policy("race"), Selection(tuple(entries), 9 * len(entries)), 1e-6)


OURS = Measurement(
    replace(named("fixed@1:ROWS=4"), behavior_notes=("RUNTIME_COMPILATION",), rank=20_000), 1.0, 9
)
THEIRS = Measurement(replace(candidate("eng3"), engine=3, text="eng3"), 1.5, 9)
SLOW = Measurement(OWN_PATH, 2.0, 9)


def test_a_decision_is_written_and_read() -> None:
    decision = decided(OURS, THEIRS, SLOW)
    tree = json.loads(codec.body(decision, 2000))
    assert codec.from_body(tree, PROBLEM, "race", 0) == decision


def test_what_serves_without_the_implementation_is_kept() -> None:
    ours = (named(f"fixed@1:ROWS={rows}") for rows in range(40))
    many = [replace(OURS, candidate=c, time_ms=1 + n / 100) for n, c in enumerate(ours)]
    tree = json.loads(codec.body(decided(*many, THEIRS, SLOW), 1000))
    kept = [row[0] for row in tree["ranking"]]
    assert kept[0] == "fixed@1:ROWS=0"
    assert {"eng3", "aten"} <= set(kept)
    assert tree["omitted"] > 0


@pytest.mark.search
def test_the_store_keeps_what_it_cannot_serve(tmp_path: Path) -> None:
    Store(tmp_path, OF_H200).add([decided(OURS, THEIRS)])
    for here, served in [((), THEIRS), ((Fixed(),), OURS)]:
        with registered(*here):
            assert Store(tmp_path, OF_H200).find(PROBLEM, sampling="race").chosen == served


# Pins


@pytest.mark.search
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would build it")
def test_an_implementation_is_pinned() -> None:
    with registered(Fixed()):
        ca.pin(PROBLEM, "fixed@1:ROWS=4")
        found = remembering.find(PROBLEM, Policy("auto"), 0)
        assert (found.text, found.origin, found.engine) == ("fixed@1:ROWS=4", "pinned", None)
        for text, why in [("fixed@2", "in version '1'"), ("other@1", "'other' is registered")]:
            with pytest.raises(ValueError, match=f"^engine_text: .*{why}"):
                ca.pin(PROBLEM, text)
        with pytest.raises(ValueError, match="name@version"):
            ca.pin(PROBLEM, "fixed@")


@pytest.mark.search
def test_a_plan_is_built_for_a_cuda_device_only() -> None:
    with registered(Fixed()), pytest.raises(ValueError, match="name@version"):
        build_plan(PROBLEM, "fixed@", "h200")
