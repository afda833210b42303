"""Artifacts of compiled graphs on a GPU: those that carry decisions into another process, and those
of PyTorch's log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.processes.structured_log import artifacts
from support.processes.subprocesses import evaluate

COMPILES = """
import json, sys, torch
from torch import nn

is_loaded, file, is_trained = sys.argv[1] == "loads", sys.argv[2], sys.argv[3] == "training"
if is_loaded:
    assert "cudnn_autotune" not in sys.modules
    assert torch.compiler.load_cache_artifacts(open(file, "rb").read()) is not None
import cudnn_autotune as ca

torch.manual_seed(0)
layers = [nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
layers += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
model = nn.Sequential(*layers).to("cuda", torch.half, memory_format=torch.channels_last)
model.train(is_trained)
x = torch.randn(32, 16, 28, 28).to("cuda", torch.half, memory_format=torch.channels_last)
run = torch.compile(model, backend="cudnn_autotune")
with torch.set_grad_enabled(is_trained):
    for _ in range(2):
        output = run(x)
        if is_trained:
            output.sum().backward()
torch.cuda.synchronize()
(record,) = ca.compilations()
if not is_loaded:
    open(file, "wb").write(torch.compiler.save_cache_artifacts()[0])
print(json.dumps({
    "origins": sorted({choice.origin for choice in ca.choices()}),
    "chosen": sorted([choice.problem.text, choice.text] for choice in ca.choices()),
    "source": record.source if record.times_ms else None,
    "reasons": [group.reason for group in record.groups if group.fused_ms is not None],
}))
"""


def in_process(folder: Path, *arguments: str) -> dict[str, Any]:
    """What one process compiles with a store and a cache of Inductor's of its own."""
    variables = {
        "CUDNN_AUTOTUNE_CACHE": "read_write",
        "CUDNN_AUTOTUNE_CACHE_DIR": str(folder / "store"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TORCH_TRACE": str(folder / "trace"),
    }
    code = f"import sys; sys.argv[1:] = {[*arguments]!r}\n{COMPILES}"
    found: dict[str, Any] = json.loads(evaluate(code, env=variables).splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", ["inference", "training"])
def test_another_process_takes_the_decisions_over(kind: str, tmp_path: Path) -> None:
    file = str(tmp_path / "artifacts")
    first = in_process(tmp_path / "first", "saves", file, kind)
    second = in_process(tmp_path / "second", "loads", file, kind)
    assert first["origins"] == ["tuned"]
    assert second["origins"] == ["store"]
    assert set(map(tuple, second["chosen"])) <= set(map(tuple, first["chosen"]))
    if first["source"] is not None:
        assert (first["source"], second["source"]) == ("tuned", "store")
    assert all(reason.startswith("from the store: ") for reason in second["reasons"])


@pytest.mark.parametrize("kind", ["inference", "training"])
def test_pytorchs_log_has_each_convolutions_engine(kind: str, tmp_path: Path) -> None:
    found = in_process(tmp_path, "saves", str(tmp_path / "artifacts"), kind)
    ((_, tree),) = artifacts(tmp_path / "trace")
    assert tree["mode"] == kind
    assert len(tree["groups"]) == 2
    chosen = dict(found["chosen"])
    for group in tree["groups"]:
        assert group["choices"]
        for choice in group["choices"]:
            assert choice["chosen"] == chosen[choice["problem"]]
