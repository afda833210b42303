"""What a release is made of: its version, the changelog, the workflows and the form for bugs."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.checkout import ROOT

GITHUB = ROOT / ".github"
SCREEN = 50
"""The lines of a release's section at most."""


def read(path: Path) -> Any:
    return pytest.importorskip("yaml").safe_load(path.read_text())


def steps(workflow: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the only job of a workflow, and its steps."""
    (job,) = read(GITHUB / "workflows" / workflow)["jobs"].values()
    return job, job["steps"]


def test_the_changelog_begins_with_this_version_and_is_short() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sections[0].startswith(f"[{project['version']}] - ")
    for section in sections:
        assert re.match(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d\n", section), section[:40]
        assert len(section.splitlines()) <= SCREEN


def test_no_file_but_pyproject_says_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    files = [*ROOT.glob("*.py"), *(ROOT / "building").glob("*.py")]
    files += (ROOT / "cudnn_autotune").rglob("*.py")
    said = [file.name for file in files if f'"{version}"' in file.read_text()]
    assert said == []


def test_ci_runs_what_a_contributor_runs() -> None:
    job, done = steps("ci.yml")
    assert ".ci/run" in [step.get("run") for step in done]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert f">={job['strategy']['matrix']['python'][0]}" == oldest


def test_wheels_are_built_for_each_torch_and_kept() -> None:
    job, done = steps("wheels.yml")
    script = runpy.run_path(str(ROOT / ".ci" / "wheels.py"), run_name="wheels")
    assert tuple(job["strategy"]["matrix"]["torch"]) == script["RELEASES"]
    (build,) = (step["run"] for step in done if "wheels.py" in step.get("run", ""))
    assert build == "python .ci/wheels.py ${{ matrix.torch }} --into dist"
    (kept,) = (step["with"] for step in done if "upload-artifact" in step.get("uses", ""))
    assert kept["path"] == "dist"
    assert kept["if-no-files-found"] == "error"
    for name in ("torch", "python"):
        assert f"${{{{ matrix.{name} }}}}" in kept["name"]  # else one artifact replaces another


def test_a_bug_report_asks_for_the_environment() -> None:
    form = read(GITHUB / "ISSUE_TEMPLATE" / "bug.yml")
    (asked,) = (field for field in form["body"] if field["id"] == "env")
    assert "`cudnn-autotune env`" in asked["attributes"]["label"]
    assert asked["validations"]["required"] is True


def test_the_wheels_script_tells_what_it_is_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = runpy.run_path(str(ROOT / ".ci" / "wheels.py"), run_name="wheels")
    told: list[str] = []

    def run(command: list[str]) -> str:
        told.append(capsys.readouterr().err)
        if "wheel" in command:
            (tmp_path / "torch-2.14" / "a.whl").write_bytes(b"")
        return "2.14.1"

    scope = script["main"].__globals__
    monkeypatch.setitem(scope, "run", run)
    monkeypatch.setitem(scope, "fresh", lambda folder: ["python"])
    monkeypatch.setattr("sys.argv", ["wheels.py", "2.14", "--into", str(tmp_path)])
    assert script["main"]() == 0
    for text, part in zip(told, ("build in", "compiling", "trying a.whl", ""), strict=True):
        assert part in text
        assert not part or re.match(r"\d\d:\d\d:\d\d torch 2\.14: ", text)
