"""warm_start.py, neighbours.py and ranks.py: dry runs, and how their figures are made."""

from __future__ import annotations

import copy
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import (
    BENCHMARKS,
    assert_help,
    assert_plotted,
    assert_rendered,
    record,
    run,
    whole_record,
)
from torch import nn

import cudnn_autotune as ca
from cudnn_autotune.store.decision import key_of
from cudnn_autotune.store.neighbours import nearest

DRY_RUNS = {
    "warm_start": "--runs 1 --modes heuristic,auto_empty,auto_filled,pytorch_on_10",
    "neighbours": "--count 4 --budgets 20 --changes batch*2,channels*3/2 --rounds 6",
    "ranks": "--gpus 1,2 --modes race --problems 8",
}
REPORTS = {
    "warm_start": "warm_processes.report",
    "neighbours": "neighbour_picks.report",
    "ranks": "rank_tuning.report",
}
ARMS = ["heuristic", "neighbour", "race", "race+neighbours", "race@20", "race@20+neighbours"]


@pytest.mark.parametrize("script", DRY_RUNS)
def test_help(script: str) -> None:
    assert_help(script)


@pytest.mark.parametrize("script", DRY_RUNS)
def test_dry_run_leaves_a_whole_record(dry_runs: Path, script: str) -> None:
    data = whole_record(dry_runs, script)
    assert data["results"]["failures"] == []
    assert_plotted(dry_runs, script)


# ---- warm_start -----------------------------------------------------------------------------


def test_with_a_filled_store_nothing_is_timed(dry_runs: Path) -> None:
    processes = record(dry_runs, "warm_start")["results"]["processes"]
    assert Counter(p["setting"] for p in processes) == {"compiled": 4, "empty": 4}
    for process in processes:
        assert 0 < process["forward_ms"] < process["both_ms"]
        choices = process.get("choices")
        if process["mode"] == "pytorch_on_10":
            assert choices is None
            assert "store" not in process
            continue
        # Nine layers, of which some are alike; the first one's input needs no gradient.
        assert process["layers"] == 9
        assert choices["made"] == 14
        origin = "store" if process["mode"] == "auto_filled" else "tuned"
        assert choices["from"] == {origin: 14}
        assert (choices["timed_launches"] > 0) == (process["mode"] == "auto_empty")
        assert ("store" in process) == (process["mode"] != "heuristic")


def test_the_store_is_weighed(dry_runs: Path) -> None:
    for process in record(dry_runs, "warm_start")["results"]["processes"]:
        if "store" in process:
            store = process["store"]
            assert store["entries"] == store["lookups"] == store["found"] == 14
            assert store["bytes"] > 14 * 100
            assert store["open_ms"] > 0
            assert store["lookups_ms"] > 0


def test_ratios_are_those_of_medians(modules: None) -> None:
    from warm_processes.report import ratio

    def process(mode: str, ms: float) -> dict[str, object]:
        return {"setting": "empty", "mode": mode, "both_ms": ms}

    processes = [process("heuristic", ms) for ms in (100, 110, 400)]
    processes += [process("auto_filled", ms) for ms in (90, 121, 130)]
    found = {"processes": processes}
    assert ratio(found, "empty", "auto_filled", "both_ms") == pytest.approx(1.1)
    assert ratio(found, "compiled", "auto_filled", "both_ms") is None


def test_stores_are_filled_before_they_are_used(modules: None) -> None:
    from warm_processes.modes import MODES, Run, plan

    runs = list(plan(list(MODES), ["compiled", "empty"], runs=3, fills=2))
    assert len(runs) == len(set(runs)) == 2 * (3 * 5 + 2)
    assert [Run.of(one.name) for one in runs] == runs
    for setting in ("compiled", "empty"):
        modes = [one.mode for one in runs if one.setting == setting]
        assert modes.index("auto_empty") < modes.index("auto_filled")
        assert Counter(modes)["auto_empty"] == 2
        # The one that goes first changes.
        assert modes[0] == "heuristic"
        assert [o.mode for o in runs if (o.setting, o.number) == (setting, 1)][-1] == "heuristic"
    shared = {one.compiled for one in runs if one.setting == "compiled"}
    own = {one.compiled for one in runs if one.setting == "empty"}
    assert len(shared) == 1
    assert len(own) == len(runs) / 2, "each finds nothing compiled"


