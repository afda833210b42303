"""A compiled inference computes with the weights that the model has at the call, however they got
there, unless its user asked for frozen ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.models.weight_changes import statistics, swapped, trained_by
from torch import Tensor, nn

import cudnn_autotune as ca

# Inductor's own packing takes convolutions away before groups are looked for.
FUSED = {"fuse": "always", "cpp.weight_prepack": False, "compare": False}


def network() -> nn.Sequential:
    layers = (nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU())
    return nn.Sequential(*layers, nn.Conv2d(8, 4, 1), nn.ReLU()).eval()


def replaced_data(model: Any, x: Tensor) -> None:
    model[0].weight.data = torch.rand_like(model[0].weight)


def loaded(model: Any, x: Tensor) -> None:
    model.load_state_dict(network().state_dict())


def copied(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        model[3].weight.copy_(torch.rand_like(model[3].weight))


def together(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_mul_([model[0].weight, model[3].weight], -1.5)


def merged(model: Any, x: Tensor) -> None:
    """As PEFT merges an adapter of a convolution into its weight."""
    down, up = torch.randn(2, 4, 3, 3), torch.randn(8, 2, 1, 1)
    delta = nn.functional.conv2d(down.permute(1, 0, 2, 3), up).permute(1, 0, 2, 3)
    model[0].weight.data += delta


def written_elsewhere(model: Any, x: Tensor) -> None:
    """Through memory that something else has, of which PyTorch does not know."""
    model[1].running_var.numpy()[:] = 3.0


CHANGES = {
    "fused Adam": trained_by(torch.optim.Adam, fused=True),
    "fused AdamW": trained_by(torch.optim.AdamW, fused=True),
    "fused SGD": trained_by(torch.optim.SGD, fused=True, momentum=0.9),
    "foreach Adam": trained_by(torch.optim.Adam, foreach=True),
    "SGD": trained_by(torch.optim.SGD),
    "statistics": statistics,
    "swapped": swapped,
    "replaced data": replaced_data,
    "loaded": loaded,
    "copied": copied,
    "foreach": together,
    "merged": merged,
    "written elsewhere": written_elsewhere,
}


@pytest.mark.basic(1)
@pytest.mark.parametrize("options", [{}, {"memory_format": "auto", "compare": True}], ids=str)
def test_every_change_is_seen_by_the_next_call(options: dict[str, Any]) -> None:
    model, x = network(), torch.randn(2, 4, 9, 8)
    compiled = torch.compile(model, backend="cudnn_autotune", options={**FUSED, **options})
    initial = copy.deepcopy(model.state_dict())
    for name, change in CHANGES.items():
        model.load_state_dict(initial)
        with torch.no_grad():
            before = compiled(x)
            record = ca.compilations()[-1]
        change(model, x)
        with torch.no_grad():
            expected = copy.deepcopy(model)(x)
            assert (expected - before).abs().max() > 1e-2 * expected.abs().max(), name
            error = (compiled(x) - expected).norm() / expected.norm()
            assert error < 1e-5, name
        assert not record.is_frozen
    if not options:
        assert [group.text for group in record.fused] == [
            "conv + bias + silu",
            "conv + bias + relu",
        ]


@pytest.mark.slow
def test_validation_between_training_steps_of_the_compiled_model() -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    model = nn.Sequential(*layers)
    compiled = torch.compile(model, backend="cudnn_autotune", options=FUSED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    x = torch.randn(4, 3, 16, 16)
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
        for _ in range(2):
            compiled(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow
def test_frozen_weights_are_for_who_asks_for_them() -> None:
    """Also for a user who set Inductor's own option for the process."""
    model, x = network(), torch.randn(2, 4, 9, 8)
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        compiled = torch.compile(model, backend="cudnn_autotune", options=FUSED)
        compiled(x)
        swapped(model, x)
        torch.testing.assert_close(compiled(x), model(x))
    assert not ca.compilations()[-1].is_frozen
