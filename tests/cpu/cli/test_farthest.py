"""Limits as the commands show them: ``show --far``, ``show``, ``report``, ``env`` and ``audit``."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decisions import under
from stored import H200, decisions, fill, refused, run, simulation, slower, succeeded

import cudnn_autotune as ca
from cudnn_autotune.audit import record_file, report
from cudnn_autotune.audit.layers import Case
from cudnn_autotune.audit.model import BURST_COLD, BURST_HOT, PEAKS, Oracle, Pick, Record, Truth
from cudnn_autotune.cli import gpu_peaks, wording
from cudnn_autotune.cli.gpu_peaks import far, farthest
from cudnn_autotune.core import versions
from cudnn_autotune.core.display import milliseconds
from cudnn_autotune.core.json_dataclass import encode
from cudnn_autotune.engines import roofline
from cudnn_autotune.engines.roofline import Peaks
from cudnn_autotune.store import Decision, Environment, peaks_file
from cudnn_autotune.timers import peaks as timer

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


def test_the_table(file: Path) -> None:
    done = run("show", "--store", file, "--far", 3)
    assert done.exit_code == 0, done.output
    assert "3 of 6 decisions, farthest from the roofline" in done.stdout
    header, *cells = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    assert header[2:4] == ["time, ms", "limit, ms"]
    rows = [row[2:] for row in cells]
    found = farthest(decisions(), H200_LIKE, 3)
    assert rows == [
        [
            milliseconds(one.time_ms),
            milliseconds(one.limit.limit_ms),
            wording.ratio(one.time_ms / one.limit.limit_ms),
            milliseconds(one.time_ms - one.limit.limit_ms),
            one.limit.bound_by,
        ]
        for one in found
    ]


def test_json_tells_limits_where_they_are_known(file: Path) -> None:
    told = json.loads(run("show", "--store", file, "--json").stdout)["decisions"]
    assert {tree["limit"]["bound_by"] for tree in told} <= {"memory", "compute", "launch"}
    problems = {d.key: d.problem for d in decisions()}
    for tree in told:
        limit = roofline.limit(problems[tree["key"]], H200_LIKE)
        assert tree["limit"]["limit_ms"] == pytest.approx(limit.limit_ms, rel=1e-5)


def test_show_tells_limits_beside_times(file: Path) -> None:
    text = succeeded("show", "--store", file)
    for decision in decisions():
        found = far(decision, H200_LIKE)
        assert f"limit {milliseconds(found.limit.limit_ms)}" in text
        assert f"{wording.ratio(found.times_limit)} {found.limit.bound_by}" in text


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


def test_bad_options(file: Path) -> None:
    for number in ("0", "1.5", "all"):
        assert "'--far'" in refused("show", "--store", file, "--far", number)
    assert "'--sort': not with --far" in refused("show", "--store", file, "--far", "--sort", "time")


def test_an_empty_store(tmp_path: Path) -> None:
    assert "nothing is stored there yet" in succeeded("show", "--store", tmp_path, "--far")


def test_a_filter_that_passes_none(file: Path) -> None:
    said = succeeded("show", "--store", file, "--far", "--dtype", "float64")
    assert "none of its 6 decisions has dtype float64" in said


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


def test_report(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    succeeded("report", out, "--store", file)
    html = out.read_text()
    section = html.partition("Farthest from the roofline</h2>")[2].partition("</section>")[0]
    rows = section.partition("<tbody")[2].split("</tr>")[:-1]
    found = farthest(decisions(), H200_LIKE, 10)
    assert len(rows) == len(found) == 6
    numbered = re.findall(r'<a href="#d(\d+)"><b>(\w+)</b> ([^<]*)', html.partition("Overview")[2])
    by_number = {number: f"{op} {text}" for number, op, text in numbered}
    for row, one in zip(rows, found, strict=True):
        number = re.findall('href="#d([0-9]+)"', row)[0]
        problem = one.decision.problem
        assert by_number[number] == f"{problem.op} {wording.shapes(problem)}"
        cells = re.findall(r"<td[^>]*>([^<]*)</td>", row)
        assert cells == [
            milliseconds(one.time_ms),
            milliseconds(one.limit.limit_ms),
            wording.ratio(one.times_limit),
            milliseconds(one.gain_ms),
            one.limit.bound_by,
        ]
        times = f"{one.times_limit:.2f} times the limit"
        assert times in html
    overview = html.partition('id="overview"')[2].partition("</table>")[0]
    assert overview.count('data-label="time / limit"') == 6


@NO_GPU
def test_a_report_without_peaks_has_no_limits(unmeasured: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    succeeded("report", out, "--store", unmeasured)
    html = out.read_text()
    assert "time / limit" not in html
    assert "roofline" not in html


class TestEnv:
    @NO_GPU
    def test_without_a_gpu(self, tmp_path: Path) -> None:
        told = json.loads(run("env", "--json", "--store", tmp_path).stdout)["peaks"]
        path = peaks_file.path_of(tmp_path, Environment.of())
        assert told == {"path": str(path), "measured": "no: there is no GPU"}
        assert "needs a CUDA GPU" in refused("env", "--store", tmp_path, "--measure")

    def test_what_was_measured(self, tmp_path: Path) -> None:
        peaks_file.keep(tmp_path, Environment.of(), H200_LIKE)
        told = json.loads(run("env", "--json", "--store", tmp_path).stdout)["peaks"]
        assert told.pop("measured").endswith("Z")
        assert told == {
            "path": str(peaks_file.path_of(tmp_path, Environment.of())),
            "memory, GB/s": 4200.0,
            "float16, TFLOPS": 800.0,
            "bfloat16, TFLOPS": 800.0,
            "tf32, TFLOPS": 400.0,
            "float32, TFLOPS": 50.0,
            "float64, TFLOPS": 60.0,
            "launch, us": 2.0,
        }
        assert "memory, GB/s 4200.0" in succeeded("env", "--store", tmp_path)


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

    def test_not_for_another_gpu(self, gpu: SimpleNamespace, tmp_path: Path) -> None:
        file = fill(tmp_path, decisions(), replace(H200, gpu="NVIDIA L4"))
        assert "peaks of NVIDIA L4 are unknown" in refused(
            "show", "--store", file, "--far", status=1
        )
        assert gpu.measured == 0

    def test_for_another_cudnn(self, gpu: SimpleNamespace, tmp_path: Path) -> None:
        file = fill(tmp_path, decisions(), replace(H200, cudnn="9.10.0"))
        assert len(keys(file, "--far")) == 6
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

    def test_a_file_that_cannot_be_written(self, gpu: SimpleNamespace, unmeasured: Path) -> None:
        peaks_file.path_of(unmeasured.parent, H200).mkdir()
        done = run("show", "--store", unmeasured, "--far")
        assert "6 of 6 decisions" in done.stdout
        assert "cannot be written" in done.stderr

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


def audited(**times: float) -> Record:
    """A record of three layers whose fastest candidates take ``times`` with a cold cache."""
    cases = {}
    for name in times:
        case = Case(name, "fprop", (64, 64, 56, 56), (64, 64, 1, 1))
        cases[case.id] = encode(case)
    truths = [
        {
            BURST_COLD: Truth({"eng1": ms, "eng2": 2 * ms}),
            BURST_HOT: Truth({"eng1": ms / 2, "eng2": ms}),
        }
        for ms in times.values()
    ]
    return Record(
        "gpu",
        settings={"reference": "auto"},
        environment={"gpu": "NVIDIA H200", PEAKS: encode(H200_LIKE)},
        cases=cases,
        oracle={case: Oracle(found) for case, found in zip(cases, truths, strict=True)},
        picks={"auto": {"1": {case: Pick("eng1") for case in cases}}},
    )


class TestAudit:
    def test_the_table(self) -> None:
        record = audited(near=0.02, farthest=0.2, cached=0.001, far=0.1)
        (table,) = (t for t in report.tables(record) if "roofline" in t.title)
        limit_ms = 2 * (2 * 64 * 64 * 56 * 56 + 64 * 64) / 4.2e9
        assert table.rows == [
            (
                f"{name}/fprop/float16/nhwc",
                "eng1",
                f"{ms:.4g}",
                f"{limit_ms:.4g}",
                f"{ms / limit_ms:.2f}",
                "memory",
            )
            for name, ms in (("farthest", 0.2), ("far", 0.1), ("near", 0.02))
        ]

    def test_a_record_keeps_the_peaks(self, tmp_path: Path) -> None:
        record = audited(far=0.1)
        record_file.save(record, tmp_path / "audit.json")
        loaded = record_file.load(tmp_path / "audit.json")
        assert report.tables(loaded) == report.tables(record)

    def test_without_peaks_there_is_none(self) -> None:
        record = audited(far=0.1)
        del record.environment[PEAKS]
        assert not any("roofline" in table.title for table in report.tables(record))

    def test_a_long_list_is_cut(self) -> None:
        record = audited(**{f"layer{i}": 0.1 + i for i in range(30)})
        (table,) = (t for t in report.tables(record) if "roofline" in t.title)
        assert [row[0].partition("/")[0] for row in table.rows[:2]] == ["layer29", "layer28"]
        assert len(table.rows) == 12


def test_a_decision_that_was_measured_otherwise_is_not_confused() -> None:
    """Two modes decide on one problem; each has its own time."""
    first: Decision = decisions()[3]
    other = under(slower(first, 2.0), mode="race")
    found = farthest([first, other], H200_LIKE, 9)
    assert [one.decision.sampling for one in found] == ["race", "auto"]
    assert found[0].time_ms == pytest.approx(2 * found[1].time_ms)