def test_pytorch_is_warmed_up_with_benchmark_on_first(modules: None) -> None:
    """The other way round, benchmark would have no effect on shapes that were seen."""
    from warm_processes.modes import DEFAULT, MODES, warm_up_order

    assert warm_up_order(list(DEFAULT)) == [
        "pytorch_on_10",
        "pytorch_off",
        "auto_filled",
        "heuristic",
    ]
    assert warm_up_order(list(MODES))[:3] == ["pytorch_on_0", "pytorch_on_10", "pytorch_off"]


def test_each_worker_has_its_compiled_kernels(
    modules: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from common.scratch import compiled_in, copy_compiled, find_compiled, scratch

    monkeypatch.setenv("CUDA_CACHE_PATH", "elsewhere")
    with scratch() as folder:
        find_compiled("fill")
        own = compiled_in(folder, "fill")
        assert os.environ["CUDA_CACHE_PATH"] == str(own)
        (own / "kernel").write_text("x")
        copy_compiled(folder, "fill", "race@50")
        copy_compiled(folder, "nobody", "race@50")
        find_compiled("race@50")
        assert os.environ["CUDA_CACHE_PATH"] != str(own)
        assert os.listdir(os.environ["CUDA_CACHE_PATH"]) == ["kernel"]
        find_compiled("race@100")
        assert os.listdir(os.environ["CUDA_CACHE_PATH"]) == []
    assert not folder.exists()


def test_a_converted_model_shares_its_parameters(modules: None) -> None:
    from common.converted import convert

    class Own(nn.Conv2d):
        pass

    shared = nn.Conv2d(4, 4, 3, padding="same", padding_mode="reflect")
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, bias=False),
        nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared)),
        nn.Conv2d(4, 8, 3, dilation=2, groups=2),
        Own(8, 2, 1),
    ).eval()
    x = torch.randn(2, 3, 16, 16)
    expected, parameters = model(x), dict(model.named_parameters())
    assert convert(model, "race") == 3
    kinds = Counter(type(m) for m in model.modules() if isinstance(m, nn.Conv2d))
    assert kinds == {ca.Conv2d: 3, Own: 1}
    assert all(m.sampling == "race" for m in model.modules() if isinstance(m, ca.Conv2d))
    found = dict(model.named_parameters())
    assert found.keys() == parameters.keys()
    assert all(found[name] is parameters[name] for name in found)
    assert not any(module.training for module in model.modules())
    assert torch.equal(model(x), expected)
    assert convert(model) == 0


# ---- neighbours -----------------------------------------------------------------------------


def test_every_arm_picks_for_every_layer(dry_runs: Path, modules: None) -> None:
    from neighbour_picks.judged import Judged

    results = record(dry_runs, "neighbours")["results"]
    assert results["arms"] == ARMS
    judged = Judged(results)
    assert len(judged.cases) == 4
    assert judged.compared(ARMS) == list(results["cases"])
    for case in judged.cases.values():
        assert set(case["changes"]) <= {"batch*2", "channels*3/2"}
        near = min(case["changes"].values(), key=lambda told: told["distance"])
        assert case["picks"]["neighbour"]["text"] == near["text"]
        assert case["picks"]["neighbour"]["rule"] == "chosen for a similar problem"
        for arm in ("heuristic", "neighbour"):
            assert case["picks"][arm]["launches"] == 0
        for arm in ("race", "race@20"):
            assert case["picks"][arm]["launches"] > 0
        assert case["picks"]["race@20"]["wall_ms"] < case["picks"]["race"]["wall_ms"]
    for arm in ARMS:
        assert min(judged.regrets(arm, list(judged.cases))) >= 1
    # Ten engines, up to 30 % apart: who raced to the end has the best one, or one that ties.
    assert max(judged.regrets("race", list(judged.cases))) < 1.02


