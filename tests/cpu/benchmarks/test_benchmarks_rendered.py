"""render_results.py: what of the records is published, and that the pages say what they say."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import render_results
from models import chart
from support.processes.benchmark_scripts import BENCHMARKS, main, run

RECORDS = BENCHMARKS / "results" / "h200"
SHIPPED = BENCHMARKS.parent / "cudnn_autotune" / "cli" / "measured.json"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with real records of two kinds: a script's, and the package's audit."""
    folder = tmp_path / "results" / "gpu"
    folder.mkdir(parents=True)
    for name in ("gpu_tests.part1", "audit_layers_missed"):
        (folder / f"{name}.json").write_bytes((RECORDS / f"{name}.json").read_bytes())
    return tmp_path / "results"


def render(results: Path, *more: str | Path) -> int | str:
    return main("render_results", "--results", results, "--pages", results.parent / "pages", *more)


def changed(results: Path, name: str, **environment: Any) -> None:
    path = results / "gpu" / f"{name}.json"
    data = json.loads(path.read_text())
    data["environment"].update(environment)
    path.write_text(json.dumps(data))


def test_rendering_writes_a_page_and_check_sees_what_changed(results: Path) -> None:
    page = results.parent / "pages" / "gpu.md"
    assert render(results, "--check") == 1
    assert not page.exists(), "--check writes nothing"
    assert render(results) == 0
    text = page.read_text()
    assert text.startswith("# Measured on: NVIDIA H200\n")
    for name in ("gpu_tests.part1", "audit_layers_missed"):
        assert f"[Record](../results/gpu/{name}.json)" in text
    plot = results / "gpu" / "audit_layers_missed.png"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "cuDNN 9.19.0" in text
    assert render(results, "--check") == 0
    page.write_text(text.replace("NVIDIA H200", "Another GPU"))
    assert render(results, "--check") == 1
    page.write_text(text)
    plot.unlink()
    assert render(results, "--check") == 1


@pytest.mark.basic(2)
@pytest.mark.parametrize("name", ["gpu_tests.part1", "audit_layers_missed"])
@pytest.mark.parametrize(
    ("change", "named"),
    [({"device": "cpu"}, "dry run"), ({"driver": None}, "driver"), ({"commit": ""}, "commit")],
)
def test_figures_without_their_origin_are_left_out(
    results: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    change: dict[str, Any],
    named: str,
) -> None:
    """They are named; the others are rendered."""
    changed(results, name, **change)
    assert render(results, "--check") == 1
    output = capsys.readouterr().err
    assert f"left out: {name}.json" in output
    assert named in output
    (results / "gpu" / "gpu_tests.part1.json").unlink()
    changed(results, "audit_layers_missed", device="cuda", driver="1", commit="0" * 40)
    assert render(results) == 0


def test_a_simulation_and_a_session_without_its_origin_are_refused(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever their environment claims."""
    path = results / "gpu" / "audit_layers_missed.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "kind": "replay"}))
    assert render(results, "--check") == 1
    assert "dry run" in capsys.readouterr().err
    session = {"environment": {**data["environment"], "commit": None}, "telemetry": None}
    path.write_text(json.dumps({**data, "sessions": [session]}))
    assert render(results, "--check") == 1
    assert "lacks commit" in capsys.readouterr().err


def test_the_results_pages_say_what_the_records_say() -> None:
    assert main("render_results", "--check") == 0


@pytest.fixture
def shown() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(SHIPPED.read_text())
    return data


@pytest.mark.parametrize("theme", chart.THEMES)
def test_a_chart_is_the_same_each_time_it_is_drawn(shown: dict[str, Any], theme: str) -> None:
    text = chart.svg(shown, theme)
    assert chart.svg(shown, theme) == text
    assert chart.is_of(text, shown, theme)
    for ratio in shown["panels"][0]["models"].values():
        assert f">{ratio:.2f}</text>" in text
    other = re.sub(r"Matplotlib v[\d.]+,", "Matplotlib v0.1,", text)
    assert chart.is_of(other, shown, theme)  # another version draws other lines
    shown["panels"][0]["models"]["ResNet-50"] += 0.1
    assert not chart.is_of(text, shown, theme)
    assert not chart.is_of(other, shown, theme)


def test_check_judges_the_chart_and_the_shipped_figures(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)
    for path in RECORDS.glob("*.json"):
        if path.stem.partition(".part")[0] in chart.NEEDED:
            (folder / path.name).write_bytes(path.read_bytes())
    shipped = tmp_path / "measured.json"
    given = (tmp_path / "results", "--shipped", shipped)
    assert render(*given) == 0
    assert shipped.read_text() == SHIPPED.read_text()
    assert render(*given, "--check") == 0
    picture = tmp_path / "pages" / "whole_models_dark.svg"
    for path in (shipped, picture):
        text = path.read_text()
        path.write_text(text.replace("2.71", "2.81"))
        assert render(*given, "--check") == 1
        path.write_text(text)
    picture.unlink()
    assert render(*given, "--check") == 1


def test_a_page_of_results_has_the_tables_of_the_findings() -> None:
    docs = BENCHMARKS.parent / "docs"
    tables = (docs / "results" / render_results.INVESTIGATIONS).read_text()
    for record, page in render_results.FINDINGS.items():
        assert f"\n## {record}\n" in tables
        assert f"benchmarks/results/h200/{record}.json" in tables
        link = f"(../results/{render_results.INVESTIGATIONS}#{record})"
        assert link in (docs / "findings" / f"{page}.md").read_text()
        assert (RECORDS / f"{record}.json").exists()


def audit(*arguments: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return run("audit_layers", *arguments, **more)


@pytest.mark.slow
def test_a_dry_run_of_the_audit_says_where_it_comes_from(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    recording = next((BENCHMARKS.parent / "cudnn_autotune/audit/recordings").glob("*.json.gz"))
    done = audit(
        *("--replay", recording, "--modes", "heuristic", "--json", path),
        env={"GIT_COMMIT": "abc123", "GIT_DIRTY": "0"},
    )
    assert done.returncode == 0, done.stderr
    environment = json.loads(path.read_text())["environment"]
    assert (environment["commit"], environment["dirty"]) == ("abc123", False)
    assert environment["device"] == "cpu"
    # The command without the machine's folders.
    wanted = f"benchmarks/audit_layers.py --replay {recording.name} --modes heuristic"
    assert environment["command"] == f"{wanted} --json audit.json"
    done = audit("--replay", recording, "--json", tmp_path / "results" / "audit.json")
    assert done.returncode == 2
    assert "dry run" in done.stderr
    assert not (tmp_path / "results").exists()
