"""A locked store is the authority: nothing is measured, and PyTorch computes what it lacks."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes.subprocesses import evaluate_forked, python
from support.store.decisions import H200, L4, decision, problem
from support.store.locked import COUNTED, contents, forget_warnings
from support.store.stored import refused

import cudnn_autotune as ca
from cudnn_autotune import sampling
from cudnn_autotune.engines.configs import OWN_PATH
from cudnn_autotune.engines.problem import ConvProblem
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.engines.unlisted import MATMUL
from cudnn_autotune.models.process_summary import summary
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.file_store import Store
from cudnn_autotune.timers.measuring import operands
from cudnn_autotune.tuning import choice_log, compiling_ahead, miss, remembering, serving

POINTWISE = ConvProblem(
    "fprop", (2, 16, 6, 5), (8, 16, 1, 1), dtype=torch.float16, memory_format=torch.channels_last
)
LACKING = replace(POINTWISE, input_shape=(3, 16, 6, 5))


@pytest.fixture(autouse=True)
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_warnings(monkeypatch)


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A locked store with a matrix product for one problem, which nothing may change."""
    ca.set_store(tmp_path, mode="read_write")
    ranking = (Measurement(MATMUL, 1.0, 9), Measurement(OWN_PATH, 2.0, 9))
    ca.get_store().add([Decision(POINTWISE, Policy("auto"), Selection(ranking, 18), 1e-4)])
    before = contents(tmp_path)
    ca.set_store(mode="locked")
    yield tmp_path
    assert contents(tmp_path) == before


def asked(problem: ConvProblem, mode: str = "auto", **options: Any) -> str:
    """The text of what serves a call, as C++ asks for it."""
    tensors = operands(problem, "cpu")
    plan, trial, is_provisional, afterwards = miss.choose(
        problem.native(), mode, -1, 0, 0, *tensors, **options
    )
    if afterwards is not None:
        afterwards()
    assert trial is None
    assert not is_provisional
    return plan.text


def is_warned(what: Any) -> list[str]:
    return [str(one.message) for one in what if "locked store" in str(one.message)]


# Convolutions


@pytest.mark.search
@pytest.mark.usefixtures("locked")
@pytest.mark.parametrize("mode", ["auto", "race", "online", "sustained"])
def test_what_is_lacking_is_pytorchs_and_counted(mode: str) -> None:
    assert sampling.traits(mode).times
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        assert asked(POINTWISE) == "matmul"
        assert ca.fallbacks() == {}
        for batch in (3, 4, 5):
            assert asked(replace(LACKING, input_shape=(batch, 16, 6, 5)), mode) == "aten"
    assert ca.fallbacks() == {f"{COUNTED}convolutions": 3}
    (message,) = is_warned(given)
    assert 'mode="read_write"' in message
    assert "fallbacks()" in message
    stored, *missing = ca.choices()
    assert stored.origin == "store"
    for one in missing:
        assert (one.origin, one.text, one.total_samples) == ("missing", "aten", 0)
        assert "locked store" in one.selection.evidence.rule


@pytest.mark.search
@pytest.mark.usefixtures("locked")
def test_sizes_that_change_are_no_neighbours() -> None:
    assert asked(POINTWISE) == "matmul"
    for new_sizes in ("online", "neighbour", "tune"):
        ca.set_new_shapes(new_sizes)
        choice_log.forget_problem(LACKING)
        assert asked(LACKING) == "aten"


@pytest.mark.search
@pytest.mark.usefixtures("locked")
def test_a_pin_and_ranks_agreement_hold() -> None:
    ca.pin(LACKING, "matmul")
    assert asked(LACKING) == "matmul"
    ca.unpin()
    agreed = Decision(LACKING, Policy("auto"), Selection((Measurement(MATMUL, 1.0, 9),), 9), 1e-4)
    remembering.install([agreed], 0)
    assert asked(LACKING) == "matmul"
    assert ca.fallbacks() == {}


