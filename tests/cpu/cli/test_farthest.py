"""Limits as the commands show them: ``show --far``, ``show``, ``report``, ``env`` and ``audit``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.store.stored import H200, decisions, fill, refused, run, simulation, slower, succeeded

import cudnn_autotune as ca
from cudnn_autotune.cli.far import far, farthest
from cudnn_autotune.core import versions
from cudnn_autotune.engines import roofline
from cudnn_autotune.engines.roofline import Peaks
from cudnn_autotune.store import peaks_file
from cudnn_autotune.timers import peaks as timer
from cudnn_autotune.tools import gpu_peaks

H200_LIKE = Peaks(
    bytes_per_ms=4.2e9,
    flops_per_ms={
        "float16": 8e11,
        "bfloat16": 8e11,
        "tf32": 4e11,
        "float32": 5e10,
        "float64": 6e10,
    },
    launch_ms=0.002,
)
HERE = {
    **ca.environment(),
    "gpu": H200.gpu,
    "multiprocessors": H200.multiprocessors,
    "compute_capability": H200.compute_capability,
    "driver": "580.65",
}
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = fill(tmp_path)
    peaks_file.keep(tmp_path, H200, H200_LIKE)
    return made


@pytest.fixture
def unmeasured(tmp_path: Path) -> Path:
    return fill(tmp_path)


def gains(kept: Any = None) -> dict[str, float]:
    """What each decision could win, in milliseconds, computed anew."""
    found = {}
    for decision in kept or decisions():
        problem, time_ms = decision.problem, decision.chosen.time_ms
        limit_ms = max(
            roofline.bytes_moved(problem) / H200_LIKE.bytes_per_ms,
            roofline.operations(problem) / H200_LIKE.rate_of(problem),
            H200_LIKE.launch_ms,
        )
        found[decision.key] = time_ms - limit_ms
    return found


def keys(file: Path, *options: str | int) -> list[str]:
    done = run("show", "--store", file, "--json", *options)
    assert done.exit_code == 0, done.output
    return [decision["key"] for decision in json.loads(done.stdout)["decisions"]]


def test_the_most_time_to_be_won_comes_first(file: Path) -> None:
    expected = sorted(gains(), key=gains().__getitem__, reverse=True)
    assert keys(file, "--far") == expected
    assert keys(file, "--far", 2) == expected[:2]
    assert keys(file, "--far", "--op", "dgrad") == [key for key in expected if "dgrad" in key]
    by_ratio = sorted(
        decisions(), key=lambda d: -roofline.limit(d.problem, H200_LIKE).times(d.chosen.time_ms)
    )
    assert [d.key for d in by_ratio] != expected, "the ratio alone would order otherwise"


@NO_GPU
def test_without_peaks_nothing_is_guessed(unmeasured: Path) -> None:
    said = refused("show", "--store", unmeasured, "--far", status=1)
    assert "the peaks of NVIDIA H200 are unknown" in said
    assert "env --measure" in said
    assert "limit" not in succeeded("show", "--store", unmeasured)
    told = json.loads(run("show", "--store", unmeasured, "--json").stdout)["decisions"]
    assert all("limit" not in tree for tree in told)


def test_peaks_of_another_gpu_are_not_used(unmeasured: Path) -> None:
    peaks_file.keep(unmeasured.parent, replace(H200, multiprocessors=114), H200_LIKE)
    assert "are unknown" in refused("show", "--store", unmeasured, "--far", status=1)


def test_a_time_below_its_limit_has_nothing_to_win(tmp_path: Path) -> None:
    """As of tensors in the cache, or of Winograd's algorithm."""
    fast = [slower(d, 1e-4) for d in decisions()[:2]]
    kept = [*fast, decisions()[3]]
    file = fill(tmp_path, kept)
    peaks_file.keep(tmp_path, H200, H200_LIKE)
    assert keys(file, "--far") == [decisions()[3].key]
    fill(tmp_path / "fast", fast)
    peaks_file.keep(tmp_path / "fast", H200, H200_LIKE)
    said = succeeded("show", "--store", tmp_path / "fast", "--far")
    assert "none of 2 decisions is known to be slower than its limit" in said
    out = tmp_path / "page.html"
    succeeded("report", out, "--store", tmp_path / "fast")
    html = out.read_text()
    assert "Below the limit of" in html
    assert "Farthest from the roofline" not in html


def test_what_was_not_timed_has_no_distance(file: Path) -> None:
    untimed = simulation("quiet", decisions()[3].problem, "heuristic")
    rejected = tuple((entry.candidate.text, 0.5) for entry in decisions()[3].selection.ranking)
    for decision in (untimed, replace(decisions()[3], rejected=rejected)):
        assert far(decision, H200_LIKE) is None
        assert farthest([decision], H200_LIKE, 9) == []


class TestWithAGpu:
    """Where torch says that there is one, and a measurement is prescribed."""

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        told = SimpleNamespace(measured=0, peaks=H200_LIKE)

        def measure() -> Peaks:
            told.measured += 1
            if isinstance(told.peaks, Exception):
                raise told.peaks
            return told.peaks

        monkeypatch.setattr(timer, "measure", measure)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(versions, "environment", lambda device=None: HERE)
        ca.set_store(mode="read_write")
        return told

    def test_they_are_measured_once(
        self, gpu: SimpleNamespace, unmeasured: Path, tmp_path: Path
    ) -> None:
        assert "limit" not in succeeded("show", "--store", unmeasured)
        assert gpu.measured == 0, "what does not need them does not measure them"
        assert len(keys(unmeasured, "--far")) == 6
        assert len(keys(unmeasured, "--far")) == 6
        succeeded("report", tmp_path / "page.html", "--store", unmeasured)
        assert "limit" in succeeded("show", "--store", unmeasured)
        assert gpu.measured == 1

    def test_a_failure_is_said(self, gpu: SimpleNamespace, unmeasured: Path) -> None:
        gpu.peaks = torch.OutOfMemoryError("no memory")
        said = refused("show", "--store", unmeasured, "--far", status=1)
        assert "cannot be measured: no memory" in said
        assert "are unknown" in said

    @pytest.mark.parametrize("mode", ["off", "read"])
    def test_a_store_that_is_not_written(
        self, gpu: SimpleNamespace, unmeasured: Path, mode: str
    ) -> None:
        ca.set_store(mode=mode)
        assert len(keys(unmeasured, "--far")) == 6
        assert gpu_peaks.known(unmeasured.parent, H200) is None
        assert "forbids" in refused("env", "--store", unmeasured, "--measure")
        assert gpu.measured == 1

    def test_measured_again_they_stay_the_best(self, gpu: SimpleNamespace, tmp_path: Path) -> None:
        def told() -> dict[str, Any]:
            done = run("env", "--store", tmp_path, "--measure", "--json")
            assert done.exit_code == 0, done.output
            found: dict[str, Any] = json.loads(done.stdout)["peaks"]
            return found

        assert told()["memory, GB/s"] == 4200.0
        gpu.peaks = replace(H200_LIKE, bytes_per_ms=1e9, launch_ms=0.001)
        assert told()["memory, GB/s"] == 4200.0
        assert told()["launch, us"] == 1.0
        assert gpu.measured == 3
