"""Decisions travel by ``torch.compiler.save_cache_artifacts`` into another process's store."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.subprocesses import evaluate
from support.store.decisions import H200, L4, decision, measured_otherwise
from torch.compiler._cache import CacheArtifactFactory, CacheArtifactManager

import cudnn_autotune as ca
from cudnn_autotune.compile import cache_artifacts
from cudnn_autotune.engines.selection import Evidence
from cudnn_autotune.store import codec, file_format, notices, verdicts
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.tuning import choice_log
from cudnn_autotune.tuning.remembering import commit
from cudnn_autotune_autoload import ARTIFACT, register_artifact

SAVES = """
import json, sys, torch
import cudnn_autotune as ca
from cudnn_autotune.tuning.remembering import commit
from support.store.decisions import decision
from support.store.first_calls import first_call

folder, file = sys.argv[1:]
ca.set_store(folder, mode="read_write")
commit(ca.Choice(decision(7), 0))  # before the first graph
found = first_call(folder, "inference")
commit(ca.Choice(decision(8), 0))
content, info = torch.compiler.save_cache_artifacts()
open(file, "wb").write(content)
print(json.dumps([found["source"], sorted(info.cudnn_autotune_artifacts)]))
"""
LOADS = """
import json, sys, torch
assert "cudnn_autotune" not in sys.modules
folder, file = sys.argv[1:]
info = torch.compiler.load_cache_artifacts(open(file, "rb").read())

import cudnn_autotune as ca
from support.store.decisions import decision
from support.store.first_calls import first_call
store = ca.get_store()
known = [store.get(decision(size).problem) == decision(size).selection for size in (7, 8, 9)]
found = first_call(folder, "inference")
print(json.dumps([found, known, sorted(info.cudnn_autotune_artifacts)]))
"""


def in_process(code: str, folder: Path, file: Path) -> list[Any]:
    variables = {
        "CUDNN_AUTOTUNE_CACHE": "read_write",
        "CUDNN_AUTOTUNE_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    arguments = f"import sys; sys.argv[1:] = {[str(folder), str(file)]!r}\n"
    found: list[Any] = json.loads(evaluate(arguments + code, env=variables).splitlines()[-1])
    return found


def test_a_second_process_with_another_store_measures_nothing(tmp_path: Path) -> None:
    file = tmp_path / "artifacts"
    source, saved = in_process(SAVES, tmp_path / "first", file)
    assert source == "tuned"
    kinds = [key.partition(" ")[0] for key in saved]
    assert (kinds.count("decision"), kinds.count("verdict")) == (2, 1)
    found, known, loaded = in_process(LOADS, tmp_path / "second", file)
    assert loaded == saved
    assert known == [True, True, False]
    assert (found["source"], found["measured"], found["right"]) == ("store", 0, True)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes]]:
    """The artifacts that this process records, instead of torch's memory of them."""
    found: list[tuple[str, bytes]] = []
    monkeypatch.setattr(
        CacheArtifactManager,
        "record_artifact",
        lambda kind, key, content: found.append((key, content)),
    )
    return found


def populate(*artifacts: tuple[str, bytes]) -> None:
    """Does what ``load_cache_artifacts`` does with them."""
    made = [CacheArtifactFactory.create(ARTIFACT, *one) for one in artifacts]
    CacheArtifactManager.populate_caches({ARTIFACT: made})


def artifact(one: Decision, environment: Environment | None = None) -> tuple[str, bytes]:
    environment = environment or ca.get_store().environment
    line = codec.encode(one, environment)
    return f"decision {one.key}", file_format.encode(environment, [line])


def test_what_no_store_keeps_is_no_artifact(recorded: list[tuple[str, bytes]]) -> None:
    cache_artifacts.begin()
    recorded.clear()
    known = decision(3)
    unmeasured = replace(known, selection=replace(known.selection, total_samples=0))
    evidence = Evidence(provisional="memory was lacking")
    provisional = replace(known, selection=replace(known.selection, evidence=evidence))
    for one in (unmeasured, provisional):
        choice_log.forget()
        commit(ca.Choice(one, 0))
    assert recorded == []
    commit(ca.Choice(known, 0, "store"))
    assert recorded == [artifact(known)]


