"""``cudnn-autotune audit`` and ``cudnn-autotune record``."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from subprocesses import python

import cudnn_autotune as ca
from cudnn_autotune.audit import record_file
from cudnn_autotune.audit.model import Record
from cudnn_autotune.cli.commands import audit_gpu, tune_problems
from cudnn_autotune.cli.commands import record as recording_command
from cudnn_autotune.cli.commands import tune as tuning_command
from cudnn_autotune.timers.offline.recording import Recording
from cudnn_autotune_cli import main

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(*arguments: str | Path) -> str:
    """What is said of input that is not allowed: no traceback, exit status 2."""
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    # Boxes and line breaks out of the way.
    return " ".join(done.output.split())


def read(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text())
    assert isinstance(data, dict)
    return data


def test_simulated_audit(tmp_path: Path) -> None:
    path, plot = tmp_path / "audit.json", tmp_path / "audit.png"
    modes = ",".join(ca.SAMPLING_MODES)  # the tests' own may be registered as well
    given = ("--simulate", "forum-l4", "--modes", modes, "--runs", 8)
    done = run("audit", *given, "--json", path, "--plot", plot)
    assert done.exit_code == 0, done.output
    data = read(path)
    assert set(data["modes"]) == set(ca.SAMPLING_MODES)
    for mode, told in data["modes"].items():
        assert sum(told["picked"].values()) == 8, mode
        assert set(told["regret"]) >= {"mean", "p95", "worst"}
        assert 1.0 <= told["regret"]["mean"] <= told["regret"]["worst"]
        assert told["regret"]["p95"] <= told["regret"]["worst"]
    # Regret is against the sustained truth.
    assert data["modes"]["median_of_three"]["picked"]["128x128"] >= 6
    assert data["modes"]["median_of_three"]["regret"]["worst"] == pytest.approx(1.594, abs=0.01)
    assert data["modes"]["sustained"]["picked"] == {"128x64": 8}
    assert data["modes"]["sustained"]["regret"]["worst"] == 1.0
    assert data["environment"]["torch"] == torch.__version__
    assert data["complete"] is True
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "A simulation: nothing was measured" in done.output
    assert "128x128" in done.output


def test_modes_and_runs_by_name(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    arguments = ("--modes", "heuristic,sample_once", "--runs", "2,sample_once=3", "--json", path)
    done = run("audit", "--simulate", "quiet", "--simulate", "aa", *arguments)
    assert done.exit_code == 0, done.output
    modes = read(path)["modes"]
    assert {mode: told["runs"] for mode, told in modes.items()} == {
        "heuristic": 2,
        "sample_once": 3,
    }
    assert modes["heuristic"]["cases"] == 2


def test_seeds(tmp_path: Path) -> None:
    picks = []
    for seed in (0, 0, 1):
        path = tmp_path / "audit.json"
        arguments = ("--modes", "sample_once", "--runs", 3, "--seed", seed, "--json", path)
        assert run("audit", "--simulate", "aa", *arguments).exit_code == 0
        picks.append(read(path)["picks"])
    assert picks[0] == picks[1] != picks[2]


def test_budget_reaches_the_modes(tmp_path: Path) -> None:
    spent = []
    for budget in (("--budget-ms", "30"), ()):
        path = tmp_path / "audit.json"
        arguments = ("--modes", "race", "--json", path, *budget)
        assert run("audit", "--simulate", "quiet", *arguments).exit_code == 0
        spent.append(read(path)["modes"]["race"]["tuning"]["median_ms"])
    assert spent[0] < 0.5 * spent[1]


def test_record_and_replay(tmp_path: Path) -> None:
    recording, path = tmp_path / "folder" / "capped.json.gz", tmp_path / "audit.json"
    done = run("record", "--simulate", "h200-capped", "--rounds", 10, "--time-limit", 10, recording)
    assert done.exit_code == 0, done.output
    assert "h200-capped: 10 of 10 candidates" in done.output
    kept = Recording.load(recording)
    assert kept.environment["gpu"] == "simulated H200"
    assert len(kept.cold.time_ms) <= 10
    done = run("audit", "--replay", recording, "--runs", 2, "--json", path)
    assert done.exit_code == 0, done.output
    assert "Replayed from a recording of simulated H200" in " ".join(done.output.split())
    data = read(path)
    assert data["kind"] == "replay"
    assert list(data["cases"]) == ["capped"]
    assert data["modes"]["sustained"]["picked"] == {"eng67:b": 2}


def test_a_recording_that_ships_is_known_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    done = run("audit", "--replay", "h200_forum", "--modes", "heuristic", "--json", path)
    assert done.exit_code == 0, done.output
    assert "Replayed from a recording of NVIDIA H200" in " ".join(done.output.split())
    assert list(read(path)["cases"]) == ["h200_forum"]
    told = refused("audit", "--replay", "h100_forum")
    assert "'--replay': h100_forum is neither a file nor one of the recordings that ship" in told
    assert "h200_forum, h200_resnet50_fprop" in told


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
        "main(['audit', '--import', 'my_mode', '--modes', 'last', '--simulate', 'forum-l4', "
        f"'--json', {str(path)!r}])"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert read(path)["modes"]["last"]["picked"] == {"direct": 1}


@pytest.mark.parametrize(
    ("option", "value", "told"),
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
        ("--share", "1/2", "'--share': not with --replay or --simulate"),
        ("--share", "3/2", "'--share': must be I/N with 1 <= I <= N, as 1/4, got '3/2'"),
        ("--layers", "layers.json", "'--layers': not with --replay or --simulate"),
        ("--sustained", "throttled", "'--sustained': not with --replay or --simulate"),
        ("--seed", "x", "'--seed'"),
        ("--plot", "audit.txt", "'--plot': must end in .png"),
        ("--import", "no_such_module_of_anyone", "'--import': cannot import"),
        ("--replay", "recording.json", "--replay and --simulate exclude each other"),
        ("--simulate", "l4", "'--simulate': preset must be one of forum-l4"),
        ("--simulate", "quiet", "'--simulate': each one once"),
    ],
)
def test_bad_input_is_refused_by_name(option: str, value: str, told: str) -> None:
    assert told in refused("audit", "--simulate", "quiet", option, value)


def test_a_recording_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "recording.json"
    assert "'--replay'" in refused("audit", "--replay", path)
    path.write_text('{"format": "cudnn-autotune recording", "version": 99}')
    told = refused("audit", "--replay", path)
    assert "'--replay'" in told
    assert "version" in told


def test_an_audit_of_a_gpu_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    record_file.save(Record("gpu", settings={}, environment={}), path)
    told = refused("audit", "--simulate", "quiet", "--modes", "heuristic", "--json", path)
    assert "'--json'" in told
    assert "holds an audit of a GPU" in told
    path.write_text("something else")
    assert "'--json'" in refused("audit", "--simulate", "quiet", "--json", path)
    assert path.read_text() == "something else"


@NO_GPU
def test_without_a_gpu_it_says_what_works() -> None:
    assert "--simulate PRESET work without one" in refused("audit")
    assert "--simulate PRESET work without one" in refused("audit", "--sustained")
    several = ("--modes", "auto,pytorch_on_0", "--sustained", "always", "--share", "1/4")
    assert "--simulate PRESET work without one" in refused("audit", *several)
    assert "no CUDA GPU" in refused("record", "--cases", "resnet", "folder")


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--layers", "/nowhere/layers.json", "'--layers'"),
        ("--cases", "no such layer", "'--cases'"),
        ("--reference", "nobody", "'--reference': 'nobody' is not one of heuristic"),
        ("--modes", "pytorch_off", "'--modes': PyTorch's modes need one of ours"),
        ("--runs", "pytorch_off=2", "'--runs': 'pytorch_off' is not one of heuristic"),
        ("--share", "999/999", "'--share': leaves none of the cases"),
        ("--case-limit", "0", "'--case-limit': must be a finite number above 0"),
        ("--sustained", "sometimes", "'--sustained'"),
    ],
)
def test_bad_input_to_an_audit_of_a_gpu(option: str, value: str, told: str) -> None:
    assert told in refused("audit", option, value)


SHAPE = ("--input", "2,8,8,8", "--weight", "8,8,3,3")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("x.json",), "give one of --input with --weight, --cases"),
        ((*SHAPE, "--cases", "resnet", "x.json"), "give one of --input with --weight"),
        (("--input", "2,8,8,8", "x.json"), "--input and --weight belong together"),
        (("--input", "2,a", "--weight", "1", "x.json"), "'--input': must be whole numbers"),
        (("--cases", "resnet", "--stride", "2", "x"), "'--stride': only with --input"),
        (("--input", "2,8,8,8", "--weight", "8,4,3,3", "x.json"), "channels"),
        ((*SHAPE, "--padding", "1,2,3", "x.json"), "'--padding'"),
        ((*SHAPE, "--padding", "half", "x.json"), "'--padding': must be same, valid, or whole"),
        ((*SHAPE, "--dtype", "int8", "x.json"), "'--dtype'"),
        (("--cases", "resnet", "--dtype", "float32", "x"), "'--dtype': only with --input"),
        (("--simulate", "aa", "--channels-last", "x.json"), "'--channels-last': only with --input"),
        (("--cases", "no such layer", "x"), "'--cases'"),
        (("--layers", "/nowhere/layers.json", "x"), "'--layers'"),
        (("--simulate", "l4", "x.json"), "'--simulate': preset must be one of"),
        (("--simulate", "quiet", "x.txt"), "'OUT': must end in .json.gz or .json"),
        (("--simulate", "quiet", "--rounds", "0", "x.json"), "'--rounds'"),
    ],
)
def test_bad_input_to_record(arguments: tuple[str, ...], told: str) -> None:
    assert told in refused("record", *arguments)


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--padding", "same", "--op", "dgrad"),
        ("--dtype", "bfloat16", "--channels-last", "--stride", "2,1", "--padding", "valid"),
        ("--op", "wgrad", "--op", "fprop", "--dilation", "2", "--padding", "1,0"),
    ],
)
def test_tune_and_record_read_a_layer_alike(more: tuple[str, ...]) -> None:
    given = tuning_command.tune.make_context("tune", [*SHAPE, *more]).params
    wanted = tune_problems.of_layer(given)
    given = recording_command.record.make_context("record", [*SHAPE, *more, "x"]).params
    assert list(recording_command._of_layer(given).values()) == wanted


# Where it is written to


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("audit", "--simulate", "quiet", "--json"), "--json"),
        (("audit", "--simulate", "quiet", "--plot"), "--plot"),
        (("audit", "--json"), "--json"),
        (("record", "--simulate", "quiet"), "OUT"),
        (("demo", "--plot"), "--plot"),
    ],
)
def test_a_file_that_cannot_be_written_is_known_beforehand(
    tmp_path: Path, arguments: tuple[str, ...], option: str
) -> None:
    (tmp_path / "file").write_text("not a folder")
    name = "x.png" if option == "--plot" else "x.json"
    for folder in (Path("/proc"), tmp_path / "file", tmp_path / ("n" * 300)):
        done = run(*arguments, folder / name)
        assert done.exit_code == 2, done.output
        assert f"'{option}': cannot write {folder / name}" in " ".join(done.output.split())
    (tmp_path / name).mkdir()
    told = refused(*arguments, tmp_path / name)
    assert f"'{option}'" in told


def test_a_recording_replaces_nothing_unasked(tmp_path: Path) -> None:
    out = tmp_path / "layer.json"
    out.write_text("precious")
    command = ("record", "--simulate", "quiet", "--rounds", 1, "--time-limit", 1, out)
    assert f"'OUT': {out} is there already; --force replaces it" in refused(*command)
    assert out.read_text() == "precious"
    assert run(*command, "--force").exit_code == 0
    assert Recording.load(out).cold.time_ms


def without_room(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command, where every file that it makes stays empty."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
        "from cudnn_autotune_cli import main;"
        f"main({[str(argument) for argument in arguments]!r})"
    )
    return python("-B", "-c", code, env={"MPLCONFIGDIR": str(folder)})


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_what_was_measured_is_shown_where_it_cannot_be_kept(tmp_path: Path, option: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out" / "x.svg" if option == "--plot" else tmp_path / "out" / "x.json"
    done = without_room(
        tmp_path, "audit", "--simulate", "quiet", "--modes", "heuristic", option, path
    )
    assert done.returncode == 1
    assert "Picked against best" in done.stdout
    assert done.stderr.splitlines()[-1] == f"Error: {option}: cannot write {path}: File too large"
    assert not list(path.parent.iterdir()), "nothing half written is left behind"


def test_a_recording_that_cannot_be_kept(tmp_path: Path) -> None:
    path = tmp_path / "out" / "x.json.gz"
    done = without_room(tmp_path, "record", "--simulate", "quiet", "--rounds", "1", path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"Error: OUT: cannot write {path}: File too large"
    assert not list(path.parent.iterdir())


def test_an_audit_of_a_gpu_goes_on_where_it_cannot_be_saved_for_now(tmp_path: Path) -> None:
    record, told = Record("gpu", settings={}, environment={}), list[str]()
    audit_gpu._save(record, None, told.append)
    audit_gpu._save(record, tmp_path / "x.json", told.append)
    assert record_file.load(tmp_path / "x.json") == record
    assert not told
    (tmp_path / "file").write_text("not a folder")
    audit_gpu._save(record, tmp_path / "file" / "x.json", told.append)
    assert "--json: cannot write" in told[0]
