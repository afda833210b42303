"""``cudnn-autotune tune`` on a GPU, and what the other commands tell of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from support.kernels.user_implementations import EMPTY, Written, registered
from support.store.stored import refused, run, succeeded

import cudnn_autotune as ca
from cudnn_autotune.store import settings as store_settings
from cudnn_autotune.store.decision import Decision
from cudnn_autotune.store.environment import Environment
from cudnn_autotune.store.file_store import Store
from cudnn_autotune.tuning.gain import against_pytorch, total

LAYER = ("--input", "16,64,28,28", "--weight", "64,64,3,3", "--padding", "1")
HALF = ("--dtype", "float16", "--channels-last", "--budget-ms", "300")

NET = """
from torch import nn


def net():
    layers = [nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1))
"""


def kept(place: Path) -> dict[str, Decision]:
    return {decision.key: decision for decision in Store(place)}


def test_a_layer(tmp_path: Path) -> None:
    before = store_settings.get_store_settings()
    succeeded("tune", *LAYER, *HALF, "--store", tmp_path)
    assert store_settings.get_store_settings() == before
    found = kept(tmp_path)
    assert [d.problem.op for d in found.values()] == ["fprop", "dgrad", "wgrad"]
    for decision in found.values():
        assert decision.chosen.time_ms
        assert decision.relative_error is not None
        assert decision.provenance.torch == torch.__version__
        # PyTorch's own pick is always among the candidates.
        assert against_pytorch(decision) is not None
    told = run("tune", *LAYER, *HALF, "--store", tmp_path, "--json")
    assert told.exit_code == 0, told.output
    gain = json.loads(told.stdout)["gain"]
    assert (gain["calls"], gain["compared_calls"]) == (3, 3)
    assert gain["speedup"] == pytest.approx(total(found.values()).ratio)
    ca.forget()  # each command is a process of its own for its users
    text = succeeded("tune", *LAYER, *HALF, "--store", tmp_path)
    assert "3 problems, 3 of them known already" in text
    assert kept(tmp_path) == found
    ca.forget()
    succeeded("tune", *LAYER, *HALF, "--op", "fprop", "--retune", "--store", tmp_path)
    again = kept(tmp_path)
    assert again.keys() == found.keys()
    # Its times and clocks, which no two tunings have alike: only what was timed anew has others.
    changed = [k for k in again if again[k].selection.evidence != found[k].selection.evidence]
    assert [key.split()[0] for key in changed] == ["fprop"]
    shown = json.loads(run("show", "--store", tmp_path, "--json").stdout)
    assert Environment.from_json(shown["environment"]) == Environment.of()
    assert len(shown["decisions"]) == 3
    succeeded("report", tmp_path / "page.html", "--store", tmp_path)
    assert torch.cuda.get_device_name() in (tmp_path / "page.html").read_text()


def test_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_gpu_net.py").write_text(NET)
    given = ("tune", "my_gpu_net:net", "--input", "8,8,24,24", "--store", tmp_path / "store")
    succeeded(*given, *HALF)
    assert [d.problem.op for d in kept(tmp_path / "store").values()] == ["fprop", "fprop"]
    succeeded(*given, *HALF, "--train")
    ops = sorted(d.problem.op for d in kept(tmp_path / "store").values())
    # Nothing asks for the gradient of the model's input.
    assert ops == ["dgrad", "fprop", "fprop", "wgrad", "wgrad"]
    assert "RuntimeError" in refused(*given[:2], "--input", "8,9,24,24", status=1)
    sys.modules.pop("my_gpu_net")


CHECKED = (
    "check",
    "--input",
    "2,64,9,9",
    "--weight",
    "64,1,3,3",
    "--groups",
    "64",
    "--padding",
    "1",
    "--dtype",
    "float16",
    "--channels-last",
    "--op",
    "fprop",
)


@pytest.mark.parametrize("candidate", ["depthwise", "aten"])
def test_a_right_candidate_is_timed(candidate: str) -> None:
    text = succeeded(*CHECKED, "--candidate", candidate)
    assert torch.cuda.get_device_name() in text
    assert "right, relative error" in text
    assert " ms; workspace" in text


def test_a_wrong_candidate_is_told() -> None:
    with registered(Written(EMPTY)):
        done = run(*CHECKED, "--candidate", "written")
    assert done.exit_code == 1
    assert "written@1: is wrong (relative error" in done.stdout
    assert "1 candidate at fault" in done.stderr, done.stdout


def test_a_gpu_that_is_not_here_is_built_for() -> None:
    text = succeeded(*CHECKED, "--candidate", "depthwise", "--gpu", "a100")
    assert "compiles to" in text
    assert "Nothing was run, since a100 is not here" in text