def test_regret_is_over_the_best_of_all(modules: None) -> None:
    from neighbour_picks.judged import Judged, spread

    truth = {"times_ms": {"a": 1.0, "b": 1.1, "c": 1.003}, "errors": {"b": 0.01, "c": 0.01}}
    cold = {"times_ms": {"a": 2.0, "b": 2.0, "c": 2.0}, "errors": {"b": 0.0, "c": 0.0}}
    truths = {"burst hot": truth, "burst cold": cold}
    picks = {"neighbour": {"text": "b"}, "race": {"text": "c"}, "heuristic": {"text": "gone"}}
    case = {"op": "fprop", "picks": picks, "changes": {}, "oracle": {"truths": truths}}
    judged = Judged({"cases": {"one": case, "two": {"op": "dgrad", "picks": {}, "changes": {}}}})
    assert list(judged.cases) == ["one"]
    assert judged.arm("neighbour", "burst hot")["one"] == pytest.approx(1.1)
    assert judged.arm("neighbour")["one"] == pytest.approx(math.sqrt(1.1))
    assert judged.arm("race")["one"] == 1.0, "within the error"
    assert judged.arm("heuristic")["one"] is None
    assert judged.compared(["neighbour", "race"]) == ["one"]
    assert judged.compared(["neighbour", "race"], "dgrad") == []
    assert judged.compared(["neighbour", "heuristic"]) == []
    assert spread([1.0, 1.21]) == ("1.1000", "1.200", "1.210", "50 %")


def test_a_failure_is_told(dry_runs: Path, modules: None, tmp_path: Path) -> None:
    from neighbour_picks.report import plot, tables

    data = record(dry_runs, "neighbours")
    case = next(iter(data["results"]["cases"].values()))
    case["picks"]["race"] = {"error": "RuntimeError: no candidate runs"}
    case["picks"]["neighbour"]["rule"] = "first of heuristic mode A"
    shown = "\n".join(table.markdown() for table in tables(data))
    assert "race: RuntimeError: no candidate runs." in shown
    assert "1 of 4 had no neighbour's config" in shown
    assert "| heuristic, all | 3 |" in shown
    plot(data, tmp_path / "failed.png")


BASE: dict[str, Any] = {
    "op": "dgrad",
    "input_shape": (64, 96, 56, 56),
    "weight_shape": (128, 96, 3, 3),
    "padding": 1,
    "dtype": torch.float16,
    "memory_format": torch.channels_last,
}


@pytest.mark.parametrize(
    ("change", "fields", "input_shape", "weight_shape"),
    [
        ("batch*2", {}, (128, 96, 56, 56), (128, 96, 3, 3)),
        ("batch/2", {}, (32, 96, 56, 56), (128, 96, 3, 3)),
        ("size*8/7", {}, (64, 96, 64, 64), (128, 96, 3, 3)),
        ("channels*3/2", {}, (64, 144, 56, 56), (192, 144, 3, 3)),
        ("channels*3/4", {}, (64, 72, 56, 56), (96, 72, 3, 3)),
        # Colours and classes stay.
        (
            "channels*2",
            {"input_shape": (8, 3, 224, 224), "weight_shape": (64, 3, 7, 7)},
            (8, 3, 224, 224),
            (128, 3, 7, 7),
        ),
        (
            "channels*3/2",
            {"weight_shape": (96, 1, 3, 3), "groups": 96},
            (64, 144, 56, 56),
            (144, 1, 3, 3),
        ),
        (
            "channels*3/2",
            {"weight_shape": (128, 24, 3, 3), "groups": 4},
            (64, 144, 56, 56),
            (192, 36, 3, 3),
        ),
    ],
)
def test_changed_shapes(
    modules: None,
    change: str,
    fields: dict[str, Any],
    input_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
) -> None:
    from neighbour_picks.changes import CHANGES, changed

    problem = ca.ConvProblem(**{**BASE, **fields})
    found = changed(problem, CHANGES[change])
    assert (found.input_shape, found.weight_shape) == (input_shape, weight_shape)
    assert (found.op, found.padding, found.dtype) == (problem.op, problem.padding, problem.dtype)
    is_depthwise = problem.groups == problem.input_shape[1]
    assert found.groups == (found.input_shape[1] if is_depthwise else problem.groups)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ("batch/2", {"input_shape": (1, 96, 56, 56)}),
        ("size*8/7", {"input_shape": (64, 96, 1, 1), "weight_shape": (128, 96, 1, 1)}),
        (
            "size*6/7",
            {"input_shape": (64, 96, 7, 7), "weight_shape": (128, 96, 7, 7), "padding": 0},
        ),
        ("channels*2", {"input_shape": (64, 4, 56, 56), "weight_shape": (10, 4, 3, 3)}),
    ],
)
def test_a_change_that_is_none(modules: None, change: str, fields: dict[str, Any]) -> None:
    from neighbour_picks.changes import CHANGES, changed

    assert changed(ca.ConvProblem(**{**BASE, **fields}), CHANGES[change]) is None


