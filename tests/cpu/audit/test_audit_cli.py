"""``cudnn-autotune audit``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import simulation
from support.processes.subprocesses import evaluate_forked
from support.store.stored import refused, run
from support.tuning.recorder import record, save
from support.tuning.strategies import AT_ONCE

from cudnn_autotune.audit import record_file
from cudnn_autotune.audit.model import Record


def read(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text())
    assert isinstance(data, dict)
    return data


def test_an_audit_of_a_recording(tmp_path: Path) -> None:
    path, plot = tmp_path / "audit.json", tmp_path / "audit.png"
    modes = ",".join(AT_ONCE)  # the tests' own may be registered as well
    given = ("--replay", "h200_forum", "--modes", modes, "--runs", 2)
    done = run("audit", *given, "--json", path, "--plot", plot)
    assert done.exit_code == 0, done.output
    data = read(path)
    assert data["kind"] == "replay"
    assert list(data["cases"]) == ["h200_forum"]
    assert set(data["modes"]) == set(AT_ONCE)
    for mode, result in data["modes"].items():
        assert sum(result["picked"].values()) == 2, mode
        assert 1.0 <= result["regret"]["mean"] <= result["regret"]["worst"]
        assert result["regret"]["p95"] <= result["regret"]["worst"]
    assert data["environment"]["torch"] == torch.__version__
    assert data["complete"] is True
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "Replayed from a recording of NVIDIA H200" in " ".join(done.output.split())
    assert not set("│┃─━\x1b") & set(done.stdout), "a pipe gets plain lines"
    first = {line.split("\t")[0] for line in done.stdout.splitlines() if "\t" in line}
    assert set(AT_ONCE) <= first


def picks(path: Path, *arguments: str | int) -> Any:
    given = ("--modes", "sample_once", "--runs", 3, *arguments)
    assert run("audit", "--replay", "h200_forum", *given, "--json", path).exit_code == 0
    return read(path)["picks"]


def test_modes_runs_and_seeds(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    assert picks(path) == picks(path, "--seed", 0) != picks(path, "--seed", 1)
    arguments = ("--modes", "heuristic,sample_once", "--runs", "2,sample_once=3", "--json", path)
    several = ("--replay", "h200_forum", "--replay", "h200_vgg_dgrad")
    done = run("audit", *several, *arguments)
    assert done.exit_code == 0, done.output
    modes = read(path)["modes"]
    assert {mode: result["runs"] for mode, result in modes.items()} == {
        "heuristic": 2,
        "sample_once": 3,
    }
    assert modes["heuristic"]["cases"] == 2


def test_budget_reaches_the_modes(tmp_path: Path) -> None:
    spent = []
    for budget in (("--budget-ms", "30"), ()):
        path = tmp_path / "audit.json"
        arguments = ("--modes", "race", "--json", path, *budget)
        assert run("audit", "--replay", "h200_forum", *arguments).exit_code == 0
        spent.append(read(path)["modes"]["race"]["tuning"]["median_ms"])
    assert spent[0] < 0.5 * spent[1]


def test_an_audit_of_a_file(tmp_path: Path) -> None:
    recording, path = tmp_path / "capped.json.gz", tmp_path / "audit.json"
    timer = simulation.preset("h200-capped", 1)
    save(record(timer, timer.candidates, simulation.PROBLEM, rounds=10), recording)
    done = run("audit", "--replay", recording, "--modes", "sustained", "--json", path)
    assert done.exit_code == 0, done.output
    data = read(path)
    assert list(data["cases"]) == ["capped"]
    # What is recorded differs from time to time, and so does the pick, between the nearest ones.
    assert 1.0 <= data["modes"]["sustained"]["regret"]["worst"] < 1.1


def test_modes_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "my_mode.py").write_text(
        "from cudnn_autotune import sampling\n"
        "from cudnn_autotune.sampling import Selection, Measurement\n"
        "class Last:\n"
        "    name = 'last'\n"
        "    def select(self, candidates, timer, limits):\n"
        "        found = timer.runnable(candidates.all())\n"
        "        return Selection((Measurement(found[-1], None, 0),), total_samples=0)\n"
        "sampling.register(Last())\n"
    )
    path = tmp_path / "audit.json"
    code = (
        "from cudnn_autotune_cli import main\n"
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "main(['audit', '--import', 'my_mode', '--modes', 'last', '--replay', 'h200_forum', "
        f"'--json', {str(path)!r}])"
    )
    evaluate_forked(code)
    data = read(path)
    (pick,) = data["picks"]["last"]["1"].values()
    assert data["modes"]["last"]["picked"] == {pick["text"]: 1}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--runs", "0", "'--runs': must be a number of 1 or more"),
        ("--runs", "many", "'--runs': must be a number of 1 or more"),
        ("--runs", "nobody=3", "'--runs': 'nobody' is not one of heuristic"),
        ("--modes", "nobody", "'--modes': 'nobody' is not one of heuristic"),
        ("--modes", "race,,auto", "'--modes': must be names with commas between, each once"),
        ("--modes", "pytorch_off", "'--modes': 'pytorch_off' is not one of heuristic"),
        ("--budget-ms", "0", "'--budget-ms': must be a finite number above 0, got '0'"),
        ("--budget-ms", "nan", "'--budget-ms': must be a finite number above 0"),
        ("--time-limit", "-3", "'--time-limit': must be a finite number above 0"),
        ("--share", "1/2", "'--share': not with --replay"),
        ("--share", "3/2", "'--share': must be I/N with 1 <= I <= N, as 1/4, got '3/2'"),
        ("--layers", "layers.json", "'--layers': not with --replay"),
        ("--sustained", "throttled", "'--sustained': not with --replay"),
        ("--seed", "x", "'--seed'"),
        ("--plot", "audit.txt", "'--plot': must end in .png"),
        ("--import", "no_such_module_of_anyone", "'--import': cannot import"),
        ("--import", "", "'--import': cannot import ''"),
        ("--import", ".relative", "'--import': cannot import '.relative'"),
        ("--replay", "", "'--replay': '' is neither a file nor one of the recordings"),
        ("--replay", "h200_forum", "'--replay': each one once"),
    ],
)
def test_bad_input_is_refused_by_name(option: str, value: str, message: str) -> None:
    assert message in refused("audit", "--replay", "h200_forum", option, value)


def test_an_audit_of_a_gpu_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    record_file.save(Record("gpu", settings={}, environment={}), path)
    output = refused("audit", "--replay", "h200_forum", "--modes", "heuristic", "--json", path)
    assert "'--json'" in output
    assert "holds an audit of a GPU" in output
    path.write_text("something else")
    assert "'--json'" in refused("audit", "--replay", "h200_forum", "--json", path)
    assert path.read_text() == "something else"
