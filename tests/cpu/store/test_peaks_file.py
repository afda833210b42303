"""The file of a GPU's measured peaks: what is believed of it, and that it survives its writers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes.subprocesses import evaluate_forked
from support.store.decisions import H200, L4, decision, timed

import cudnn_autotune as ca
from cudnn_autotune.cli import stores
from cudnn_autotune.engines import roofline
from cudnn_autotune.engines.roofline import ARITHMETICS, Peaks
from cudnn_autotune.store import peaks_file
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.tuning.choice import Choice

PEAKS = Peaks(4e9, {"float16": 8e11, "float32": 5e10, "float64": 6e10}, 0.002)


def peaks_in(place: Path, environment: Environment = H200) -> Peaks | None:
    found = peaks_file.find(place, environment)
    return found.peaks if found else None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    peaks_file.keep(tmp_path, H200, PEAKS)
    return peaks_file.path_of(tmp_path, H200)


def test_what_is_kept_is_found(file: Path) -> None:
    assert peaks_in(file.parent) == PEAKS
    assert file.name.startswith("nvidia-h200_132sm_sm90_")
    measured = peaks_file.find(file.parent, H200)
    assert measured.provenance.cudnn_autotune == ca.environment()["cudnn_autotune"]
    assert peaks_in(file.parent / "other") is None


def test_a_store_of_one_file_has_them_beside_it(tmp_path: Path) -> None:
    peaks_file.keep(tmp_path / "new" / "tuned.json", H200, PEAKS)
    assert peaks_in(tmp_path / "new") == peaks_in(tmp_path / "new" / "others.json") == PEAKS


def test_they_are_no_file_of_the_store(file: Path) -> None:
    store = ca.Store(file.parent, H200)
    store.add([decision()])
    assert len(ca.Store(file.parent, H200)) == 1
    assert stores.files_of(file.parent) == [store.path]


@pytest.mark.parametrize(
    "other",
    [
        L4,
        replace(H200, gpu="NVIDIA H200 NVL"),
        replace(H200, multiprocessors=114),
        replace(H200, mig_profile="1g.18gb"),
    ],
)
def test_another_gpu_has_others(file: Path, other: Environment) -> None:
    assert peaks_in(file.parent, other) is None
    # Nor is a file believed that was renamed.
    os.replace(file, peaks_file.path_of(file.parent, other))
    assert peaks_in(file.parent, other) is None
    peaks_file.keep(file.parent, other, PEAKS)
    assert peaks_in(file.parent, other) == PEAKS
    assert peaks_in(file.parent) is None


def test_of_two_measurements_the_best_stay(file: Path) -> None:
    disturbed = Peaks(1e9, dict.fromkeys(ARITHMETICS, 1e10), 0.02)
    peaks_file.keep(file.parent, H200, disturbed)
    rates = {**disturbed.flops_per_ms, **PEAKS.flops_per_ms}
    assert peaks_in(file.parent) == replace(PEAKS, flops_per_ms=rates)
    better = replace(PEAKS, bytes_per_ms=5e9, launch_ms=0.001)
    peaks_file.keep(file.parent, H200, better)
    assert peaks_in(file.parent) == replace(better, flops_per_ms=rates)


UNTRUE: dict[str, Callable[[str], str]] = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "a list": lambda text: f"[{text}]",
    "newer": lambda text: text.replace("version 1", "version 2"),
    "negative": lambda text: text.replace("4000000000.0", "-4000000000.0"),
    "zero": lambda text: text.replace("0.002", "0"),
    "not a number": lambda text: text.replace("0.002", "NaN"),
    "a text": lambda text: text.replace("0.002", '"0.002"'),
    "an unknown type": lambda text: text.replace("float16", "int8"),
    "without a field": lambda text: text.replace('"launch_ms"', '"launch_us"'),
    "huge": lambda text: text + " " * (1 << 20),
}


@pytest.mark.parametrize("change", UNTRUE.values(), ids=UNTRUE)
def test_what_cannot_be_true_is_not_believed(file: Path, change: Callable[[str], str]) -> None:
    text = file.read_text()
    assert change(text) != text
    file.write_text(change(text))
    assert peaks_in(file.parent) is None
    peaks_file.keep(file.parent, H200, PEAKS)
    assert peaks_in(file.parent) == PEAKS


@pytest.mark.parametrize("text", ['{"format": "notes"}', "[" * 8000], ids=["foreign", "deep"])
def test_what_does_not_say_that_it_holds_peaks_stays(file: Path, text: str) -> None:
    file.write_text(text)
    assert peaks_in(file.parent) is None
    with pytest.raises(OSError, match="does not hold peaks"):
        peaks_file.keep(file.parent, H200, PEAKS)
    assert file.read_text() == text


# It asks for the GPU's name, which a process that was forked from this one might not.
WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, {here!r})
from support.store.decisions import H200
from test_peaks_file import PEAKS
from cudnn_autotune.store import peaks_file
for number in range({first}, {first} + 25):
    more = replace(PEAKS, bytes_per_ms=4e9 + 1e6 * number)
    peaks_file.keep(Path({folder!r}), H200, more)
print("written")
"""


def test_processes_that_write_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    peaks_file.keep(tmp_path, H200, PEAKS)
    codes = [
        WRITER.format(here=str(Path(__file__).parent), folder=str(tmp_path), first=n)
        for n in range(0, 100, 25)
    ]
    seen = 0
    with ThreadPoolExecutor(4) as threads:
        writers = [threads.submit(evaluate_forked, code) for code in codes]
        while not all(one.done() for one in writers):
            assert 4e9 <= peaks_in(tmp_path).bytes_per_ms < 4.1e9
            seen += 1
            time.sleep(0.001)
    assert [one.result() for one in writers] == ["written"] * 4
    assert seen > 4
    assert [path.suffix for path in tmp_path.iterdir()] == [".peaks"]


def choice() -> Choice:
    return Choice(decision(), 0)


def test_a_choice_tells_its_limit(tmp_path: Path) -> None:
    made = choice()
    ca.set_store(tmp_path, mode="read_write")
    assert made.limit is made.times_limit is None
    here = ca.get_store().environment
    peaks_file.keep(tmp_path, here, PEAKS)
    assert made.limit == roofline.limit(made.problem, PEAKS)
    assert made.times_limit == pytest.approx(1.0 / made.limit.limit_ms)
    untimed = (timed("first", None),)
    by_heuristics = replace(made.decision, selection=replace(made.selection, ranking=untimed))
    assert replace(made, decision=by_heuristics).times_limit is None
    for mode, is_told in (("retune", True), ("read", True), ("off", False)):
        ca.set_store(mode=mode)
        assert (made.limit is not None) is is_told