@pytest.mark.search
@pytest.mark.usefixtures("locked")
def test_a_decision_that_is_wrong_here_is_left_to_pytorch() -> None:
    x, w, y = operands(POINTWISE, "cpu")
    other_layout = torch.empty(y.shape, dtype=y.dtype)
    plan, *_ = miss.choose(POINTWISE.native(), "auto", -1, 0, 0, x, w, other_layout)
    assert plan.text == "aten"
    assert ca.fallbacks() == {
        serving.WRONG.replace("tuned again", "left to PyTorch"): 1,
        f"{COUNTED}convolutions": 1,
    }


@pytest.mark.search
@pytest.mark.usefixtures("locked")
def test_a_capture_has_pytorchs_own_path() -> None:
    assert serving.during_capture(LACKING.native(), "auto", -1, 0, 0).text == "aten"


@pytest.mark.search
@pytest.mark.usefixtures("locked")
def test_nothing_is_compiled_for_a_search() -> None:
    problem = ConvProblem("fprop", (8, 64, 28, 28), (64, 64, 3, 3), dtype=torch.float16)
    begun = compiling_ahead._begun
    for mode, is_begun in (("locked", False), ("off", True)):
        ca.set_store(mode=mode)  # type: ignore[arg-type]
        with compiling_ahead.compiling([(problem, "h200", "auto", None)]):
            assert bool(begun) == is_begun


@pytest.mark.search
@pytest.mark.usefixtures("locked")
def test_what_was_lacking_is_tuned_once_the_store_is_open() -> None:
    asked(LACKING)
    choice_log.forget_unsettled(LACKING)
    assert [one.problem for one in ca.choices()] == [LACKING], "it is still locked"
    assert not choice_log.are_settled()
    ca.set_store(mode="read")
    choice_log.forget_unsettled(LACKING)
    assert ca.choices() == []


@pytest.mark.usefixtures("locked")
def test_a_user_may_not_change_it() -> None:
    """The decisions are served from the memory of the process."""
    ca.get_store().add([replace(decision(), problem=problem(size=9))])
    assert ca.get_store().get(problem(size=9)) is not None


def test_the_summary_of_a_process_tells() -> None:
    left = {f"{COUNTED}convolutions": 2, f"{COUNTED}norms": 1, "another": 4}
    assert summary([], left, [])[1:] == [
        "the locked store lacks 3 shapes, which PyTorch computes",
        "4 calls left to PyTorch, mostly: another",
    ]


# Norms


def test_norms_of_a_second_process(tmp_path: Path) -> None:
    code = (
        "import json, cudnn_autotune as ca; from support.norms.stored import trained\n"
        f"ca.set_store({str(tmp_path)!r}, mode=MODE)\n"
        "print(json.dumps([trained('half kept', SIDES), ca.fallbacks()]))"
    )

    def process(mode: str, *sides: int) -> Any:
        return json.loads(
            evaluate_forked(code.replace("MODE", repr(mode)).replace("SIDES", repr(sides)))
        )

    process("read_write", 6)
    before = contents(tmp_path)
    found, counts = process("locked", 6, *range(7, 14))
    assert found["timed"] == 0
    assert found["chosen"] == [["half kept", "store"], *[["pytorch", "missing"]] * 7]
    assert counts == {f"{COUNTED}norms": 7}
    assert contents(tmp_path) == before


# Bad input


def refusal(path: Path, **options: Any) -> str:
    before = store_settings.get_store_settings()
    with pytest.raises(ValueError) as error:
        ca.set_store(path, mode="locked", **options)
    assert store_settings.get_store_settings() == before, "no setting changes"
    message = str(error.value)
    assert message.startswith("path: ")
    assert 'mode="read_write"' in message, "the way out"
    assert str(path) in message
    assert "\n" not in message
    return message