def test_distances_rank_as_the_package_does(modules: None) -> None:
    from neighbour_picks.changes import CHANGES, changed, distance

    problem = ca.ConvProblem(**BASE)
    others = [changed(problem, change) for change in CHANGES.values()]
    by_key = {key_of(other): distance(problem, other) for other in others}
    found = nearest(problem, by_key, most=len(by_key))
    assert len(found) == len(CHANGES)
    assert [by_key[key] for key in found] == sorted(by_key.values())


def test_the_default_cases_are_of_all_operations(modules: None) -> None:
    import neighbours

    options = neighbours.parser().parse_args([])
    cases = neighbours.wanted(options)
    assert len(cases) == 24
    assert {case["dtype"] for case in cases.values()} == {"float16"}
    assert len({case["op"] for case in cases.values()}) == 3


# ---- ranks ----------------------------------------------------------------------------------


def test_ranks_agree_and_share(dry_runs: Path, modules: None) -> None:
    from rank_tuning.report import agree, is_tuned_once, rows, seconds, speedup

    results = record(dry_runs, "ranks")["results"]
    found = rows(results)
    assert list(found) == [("race", 1), ("race", 2)]
    for (_, gpus), (launch,) in found.items():
        ranks = launch["ranks"]
        assert [rank["rank"] for rank in ranks] == list(range(gpus))
        assert agree(launch)
        assert is_tuned_once(launch)
        assert all(rank["tuned"] > 0 for rank in ranks)
        for rank in ranks:
            assert rank["problems"] == rank["stored"] == 8
            assert rank["from"] == {"agreed": 8}
            assert 0 < rank["busy_s"] <= rank["seconds"] <= seconds(launch)
    # Ranks alone would not agree: each simulated GPU has noise of its own.
    (one,), (two,) = found.values()
    assert one["ranks"][0]["decisions"] != two["ranks"][0]["decisions"]
    assert speedup(found, "race", 2) == pytest.approx(seconds(one) / seconds(two))


def test_what_ranks_do_not_agree_upon_is_seen(dry_runs: Path, modules: None) -> None:
    from rank_tuning.report import agree, is_tuned_once, speedup, tables

    data = record(dry_runs, "ranks")
    launch = next(one for one in data["results"]["launches"] if one["gpus"] == 2)
    for key in ("decisions", "served"):
        other = copy.deepcopy(launch)
        other["ranks"][1][key] = "0" * 16
        assert not agree(other)
    for key in ("tuned", "tuned_again"):
        other = copy.deepcopy(launch)
        other["ranks"][1][key] += 1
        assert not is_tuned_once(other)
    data["results"]["launches"].append({**launch, "ranks": other["ranks"]})
    (table,) = tables(data)
    (row,) = [row for row in table.rows if row[1] == "2"]
    assert row[-2:] == ("2 of 2", "1 of 2")
    assert speedup({}, "race", 2) is None


def test_a_rank_that_fails_ends_the_launch(modules: None) -> None:
    from rank_tuning.launch import LaunchError, launch

    request = {"device": "cpu", "mode": "race", "run": 0, "problems": 1, "timeout_s": 9}
    with pytest.raises(LaunchError, match=r"nowhere\.json: not a readable JSON file"):
        launch(BENCHMARKS / "ranks.py", 1, {**request, "layers": "nowhere.json"}, 90)
    with pytest.raises(LaunchError, match="ran past its limit of 1 s"):
        launch(BENCHMARKS / "ranks.py", 1, {**request, "layers": "nowhere.json"}, 1)


