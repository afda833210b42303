"""board_power.py: a dry run on the simulated GPU, and its analysis."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_scripts import (
    BENCHMARKS,
    assert_default_cases,
    assert_help,
    assert_plotted,
    assert_rendered,
    record,
    run,
    whole_record,
)
from simulation import engine, timer_of

from cudnn_autotune.timers.board_power import EXPONENT

SCRIPT = "board_power"
DRY_RUNS = {SCRIPT: "--cases vgg16_conv4_2/dgrad/float16,sd_unet_down_1280/wgrad/float16"}
CASES = ["vgg16_conv4_2/dgrad/float16/nhwc", "sd_unet_down_1280/wgrad/float16/nhwc"]
LEADERS, BLOCKS, LONG_BLOCKS = 4, 6, 2

LIMIT_W = 700.0
HELD_W = 0.99 * LIMIT_W  # boards hold themselves a percent below their limit
MAX_CLOCK_MHZ = 1980.0
CALLS, CALL_MS = 10, 0.5  # batches of 5 ms


def test_help() -> None:
    assert_help(SCRIPT)


def test_dry_run_leaves_a_whole_record(dry_runs: Path) -> None:
    whole_record(dry_runs, SCRIPT)
    assert_plotted(dry_runs, SCRIPT)


def test_every_leader_ran_alone_in_mirrored_turns(dry_runs: Path) -> None:
    results = record(dry_runs, SCRIPT)["results"]
    assert list(results["cases"]) == CASES
    assert results["failures"] == []
    for entry in results["cases"].values():
        assert entry["failed"] == []
        assert entry["board"] == {"power_limit_w": LIMIT_W, "max_clock_mhz": MAX_CLOCK_MHZ}
        for kind, rounds, least_ms in (("short", BLOCKS, 140), ("long", LONG_BLOCKS, 650)):
            blocks = [block for block in entry["blocks"] if block["kind"] == kind]
            texts = [block["text"] for block in blocks]
            assert len(texts) == rounds * LEADERS
            assert len(set(texts)) == LEADERS
            for at in range(0, len(texts), 2 * LEADERS):
                pair = texts[at : at + 2 * LEADERS]
                assert pair == pair[::-1], "a round goes one way and the next one back"
            for block in blocks:
                columns = [block[name] for name in ("times_ms", "clocks_mhz", "powers_w")]
                assert len({len(column) for column in columns}) == 1
                assert block["calls"] * sum(block["times_ms"]) > least_ms
        assert {block["kind"] for block in entry["blocks"][: BLOCKS * LEADERS]} == {"short"}
        assert any(power for block in entry["blocks"] for power in block["powers_w"])


def test_the_dry_runs_blocks_agree_at_the_limit(dry_runs: Path, modules: None) -> None:
    """The simulated board hunts by 2 %, and its power goes with the clock as that of its engines:
    a static part, and one that goes with its square."""
    from power_limit.analysis import analysis

    found = analysis(record(dry_runs, SCRIPT))
    assert len(found.alone) == len(CASES) * LEADERS
    measured, at_limit = found.median("spread"), found.median("spread_at_limit")
    assert measured is not None
    assert at_limit is not None
    assert at_limit < 0.6 * measured
    assert found.median("ratio") == pytest.approx(1, abs=0.02)
    assert found.fit is not None
    assert found.fit.exponent == pytest.approx(2 * (LIMIT_W - 150) / LIMIT_W, abs=0.15)
    assert found.fit.correlation > 0.9


def test_records_are_rendered(dry_runs: Path, tmp_path: Path) -> None:
    assert_rendered(dry_runs, DRY_RUNS, tmp_path)


def test_a_record_cut_short_still_has_its_tables(
    dry_runs: Path, modules: None, tmp_path: Path
) -> None:
    from power_limit import report

    data = record(dry_runs, SCRIPT)
    first, second = data["results"]["cases"].values()
    del first["blocks"][5:]
    del second["board"]
    second["blocks"] = []
    second["failed"].append({"step": "blocks", "error": "RuntimeError: no candidate runs"})
    shown = "\n".join(table.markdown() for table in report.tables(data))
    assert "no candidate runs" in shown
    report.plot(data, tmp_path / "cut.png")
    assert (tmp_path / "cut.png").exists()
    data["results"]["cases"] = {}
    assert "too few readings" in report.tables(data)[0].markdown()
    report.plot(data, tmp_path / "empty.png")


def test_a_time_limit_cuts_off_layers(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    done = run(SCRIPT, "--device", "cpu", "--time-limit", "0", "--json", path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    data = json.loads(path.read_text())
    assert data["complete"] is False
    assert data["results"]["failures"] == ["time limit: 3 layers not measured"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--cases", "no such layer"), "--cases"),
        (("--cases", ","), "--cases"),
        (("--layers", "no-such-file.json"), "--layers"),
        (("--leaders", "0"), "--leaders"),
        (("--blocks", "1"), "--blocks"),
        (("--block-s", "0"), "--block-s"),
        (("--long-blocks", "0"), "--long-blocks"),
        (("--long-s", "nan"), "--long-s"),
    ],
)
def test_bad_options_are_named(arguments: tuple[str, ...], named: str) -> None:
    done = run(SCRIPT, *arguments)
    assert done.returncode != 0
    assert named in done.stderr
    assert "Traceback" not in done.stderr


# ---- parts ----------------------------------------------------------------------------------


def test_the_default_cases_are_there(modules: None) -> None:
    assert_default_cases(SCRIPT)


def block(
    factor: float,
    text: str = "eng1",
    *,
    kind: str = "short",
    exponent: float = EXPONENT,
    level: float = 1.0,
    is_read: bool = True,
) -> dict[str, Any]:
    """Of 20 batches: the clock is ``factor`` times 1600 MHz, and with it go the time and, as
    ``clock ** exponent``, the power, which is the limit's times ``level`` at 1600 MHz. It is read
    once in each half, in batches whose clocks are some MHz off its mean."""
    clocks = [1600.0 * factor] * 20
    powers: list[float | None] = [None] * 20
    for at, sign in ((8, 1), (15, -1)):
        clock = 1600.0 * factor * (1 + 0.001 * sign)
        clocks[at : at + 3] = clock - 3, clock, clock + 3
        if is_read:
            powers[at : at + 3] = [HELD_W * level * (clock / 1600) ** exponent] * 3
    times = [CALL_MS * 1600 / clock for clock in clocks]
    return {
        "text": text,
        "kind": kind,
        "calls": CALLS,
        "times_ms": times,
        "clocks_mhz": clocks,
        "powers_w": powers,
    }


def record_of(*rows: list[dict[str, Any]], limit_w: float | None = LIMIT_W) -> dict[str, Any]:
    board = {"power_limit_w": limit_w, "max_clock_mhz": MAX_CLOCK_MHZ}
    return {
        "results": {
            "cases": {
                f"layer{index}/dgrad/float16/nhwc": {"board": board, "blocks": row, "failed": []}
                for index, row in enumerate(rows)
            }
        }
    }


def test_blocks_at_unlike_power_agree_at_the_limit(modules: None) -> None:
    """Calls whose time goes as the power to the -1/EXPONENT: nothing is left of the spread, and
    the exponent is the one that went in."""
    from power_limit.analysis import analysis

    factors = (0.97, 0.99, 1.0, 1.02, 1.03)
    row = [block(factor) for factor in factors]
    row += [block(1.01, is_read=False), block(1.0, kind="long")]
    found = analysis(record_of(row))
    (one,) = found.alone
    assert one.long_ms == pytest.approx(CALL_MS, rel=1e-4)
    assert one.clock_mhz == pytest.approx(1600 * statistics.fmean((*factors, 1.01, 1)), rel=1e-3)
    expected = statistics.stdev(math.log(factor) for factor in (*factors, 1.01))
    assert one.spread == pytest.approx(expected, rel=1e-4)
    assert one.at_limit_ms[:5] == pytest.approx([CALL_MS] * 5, rel=1e-5)
    assert one.at_limit_ms[5] is None
    assert one.spread_at_limit == pytest.approx(0, abs=1e-5)
    assert one.ratio == pytest.approx(1, abs=1e-4)
    assert found.fit is not None
    assert found.fit.exponent == pytest.approx(EXPONENT, rel=1e-4)
    assert found.fit.correlation == pytest.approx(1)
    assert found.fit.readings == 12
    assert found.median("spread") == one.spread


@pytest.mark.parametrize("exponent", [1.2, 2.4])
def test_the_exponent_is_that_within_candidates(modules: None, exponent: float) -> None:
    """Candidates at levels of their own, which a fit of all readings in one would take for a
    slope of the clock."""
    from power_limit.analysis import analysis

    first = [block(f, "eng1", exponent=exponent, level=1.04) for f in (0.97, 0.98, 0.99)]
    second = [block(f, "eng2", exponent=exponent, level=0.97) for f in (1.01, 1.02)]
    other = [block(f, "eng1", exponent=exponent, level=0.98) for f in (0.995, 1.01)]
    far = [block(0.90, "eng1", exponent=exponent, level=0.8)]  # not held by the limit
    found = analysis(record_of(first + second, other + far))
    assert [one.text for one in found.alone] == ["eng2", "eng1", "eng1"]
    assert found.fit is not None
    assert found.fit.exponent == pytest.approx(exponent, rel=1e-3)
    assert found.fit.readings == 14
    assert found.alone[2].at_limit_ms[2] is None, "it is not near the limit"
    assert [one.far for one in found.alone[:2]] == [(), ()]


def test_blocks_far_from_the_limit_are_told_apart(modules: None) -> None:
    """As they ended, and brought to it, over the long blocks."""
    from power_limit import report
    from power_limit.analysis import analysis

    row = [block(1.0), block(0.91, level=1.02), block(0.91, level=0.5), block(1.0, kind="long")]
    data = record_of(row)
    (one,) = analysis(data).alone
    assert one.at_limit_ms == (pytest.approx(CALL_MS, rel=1e-3), None, None)
    ((measured, brought),) = one.far_ratios
    assert measured == pytest.approx(1 / 0.91, rel=1e-3)
    assert brought == pytest.approx(1.02 ** (1 / EXPONENT), rel=1e-3)
    about = {"arguments": {"block_s": 0.16, "long_s": 0.7}, "environment": {"device": "cuda"}}
    _, table = report.tables(data | about)
    assert [tuple(line[2:]) for line in table.rows] == [("+9.9 %", "+1.1 %"), ("9.48 %", "1.07 %")]
    near = record_of([block(1.0), block(1.0, kind="long")])
    assert len(report.tables(near | about)) == 1


def test_readings_that_scatter_correlate_less(modules: None) -> None:
    from power_limit.analysis import analysis

    rng = random.Random(0)
    row = [
        block(factor, level=math.exp(rng.gauss(0, 0.01)))
        for factor in [0.97 + 0.06 * i / 99 for i in range(100)]
    ]
    found = analysis(record_of(row))
    assert found.fit is not None
    signal = EXPONENT * statistics.stdev(math.log(0.97 + 0.06 * i / 99) for i in range(100))
    assert found.fit.exponent == pytest.approx(EXPONENT, abs=0.2)
    expected = signal / math.hypot(signal, 0.01)
    assert found.fit.correlation == pytest.approx(expected, abs=0.02)
    assert found.alone[0].spread_at_limit == pytest.approx(0.01 / EXPONENT, rel=0.2)


def test_what_ran_before_is_not_counted(modules: None) -> None:
    """A reading in the first 30 ms brings nothing to the limit."""
    from power_limit.analysis import analysis

    early = block(1.0, is_read=False)
    early["powers_w"][1:4] = [HELD_W] * 3
    (one,) = analysis(record_of([early, early])).alone
    assert one.at_limit_ms == (None, None)
    assert one.spread == 0
    assert one.spread_at_limit is None
    assert one.ratio is None


def test_a_board_that_tells_no_limit_has_no_times_at_it(modules: None) -> None:
    from power_limit.analysis import analysis

    found = analysis(record_of([block(0.99), block(1.01), block(1, kind="long")], limit_w=None))
    assert found.fit is None
    assert found.alone[0].brought_ms == ()
    assert found.alone[0].spread is not None


REQUEST = {
    "device": "cpu",
    "leaders": 2,
    "blocks": 2,
    "block_s": 0.1,
    "long_blocks": 1,
    "long_s": 0.2,
}


def test_a_layer_that_fails_is_recorded(modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from common.sources import SimulatedSource
    from power_limit import measure

    class Broken(SimulatedSource):
        def open(self) -> tuple[Any, Any]:
            timer = timer_of(engine("eng1:a", 1.0, error="CUDNN_STATUS_EXECUTION_FAILED"))
            return timer, timer.candidates

    monkeypatch.setattr(measure, "source_of", lambda request: Broken())
    (told,) = measure.measure(REQUEST)
    assert told["part"] == "failed"
    assert "no candidate runs" in told["error"]


def test_a_candidate_that_fails_alone_is_told_and_left_out(
    modules: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from common.sources import SimulatedSource
    from power_limit import measure

    class Failing(SimulatedSource):
        def open(self) -> tuple[Any, Any]:
            timer = timer_of(engine("eng1:a", 1.0), engine("eng2:a", 1.05, fails_at_ms=450.0))
            return timer, timer.candidates

    monkeypatch.setattr(measure, "source_of", lambda request: Failing())
    told = list(measure.measure(REQUEST))
    assert [part["part"] for part in told].count("failed") == 1
    (failed,) = [part for part in told if part["part"] == "failed"]
    assert failed["step"] == "eng2:a"
    assert failed["error"] == "CUDNN_STATUS_EXECUTION_FAILED"
    assert [part["text"] for part in told if part["part"] == "block"].count("eng1:a") == 3
    assert told[-1] == {"part": "finished"}


def test_the_constants_are_those_of_the_record(modules: None) -> None:
    """Of an H200: what ``sampling.board_power`` and ``sampling.sustained_run`` rest on."""
    from power_limit.analysis import analysis

    from cudnn_autotune.sampling.sustained_run import _READING_SIGMA, FAR_READING_SIGMA, RUN_SIGMA

    path = BENCHMARKS / "results" / "h200" / f"{SCRIPT}.json"
    found = analysis(json.loads(path.read_text()))
    assert found.agreeing == pytest.approx(EXPONENT, abs=0.15)
    assert found.fit is not None
    assert found.fit.correlation > 0.9
    spread, at_limit = found.median("spread"), found.median("spread_at_limit")
    assert spread is not None
    assert at_limit is not None
    assert spread > RUN_SIGMA
    assert at_limit < _READING_SIGMA
    assert at_limit < spread / 4
    far = [pair for one in found.alone for pair in one.far_ratios]
    assert len(far) >= 5
    measured, brought = (math.sqrt(np.mean(np.log(some) ** 2)) for some in zip(*far, strict=True))
    assert measured > 4 * RUN_SIGMA
    assert brought < FAR_READING_SIGMA


def test_times_at_the_limit_are_as_far_from_long_blocks_as_is_said(modules: None) -> None:
    """From one candidate to another of a layer, however many blocks there are."""
    from power_limit.analysis import analysis

    from cudnn_autotune.sampling.steady_times import _POWER_ERROR

    path = BENCHMARKS / "results" / "h200" / f"{SCRIPT}.json"
    off: dict[str, list[float]] = {}
    for one in analysis(json.loads(path.read_text())).alone:
        assert one.ratio is not None
        off.setdefault(one.case, []).append(math.log(one.ratio))
    variances = [statistics.variance(values) for values in off.values()]
    assert math.sqrt(statistics.fmean(variances)) == pytest.approx(_POWER_ERROR, rel=0.3)
