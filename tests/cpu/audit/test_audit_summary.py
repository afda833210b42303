"""Audit: regrets, ties, flips, coverage, PyTorch's rows; and the record's file."""

from __future__ import annotations

import functools
import json
import math
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudnn_autotune.audit import record_file, recordings, report
from cudnn_autotune.audit.judged_turns import of_rounds
from cudnn_autotune.audit.model import (
    BURST,
    BURST_COLD,
    BURST_HOT,
    STEADY,
    SUSTAINED,
    Oracle,
    Pick,
    PytorchRow,
    Ratio,
    Record,
    Truth,
)
from cudnn_autotune.audit.summary import (
    regret,
    summarize,
    truth_of,
)

ERRORS = {"b": 0.004, "c": 0.004, "d": 0.004}
# a is the best; b is tied with it, c is 3 % slower, d twice as slow.
TIMES = {"a": 1.0, "b": 1.002, "c": 1.03, "d": 2.0}


def oracle(**changes: Any) -> Oracle:
    truths = {BURST_COLD: Truth(TIMES, ERRORS), BURST_HOT: Truth(TIMES, ERRORS)}
    return Oracle(**{"truths": truths, "candidates": 4, **changes})


def record(**picked: list[list[str]]) -> Record:
    """``mode=[[texts of run 1 by case], [of run 2], ...]``"""
    cases = max(len(run) for runs in picked.values() for run in runs)
    ids = [f"case{i}" for i in range(cases)]
    picks = {
        mode: {
            str(number): {
                case: Pick(text=text, tuning_ms=10.0 * number)
                for case, text in zip(ids, run, strict=False)
            }
            for number, run in enumerate(runs, start=1)
        }
        for mode, runs in picked.items()
    }
    return Record(
        "gpu",
        settings={"reference": "auto"},
        environment={"gpu": "none"},
        cases={case: {"layer": case} for case in ids},
        oracle={case: oracle() for case in ids},
        picks=picks,
    )


def test_regret_is_time_over_best_and_ties_are_none() -> None:
    truth = Truth(TIMES, ERRORS)
    assert regret(truth, "a") == 1.0
    assert regret(truth, "b") == 1.0, "0.2 % is below the oracle's 0.4 %"
    assert regret(truth, "c") == pytest.approx(1.03)
    assert regret(truth, "unknown") is None


def test_burst_is_the_mean_of_cold_and_hot_and_steady_prefers_sustained() -> None:
    truths = {BURST_COLD: Truth({"a": 1.0, "b": 4.0}), BURST_HOT: Truth({"a": 4.0, "b": 1.0})}
    both = truth_of(Oracle(truths), BURST)
    assert both.times_ms == {"a": 2.0, "b": 2.0}
    assert truth_of(Oracle(truths), STEADY) == both
    alone = Truth({"a": 7.0})
    assert truth_of(Oracle({**truths, SUSTAINED: alone}), STEADY) is alone
    assert truth_of(Oracle({BURST_COLD: Truth(TIMES)}), BURST) is None


def test_summary() -> None:
    result = summarize(record(auto=[["a", "c"], ["a", "d"]]))["auto"]
    assert result.runs == 2
    assert result.cases == 2
    assert result.picked == {"a": 2, "c": 1, "d": 1}
    assert result.regret.mean == pytest.approx((1.03 * 2.0) ** 0.25)
    assert result.regret.worst == pytest.approx(2.0)
    assert result.regret.within_1_percent == 0.5
    assert result.regret.picks == 4
    assert result.tuning.median_ms == 15.0
    assert result.tuning.total_ms == 30.0, "the median of the runs' totals, 20 and 40"
    assert result.coverage is None