def test_a_store_that_is_missing(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nothing")
    assert "does not exist" in refusal(tmp_path / "nothing.json")
    assert "has no decisions" in refusal(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("other", [H200, L4], ids=lambda one: one.gpu)
def test_a_store_of_another_gpu_or_cudnn(other: Any, tmp_path: Path) -> None:
    Store(tmp_path, other).add([decision()])
    before = contents(tmp_path)
    for path in (tmp_path, tmp_path / other.file_name):
        message = refusal(path)
        assert f"{other.gpu} ({other.multiprocessors} multiprocessors)" in message
        assert f"cuDNN {other.cudnn}" in message
        assert f"not of {ca.environment()['gpu'] or 'none'}" in message
    assert contents(tmp_path) == before


def test_without_cuda_being_initialised_cudnn_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that set it up could no longer be forked."""
    from cudnn_autotune.store import locked

    monkeypatch.setattr(locked, "known_environment", lambda: None)
    here = store_settings.get_store().environment
    for cudnn, is_allowed in ((here.cudnn, True), ("8.1.0", False)):
        folder = tmp_path / cudnn
        Store(folder, replace(H200, cudnn=cudnn, cudnn_frontend=here.cudnn_frontend)).add(
            [decision()]
        )
        if is_allowed:
            ca.set_store(folder, mode="locked")
            ca.set_store(mode="off")
        else:
            assert f"not of cuDNN {here.cudnn}" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"nothing", b"{}\n", b'{"format": "cudnn-autotune'])
def test_a_file_that_is_no_store(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    path.write_bytes(content)
    assert f"{path} cannot be read" in refusal(path)
    assert f"{tmp_path} holds store.json, which cannot be read" in refusal(tmp_path)
    assert path.read_bytes() == content


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read any file")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "store.json"
    Store(path).add([decision()])
    path.chmod(0)
    assert "cannot be read (Permission denied)" in refusal(path)


def test_a_damaged_store_is_left_as_it_is(locked: Path) -> None:
    (path,) = locked.glob("*.json")
    whole = path.read_bytes()
    try:
        path.write_bytes(whole + b"garbage\n")
        ca.set_store(mode="locked")
        with pytest.warns(UserWarning, match="damaged"):
            assert ca.get_store().get(POINTWISE) is not None
        assert path.read_bytes() == whole + b"garbage\n"
    finally:
        path.write_bytes(whole)


def test_shipped_decisions_may_be_all(tmp_path: Path) -> None:
    shipped = tmp_path / "shipped.json"
    Store(shipped).add([decision()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDNN_AUTOTUNE_CACHE_DIR", str(tmp_path / "none"))
        ca.set_store(None, mode="locked", shipped=[shipped])
        with pytest.raises(ValueError, match=r"^shipped: .*does not exist"):
            ca.set_store(shipped=[tmp_path / "gone"])
    refusal(tmp_path / "none", shipped=[shipped])


ASKED = (
    "import torch, cudnn_autotune as ca\n"
    "from cudnn_autotune.tuning import miss\n"
    "from cudnn_autotune.timers.measuring import operands\n"
    "p = ca.ConvProblem('fprop', (2, 8, 9, 9), (4, 8, 3, 3), dtype=torch.float16)\n"
    "plan, *_ = miss.choose(p.native(), 'auto', -1, 0, 0, *operands(p, 'cpu'))\n"
    "print(plan.text, ca.fallbacks())"
)


@pytest.mark.search
@pytest.mark.parametrize("place", ["nothing", "other"])
def test_a_variable_that_locks_what_cannot_be_is_told_once(place: str, tmp_path: Path) -> None:
    """Its program runs, by PyTorch's own path."""
    Store(tmp_path / "other", H200).add([decision()])
    folder = str(tmp_path / place)
    env = {"CUDNN_AUTOTUNE_CACHE": "locked", "CUDNN_AUTOTUNE_CACHE_DIR": folder}
    done = python("-c", ASKED, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"aten {{'{COUNTED}convolutions': 1}}"
    (line,) = [line for line in done.stderr.splitlines() if "must be of this GPU" in line]
    assert "CUDNN_AUTOTUNE_CACHE_DIR: a locked store" in line
    assert folder in line
    assert "CUDNN_AUTOTUNE_CACHE=read_write" in line
    assert not (tmp_path / "nothing").exists()


def test_the_command_does_not_tune_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path).add([decision()])
    ca.set_store(tmp_path, mode="locked")
    layer = ("--input", "16,64,28,28", "--weight", "64,64,3,3")
    message = refused("tune", *layer, "--store", tmp_path)
    assert "CUDNN_AUTOTUNE_CACHE=locked" in message
    assert "unset it" in message
