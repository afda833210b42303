"""``cudnn-autotune demo`` answers first: what each mode gains over PyTorch on two layers."""

from __future__ import annotations

import re

import pytest
import torch
from support.processes.benchmark_scripts import BENCHMARKS
from support.store.decisions import selection, timed
from support.store.stored import run
from support.tuning.strategies import AT_ONCE, BUILT_IN_MODES

from cudnn_autotune import sampling
from cudnn_autotune.audit import recordings
from cudnn_autotune.cli.commands.demo import LAYERS, RECORDED, Tried, answer, measured

TIMES = {"eng1": 2.0, "eng2": 3.0}
MODES = AT_ONCE if not torch.cuda.is_available() else BUILT_IN_MODES
RANKED = selection((timed("eng1", 2.0), timed("eng2", 3.0), timed("aten", 3.0, runs="eng2")))


@pytest.fixture(autouse=True)
def _only_built_in_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests register modes of their own, which stay."""
    monkeypatch.setattr(sampling, "names", lambda: BUILT_IN_MODES)


def test_a_few_lines_answer_without_a_gpu() -> None:
    done = run("demo", obj=None)
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert text.startswith("No GPU here: in short batches, from recordings of an NVIDIA H200.")
    forum, resnet = text.index("The forum's convolution"), text.index("A layer of ResNet-50")
    vgg, kernel = text.index("A layer of VGG"), text.index("A kernel of this package")
    assert resnet < vgg < kernel
    (gain,) = re.findall(r"ms; (\d\.\d\d)x by [a-z_, ]*auto", text[vgg:kernel])
    assert float(gain) >= 1.04
    assert "PyTorch 0.6523 ms; 1.00x by every mode" in text[forum:resnet]
    assert "PyTorch 0.02964 ms; 1.02x by auto, " in text[resnet:]
    assert "demo --details" in text
    assert text.endswith("cudnn-autotune run SCRIPT ARGUMENTS...")
    assert "; 1.00x by heuristic; " in text[resnet:]
    first, *answers = done.stdout.splitlines()[:3]
    assert done.stdout.splitlines()[4:-2] == list(measured())
    assert first.endswith(" NVIDIA H200.")
    starts = [line.partition(":")[0] for line in answers]  # a pipe's lines are not broken
    assert starts == [layer.name for layer in LAYERS]


def test_modes_are_compared_by_the_same_times() -> None:
    chosen = {**dict.fromkeys(MODES, "eng1"), "heuristic": "aten", "sample_once": "eng9"}
    tried = Tried.of(chosen, [RANKED])
    assert tried.pytorch == "eng2"
    assert tried.times_ms == {**TIMES, "aten": 3.0}
    line = answer("It", [tried, tried])
    assert line.startswith("It: PyTorch 6.000 ms; 1.50x by auto, ")
    assert line.endswith("; 1.00x by heuristic; not timed by sample_once")
    every = Tried.of(dict.fromkeys(MODES, "eng1"), [RANKED])
    assert answer("It", [every]) == "It: PyTorch 3.000 ms; 1.50x by every mode"


def test_what_is_measured_names_a_record_that_is_there() -> None:
    """The figures are checked against the records by ``render_results.py --check``."""
    lines = list(measured())
    assert len(lines) == 4
    for line in lines:
        gains = [float(text) for text in re.findall(r"(\d+\.\d\d)x", line)]
        assert max(gains) > 1.5
        (names,) = re.findall(r"\(records? ([\w, ]+)\)$", line)
        for name in names.split(", "):
            assert list((BENCHMARKS / "results" / "h200").glob(f"{name}.*json"))


def test_a_recordings_name_has_its_shape() -> None:
    for name, recording in RECORDED:
        problem = recordings.load(recording).problem
        shape = "x".join(map(str, problem.input_shape))
        k, _, *kernel = problem.weight_shape
        assert f", {shape}, {k} of {'x'.join(map(str, kernel))}, " in name
