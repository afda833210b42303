"""The examples run as they are, on the CPU with tiny inputs."""

from __future__ import annotations

import re
import runpy
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.processes.benchmark_scripts import BENCHMARKS
from support.simulation import SimulatedEngine, candidate, timer_of

import cudnn_autotune as ca
from cudnn_autotune.audit import recordings

EXAMPLES = BENCHMARKS.parent / "examples"
TINY = ("--batch", "2", "--size", "32", "--steps", "2")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(example: str, *arguments: str) -> str:
        path = EXAMPLES / f"{example}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.stem}"' in text


def test_plain(run, tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    given = ("train_plain", *TINY, "--device", "cpu", "--channels", "4")
    assert "served by" not in run(*given)
    text = run(*given, "--checkpoint", str(file), "--convert")
    assert "5 served by cudnn_autotune, 0 by PyTorch" in text
    assert "ms a step" in text
    assert re.search(r"step 1: loss \d", text)
    plain = runpy.run_path(str(EXAMPLES / "train_plain.py"))["make"](4)
    plain.load_state_dict(torch.load(file))


def test_a_custom_mode_is_one_short_file(run) -> None:
    assert len((EXAMPLES / "custom_mode.py").read_text().splitlines()) <= 70
    lines = run("custom_mode").splitlines()
    assert [line.partition(":")[0] for line in lines] == list(recordings.names())
    assert all(re.search(r"\d\.\d{4} ms, \d+\.\d MiB$", line) for line in lines)
    fast, small, slow = (
        SimulatedEngine(replace(candidate(text, i), workspace_bytes=size), time_ms, 100.0)
        for i, (text, size, time_ms) in enumerate(
            [("fast", 1000, 1.0), ("small", 10, 1.05), ("slow", 0, 2.0)]
        )
    )
    timer = timer_of(fast, small, slow)
    selection = ca.sampling.get("least_memory").select(
        timer.candidates, timer, ca.sampling.Limits()
    )
    assert [m.candidate.text for m in selection.ranking] == ["small", "fast", "slow"]


def test_timm(run) -> None:
    pytest.importorskip("timm", reason="timm is not installed")
    text = run("infer_timm", "tf_efficientnet_b0", *TINY, "--device", "cpu")
    assert "81 served by cudnn_autotune, 0 by PyTorch" in text
    assert "Conv2dSame" in text
    assert float(re.search(r"outputs differ by (\S+)", text)[1]) < 1e-4


def test_timm_tells_the_layout_from_the_engines(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for timm, which may not be installed, makes the model."""
    timm = types.ModuleType("timm")
    timm.create_model = lambda name: runpy.run_path(str(EXAMPLES / "train_plain.py"))["make"](4)
    monkeypatch.setitem(sys.modules, "timm", timm)
    text = run("infer_timm", "any", *TINY, "--device", "cpu")
    assert "5 served by cudnn_autotune, 0 by PyTorch" in text
    by = ("by PyTorch", "by PyTorch in that layout", "with this package")
    assert re.search("ms a step: " + ", ".join(rf"[\d.]+ {words}" for words in by), text)
    assert float(re.search(r"outputs differ by (\S+)", text)[1]) < 1e-4
    assert "on a CPU this package runs PyTorch's convolutions" in text


@pytest.mark.slow
def test_decoding_of_videos(run) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    text = run("decode_videos", "tune", "--tiny", "--device", "cpu")
    assert "55 served by cudnn_autotune, 0 by PyTorch" in text
    text = run("decode_videos", "serve", "--tiny", "--device", "cpu", "--requests", "2")
    assert text.count("5 frames in ") == 2
    assert float(re.search(r"differ from PyTorch's by (\S+)", text)[1]) < 1e-6


def test_lightning(run) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    text = run("train_lightning", *TINY, "--accelerator", "cpu", "--channels", "4")
    assert "2 served by cudnn_autotune, 0 by PyTorch" in text
    assert re.search(r"loss \d", text)
