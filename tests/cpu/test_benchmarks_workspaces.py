"""workspace_place.py: a dry run on the simulated GPU, its table, and the record of an H200."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

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

SCRIPT = "workspace_place"
DRY_RUNS = {
    SCRIPT: "--cases vgg16_conv4_2/dgrad/float16,sd_unet_down_1280/wgrad/float16 --engines 3"
}
CASES = ["vgg16_conv4_2/dgrad/float16/nhwc", "sd_unet_down_1280/wgrad/float16/nhwc"]
PUBLISHED = BENCHMARKS / "results" / "h200" / f"{SCRIPT}.json"


def test_help() -> None:
    assert_help(SCRIPT)


def test_the_default_cases_are_there(modules: None) -> None:
    assert_default_cases(SCRIPT)


def test_dry_run_leaves_a_whole_record(dry_runs: Path) -> None:
    data = whole_record(dry_runs, SCRIPT)
    assert_plotted(dry_runs, SCRIPT)
    assert list(data["results"]["cases"]) == CASES
    for entry in data["results"]["cases"].values():
        assert not entry["failed"]
        assert len(entry["engines"]) == 3
        cycles, far = entry["pages"]["cycles"], entry["pages"]["far"]
        assert len(far) == len(cycles) / 2
        assert min(cycles[page] for page in far) > min(cycles)
        for engine in entry["engines"]:
            assert {half: len(times) for half, times in engine["times_ms"].items()} == {
                "near": 8,
                "far": 8,
            }


def test_pages_that_do_not_matter_do_not_seem_to(dry_runs: Path, modules: None) -> None:
    from workspaces.report import all_engines, ratio

    ratios = [ratio(engine) for _, engine in all_engines(record(dry_runs, SCRIPT))]
    assert ratios == pytest.approx([1.0] * len(ratios), abs=0.03)


def test_the_record_can_be_published(dry_runs: Path, tmp_path: Path) -> None:
    assert_rendered(dry_runs, [SCRIPT], tmp_path)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--pages", "0"), "--pages must be 1 or more"),
        (("--rounds", "-1"), "--rounds must be 1 or more"),
        (("--engines", "0"), "--engines must be 1 or more"),
        (("--cases", "no_such_layer"), "no_such_layer"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], told: str) -> None:
    done = run(SCRIPT, "--device", "cpu", *arguments)
    assert done.returncode != 0
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failing_layer_is_told(modules: None) -> None:
    from workspaces.report import tables

    failed = {"step": "engines", "error": "RuntimeError: the pages are not of two kinds"}
    data: dict[str, Any] = {
        "environment": {},
        "arguments": {"pages": 8, "rounds": 5},
        "results": {"cases": {CASES[0]: {"engines": [], "failed": [failed]}}},
    }
    ((row,),) = [table.rows for table in tables(data)]
    assert "the pages are not of two kinds" in row[1]


def test_the_published_record_shows_that_far_pages_are_faster(modules: None) -> None:
    """What csrc/core/page_distance.h rests on, and that ``far_pages`` reads that GPU right."""
    from workspaces.report import all_engines, ratio

    from cudnn_autotune import _C

    data = json.loads(PUBLISHED.read_text())
    engines = all_engines(data)
    ratios = [ratio(engine) for _, engine in engines]
    assert len(ratios) >= 20
    assert statistics.geometric_mean(ratios) > 1.01
    assert sum(value > 1.15 for value in ratios) >= 2
    assert sum(value < 0.98 for value in ratios) <= 1
    for entry in data["results"]["cases"].values():
        assert _C.far_pages(entry["pages"]["cycles"]) == entry["pages"]["far"]
