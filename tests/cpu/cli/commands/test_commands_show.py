"""``cudnn-autotune show`` and ``env``, on stores that sampling modes have filled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.store.decisions import resealed
from support.store.stored import (
    H200,
    NEWER_CUDNN,
    decisions,
    fill,
    misspelt,
    refused,
    run,
    succeeded,
)

import cudnn_autotune as ca
from cudnn_autotune.cli import stores
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.tuning.gain import against_pytorch


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return fill(tmp_path / "store")


def shown(file: Path, *options: str) -> list[Decision]:
    """The decisions that ``show --json`` tells of, each of them whole."""
    done = run("show", "--store", file, "--json", *options)
    assert done.exit_code == 0, done.output
    trees: list[dict[str, Any]] = json.loads(done.stdout)["decisions"]
    known = {decision.key: decision for decision in stores.read(file).decisions}
    found = [known[tree.pop("key")] for tree in trees]
    compared = [against_pytorch(decision) for decision in found]
    assert [tree.pop("gain") for tree in trees] == [one and one.to_json() for one in compared]
    assert trees == [decision.to_json() for decision in found]
    return found


def test_table(file: Path) -> None:
    text = succeeded("show", "--store", file.parent)
    assert "NVIDIA H200, cuDNN 9.19.0, frontend 1.28.0: 6 of 6 decisions" in text
    for decision in decisions():
        assert decision.chosen.candidate.text[:20] in text
        assert f"{decision.chosen.time_ms:.4g}"[:5] in text
        assert decision.selection.evidence.rule.split(":")[0] in text
    assert "64×128×28×28, 128 of 3×3, padding 1" in text
    assert text.startswith("2.426 -> 2.379 ms for one call of each of 6 convolutions (1.02x)")
    assert "float16 nhwc" in text
    assert "2025-11-21 17:28" in text


def test_json_is_all_of_it(file: Path) -> None:
    assert {d.key: d for d in shown(file)} == {d.key: d for d in decisions()}


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        (("--op", "dgrad"), lambda d: d.problem.op == "dgrad"),
        (("--op", "dgrad", "--op", "wgrad"), lambda d: d.problem.op != "fprop"),
        (("--dtype", "float32"), lambda d: "float32" in d.key),
        (("--engine", "67"), lambda d: d.chosen.candidate.engine == 67),
        (("--engine", "eng67"), lambda d: d.chosen.candidate.text.startswith("eng67:")),
        (("--engine", "aten"), lambda d: d.chosen.candidate.text == "aten"),
        (("--contains", "X=64x128x28x28"), lambda d: "x=64x128x28x28" in d.key),
        (("--contains", "dgrad", "--contains", "512"), lambda d: "w=512x512" in d.key),
        (("--sampling", "auto"), lambda d: True),
        (("--sampling", "race"), lambda d: False),
    ],
)
def test_filters(file: Path, options: tuple[str, ...], passes: Any) -> None:
    wanted = {d.key for d in decisions() if passes(d)}
    assert {d.key for d in shown(file, *options)} == wanted
    assert wanted or options[1] == "race"


@pytest.mark.parametrize("command", ["show", "export", "prune", "report", "diff"])
def test_an_unknown_mode_is_refused(file: Path, tmp_path: Path, command: str) -> None:
    arguments: dict[str, tuple[object, ...]] = {
        "show": ("--store", file),
        "export": (tmp_path / "new.json", "--store", file),
        "prune": ("--store", file),
        "report": ("--store", file),
        "diff": (file, file),
    }
    message = refused(command, *arguments[command], "--sampling", "auto", "--sampling", "fast")
    assert "'--sampling'" in message
    assert "'fast' is not one of" in message
    for mode in ca.sampling.names():
        assert mode in message
    assert "--contains sampling=fast" in message


def test_a_file_of_this_machine_comes_first(tmp_path: Path) -> None:
    fill(tmp_path, decisions()[:1], H200)
    fill(tmp_path, decisions()[1:], Environment.of())
    assert "5 of 5 decisions" in succeeded("show", "--store", tmp_path)


def test_the_users_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNN_AUTOTUNE_CACHE_DIR", str(tmp_path / "cache"))
    assert f"{tmp_path / 'cache'}: nothing is stored there yet" in succeeded("show")
    assert json.loads(run("show", "--json").stdout)["decisions"] == []
    fill(tmp_path / "cache")
    assert "6 of 6 decisions" in succeeded("show")


def test_what_cannot_be_read_is_said_and_the_rest_shown(file: Path) -> None:
    damaged = misspelt(file.read_bytes())
    file.write_bytes(damaged)
    done = run("show", "--store", file)
    assert "5 of 6 decisions" in done.stdout
    assert "left out" in done.stderr
    assert "wgrid" in done.stderr
    # Looking changes nothing.
    assert file.read_bytes() == damaged
    assert list(file.parent.glob("*.damaged-*")) == []


def test_an_entry_that_is_nested_deeply_is_damage_to_every_verb(file: Path, tmp_path: Path) -> None:
    head, first, *rest = file.read_bytes().split(b"\n")
    deep = b'"decision":' + b"[" * 200_000 + b"]" * 200_000 + b',"was":'
    data = b"\n".join([head, resealed(first.replace(b'"decision":', deep, 1)), *rest])
    file.write_bytes(data)
    out = tmp_path / "out"
    for arguments in (
        ("show", "--store", file),
        ("diff", file, file),
        ("report", "--store", file, out.with_suffix(".html")),
        ("export", "--store", file, out.with_suffix(".json")),
    ):
        done = run(*arguments)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        assert "nested too deeply" in done.stderr, arguments
        assert "Traceback" not in done.output
    assert "nested too deeply" in refused("import", file, "--store", tmp_path / "made")
    assert "would remove" in succeeded("prune", "--store", file, "--older-than", "1d", "--dry-run")
    assert "too deeply" not in succeeded("env", "--store", file)  # which parses no entry
    assert file.read_bytes() == data


@pytest.fixture(params=["no JSON", "a head of another's", "empty", "a link to itself"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder: the file of this machine, damaged beyond reading, and one that is sound."""
    fill(tmp_path / "store")
    own = tmp_path / "store" / Environment.of().file_name
    if request.param == "a link to itself":
        own.symlink_to(own)
    else:
        own.write_text({"no JSON": "{", "empty": ""}.get(request.param, '{"format": "notes"}'))
    return own


