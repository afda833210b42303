"""With a locked store nothing of compiled graphs and layouts is measured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.store.first_calls import first_call, in_process
from support.store.locked import COUNTED, contents, forget_warnings

import cudnn_autotune as ca
from cudnn_autotune.compile import comparison, judges
from cudnn_autotune.store import verdicts


@pytest.fixture(autouse=True)
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_warnings(monkeypatch)


@pytest.mark.basic(3)
@pytest.mark.parametrize("kind", ["inference", "training", "convert"])
def test_a_second_process_is_served_or_left_to_pytorch(kind: str, tmp_path: Path) -> None:
    first = in_process(tmp_path, kind)
    before = contents(tmp_path)
    second = in_process(tmp_path, kind, mode="locked")
    assert (second["source"], second["measured"]) == ("store", 0)
    assert second["times"] == pytest.approx(first["times"], rel=1e-5)
    assert second["right"]
    assert second["fallbacks"] == {}
    third = in_process(tmp_path, kind, mode="locked", batch=5)
    assert (third["times"], third["measured"]) == ({}, 0)
    assert third["right"]
    what = "layouts" if kind == "convert" else "programs"
    assert third["fallbacks"] == {f"{COUNTED}{what}": 1}
    assert contents(tmp_path) == before


def compiled(folder: Path, kind: str, **changes: Any) -> ca.Compilation:
    torch._dynamo.reset()
    found = first_call(str(folder), kind, mode="locked", **changes)
    assert found["right"]
    assert found["measured"] == 0
    return ca.compilations()[-1]


@pytest.mark.basic(2)
def test_programs_that_need_no_decision_run(tmp_path: Path) -> None:
    for kind in ("inference", "training"):
        torch._dynamo.reset()
        first_call(str(tmp_path), kind)
    ca.forget()
    missing = compiled(tmp_path, "inference", batch=5)
    assert missing.chosen == missing.chosen_in_captures == "inductor"
    assert "locked store" in missing.note
    frozen = compiled(tmp_path, "freezing")
    assert frozen.chosen == "inductor"
    assert not frozen.is_frozen
    training = compiled(tmp_path, "training", batch=5)
    assert training.chosen == "cudnn_autotune, PyTorch's norms"
    assert not any(norm.is_served for norm in training.norms)
    assert ca.fallbacks() == {f"{COUNTED}programs": 3}
    asked_for = compiled(tmp_path, "training", batch=6, norms="always")
    assert asked_for.chosen == "cudnn_autotune"
    assert ca.fallbacks() == {f"{COUNTED}programs": 3}, "it needs no decision"


@pytest.mark.basic(2)
def test_programs_that_are_wrong_now_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("inference", "training"):
        torch._dynamo.reset()
        first_call(str(tmp_path), kind)
    ca.forget()
    monkeypatch.setattr(comparison, "difference", lambda *args: "it differs")
    assert compiled(tmp_path, "inference").chosen == "inductor"
    assert compiled(tmp_path, "training").chosen == "cudnn_autotune, PyTorch's norms"
    assert ca.fallbacks() == {f"{COUNTED}programs": 2}


def test_groups_are_fused_only_by_a_kept_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their forms are a GPU's, and so are their times."""
    cpu = torch.device("cpu")

    def forms(key: str) -> Any:
        names = ("fused", "in several kernels")
        return SimpleNamespace(kind="group", names=names, key=key, device=cpu, searches=())

    ca.set_store(tmp_path, mode="read_write")
    verdicts.keep(None, judges._name(forms("known")), judges._Times(1.0, 2.0))
    ca.set_store(mode="locked")
    monkeypatch.setattr(judges, "_forms_of", forms)
    monkeypatch.delattr(judges, "_measured")
    judge = judges.Measured()
    assert judge("known").fuse  # type: ignore[arg-type]
    for _ in range(2):
        left = judge("unknown")  # type: ignore[arg-type]
        assert not left.fuse
        assert "locked store" in left.reason
    assert ca.fallbacks() == {f"{COUNTED}groups": 1}
