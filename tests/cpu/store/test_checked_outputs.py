"""An output that was right is not checked again by this user, on this GPU and with these versions.

There is no GPU here, so the tests say which one there is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cudnn_autotune as ca
from cudnn_autotune.engines.selection import Measurement, Selection
from cudnn_autotune.engines.unlisted import MATMUL
from cudnn_autotune.sampling.policy import Policy
from cudnn_autotune.store import checked_outputs, kept_plans
from cudnn_autotune.store.checked_outputs import CheckedOutputs
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.timers.measuring import operands
from cudnn_autotune.tuning import checking, remembering, serving
from cudnn_autotune.tuning.checking import tolerance
from cudnn_autotune.tuning.choice import Choice

pytestmark = pytest.mark.search

POINTWISE = ca.ConvProblem(
    "fprop", (2, 16, 6, 5), (8, 16, 1, 1), dtype=torch.float16, memory_format=torch.channels_last
)
HERE = {**ca.environment(), "gpu": "NVIDIA H200", "multiprocessors": 132, "driver": "580.82.07"}


def use_environment(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    monkeypatch.setattr(kept_plans.versions, "environment", lambda device=None: {**HERE, **changes})
    checked_outputs._file_at.cache_clear()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    use_environment(monkeypatch)
    ca.set_store(tmp_path, mode="read_write")
    yield tmp_path
    checked_outputs._file_at.cache_clear()


def new_process() -> None:
    """What this process has read is forgotten, as if it were another one."""
    checked_outputs._file_at.cache_clear()
    ca.forget()


def choice(origin: str = "store") -> Choice:
    selection = Selection((Measurement(MATMUL, 1.0, 9),), 9)
    return Choice(Decision(POINTWISE, Policy("race"), selection, 1e-5), 0, origin)


def serve(*, right: bool = True, origin: str = "store") -> Choice | None:
    """Serves the choice, on tensors for which its output is right or wrong."""
    x, w, y = operands(POINTWISE, "cpu")
    if not right:  # in another layout than the problem says, the product's rows lie elsewhere
        y = torch.empty(y.shape, dtype=y.dtype)
    found = serving.serve(choice(origin), (x, w, y))
    if found is None:
        return None
    remembering.commit(found.choice)
    return found.choice


def is_checked() -> bool:
    """Whether the output is checked: then a wrong one is noticed."""
    return serve(right=False) is None


def test_what_was_right_is_not_checked_again() -> None:
    first = serve()
    assert not is_checked()
    new_process()
    assert serve(right=False).relative_error == pytest.approx(first.relative_error, rel=1e-5)


def test_what_was_wrong_is_checked_again() -> None:
    assert is_checked()
    assert is_checked()
    # A pinned one serves all the same, and is not remembered as right.
    assert serve(right=False, origin="pinned") is not None
    assert is_checked()


def test_what_was_wrong_later_is_checked_again() -> None:
    """An engine may be wrong now and then, or for some values only."""
    found = serve()
    decision = replace(found.decision, rejected=(("matmul", 0.5),), relative_error=None)
    remembering.commit(replace(found, decision=decision))
    assert is_checked()
    new_process()
    assert is_checked()
    serve()
    new_process()
    assert not is_checked()


def test_what_is_not_right_by_todays_tolerance_is_checked_again() -> None:
    checked_outputs.remember(POINTWISE.text, "matmul", 0, 0.5)
    assert is_checked()


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_operands_that_tell_nothing_record_what_random_ones_do(value: float) -> None:
    x, w, y = operands(POINTWISE, "cpu")
    found = serving.serve(choice(), (x.fill_(value), w, y))
    error = found.choice.relative_error
    assert error is not None
    assert error < tolerance(POINTWISE)
    remembering.commit(found.choice)
    assert not is_checked()


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_what_could_not_be_checked_is_checked_again(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> object:
        raise torch.OutOfMemoryError("no memory")

    x, w, y = operands(POINTWISE, "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(checking, "telling_operands", refuse)
        found = serving.serve(choice(), (x.fill_(value), w, y))
    assert found.choice.relative_error is None
    remembering.commit(found.choice)
    assert is_checked()


def test_what_serves_a_new_size_is_checked_by_each_process(folder: Path) -> None:
    """Such sizes are many, and seldom come again: nothing is written for them."""
    assert serve(origin="neighbour") is not None
    assert not list(folder.rglob("checked-outputs"))
    assert is_checked()


@pytest.mark.parametrize(
    "changes", [{"gpu": "NVIDIA H100"}, {"driver": "580.99"}, {"cudnn": "9.20.0"}, {"driver": None}]
)
def test_in_another_environment_it_is_checked(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    serve()
    use_environment(monkeypatch, **changes)
    assert is_checked()
    use_environment(monkeypatch)
    assert not is_checked()


def test_another_problem_or_engine_is_checked() -> None:
    serve()
    text = POINTWISE.text
    assert checked_outputs.error_of(text, "matmul", 0) is not None
    assert checked_outputs.error_of(text, "eng0", 0) is None
    assert checked_outputs.error_of(text + " deterministic", "matmul", 0) is None


@pytest.mark.parametrize("mode", ["off", "read", "retune"])
def test_modes_of_the_store(mode: str) -> None:
    serve()
    ca.set_store(mode=mode)
    assert is_checked() is (mode != "read")


def file_in(folder: Path) -> Path:
    return folder / f"plans-{os.geteuid()}" / "checked-outputs"


DAMAGES: dict[str, Callable[[Path], object]] = {
    "loose": lambda file: file.chmod(0o666),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:50]),
    "negative": lambda file: file.write_bytes(file.read_bytes().replace(b" ", b" -")),
    "no number": lambda file: file.write_bytes(file.read_bytes().split()[0] + b" nan\n"),
}


@pytest.mark.parametrize("change", DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_or_of_others_is_not_believed(
    folder: Path, change: Callable[[Path], None]
) -> None:
    """What else others could have done to a file of a private folder is in test_kept_plans.py."""
    serve()
    change(file_in(folder))
    new_process()
    assert is_checked()
    assert serve() is not None  # nor does it harm


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_outputs, "_MOST_BYTES", 2000)
    kept = CheckedOutputs(tmp_path, HERE)
    for number in range(200):
        kept.add("problem", f"eng{number}", 1e-3)
        assert file_in(tmp_path).stat().st_size <= 2000
    fresh = CheckedOutputs(tmp_path, HERE)
    left = [n for n in range(200) if fresh.error_of("problem", f"eng{n}") is not None]
    assert left == list(range(200 - len(left), 200))
    assert len(left) >= 10


def test_what_cannot_be_written_is_known_in_this_process(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    ca.set_store(tmp_path / "file" / "below")
    with pytest.warns(UserWarning, match="cannot be written"):
        ca.get_store().add([choice().decision])
    serve()
    assert not is_checked()
    new_process()
    assert is_checked()
