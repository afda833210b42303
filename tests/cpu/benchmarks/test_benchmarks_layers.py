"""The random layers of auto_against_pytorch.py, and which of their measurements counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from auto_against_pytorch import layers, measure


def test_pytorch_computes_the_output_that_they_name() -> None:
    for layer in layers.draw(60, seed=0, is_dry=True):
        x, w = torch.randn(layer.input_shape), torch.randn(layer.weight_shape)
        padding = (0,) * layer.spatial_dims
        geometry = (layer.stride, layer.padding, layer.dilation, layer.transposed, padding)
        y = torch.ops.aten.convolution(x, w, None, *geometry, layer.groups)
        assert tuple(y.shape) == layer.output_shape, layer.text


def test_the_second_measurement_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times are made up: first PyTorch seems to be faster, then it is not."""
    rounds: list[int] = []

    def in_turns(call: Any, counts: Any, count: int, device: str, seed: int) -> Any:
        rounds.append(count)
        pytorchs = 0.9 if len(rounds) == 1 else 1.1
        return {"pytorch": [pytorchs] * count, "auto": [1.0] * count}

    monkeypatch.setattr(measure, "in_turns", in_turns)
    (layer,) = layers.draw(1, seed=0, is_dry=True)
    row = measure.measure(layer, "cpu", 0.99)
    assert rounds[1] > rounds[0]
    assert (row["times measured"], row["PyTorch over auto"]) == (2, 1.1)
    assert measure.measure(layer, "cpu", 0.99)["times measured"] == 1
