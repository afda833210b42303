"""Choices for norms of eager training are on disk for the next process."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.norms.stored import trained
from support.processes.subprocesses import evaluate_forked

import cudnn_autotune as ca
from cudnn_autotune.norms import batch_norm_calls, plan
from cudnn_autotune.store import verdicts

TUNED, STORED = [["half kept", "tuned"]], [["half kept", "store"]]


def in_process(folder: Path, fastest: str, *sides: int) -> Any:
    """Returns what :func:`trained` does in a process of its own."""
    code = (
        "import json, cudnn_autotune as ca; from support.norms.stored import trained\n"
        f"ca.set_store({str(folder)!r}, mode='read_write')\n"
        f"print(json.dumps(trained({fastest!r}, {sides})))"
    )
    return json.loads(evaluate_forked(code))


def file_in(folder: Path) -> Path:
    (path,) = folder.glob("*.norms")
    return path


def test_the_next_process_times_nothing(tmp_path: Path) -> None:
    assert in_process(tmp_path, "half kept", 6) == {"chosen": TUNED, "timed": 1}
    assert in_process(tmp_path, "pytorch", 6) == {"chosen": STORED, "timed": 0}
    assert in_process(tmp_path, "pytorch", 6, 7) == {
        "chosen": [*STORED, ["pytorch", "tuned"]],
        "timed": 1,
    }
    assert in_process(tmp_path, "kept", 7) == {"chosen": [["pytorch", "store"]], "timed": 0}


def test_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda side: in_process(tmp_path, "kept", side), range(4, 8)))
    found = trained_with(tmp_path, "pytorch", 4, 5, 6, 7)
    assert found == {"chosen": [["kept", "store"]] * 4, "timed": 0}


def trained_with(folder: Path, fastest: str, *sides: int, **options: Any) -> Any:
    """Returns what :func:`trained` does in this process with a store of its own."""
    ca.set_store(folder, **{"mode": "read_write", **options})
    return trained(fastest, sides)


def test_modes_of_the_store(tmp_path: Path) -> None:
    again = {"chosen": TUNED, "timed": 1}
    for mode in ("off", "read"):
        assert trained_with(tmp_path, "half kept", 6, mode=mode) == again
        assert not list(tmp_path.glob("*.norms"))
    assert trained_with(tmp_path, "pytorch", 6) == {"chosen": [["pytorch", "tuned"]], "timed": 1}
    assert trained_with(tmp_path, "half kept", 6, mode="off") == again
    assert trained_with(tmp_path, "half kept", 6, mode="retune") == again
    before = file_in(tmp_path).read_bytes()
    assert trained_with(tmp_path, "kept", 6, mode="read") == {"chosen": STORED, "timed": 0}
    assert trained_with(tmp_path, "kept", 7, mode="read")["timed"] == 1
    assert file_in(tmp_path).read_bytes() == before


def test_a_folder_that_is_shipped(tmp_path: Path) -> None:
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    trained_with(shipped, "half kept", 6)
    before = file_in(shipped).read_bytes()
    found = trained_with(own, "pytorch", 6, 7, shipped=[shipped])
    assert found == {"chosen": [*STORED, ["pytorch", "tuned"]], "timed": 1}
    assert file_in(shipped).read_bytes() == before
    assert trained_with(own, "kept", 6, 7, shipped=[])["chosen"] == [
        ["kept", "tuned"],
        ["pytorch", "store"],
    ]
    # The user's own comes first.
    assert trained_with(own, "pytorch", 6, shipped=[shipped])["chosen"] == [["kept", "store"]]


def test_another_torch_or_other_kernels_measure_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_with(tmp_path, "half kept", 6)
    for module, name in ((torch, "__version__"), (plan, "VERSION")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, "another")
            assert trained_with(tmp_path, "kept", 6)["chosen"] == [["kept", "tuned"]]
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=False, fp32_precision=None):
        assert trained_with(tmp_path, "kept", 6)["chosen"] == [["kept", "tuned"]]
    assert trained_with(tmp_path, "pytorch", 6)["chosen"] == STORED


def test_a_form_that_is_wrong_now_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_with(tmp_path, "half kept", 6)
    by_operators = batch_norm_calls._by_operators

    def wrong(given: Any, form: Any, adopts: bool = False) -> Any:
        results = by_operators(given, form, adopts)
        return results | {"output": results["output"] * (1.01 if form == "half kept" else 1)}

    monkeypatch.setattr(batch_norm_calls, "_by_operators", wrong)
    assert trained_with(tmp_path, "two passes", 6)["chosen"] == [["two passes", "tuned"]]
    monkeypatch.undo()
    assert trained_with(tmp_path, "pytorch", 6)["chosen"] == [["two passes", "store"]]


@pytest.mark.parametrize(
    "tree",
    [
        "half kept",
        {"chosen": "the best"},
        {"chosen": "kept", "times_ms": {"kept": "fast"}},
        {"chosen": "kept", "times_ms": [1]},
        {"chosen": "kept", "unknown": 1},
        {},
    ],
    ids=str,
)
def test_an_entry_that_is_no_choice_is_replaced(tree: Any, tmp_path: Path) -> None:
    trained_with(tmp_path, "half kept", 6)
    path = file_in(tmp_path)
    name = json.loads(path.read_text().splitlines()[1])["name"]
    verdicts.keep(None, name, tree)
    assert trained_with(tmp_path, "half kept", 6) == {"chosen": TUNED, "timed": 1}
    assert trained_with(tmp_path, "pytorch", 6) == {"chosen": STORED, "timed": 0}


def test_what_lacks_memory_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(batch_norm_calls, "_by_own_path", no_memory)
    trained_with(tmp_path, "half kept", 6)
    monkeypatch.undo()
    assert trained_with(tmp_path, "half kept", 6) == {"chosen": TUNED, "timed": 1}
