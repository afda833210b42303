"""``cudnn-autotune diff``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.store.decisions import under
from support.store.stored import decisions, fill, run, slower

from cudnn_autotune.store.decision import Decision


def other_engine(decision: Decision) -> Decision:
    """The same measurement, decided for the second."""
    first, second, *others = decision.selection.ranking
    return replace(
        decision, selection=replace(decision.selection, ranking=(second, first, *others))
    )


def test_alike(tmp_path: Path) -> None:
    a, b = fill(tmp_path / "a.json"), fill(tmp_path / "b.json")
    done = run("diff", a, b)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"--- A: {a}", f"+++ B: {b}"]
    assert lines[2:] == [
        "0 only in A, 0 only in B, 0 by another engine, 0 of another time; 6 decisions alike"
    ]


def test_every_kind(tmp_path: Path) -> None:
    first, second, third, fourth, fifth, sixth = decisions()
    a = fill(tmp_path / "a.json", [first, third, fourth, fifth, sixth])
    b = fill(
        tmp_path / "b.json",
        [second, other_engine(third), slower(fourth, 1.05), slower(fifth, 1.02), sixth],
    )
    done = run("diff", a, b)
    assert done.exit_code == 1
    marked = {line[0]: line for line in done.stdout.splitlines()[2:-1]}
    assert marked.keys() == set("-+!~")
    assert marked["-"].startswith(f"- {first.key}: eng70:IDX_MODE=0,TILE_SIZE=4 (0.65")
    assert marked["+"].startswith(f"+ {second.key}: ")
    texts = [entry.candidate.text for entry in third.selection.ranking[:2]]
    assert f"! {third.key}: {texts[0]}" in marked["!"]
    assert f" -> {texts[1]}" in marked["!"]
    assert f"~ {fourth.key}" in marked["~"]
    assert marked["~"].endswith("(+5.0 %)")
    assert done.stdout.splitlines()[-1] == (
        "1 only in A, 1 only in B, 1 by another engine, 1 of another time; 2 decisions alike"
    )


def test_json(tmp_path: Path) -> None:
    first, second, third, fourth, *_ = decisions()
    a = fill(tmp_path / "a.json", [first, third, fourth])
    b = fill(tmp_path / "b.json", [second, other_engine(third), slower(fourth, 1.05)])
    done = run("diff", "--json", a, b)
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["a"]["path"], found["b"]["path"]) == (str(a), str(b))
    assert found["b"]["environment"]["gpu"] == "NVIDIA H200"
    assert found["alike"] == 0
    by_kind = {one["kind"]: one for one in found["differences"]}
    assert by_kind.keys() == {
        "only in A",
        "only in B",
        "by another engine",
        "of another time",
    }
    assert by_kind["only in A"]["key"] == first.key
    assert by_kind["only in A"]["b"] is None
    texts = [entry.candidate.text for entry in third.selection.ranking[:2]]
    assert [by_kind["by another engine"][side]["engine"] for side in "ab"] == texts
    times = [by_kind["of another time"][side]["time_ms"] for side in "ab"]
    assert times[1] / times[0] == pytest.approx(1.05)
    assert json.loads(run("diff", "--json", a, a).stdout)["differences"] == []


def test_tolerance(tmp_path: Path) -> None:
    a = fill(tmp_path / "a.json")
    b = fill(tmp_path / "b.json", [slower(d, 0.98) for d in decisions()])
    assert run("diff", a, b).exit_code == 0
    done = run("diff", a, b, "--tolerance", "0.01")
    assert done.exit_code == 1
    assert "6 of another time" in done.stdout
    assert "(-2.0 %)" in done.stdout
    assert run("diff", a, b, "--tolerance", "0.01", "--sampling", "race").exit_code == 0
    assert "2 of another time" in run("diff", a, b, "--tolerance", "0.01", "--op", "dgrad").stdout


def test_what_is_damaged_is_not_alike(tmp_path: Path) -> None:
    file = fill(tmp_path / "a.json")
    file.write_bytes(file.read_bytes()[: 2 * file.stat().st_size // 3])
    done = run("diff", file, file)
    assert done.exit_code == 2
    assert done.stderr.count("damaged (its end is missing") == 2
    assert "decisions alike" in done.stdout


def test_with_and_without_determinism_are_two(tmp_path: Path) -> None:
    plain = under(decisions()[0], workspace=1 << 20)
    problem = replace(plain.problem, deterministic=True)
    both = [plain, under(replace(plain, problem=problem), workspace=None)]
    a, b = fill(tmp_path / "a.json", both), fill(tmp_path / "b.json", [plain])
    done = run("diff", a, b)
    assert "1 only in A" in done.stdout
    assert f"- {plain.key} deterministic: " in done.stdout