def test_one_damaged_file_does_not_hide_the_others(damaged: Path, tmp_path: Path) -> None:
    """The damage is named on standard error, and the rest is shown, drawn, compared, written."""
    folder, out = damaged.parent, tmp_path / "out"
    for command, status, told in (
        (("show", "--store", folder), 0, "6 of 6 decisions"),
        (("report", out / "page.html", "--store", folder), 0, "6 decisions"),
        (("export", out / "all.json", "--store", folder), 0, "6 decisions"),
        (("diff", folder, folder), 2, "6 decisions alike"),
    ):
        done = run(*command)
        assert done.exit_code == status, done.output
        assert told in done.stdout
        lines = done.stderr.splitlines()
        assert lines
        assert all(line.startswith(f"{damaged}: ") for line in lines)
    # Which of two is meant must still be said, and the damaged one is none of them.
    other = fill(folder, decisions()[:2], NEWER_CUDNN)
    message = refused("show", "--store", folder)
    assert f"{damaged}: " in message
    assert str(other) in message.partition("name one of them")[2]
    assert str(damaged) not in message.partition("name one of them")[2]


def test_names_in_a_file_do_not_steer_the_terminal(tmp_path: Path) -> None:
    made = decisions()[3]
    first, *others = made.selection.ranking
    hostile = replace(first, candidate=replace(first.candidate, text="\x1b[2J[bold red]\u202eeng"))
    selection = replace(made.selection, ranking=(hostile, *others))
    environment = replace(H200, gpu="H\x1b]0;title\x07200")
    file = fill(tmp_path / "x.json", [replace(made, selection=selection)], environment)
    done = run("show", "--store", file)
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert "\u202e" not in done.output
    data = file.read_bytes()
    head, body = data.split(b"\n", 1)
    tree = json.loads(head)
    for name in ("\x1b[31mHOSTILE", "\ud800"):
        hostile_head = {**tree, "environment": {**tree["environment"], name: 1}}
        file.write_bytes(json.dumps(hostile_head).encode() + b"\n" + body)
        for command in (("show",), ("env",)):
            done = run(*command, "--store", file)
            assert done.exit_code in (0, 2), done.exception
            assert "is not a known field" in done.output
            assert "\x1b" not in done.output
    file.write_bytes(data)
    assert "[bold red]" in run("show", "--store", file).stdout


