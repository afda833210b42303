"""Training by the backend of ``torch.compile`` on a GPU, in another layout than the model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models.trained import MODELS
from support.norms.models import check_steps, data
from torch import nn

import cudnn_autotune as ca

pytestmark = pytest.mark.usefixtures("fresh_compiler")

LAID_OUT = "cudnn_autotune, channels_last"
WIDTH = 8


def compiled(model: nn.Module, **options: Any) -> Any:
    options = {"sampling": "heuristic", **options}
    return torch.compile(model, backend="cudnn_autotune", options=options)


def last() -> ca.Compilation:
    return ca.compilations()[-1]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_under_autocast_trains_in_channels_last(name: str) -> None:
    """By the rule, as near to float64 as PyTorch; parameters and gradients keep their strides."""
    torch.manual_seed(0)
    make, (batch, channels, *size) = MODELS[name]
    model = make(WIDTH).cuda()
    inputs = [x.cuda() for x in data(batch, WIDTH * channels, *size)]
    strides = [parameter.stride() for parameter in model.parameters()]
    check_steps(model, inputs, lambda one: compiled(one, compare=False), autocast=True)
    assert last().chosen == LAID_OUT, last().note
    assert [parameter.stride() for parameter in model.parameters()] == strides
    assert [p.grad.stride() for p in model.parameters() if p.grad is not None] == strides
    formats = {choice.problem.memory_format for choice in ca.choices()}
    assert formats == {torch.channels_last_3d if len(size) == 3 else torch.channels_last}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_auto_measures_both_layouts(layout: torch.memory_format) -> None:
    make, shape = MODELS["grouped"]
    model = make(WIDTH).cuda().to(memory_format=layout)
    inputs = [x.cuda() for x in data(shape[0], WIDTH * shape[1], *shape[2:])]
    options = {"memory_format": "auto", "norms": "never"}
    check_steps(model, inputs, lambda one: compiled(one, **options), autocast=True)
    other = "contiguous" if layout == torch.channels_last else "channels_last"
    assert set(last().gpu_times_ms) == {"cudnn_autotune", f"cudnn_autotune, {other}"}, last().note
    assert last().chosen == min(last().times_ms, key=last().times_ms.__getitem__)


def test_a_step_is_measured_against_the_model_s_layout() -> None:
    make, shape = MODELS["volumes"]
    model = make(WIDTH).cuda()
    inputs = [x.cuda() for x in data(shape[0], WIDTH * shape[1], *shape[2:])]
    check_steps(model, inputs, compiled, autocast=True)
    assert set(last().gpu_times_ms) == {"cudnn_autotune", LAID_OUT}, last().note