def test_a_verdict_is_taken_over_unless_there_is_one(
    recorded: list[tuple[str, bytes]], tmp_path: Path
) -> None:
    cache_artifacts.begin()
    recorded.clear()
    ca.set_store(tmp_path / "first", mode="read_write")
    verdicts.keep(None, "one", {"ms": 1.5})
    assert verdicts.find(None, "one") == {"ms": 1.5}
    assert recorded[0] == recorded[1]
    verdicts.keep(None, "other", {"ms": 2.5})
    ca.set_store(tmp_path / "second")
    verdicts.keep(None, "other", {"ms": 3.5})
    populate(*recorded[1:3])
    assert verdicts.find(None, "one") == {"ms": 1.5}
    assert verdicts.find(None, "other") == {"ms": 3.5}


def test_a_later_decision_stays(tmp_path: Path) -> None:
    ca.set_store(tmp_path, mode="read_write")
    known = decision(3, day=5)
    ca.get_store().add([known])
    populate(artifact(measured_otherwise(known, 2.0, day=4)))
    assert ca.get_store().by_key(known.key) == known
    later = measured_otherwise(known, 2.0, day=6)
    populate(artifact(later))
    assert ca.get_store().by_key(known.key) == later


def test_another_environment_has_its_own_file(tmp_path: Path) -> None:
    ca.set_store(tmp_path, mode="read_write")
    one, other = decision(3), decision(4)
    populate(artifact(one, H200), artifact(other, L4))
    assert [*ca.Store(tmp_path, H200)] == [one]
    assert [*ca.Store(tmp_path, L4)] == [other]
    assert [*ca.get_store()] == []


def test_a_store_that_is_only_read_serves_it_from_memory(tmp_path: Path) -> None:
    ca.set_store(tmp_path, mode="read")
    populate(artifact(known := decision(3)))
    assert ca.get_store().by_key(known.key) == known
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("mode", ["off", "retune", "locked"])
def test_a_store_that_is_not_read_or_is_locked_gets_nothing(mode: Any, tmp_path: Path) -> None:
    ca.set_store(tmp_path, mode="read_write")
    ca.get_store().add([known := decision(4)])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    ca.set_store(mode=mode)
    populate(artifact(decision(3)))
    assert [*ca.get_store()] == [known]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def damaged() -> Sequence[tuple[str, bytes]]:
    key, content = artifact(decision(3))
    version = content.replace(b'"version": 2', b'"version": 3')
    flipped = content.replace(b"KERNEL_CFG", b"KERNEL_CFX")
    not_utf8 = content[:-20] + b"\xff" * 20
    no_json = b"\x00\x01garbage"
    cut = content[: len(content) // 2]
    return [(key, one) for one in (b"", no_json, version, flipped, not_utf8, cut)]


@pytest.fixture
def new_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning has been given yet."""
    monkeypatch.setattr(notices, "_given", set())


@pytest.mark.usefixtures("new_notices")
@pytest.mark.parametrize("number", range(6))
def test_bad_bytes_are_one_warning_and_the_others_are_taken(number: int, tmp_path: Path) -> None:
    ca.set_store(tmp_path, mode="read_write")
    bad, good = damaged()[number], decision(5)
    assert bad[1] != artifact(decision(3))[1]
    with pytest.warns(UserWarning, match="a cache artifact is not taken over: decision fprop"):
        populate(bad, artifact(good))
    assert [*ca.get_store()] == [good]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        populate(bad)


@pytest.mark.usefixtures("new_notices")
def test_a_warning_that_is_an_error_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ca.set_store(tmp_path, mode="read_write")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        populate(damaged()[0], artifact(good := decision(5)))
    assert [*ca.get_store()] == [good]
    assert "a cache artifact is not taken over" in caplog.text


def test_the_kind_is_registered_once() -> None:
    kind = CacheArtifactFactory._get_artifact_type(ARTIFACT)
    register_artifact()
    assert CacheArtifactFactory._get_artifact_type(ARTIFACT) is kind
    assert issubclass(kind, torch.compiler._cache.CacheArtifact)