@pytest.mark.parametrize(
    ("runs", "cases", "pairs"),
    [
        ([["a"], ["a"]], 0, 0.0),
        ([["a"], ["b"]], 0, 0.0),  # within 1 %
        ([["a"], ["c"]], 1, 1.0),
        ([["c"], ["a"], ["a"]], 1, 2 / 3),
        ([["a", "a"], ["d", "a"]], 1, 0.5),
    ],
)
def test_flips_beyond_ties(runs: list[list[str]], cases: int, pairs: float) -> None:
    flips = summarize(record(auto=runs))["auto"].flips
    assert (flips.cases, flips.of) == (cases, len(runs[0]))
    assert flips.pairs == pytest.approx(pairs)


def test_a_gap_below_the_oracles_error_is_no_flip() -> None:
    rough = record(auto=[["a"], ["c"]])
    truth = Truth(TIMES, {"c": 0.05})
    rough.oracle["case0"] = oracle(truths={BURST_COLD: truth, BURST_HOT: truth})
    flips = summarize(rough)["auto"].flips
    # The error of the mean of two independent truths is 0.05 / sqrt(2), more than 3 %.
    assert flips.cases == 0


def test_coverage_is_of_the_truth_that_the_bound_speaks_of() -> None:
    found = record(auto=[["c", "c", "c", "d"]])
    runs = found.picks["auto"]["1"]
    bounds = [0.02, 0.028, 0.05, None]  # true: 0.03, with an error of 0.004 / sqrt(2)
    for case, bound in zip(list(runs), bounds, strict=True):
        runs[case] = Pick(text=runs[case].text, regret_bound=bound)
    coverage = summarize(found)["auto"].coverage
    assert coverage.of == 3
    assert coverage.share == pytest.approx(2 / 3)
    runs["case0"] = Pick(text="c", regret_bound=0.02, bound_truth=SUSTAINED)
    coverage = summarize(found)["auto"].coverage
    assert coverage.of == 2, "no sustained truth: nothing can be said"


def row(cold: float, hot: float, reference: str = "c", error: float = 0.0) -> PytorchRow:
    ratios = {
        name: Ratio(ratio, ratio, ratio, error)
        for name, ratio in ((BURST_COLD, cold), (BURST_HOT, hot))
    }
    return PytorchRow(reference, ratios, tuning_ms=100.0)


def test_pytorch_against_ours() -> None:
    found = record(auto=[["a", "a", "a"]])
    ratios = (1.5, 0.97, 0.995)
    found.pytorch = {
        "pytorch_off": {f"case{i}": row(r, r, "a") for i, r in enumerate(ratios)},
    }
    result = summarize(found)["pytorch_off"]
    assert result.regret.worst == pytest.approx(1.5)
    direct = result.against[BURST]
    assert direct.mean == pytest.approx(math.prod(ratios) ** (1 / 3))
    assert direct.slower == ("case1",), "ours is more than 1 % slower in one case"
    shown = {table.title: table for table in report.tables(found)}
    assert "PyTorch's time / auto's time, taking turns in one process" in shown


def test_the_figures_of_a_recording() -> None:
    """Against Tukey's median polish, written out."""
    recording = recordings.load("h200_resnet50_fprop")
    columns = zip(*recording.cold.time_ms, strict=True)
    texts = [recorded.candidate.text for recorded in recording.candidates]
    times = {
        text: [t for t in column if t is not None]
        for text, column in zip(texts, columns, strict=True)
        if None not in column
    }
    assert len(times) > 30
    residual = np.log([times[text] for text in times])
    level, drift = np.zeros(len(times)), np.zeros(residual.shape[1])
    for _ in range(20):
        for axis, effect in ((1, level), (0, drift)):
            centre = np.median(residual, axis=axis)
            residual -= np.expand_dims(centre, axis)
            effect += centre
    expected = dict(zip(times, np.exp(level + np.median(drift)), strict=True))

    truth = of_rounds(times)
    assert truth.best == min(expected, key=expected.__getitem__)
    assert truth.times_ms == pytest.approx(expected, rel=1e-3)
    ratios = np.divide(times["aten"], times[truth.best])
    spread = np.median(np.abs(ratios / np.median(ratios) - 1))
    error = 1.2533 * 1.4826 * spread / len(ratios) ** 0.5
    assert truth.errors["aten"] == pytest.approx(error, rel=1e-9)