def test_paths_that_are_no_store(tmp_path: Path) -> None:
    assert "does not exist" in refused("show", "--store", tmp_path / "absent.json")
    text = tmp_path / "notes.json"
    text.write_text('{"format": "something else"}')
    assert "it is no file of 'cudnn-autotune store'" in refused("show", "--store", text)
    future = tmp_path / "future.json"
    sound = fill(tmp_path / "sound.json").read_bytes()
    future.write_bytes(sound.replace(b'"version": 2', b'"version": 9'))
    assert "'--store'" in refused("show", "--store", future)
    assert "version 9" in refused("show", "--store", future)
    for data in (
        sound.replace(b'"version": 2', b'"version": 3').replace(b'"gpu"', b'"new": 1, "gpu"'),
        b'{"format": "cudnn-autotune store", "version": 3,\n# in a form yet unknown',
    ):
        future.write_bytes(data)
        assert "it is of version 3, this package reads 2" in refused("show", "--store", future)


def test_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNN_AUTOTUNE_CACHE_DIR", str(tmp_path))
    here = Environment.of()
    fill(tmp_path, decisions()[:2], here)
    fill(tmp_path, decisions(), H200)
    ca.set_workspace_limit(1 << 20)
    told = json.loads(run("env", "--json").stdout)
    path = tmp_path / here.file_name
    assert told["environment"] == here.to_json()
    assert told["store"] == {
        "path": str(path),
        "decisions": 2,
        "bytes": path.stat().st_size,
        "other files": [H200.file_name],
    }
    assert told["versions"] == ca.environment()
    assert told["settings"]["workspace_limit"] == 1 << 20
    assert told["settings"]["sampling"] == ca.get_sampling()
    assert told["variables"]["CUDNN_AUTOTUNE_CACHE_DIR"] == str(tmp_path)
    text = succeeded("env")
    assert f"path {path}" in text
    assert f"other files {H200.file_name}" in text


def test_env_tells_what_variables_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "WORKSPACE_LIMIT": "lots",
        "SAMPLING": "fastest",
        "BUDGET_MS": " 12.5 ",
        "BENCHMARK_LIMIT": "",
        "CASHE": "off",
        "Q": "1",
        "CACHE": "no",
    }.items():
        monkeypatch.setenv(f"CUDNN_AUTOTUNE_{name}", value)
    found = json.loads(run("env", "--json").stdout)["not understood"]
    assert found.keys() == {
        f"CUDNN_AUTOTUNE_{name}" for name in ("WORKSPACE_LIMIT", "SAMPLING", "CASHE", "Q", "CACHE")
    }
    assert found["CUDNN_AUTOTUNE_WORKSPACE_LIMIT"].endswith("2**63 - 1, got 'lots'")
    assert "must be one of 'heuristic', " in found["CUDNN_AUTOTUNE_SAMPLING"]
    assert "must be one of 'off', " in found["CUDNN_AUTOTUNE_CACHE"]
    assert found["CUDNN_AUTOTUNE_CASHE"] == (
        "there is no such variable; the nearest is CUDNN_AUTOTUNE_CACHE"
    )
    assert found["CUDNN_AUTOTUNE_Q"] == "there is no such variable"
    assert "CUDNN_AUTOTUNE_Q there is no such variable" in succeeded("env")
