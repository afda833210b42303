"""``compare`` on a GPU: each way runs, with figures of its own, beside the others."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from support.models import compared_models
from support.store.stored import succeeded

import cudnn_autotune as ca
from cudnn_autotune.comparing.result import ModelComparison


def check(found: ModelComparison, most_error: float) -> None:
    """Every way has all figures, and none is far from float32."""
    print(found)
    for row in found.rows:
        assert row.step_ms is not None, (row.way, row.note)
        assert row.step_ms > 0
        assert row.first_call_s > 1e-3 * row.step_ms
        assert row.spread is not None
        assert 1 < row.peak_mib < 4000
        assert 0 < row.output_error < most_error
    assert found.rows[0].speedup == 1
    assert found.fastest is not None
    assert found.verdict.startswith(f"fastest: {found.fastest.way}")


def test_inference_in_half_precision() -> None:
    model = compared_models.Deep().cuda().half().eval()
    x = torch.randn(16, 3, 64, 64, device="cuda", dtype=torch.float16)
    ways = ["eager", "benchmark", "channels_last", "compile", "convert"]
    ways += ["backend", "backend-graphs"]
    before = ca.choices()
    found = ca.compare(model, x, ways=ways)
    check(found, 2e-2)
    rows = {row.way: row for row in found.rows}
    assert all(row.gradient_error is None for row in found.rows)
    assert "contiguous" in rows["convert"].note or "channels_last" in rows["convert"].note
    assert rows["compile"].first_call_s > rows["eager"].first_call_s  # type: ignore[operator]
    assert torch.cuda.get_device_name() in found.subject
    # This process knows of none of the ways' choices.
    assert ca.choices() == before


def test_training_by_autocast() -> None:
    model = compared_models.Deep().cuda().train()
    x = torch.randn(16, 3, 64, 64, device="cuda")
    ways = ["benchmark", "convert", "backend"]
    found = ca.compare(model, x, ways=ways, autocast=torch.bfloat16)
    check(found, 5e-2)
    for row in found.rows:
        assert 0 < row.gradient_error < 0.3
    assert found.rows[-1].code[1].startswith("model = cudnn_autotune.convert(")


def test_the_command(tmp_path: Path) -> None:
    shape = ("--input", "8,3,64,64", "--dtype", "float16", "--channels-last")
    given = (
        "compare",
        "support.models.compared_models:Deep",
        *shape,
        "--ways",
        "benchmark,convert",
    )
    assert "fastest: " in succeeded(*given, "--json", tmp_path / "a.json")
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ["benchmark", "convert"]
    assert all(row["step_ms"] > 0 for row in rows)