# ---- all ------------------------------------------------------------------------------------


def test_records_are_rendered(dry_runs: Path, tmp_path: Path) -> None:
    assert_rendered(dry_runs, DRY_RUNS, tmp_path)


def cut(script: str, results: dict[str, Any]) -> None:
    """What a record holds that a time limit has cut off early."""
    if script == "warm_start":
        del results["processes"][1:]
    elif script == "ranks":
        results["launches"] = [one for one in results["launches"] if one["gpus"] == 2]
    else:
        first, *others = results["cases"].values()
        del first["oracle"]
        for case in others:
            del case["picks"]["race@20"]


@pytest.mark.parametrize("script", DRY_RUNS)
def test_a_record_cut_short_still_has_its_tables(
    dry_runs: Path, script: str, modules: None, tmp_path: Path
) -> None:
    import importlib

    report = importlib.import_module(REPORTS[script])
    data = record(dry_runs, script)
    cut(script, data["results"])
    data["results"]["failures"] = ["time limit: the rest was not run"]
    shown = report.tables(data)
    assert any(table.rows for table in shown)
    assert "time limit: the rest was not run." in "".join(table.note for table in shown)
    report.plot(data, tmp_path / "cut.png")
    data["results"] = {"failures": data["results"]["failures"]}
    assert all(not table.rows for table in report.tables(data))
    report.plot(data, tmp_path / "empty.png")
    assert (tmp_path / "cut.png").exists()
    assert (tmp_path / "empty.png").exists()


@pytest.mark.parametrize("script", DRY_RUNS)
def test_a_time_limit_is_told(script: str, tmp_path: Path) -> None:
    least = {"warm_start": ("--modes", "heuristic"), "neighbours": ("--budgets", "")}
    path = tmp_path / f"{script}.json"
    options = ("--device", "cpu", "--time-limit", "1", "--json", path, *least.get(script, ()))
    done = run(script, *options)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    data = record(tmp_path, script)
    assert data["complete"] is False
    assert data["results"]["failures"]
    assert all(text.startswith("time limit: ") for text in data["results"]["failures"])


@pytest.mark.parametrize(
    ("script", "arguments", "named"),
    [
        ("warm_start", ("--modes", "fastest"), "--modes"),
        ("warm_start", ("--modes", "auto_empty"), "--modes"),
        ("warm_start", ("--modes", "heuristic,auto_filled"), "auto_empty"),
        ("warm_start", ("--settings", "cold"), "--settings"),
        ("warm_start", ("--runs", "0"), "--runs"),
        ("warm_start", ("--runs", "2", "--fills", "3"), "--fills"),
        ("neighbours", ("--cases", "no such layer"), "--cases"),
        ("neighbours", ("--layers", "no-such-file.json"), "--layers"),
        ("neighbours", ("--changes", "batch*3"), "--changes"),
        ("neighbours", ("--budgets", "50,0"), "--budgets"),
        ("neighbours", ("--budgets", "soon"), "--budgets"),
        ("neighbours", ("--count", "0"), "--count"),
        ("neighbours", ("--rounds", "1"), "--rounds"),
        ("ranks", ("--gpus", "1,0"), "--gpus"),
        ("ranks", ("--gpus", "two"), "--gpus"),
        ("ranks", ("--modes", "online"), "--modes"),
        ("ranks", ("--runs", "0"), "--runs"),
        ("ranks", ("--timeout", "0"), "--timeout"),
    ],
)
def test_bad_options_are_named(script: str, arguments: tuple[str, ...], named: str) -> None:
    done = run(script, "--device", "cpu", *arguments)
    assert done.returncode != 0
    assert named in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("script", ["warm_start", "neighbours", "ranks"])
def test_a_dry_run_is_not_recorded_under_results(script: str, tmp_path: Path) -> None:
    path = tmp_path / "results" / "cpu" / f"{script}.json"
    done = run(script, "--device", "cpu", "--json", path)
    assert done.returncode != 0
    assert "dry run" in done.stderr
    assert not path.exists()
