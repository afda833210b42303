"""benchmarks/online.py: a dry run, and how its figures are made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_scripts import BENCHMARKS
from subprocesses import python


def test_dry_run_leaves_a_whole_record(tmp_path: Path) -> None:
    path, picture = tmp_path / "online.json", tmp_path / "online.png"
    cases = "resnet50_layer3_3x3/fprop,convnext_t_down3/dgrad"
    done = python(
        str(BENCHMARKS / "online.py"),
        *("--device", "cpu", "--processes", "1", "--trials", "2", "--calls", "3"),
        *("--cases", cases, "--first-cases", "yolov8l_c2f4_3x3/fprop"),
        *("--time-limit", "120", "--json", str(path), "--plot", str(picture)),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert record["complete"]
    assert record["environment"]["device"] == "cpu"
    results = record["results"]
    assert results["failures"] == []
    (first,) = results["first_call"]["compared"].values()
    assert first["processes"] == 1
    assert first["ratio"] > 0
    overhead = results["overhead"]["compared"]
    assert overhead["undecided"]["difference_us"]["n"] == 2 * 8
    assert overhead["preparing"]["online_us"]["median"] > 0
    assert len(results["convergence"]) == 2
    for entry in results["convergence"]:
        assert entry["calls"] > 0
        assert entry["regret"] >= 0
        assert {entry["picked"], entry["auto"], entry["best"]} <= set(entry["times_ms"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    for text in ("First call", "Host time", "picked"):
        assert text in done.stdout


def test_what_ran_before_a_call(tmp_path: Path) -> None:
    path = tmp_path / "online.json"
    done = python(
        str(BENCHMARKS / "online.py"),
        *("--device", "cpu", "--parts", "turns", "--turns-cases", "resnet50_layer4_3x3/wgrad"),
        *("--time-limit", "120", "--json", str(path)),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    assert record["complete"]
    (entry,) = record["results"]["turns"]
    arms = {"calls", "idle", "queued", "second", "batch"}
    assert set(entry["times_ms"]) == set(entry["regret"]) == arms
    assert {len(of_text) for of_text in entry["times_ms"].values()} == {
        len(entry["times_ms"]["batch"])
    }
    assert entry["regret"]["batch"] == 0
    assert "One call of each finalist" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--parts", "nonsense"), "--parts"),
        (("--cases", "nonsense"), "--cases"),
        (("--first-cases", ","), "--first-cases"),
        (("--turns-cases", "nonsense"), "--turns-cases"),
        (("--processes", "0"), "--processes"),
    ],
)
def test_bad_options_are_named(arguments: tuple[str, ...], named: str) -> None:
    done = python(str(BENCHMARKS / "online.py"), "--device", "cpu", *arguments)
    assert done.returncode != 0
    assert named in done.stderr


def test_regret_of_an_arm_is_that_of_its_fastest_in_batches(modules: None) -> None:
    from online_mode.turns import compared

    found = compared(
        {
            "calls": {"a": [1.0, 1.1, 1.2], "b": [1.3, 1.3, 9.0], "c": []},
            "batch": {"a": [1.02], "b": [1.0], "c": [1.5]},
        }
    )
    assert found["regret"] == {"calls": pytest.approx(0.02), "batch": 0.0}
    assert found["times_ms"]["calls"]["a"]["median"] == 1.1
    assert "c" not in found["times_ms"]["calls"]


def test_differences_are_paired_block_by_block(modules: None) -> None:
    from online_mode.overhead import compared

    found = compared(
        [
            {
                "quiet_us": [10.0, 10.0, 12.0],
                "tuner_cpu_us": 300.0,
                "turns": 75,
                "preparing": {"heuristic": [], "online": []},
                "undecided": {"heuristic": [10.0, 20.0, 30.0], "online": [12.0, 23.0, 32.0]},
            }
        ]
    )
    assert "preparing" not in found
    assert found["undecided"]["difference_us"]["median"] == 2.0
    assert found["undecided"]["difference_to_quiet_us"]["median"] == 13.0
    assert found["undecided"]["difference_us"]["mean"] == pytest.approx(7 / 3, rel=1e-4)
    assert found["tuner_cpu_us_a_turn"] == 4.0


def test_first_calls_are_compared_where_both_modes_were_measured(modules: None) -> None:
    from online_mode.first_call import compared

    def entry(case: str, mode: str, first_ms: float) -> dict[str, object]:
        return {"case": case, "mode": mode, "first_ms": first_ms, "second_ms": 1.0}

    found = compared(
        [
            *(entry("a", "heuristic", ms) for ms in (10.0, 11.0, 50.0)),
            *(entry("a", "online", ms) for ms in (12.0, 12.1)),
            entry("b", "online", 1.0),
        ]
    )
    assert list(found) == ["a"]
    assert found["a"]["ratio"] == pytest.approx(12.05 / 11, rel=1e-4)
    assert found["a"]["processes"] == 2


def test_regret_is_against_the_best_of_all(modules: None) -> None:
    from online_mode.convergence import judged

    found = judged("a", "b", {"a": 1.02, "b": 1.01, "c": 1.0})
    assert found["best"] == "c"
    assert found["regret"] == pytest.approx(0.02)
    assert found["auto_regret"] == pytest.approx(0.01)
    assert found["against_auto"] == pytest.approx(1.02 / 1.01 - 1, rel=1e-3)
