"""What is exported from a GPU runs in a process that has never heard of this package."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import cudnn_autotune as ca

pytestmark = pytest.mark.long

LOADED = {
    "export": "torch.export.load(path).module()",
    "aoti": "torch._inductor.aoti_load_package(path)",
    "trace": "torch.jit.load(path)",
}


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(ca.Conv2d(4, 6, 4, padding="same"), ca.Conv2d(6, 8, 3)).eval().cuda()


@pytest.fixture
def input() -> Tensor:
    return torch.randn(2, 4, 9, 8, device="cuda")


@pytest.mark.parametrize("way", LOADED)
def test_it_is_loaded_without_this_package(
    model: nn.Module, input: Tensor, way: str, tmp_path: Path
) -> None:
    path = tmp_path / ("model.pt" if way == "trace" else "model.pt2")
    with torch.no_grad():
        expected = model(input)
        if way == "trace":
            torch.jit.trace(model, input).save(path)
        else:
            program = torch.export.export(model, (input,))
            if way == "export":
                torch.export.save(program, path)
            else:
                torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    torch.save(input, tmp_path / "input.pt")
    code = (
        f"import sys, torch; path = {str(path)!r};"
        f"input = torch.load({str(tmp_path / 'input.pt')!r});"
        f"model = {LOADED[way]};"
        f"torch.save(model(input).detach(), {str(tmp_path / 'output.pt')!r});"
        "assert 'cudnn_autotune' not in sys.modules;"
        # torch 2.11 has crashed while it unloaded what AOTInductor had compiled.
        "torch.cuda.synchronize(); import os; os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode == -signal.SIGSEGV and "_load_aoti" in done.stderr:
        # So it did on one kind of host with packages of models without any of our layers.
        pytest.skip("torch itself crashes here while it loads a package of AOTInductor's")
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "output.pt"), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx(model: nn.Module, input: Tensor, dynamo: bool, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="the exporter of ONNX files needs it")
    if dynamo:
        pytest.importorskip("onnxscript", reason="the newer exporter needs it")
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (input,), path, dynamo=dynamo)
    graph = onnx.load(path).graph
    assert [node.op_type for node in graph.node].count("Conv") == 2
    assert {node.domain for node in graph.node} <= {"", "ai.onnx", "pkg.onnxscript.torch_lib"}