# the file


def test_round_trip(tmp_path: Path) -> None:
    found = record(auto=[["a", "c"], ["a", "d"]])
    found.pytorch = {"pytorch_on_0": {"case0": row(1.1, 1.2), "case1": PytorchRow(error="no")}}
    found.picks["auto"]["1"]["case1"] = Pick(
        text="c",
        rule="fastest",
        rejected={"x": 0.5, "y": None},
        regret_bound=0.01,
        remarks=("a remark",),
    )
    path = tmp_path / "folder" / "record.json"
    record_file.save(found, path)
    assert record_file.load(path) == found
    assert not list(path.parent.glob("*.part"))
    assert json.loads(path.read_text())["modes"]["auto"]["picked"] == {"a": 2}


def tree() -> dict[str, Any]:
    found = json.loads(json.dumps(record_file.to_json(record(auto=[["a"]]))))
    assert isinstance(found, dict)
    return found


PICK = ["picks", "auto", "1", "case0"]
TRUTH = ["oracle", "case0", "truths", BURST_COLD]
OF_A = [*TRUTH, "times_ms", "a"]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (["format"], "something else", "not a record"),
        (["version"], 99, "version: this package reads 1, the record has 99"),
        (["kind"], None, "record.kind: is missing"),
        ([*PICK, "colour"], "blue", "record.picks.auto.1.case0.colour: is not a known field"),
        ([*PICK, "tuning_ms"], "fast", "picks.auto.1.case0.tuning_ms: must be a number from 0"),
        (OF_A, "null", "times_ms.a: must be a number from 0 to 1e+15, got None"),
        (["oracle"], [], "record.oracle: must be an object"),
        (OF_A, -1.0, "times_ms.a: must be a number from 0 to 1e+15, got -1.0"),
        (OF_A, 0.0, "truths.burst cold: times_ms.a must be above 0, got 0.0"),
        (TRUTH, {"times_ms": {}}, "truths.burst cold: times_ms must not be empty"),
    ],
)
def test_malformed_records_are_refused(
    tmp_path: Path, place: list[str], value: Any, message: str
) -> None:
    """None: the field is missing."""
    data = tree()
    *names, last = place
    holder = functools.reduce(operator.getitem, names, data)
    if value is None:
        del holder[last]
    else:
        holder[last] = None if value == "null" else value
    path = tmp_path / "record.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError) as raised:
        record_file.load(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_resuming_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    earlier = record(auto=[["a"]])
    earlier.failures = ["auto#1: ended with exit code -9"]
    record_file.save(earlier, path)
    fresh = record(auto=[["a", "a"]])
    fresh.picks, fresh.oracle = {}, {}
    resumed = record_file.resumed(path, fresh)
    assert resumed.picks == earlier.picks
    assert resumed.failures == earlier.failures
    assert list(resumed.cases) == ["case0", "case1"]
    assert [session["environment"] for session in resumed.sessions] == [earlier.environment]
    assert record_file.resumed(tmp_path / "none.json", fresh) is fresh


@pytest.mark.parametrize("changed", ["kind", "gpu", "budget", "case"])
def test_figures_that_differ_are_not_mixed(tmp_path: Path, changed: str) -> None:
    path = tmp_path / "record.json"
    record_file.save(record(auto=[["a"]]), path)
    fresh = record(auto=[["a"]])
    if changed == "kind":
        fresh.kind = "replay"
    elif changed == "gpu":
        fresh.environment = {"gpu": "another"}
    elif changed == "budget":
        fresh.settings["budget_ms"] = 5.0
    else:
        fresh.cases["case0"] = {"layer": "another"}
    with pytest.raises(ValueError, match=r"record\.json.*(another kind|differ)"):
        record_file.resumed(path, fresh)
